"""Digests of tensors that see each bit and its place, computed on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..splitmix import GOLDEN, splitmix64
from .bits import packed, spans

CHUNK = 1 << 20  # words that are digested at a time, so that what is made on the way stays small


class Digester:
    """Computes digests of 64 bits: sum over i of (w_i + 1) r_i modulo 2^64.

    w_i is word i of the tensor, its bits as a signed integer, and r_i an odd number that depends on i alone
    (:func:`multipliers`). A change of one word always changes the sum, since r_i is odd and a word has at most 64 bits;
    a permutation, a change of sign or any other change of several words goes unseen with a chance of about 2^-33 for
    words of 32 bits. Words of one tensor are digested in the order of its entries, whatever its strides.
    ``torch.hash_tensor`` is an exclusive or of all words, which sees neither order nor an even number of sign changes.
    """

    def __init__(self) -> None:
        self._kept: dict[torch.device, Tensor] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return the digest, a tensor of 0 dimensions and type int64 on the tensor's device. A tensor that is made of
        parts (a sharded one has its local shard, a sparse one indices and values) has the digest of all of them."""
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for number, (part, span) in enumerate(spans(tensor) or ()):
            words = span.words() if part.is_contiguous() else packed(part)
            found = self._digest(words.detach())
            total = total + found.to(total.device) * (2 * number + 1)
        return total

    def each(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Return the digests of several tensors, (n,) int64 on the first one's device; None for no tensors."""
        found = [self.of(tensor) for tensor in tensors]
        return torch.stack([each.to(found[0].device) for each in found]) if found else None

    def _digest(self, words: Tensor) -> Tensor:
        factors = self._factors(min(words.numel(), CHUNK), words.device)
        total = torch.zeros((), dtype=torch.int64, device=words.device)
        for number, start in enumerate(range(0, words.numel(), CHUNK)):
            part = words[start : start + CHUNK].to(torch.int64)
            # a later chunk has the same factors, times an odd number of its own
            total = total + ((part + 1) * factors[: part.numel()]).sum() * _odd(number)
        return total

    def _factors(self, count: int, device: torch.device) -> Tensor:
        kept = self._kept.get(device)
        if kept is None or kept.numel() < count:
            kept = self._kept[device] = multipliers(max(count, 1 << 10), device)
        return kept


def multipliers(count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return r_0 .. r_{count-1}: SplitMix64 of each index, with its last bit set, (count,) int64."""
    return splitmix64(torch.arange(count, dtype=torch.int64, device=device)) | 1


def _odd(number: int) -> int:
    """Return the odd factor of a chunk, as a signed number of 64 bits."""
    factor = (number * GOLDEN * 2 + 1) % 2**64
    return factor - 2**64 if factor >= 2**63 else factor
