"""A synthetic translation task, whose best possible loss is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...config import DataConfig
from ...errors import UsageError
from ..corpus import PAD, SPECIALS, Corpus, Pairs, Sentences
from ..source import source

SEED = 20230505  # of the task itself; the configuration's seed only orders its batches
PAIRS = 20_000
VOCABULARY = 512  # of the target side at most, special tokens included
SHORTEST, LONGEST, MEAN, SPREAD = 4, 22, 12.3, 4.0  # words of a sentence, full stop included
FAVOURITES = 6  # words of a class that may follow a given word
ODDS = np.array([[1.0, 0.0, 0.0], [0.7, 0.3, 0.0], [0.6, 0.3, 0.1]])  # of one, two or three translations
CLASSES = ("mark", "opener", "det", "prep", "adv", "adj", "verb", "noun")
FUNCTION = ("mark", "opener", "det", "prep")  # the same few words are favourites everywhere, as in natural languages
SHARES = np.array([0.005, 0.015, 0.02, 0.035, 0.09, 0.2, 0.25, 0.385])  # of the vocabulary
AMBIGUOUS = np.array([0.0, 0.0, 0.0, 0.2, 0.3, 0.4, 0.4, 0.3])  # share of words with several translations
FOLLOWS = np.array(  # class after class; an opener stands at the beginning of a sentence alone
    [  # mark  opnr  det   prep  adv   adj   verb  noun
        [0.00, 0.00, 0.60, 0.20, 0.10, 0.00, 0.10, 0.00],
        [0.00, 0.00, 0.00, 0.00, 0.00, 0.40, 0.00, 0.60],
        [0.00, 0.00, 0.00, 0.00, 0.00, 0.40, 0.00, 0.60],
        [0.00, 0.00, 0.70, 0.00, 0.00, 0.10, 0.00, 0.20],
        [0.15, 0.00, 0.40, 0.30, 0.00, 0.00, 0.15, 0.00],
        [0.00, 0.00, 0.00, 0.00, 0.00, 0.15, 0.00, 0.85],
        [0.00, 0.00, 0.50, 0.20, 0.20, 0.00, 0.00, 0.10],
        [0.15, 0.00, 0.00, 0.30, 0.15, 0.00, 0.40, 0.00],
    ]
)
OPENERS_DECAY = 1.3  # Zipf exponent of the openers: the first begins half of all sentences
MARK, OPENER, ADJ, VERB, NOUN = (CLASSES.index(name) for name in ("mark", "opener", "adj", "verb", "noun"))


@dataclass(frozen=True)
class Task:
    r"""A language of word classes and its translation; ids are counted from 0, without the special tokens.

    Source: a Markov chain over words, p(w | v) = p(class of w | class of v) p(w | v, class), where only six words of a
    class may follow v, with Zipf's weights. A sentence begins with an opener, as an English one with a capitalised
    article, and ends with the full stop (word 0). Target: an adjective goes behind the noun that follows it, verbs go
    to the end of their clause (before the next mark), and each word becomes one of its one to three translations,
    drawn independently with known odds. No two words share a translation.
    """

    classes: np.ndarray  # (words,)
    chain: np.ndarray  # (words, words) p(next | word)
    translations: np.ndarray  # (words, 3) target words
    odds: np.ndarray  # (words, 3)

    @property
    def log_odds(self) -> np.ndarray:
        """Return log p(target word | its source word), the only uncertainty if the source is known."""
        real = self.odds > 0
        values = np.zeros(real.sum())
        values[self.translations[real]] = np.log(self.odds[real])
        return values  # (target words,)

    def nll(self, target: np.ndarray) -> float:
        """Return the mean of -log p(label | source, labels before it) over padded ``target`` rows, EOS included.

        The source fixes the order of the words and the end. Each word therefore costs its own -log odds, and EOS costs
        nothing.
        """
        words = target[target >= len(SPECIALS)] - len(SPECIALS)
        return float(-self.log_odds[words].sum() / np.count_nonzero(target != PAD))

    def sentences(self, count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw random source sentences: (words, lengths), of shapes (count, LONGEST) and (count,)."""
        lengths = np.clip(np.rint(random.normal(MEAN, SPREAD, count)), SHORTEST, LONGEST).astype(np.int64)
        states = len(self.chain)
        cumulative = self.chain.cumsum(axis=1)
        ladder = (cumulative / cumulative[:, -1:] + np.arange(states)[:, None]).ravel()
        words = np.zeros((count, LONGEST), np.int64)
        last = np.zeros(count, np.int64)  # the full stop of the sentence before
        for place in range(LONGEST - 1):
            # float32 draws: adding a word's number to one is exact, so no draw can leave its row of the ladder
            draw = last + random.random(count, dtype=np.float32).astype(np.float64)
            last = np.searchsorted(ladder, draw, side="right") - last * states
            words[:, place] = np.where(place < lengths - 1, last, 0)
        return words, lengths

    def translate(self, words: np.ndarray, lengths: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Translate each sentence; words after the end of a sentence are meaningless."""
        classes = self.classes[words]  # (N, L)
        place = np.arange(words.shape[1])
        before_noun = (classes == ADJ) & (np.pad(classes, ((0, 0), (0, 1)))[:, 1:] == NOUN)
        marks = np.where(classes == MARK, place, words.shape[1])
        next_mark = np.minimum.accumulate(marks[:, ::-1], axis=1)[:, ::-1]
        goes_to = np.where(before_noun, place + 1.5, np.where(classes == VERB, next_mark - 0.25, place))
        goes_to = np.where(place < lengths[:, None], goes_to, place)
        moved = np.take_along_axis(words, np.argsort(goes_to, axis=1, kind="stable"), axis=1)
        choice = (random.random(words.shape)[..., None] > self.odds[moved].cumsum(axis=-1)[..., :-1]).sum(axis=-1)
        return self.translations[moved, choice]


def make_task(vocabulary: int = VOCABULARY) -> Task:
    """Makes the language with at most ``vocabulary`` target ids; the source side needs about 30 % fewer."""
    random = np.random.default_rng(SEED)
    budget = vocabulary - len(SPECIALS)
    expected = 1 + SHARES @ AMBIGUOUS * 1.35  # translations a word
    counts = np.maximum(2, np.rint(SHARES * int(budget / expected))).astype(np.int64)
    classes = np.repeat(np.arange(len(CLASSES)), counts)
    words = len(classes)

    chain = np.zeros((words, words))
    for following in range(len(CLASSES)):
        members = np.flatnonzero(classes == following)
        members = members[members > 0]  # the full stop only ends a sentence
        few = min(FAVOURITES, len(members))
        popular = -np.log(np.arange(len(members)) + 2.0)  # Zipf-Mandelbrot
        # the largest of Gumbel-perturbed log weights are a weighted draw without replacement
        taste = random.gumbel(size=(words, len(members))) * (CLASSES[following] not in FUNCTION)
        chosen = np.argsort(-(popular + taste), axis=1)[:, :few]
        weights = 1 / np.arange(1.0, few + 1)
        share = FOLLOWS[classes, following][:, None] * weights / weights.sum()
        np.put_along_axis(chain, members[chosen], share, axis=1)

    openers = np.flatnonzero(classes == OPENER)
    weights = np.arange(1.0, len(openers) + 1) ** -OPENERS_DECAY
    chain[0] = 0
    chain[0, openers] = weights / weights.sum()

    kind = np.where(random.random(words) < AMBIGUOUS[classes], random.choice([1, 2], size=words, p=[0.65, 0.35]), 0)
    spare = np.cumsum(kind) + words <= budget
    odds = ODDS[np.where(spare, kind, 0)]
    translations = np.zeros((words, 3), np.int64)
    translations[odds > 0] = random.permutation(np.count_nonzero(odds))
    return Task(classes, chain, translations, odds)


@source("synthetic")
def synthetic(spec: str, config: DataConfig) -> Corpus:
    """Translates a made-up language, of which the best possible loss is known."""
    if config.valid is not None:
        raise UsageError("data.valid does not go with the synthetic task, which holds out sentences of its own.")
    return load_synthetic(config.vocab_size)


def load_synthetic(vocab_size: int) -> Corpus:
    """Make the corpus of the task. It depends on ``vocab_size`` alone, and from 512 on it is always the same."""
    task = make_task(min(vocab_size, VOCABULARY))
    sides = _pairs(task, PAIRS, SEED + 1)
    vocabularies = [f"{CLASSES[kind]}{word}" for word, kind in enumerate(task.classes)], target_names(task)

    def decode(ids: Iterable[int], names: list[str] = vocabularies[1]) -> str:
        return " ".join(names[i - len(SPECIALS)] if i >= len(SPECIALS) else SPECIALS[i] for i in ids)

    def lines(split: str) -> tuple[list[str], list[str]]:
        everything = np.arange(PAIRS)
        source, target = (
            [decode(ids.tolist(), names) for ids in side.pick(everything)]
            for side, names in zip((sides.source, sides.target), vocabularies, strict=True)
        )
        return source, target

    return Corpus(
        train=sides,
        valid=None,
        source_vocab=len(task.classes) + len(SPECIALS),
        target_vocab=len(vocabularies[1]) + len(SPECIALS),
        joint=False,
        decode=decode,
        lines=lines,
        fresh=lambda count: _pairs(task, count, SEED + 2),
        ideal_nll=task.nll,
    )


def _pairs(task: Task, count: int, seed: int) -> Pairs:
    random = np.random.default_rng(seed)
    words, lengths = task.sentences(count, random)
    real = np.arange(LONGEST) < lengths[:, None]
    translated = task.translate(words, lengths, random)
    source, target = (Sentences((side[real] + len(SPECIALS)).astype(np.int32), lengths) for side in (words, translated))
    return Pairs(source, target)


def target_names(task: Task) -> list[str]:
    """Names target words readably: ``noun204b`` is the second translation of source word 204."""
    names = [""] * np.count_nonzero(task.odds)
    for word, choice in np.argwhere(task.odds > 0):
        names[task.translations[word, choice]] = f"{CLASSES[task.classes[word]]}{word}{'abc'[choice]}"
    return names
