"""The inputs of a model: padded rows as the tensors of each kind of stack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import Stack
from .corpus import BOS, EOS, MASK, PAD, SPECIALS, Rows

MASKED = 0.15  # share of a sentence's words that are to be predicted


@dataclass(frozen=True)
class Batch:
    """The tensors of one micro-batch: the model's keyword arguments, and the tensors for its loss and its probes."""

    inputs: dict[str, Tensor]
    labels: Tensor  # (B, T) int64
    weight: Tensor  # (B, T) float32: 1 where a label counts in the loss, else 0
    tokens: int  # weight.sum(), known on the host
    masks: dict[str, Tensor]  # stack -> (B, L) bool: True on real tokens

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on ``device``; a GPU gets it from pinned memory, so that the host does not wait."""
        if torch.device(device).type == "cuda":
            return self._each(lambda tensor: tensor.pin_memory().to(device, non_blocking=True))
        return self._each(lambda tensor: tensor.to(device))

    def padded(self, multiple: int) -> Batch:
        """Return the batch, padded to lengths that are multiples of ``multiple``. A model's numbers change only by
        rounding."""
        return self._each(lambda tensor: F.pad(tensor, (0, -tensor.shape[-1] % multiple)))  # PAD, no weight, no mask: 0

    def clone(self) -> Batch:
        return self._each(torch.Tensor.clone)

    def copy_(self, other: Batch) -> None:
        """Copy the tensors of ``other``, of the same shapes, into its own tensors; ``tokens`` stays."""
        for own, new in zip(self.tensors(), other.tensors(), strict=True):
            own.copy_(new, non_blocking=True)

    def tensors(self) -> list[Tensor]:
        return [*self.inputs.values(), self.labels, self.weight, *self.masks.values()]

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        return tuple(tensor.shape for tensor in self.tensors())

    def of_other_sources(self) -> dict[str, Tensor]:
        """Return the model's arguments, in which each sentence has the source of the next sentence.

        The last sentence has the source of the first. Rows that only fill the batch keep their source. The arguments
        of a model without a source do not change.
        """
        rows = torch.arange(len(self.weight), device=self.weight.device)
        real = (self.weight.sum(1) > 0).sum()  # stays on the device, which the host does not wait for
        other = torch.where(rows < real, (rows + 1) % real.clamp(min=1), rows)
        return {name: each[other] if name.startswith("source") else each for name, each in self.inputs.items()}

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            {name: change(tensor) for name, tensor in self.inputs.items()},
            change(self.labels),
            change(self.weight),
            self.tokens,
            {stack: change(mask) for stack, mask in self.masks.items()},
        )


def make_batch(rows: Rows, stack: Stack, target_vocab: int, random: np.random.Generator) -> Batch:
    """Make a batch of ``rows`` for a kind of stack; single stacks read the target side. ``random`` decides only the
    masked tokens."""
    labels = rows.target  # (B, T)
    real = labels != PAD
    if stack == "encoder":
        tokens, chosen = mask_tokens(labels, target_vocab, random)
        return _batch({"tokens": tokens, "mask": real}, labels, chosen, {"encoder": real})
    shifted = np.where(real, np.pad(labels, ((0, 0), (1, 0)), constant_values=BOS)[:, :-1], PAD)
    if stack == "decoder":
        return _batch({"tokens": shifted, "mask": real}, labels, real, {"decoder": real})
    source_real = rows.source != PAD  # (B, S)
    inputs = {"source": rows.source, "target": shifted, "source_mask": source_real, "target_mask": real}
    return _batch(inputs, labels, real, {"encoder": source_real, "decoder": real})


def mask_tokens(rows: np.ndarray, vocab: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Mask tokens for the task of BERT (Devlin et al. 2019, Sec. 3.1): (input, places to predict), both (B, T).

    15 % of each sentence's words (at least one, never EOS) are to be predicted; of these 80 % become <mask>, 10 % a
    random word, 10 % stay.
    """
    words = (rows != PAD) & (rows != EOS)
    rank = np.where(words, random.random(rows.shape), 2.0).argsort(axis=1).argsort(axis=1)
    count = np.maximum(1, np.rint(MASKED * words.sum(axis=1)))
    chosen = words & (rank < count[:, None])
    fate = random.random(rows.shape)
    anything = random.integers(len(SPECIALS), vocab, rows.shape)
    return np.where(chosen & (fate < 0.8), MASK, np.where(chosen & (fate >= 0.9), anything, rows)), chosen


def _batch(
    inputs: dict[str, np.ndarray], labels: np.ndarray, counts: np.ndarray, masks: dict[str, np.ndarray]
) -> Batch:
    tensors = {name: _tensor(array) for name, array in inputs.items()}
    weight = torch.from_numpy(counts.astype(np.float32))
    return Batch(tensors, _tensor(labels), weight, int(counts.sum()), {k: _tensor(mask) for k, mask in masks.items()})


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array if array.dtype == bool else array.astype(np.int64))
