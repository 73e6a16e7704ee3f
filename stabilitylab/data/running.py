"""Running text: one stream of tokens without sentence pairs, cut into rows of equal length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .corpus import EOS, Pairs, Rows, Sentences


@dataclass(frozen=True)
class RunningText(Pairs):
    """A text as consecutive blocks of tokens, on the target side; there is no source side.

    EOS stands for the end of each line. A block ends where the next one begins: it has no EOS of its own, and no token
    stands in two blocks.
    """

    @classmethod
    def of(cls, lines: Sentences, block: int) -> RunningText:
        """Cut a text into blocks of ``block`` tokens. The last block is shorter, or left out if it has one token
        alone."""
        ends = (lines.lengths + 1).cumsum()
        kind = np.promote_types(lines.ids.dtype, np.min_scalar_type(EOS))
        stream = np.full(int(lines.lengths.sum()) + len(ends), EOS, kind)
        inside = np.ones(len(stream), bool)
        inside[ends - 1] = False
        stream[inside] = lines.ids
        if len(stream) % block == 1:
            stream = stream[:-1]
        whole, rest = divmod(len(stream), block)
        lengths = np.array([block] * whole + [rest] * (rest > 0), np.int64)
        nothing = Sentences(stream[:0], np.zeros(len(lengths), np.int64))
        return cls(nothing, Sentences(stream, lengths))

    def rows(self, keep: np.ndarray) -> Rows:
        target = self.target.rows(keep)[:, :-1] if keep.any() else self.target.rows(keep)
        lengths = self.target.lengths[keep]
        target[np.arange(target.shape[1]) >= lengths[:, None]] = 0  # the EOS that ends a sentence
        return Rows(np.zeros((len(target), 1), target.dtype), target)

    def empty(self) -> np.ndarray:
        return self.target.lengths == 0  # (N,)

    def longer_than(self, tokens: int) -> np.ndarray:
        return self.target.lengths > tokens  # (N,)
