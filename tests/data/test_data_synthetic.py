"""The synthetic task: its best loss against brute force, its structure against oracles of its own."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from rest_slow import rest_slow

from stabilitylab.config import DataConfig
from stabilitylab.data import Dataset, load_data
from stabilitylab.data.corpus import EOS, PAD, SPECIALS
from stabilitylab.data.sources.synthetic import (
    CLASSES,
    LONGEST,
    SHORTEST,
    Task,
    load_synthetic,
    make_task,
    target_names,
)
from stabilitylab.errors import UsageError

FIRST = len(SPECIALS)


@pytest.fixture(scope="module")
def data() -> Dataset:
    return load_data(DataConfig(), stack="encoder-decoder")


@pytest.fixture(scope="module")
def task() -> Task:
    return make_task()


def sentences(rows: np.ndarray) -> list[list[int]]:
    """Words without special tokens, counted from 0."""
    return [[int(token) - FIRST for token in row if token not in (PAD, EOS)] for row in rows]


def lexicon(task: Task) -> list[dict[int, float]]:
    return [
        {int(t): float(p) for t, p in zip(ts, ps, strict=True) if p > 0}
        for ts, ps in zip(task.translations, task.odds, strict=True)
    ]


def reordered(task: Task, words: list[int]) -> list[int]:
    """The rule of word order, word by word: adjective noun -> noun adjective; verbs to the end of their clause."""
    kind = [CLASSES[task.classes[word]] for word in words]
    result: list[int] = []
    verbs: list[int] = []
    behind: list[int] = []  # the adjective that waits for its noun
    for place, word in enumerate(words):
        if kind[place] == "verb":
            verbs.append(word)
        elif kind[place] == "adj" and place + 1 < len(words) and kind[place + 1] == "noun":
            behind.append(word)
        else:
            if kind[place] == "mark":
                result += verbs
                verbs = []
            result.append(word)
            if kind[place] == "noun":
                result += behind
                behind = []
    return result


def translations(task: Task, words: list[int]) -> dict[tuple[int, ...], float]:
    """Every translation of a sentence and its probability."""
    options = [lexicon(task)[word].items() for word in reordered(task, words)]
    return {tuple(t for t, _ in choice): math.prod(p for _, p in choice) for choice in itertools.product(*options)}


def test_best_nll_is_what_the_true_distribution_scores_on_the_held_out_labels(data: Dataset, task: Task) -> None:
    table = lexicon(task)
    cost, labels = 0.0, 0
    for source, target in zip(*map(sentences, data._held_rows), strict=True):
        for word, translated in zip(reordered(task, source), target, strict=True):
            cost -= math.log(table[word][translated])
        labels += len(target) + 1  # EOS is certain
    assert labels == data.held_out.tokens
    assert data.best_nll == pytest.approx(cost / labels, rel=1e-12)
    assert 0.05 < data.best_nll < 0.3


def test_the_best_nll_is_the_entropy_of_all_translations(task: Task) -> None:
    """Brute force: the probabilities of all translations of a sentence sum to one, and mean nll equals entropy."""
    random = np.random.default_rng(0)
    words, lengths = task.sentences(4000, random)
    repeats = 2000
    for row, length in itertools.islice(zip(words, lengths, strict=True), 0, 4000, 1000):
        every = translations(task, row[:length].tolist())
        assert sum(every.values()) == pytest.approx(1, rel=1e-12)
        entropy = -sum(p * math.log(p) for p in every.values())
        drawn = task.translate(np.tile(row, (repeats, 1)), np.full(repeats, length), random)[:, :length]
        assert {tuple(t) for t in drawn.tolist()} <= every.keys()
        ended = np.pad(drawn + FIRST, ((0, 0), (0, 1)), constant_values=EOS)
        spread = math.sqrt(sum(p * math.log(p) ** 2 for p in every.values()) - entropy**2 + 1e-18)
        assert abs(task.nll(ended) * (length + 1) - entropy) < 4 * spread / math.sqrt(repeats) + 1e-9


@pytest.mark.slow
def test_translations_occur_with_their_odds(data: Dataset, task: Task) -> None:
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for source, target in zip(*map(sentences, data._rows), strict=True):
        for word, translated in zip(reordered(task, source), target, strict=True):
            counts[word][translated] += 1
    ambiguous = [word for word, options in enumerate(lexicon(task)) if len(options) > 1]
    assert len(ambiguous) > 60
    z = []
    for word, options in enumerate(lexicon(task)):
        assert counts[word].keys() <= options.keys()
        total = counts[word].total()
        z += [
            (counts[word][t] - total * p) / math.sqrt(total * p * (1 - p))
            for t, p in options.items()
            if p < 1 and total > 50
        ]
    assert len(z) > 100
    assert np.mean(np.square(z)) == pytest.approx(1, abs=0.35)


def test_source_words_follow_the_chain(data: Dataset, task: Task) -> None:
    np.testing.assert_allclose(task.chain.sum(axis=1), 1, rtol=1e-12)
    assert (np.count_nonzero(task.chain, axis=1) <= 6 * len(CLASSES)).all()
    follows: Counter[tuple[int, int]] = Counter()
    for words in sentences(data._rows.source):
        assert words[-1] == 0
        assert 0 not in words[:-1]
        assert SHORTEST <= len(words) <= LONGEST
        follows.update(itertools.pairwise([0, *words[:-1]]))
    assert all(task.chain[pair] > 0 for pair in follows)
    starts = np.array([follows[0, word] for word in range(len(task.classes))])
    expected = task.chain[0] * starts.sum()
    assert (np.abs(starts - expected) <= 5 * np.sqrt(expected)).all()


def test_it_is_not_a_copy_task(data: Dataset, task: Task) -> None:
    source, target = (sentences(side) for side in data._rows)
    pairs = [(a, b) for s, t in zip(source, target, strict=True) for a, b in zip(s, t, strict=True)]
    assert np.mean([a == b for a, b in pairs]) < 0.05
    moved = [reordered(task, words) != words for words in source]
    assert np.mean(moved) > 0.8
    # the best guess of a target word from the source word in the same place, without attention
    best: dict[int, Counter[int]] = defaultdict(Counter)
    for a, b in pairs:
        best[a][b] += 1
    assert sum(c.most_common(1)[0][1] for c in best.values()) / len(pairs) < 0.75


def test_there_is_structure_to_learn_at_once_and_more_to_learn_later(data: Dataset) -> None:
    """best < bigram < unigram with wide gaps; the bigram oracle is smoothed towards the unigram distribution."""
    vocab = data.target_vocab
    unigram = np.ones(vocab)
    bigram = np.zeros((vocab, vocab))
    for row in data._rows.target.tolist():
        tokens = [1, *row[: row.index(EOS) + 1]]
        for before, token in itertools.pairwise(tokens):
            unigram[token] += 1
            bigram[before, token] += 1
    unigram /= unigram.sum()
    cost = []
    for row in data._held_rows.target.tolist():
        for before, token in itertools.pairwise([1, *row[: row.index(EOS) + 1]]):
            cost.append(-math.log((bigram[before, token] + 2 * unigram[token]) / (bigram[before].sum() + 2)))
    assert data.best_nll is not None
    assert np.mean(cost) < data.unigram.cross_entropy - 1
    assert data.best_nll < np.mean(cost) - 1


def test_it_has_the_size_of_short_sentences(data: Dataset) -> None:
    described = data.describe()
    assert 12 < described["tokens_per_sentence"]["source"] < 16
    assert described["tokens_per_sentence"]["source"] == described["tokens_per_sentence"]["target"]
    assert 300 <= data.source_vocab <= 600
    assert 300 <= data.target_vocab <= 600
    assert described["left_out"]["too_long"] == 0
    assert not data.joint


@pytest.mark.parametrize("size", rest_slow([64, 65, 100, 200, 511], [64, 511]))
def test_a_smaller_vocabulary_is_kept(size: int) -> None:
    corpus = load_synthetic(size)
    assert max(corpus.source_vocab, corpus.target_vocab) <= size
    assert corpus.target_vocab > 0.75 * size
    for side, vocab in ((corpus.train.source, corpus.source_vocab), (corpus.train.target, corpus.target_vocab)):
        assert side.ids.min() >= FIRST
        assert side.ids.max() < vocab


def test_every_configuration_sees_the_same_corpus(data: Dataset) -> None:
    for settings in ({"seed": 7}, {"vocab_size": 32_000}, {"sentences": 4}):
        other = load_data(DataConfig(**settings), stack="encoder-decoder").describe()
        assert other["train_sha256"] == data.describe()["train_sha256"]
        assert other["held_out_sha256"] == data.describe()["held_out_sha256"]


def test_single_stacks_have_no_known_best_loss() -> None:
    assert load_data(DataConfig(), stack="decoder").best_nll is None
    assert load_data(DataConfig(), stack="encoder").best_nll is None


def test_words_have_readable_names(data: Dataset, task: Task) -> None:
    names = target_names(task)
    assert len(set(names)) == len(names) == data.target_vocab - FIRST
    text = data.decode(data.held_out.labels[0].tolist())
    assert text.endswith(" mark0a")
    assert text.split() == [names[word] for word in sentences(data.held_out.labels.numpy()[:1])[0]]


def test_a_validation_text_does_not_go_with_it() -> None:
    with pytest.raises(UsageError, match=r"data\.valid does not go with the synthetic task"):
        load_data(DataConfig(valid="a,b"), stack="decoder")
