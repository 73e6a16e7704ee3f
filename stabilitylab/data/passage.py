"""Whole text to translate: every sentence once, with its reference translation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .corpus import EOS, PAD


@dataclass(frozen=True)
class Passage:
    """Sentences in the order of their text; the lines are the text itself, as it was before tokenisation."""

    name: str
    tokens: list[np.ndarray]  # of each source side, ended by EOS
    source: list[str]
    reference: list[str]
    truncated: np.ndarray  # (N,) bool: the source side was cut ...
    longest: int  # ... to this many tokens, EOS included

    @classmethod
    def of(
        cls, name: str, tokens: Sequence[np.ndarray], source: list[str], reference: list[str], *, longest: int
    ) -> Passage:
        """Make a passage of ``tokens`` without EOS. Tokens beyond ``longest``, EOS included, are cut off."""
        cut = np.array([len(ids) + 1 > longest for ids in tokens], bool)
        ended = [np.append(ids[: longest - 1].astype(np.int64), EOS) for ids in tokens]
        return cls(name, ended, source, reference, cut, longest)

    def __len__(self) -> int:
        return len(self.tokens)

    def head(self, sentences: int | None) -> Passage:
        """Return the first ``sentences`` sentences; None: all."""
        end = slice(sentences)
        sides = self.tokens[end], self.source[end], self.reference[end], self.truncated[end]
        return Passage(self.name, *sides, self.longest)

    def batches(self, sentences: int) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Yield batches of similar lengths, the longest first: (places in the passage, ids (B, S), True on real tokens
        (B, S))."""
        order = sorted(range(len(self)), key=lambda place: -len(self.tokens[place]))
        for start in range(0, len(order), sentences):
            places = order[start : start + sentences]
            ids = torch.full((len(places), len(self.tokens[places[0]])), PAD)
            for row, place in enumerate(places):
                ids[row, : len(self.tokens[place])] = torch.from_numpy(self.tokens[place])
            yield places, ids, ids != PAD
