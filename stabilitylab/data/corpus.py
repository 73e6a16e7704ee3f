"""Tokenised parallel text as a source delivers it: ragged, without special tokens, with every pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

PAD, BOS, EOS, UNK, MASK = range(5)
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")


class Rows(NamedTuple):
    """Sentence pairs as padded arrays: the tokens of a row, EOS, then PAD."""

    source: np.ndarray  # (N, S)
    target: np.ndarray  # (N, T)

    def take(self, index: np.ndarray | slice) -> Rows:
        return Rows(self.source[index], self.target[index])

    def lengths(self) -> np.ndarray:
        """Count the tokens of each side, EOS included."""
        return np.stack([np.count_nonzero(side, axis=1) for side in self], axis=1)  # (N, 2)

    def trimmed(self) -> Rows:
        source, target = self.lengths().max(axis=0)
        return Rows(self.source[:, :source], self.target[:, :target])

    def hashes(self) -> np.ndarray:
        """Hash each pair into 64 bits that depend only on its tokens, not on the padding. Equal pairs have equal
        hashes."""
        total = np.zeros(len(self.source), np.uint64)  # (N,)
        for side, tokens in enumerate(self):
            for place, column in enumerate(tokens.T.astype(np.uint64)):
                total += np.where(column != PAD, mix(column | np.uint64((2 * place + side + 1) << 32)), 0)
        return total


class Sentences(NamedTuple):
    """The tokens of many sentences end to end, and the length of each sentence."""

    ids: np.ndarray  # (sum of lengths,)
    lengths: np.ndarray  # (N,)

    def pick(self, index: np.ndarray) -> list[np.ndarray]:
        """Return the tokens of each of the sentences ``index``, in this order."""
        ends = self.lengths.cumsum()
        return [self.ids[ends[i] - self.lengths[i] : ends[i]] for i in index]

    def rows(self, keep: np.ndarray) -> np.ndarray:
        """Return the sentences where ``keep`` is True as rows, ended by EOS and padded to the longest of them."""
        lengths = self.lengths[keep]
        rows = np.zeros((len(lengths), lengths.max(initial=0) + 1), self.ids.dtype)  # (kept, L)
        rows[np.arange(rows.shape[1]) < lengths[:, None]] = self.ids[np.repeat(keep, self.lengths)]
        rows[np.arange(len(lengths)), lengths] = EOS
        return rows


@dataclass(frozen=True)
class Pairs:
    """Aligned sentences of two languages."""

    source: Sentences
    target: Sentences

    def __len__(self) -> int:
        return len(self.source.lengths)

    def rows(self, keep: np.ndarray) -> Rows:
        return Rows(self.source.rows(keep), self.target.rows(keep))

    def empty(self) -> np.ndarray:
        return (self.source.lengths == 0) | (self.target.lengths == 0)  # (N,)

    def longer_than(self, tokens: int) -> np.ndarray:
        return np.maximum(self.source.lengths, self.target.lengths) + 1 > tokens  # (N,), EOS counted


@dataclass(frozen=True)
class Corpus:
    """The output of a data source. The Dataset handles lengths, the held-out part and batches."""

    train: Pairs
    valid: Pairs | None
    source_vocab: int
    target_vocab: int
    joint: bool
    decode: Callable[[Sequence[int]], str]  # target ids -> text
    lines: Callable[[str], tuple[list[str], list[str]]]  # "train" or "valid" -> its pairs as text, read on demand
    encode: Callable[[list[str]], Sentences] | None = None  # other text in the same vocabulary
    fresh: Callable[[int], Pairs] | None = None  # n -> n further pairs, if the source can make them
    ideal_nll: Callable[[np.ndarray], float] | None = None  # target rows -> nll per label of the true distribution
    description: dict[str, Any] = field(default_factory=dict)
    rows: str = "sentence pairs"  # the noun for rows of this corpus


def mix(x: np.ndarray) -> np.ndarray:
    """Mix with the finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection that spreads every bit over all
    64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
