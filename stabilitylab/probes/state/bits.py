"""The bits of a tensor as integers, so that NaN equals NaN and a write bypasses autograd and version counters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GOLDEN = (math.sqrt(5) - 1) / 2  # the multiples of this number modulo 1 fill [0, 1) evenly

Layout = tuple[Any, ...]


@dataclass(frozen=True)
class Span:
    """The part of a storage that a tensor lies in, in words of the tensor's element size (of 8 bytes at most).

    The words of a strided view include those between its entries. A span keeps its storage alive.
    """

    storage: Any  # torch.UntypedStorage
    device: torch.device
    word: torch.dtype
    first: int
    count: int

    @classmethod
    def of(cls, tensor: Tensor) -> Span:
        """Return the span of a tensor that has a storage of its own on this device."""
        storage, size = tensor.untyped_storage(), tensor.element_size()
        unit = min(size, 8)
        if tensor.is_nested:
            return cls(storage, tensor.device, torch.uint8, 0, storage.nbytes())
        extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(
            storage, tensor.device, INTEGERS[unit], tensor.storage_offset() * size // unit, extent * size // unit
        )

    @property
    def key(self) -> tuple[Any, ...]:
        """The identity of the memory: equal for two spans of the same memory."""
        return self.device, self.storage.data_ptr(), self.word, self.first, self.count

    def words(self) -> Tensor:
        """Return a view of all words, which also shows later writes."""
        return self._view(0, self.count, 1)

    def sampled(self, most: int, turn: int) -> Tensor:
        """Return a view of evenly spaced words, ``most`` at most: all words of a small span, else every ``n / most``-th
        (rounded up) of n words. Another ``turn`` begins at another word, so that over many turns all words are seen."""
        step = -(-self.count // most)
        start = int(turn * GOLDEN % 1 * step)
        return self._view(start, -(-(self.count - start) // step), step)

    def _view(self, start: int, count: int, step: int) -> Tensor:
        empty: Any = torch.empty(0, dtype=self.word, device=self.device)
        return empty.set_(self.storage, self.first + start, (count,), (step,))


def spans(tensor: Tensor) -> list[tuple[Tensor, Span]] | None:
    """Return the plain tensors that hold the values of ``tensor`` on this rank, each with its span.

    For a DTensor this is the local shard, without communication; for a sparse tensor its indices and values; for a
    wrapper that names its parts, these parts. The list is empty for a tensor without values (meta, lazy, of no entry).
    None is returned for a tensor whose memory cannot be looked at.
    """
    try:
        return [(part, Span.of(part)) for part in _parts(tensor)]
    except (RuntimeError, NotImplementedError, AttributeError, KeyError, TypeError):
        return None


def _parts(tensor: Any) -> Iterator[Tensor]:
    if is_lazy(tensor) or tensor.device.type == "meta":
        return
    inner = _made_of(tensor)
    if inner is None and tensor.numel():
        yield tensor
    for part in inner or ():
        yield from _parts(part)


def _made_of(tensor: Any) -> list[Tensor] | None:
    """Return the tensors that a tensor is made of; None for a tensor that has a storage."""
    if (shard := getattr(tensor, "to_local", None)) is not None:
        with torch.no_grad():
            return [shard()]
    if (flatten := getattr(tensor, "__tensor_flatten__", None)) is not None:
        inner = [getattr(tensor, name) for name in flatten()[0]]
        return [part for part in inner if part is not None]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return None


def layout(tensor: Tensor) -> Layout:
    """Return the address and form of a tensor: equal before and after, unless the tensor was moved, resized or given
    another storage."""
    strides = () if tensor.is_nested else (tuple(tensor.shape), tensor.stride())
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.untyped_storage().nbytes(), strides


def version(tensor: Tensor) -> int | None:
    """Return the number of writes that autograd saw; None for an inference tensor, which counts none."""
    return None if tensor.is_inference() else tensor._version


def versions(tensors: Sequence[Tensor]) -> list[int | None]:
    """Return the :func:`version` of each tensor, in one go where none is an inference tensor."""
    if any(map(Tensor.is_inference, tensors)):
        return [version(tensor) for tensor in tensors]
    return [tensor._version for tensor in tensors]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """True if both tensors have one type, one shape and the same bits."""
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    pairs = spans(one), spans(other)
    if None in pairs or len(pairs[0] or ()) != len(pairs[1] or ()):
        return False
    return all(
        torch.equal(packed(a), packed(b).to(a.device))
        for (a, _), (b, _) in zip(pairs[0] or (), pairs[1] or (), strict=True)
    )


def packed(tensor: Tensor) -> Tensor:
    """Return a copy of the entries in order, as words."""
    return Span.of(tensor.detach().clone(memory_format=torch.contiguous_format)).words()
