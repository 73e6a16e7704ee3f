"""Copies of all parameters, which probes keep: beside them, or of a model that fills a GPU on its host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

ON_HOST = 1 << 28  # entries from which they wait on the host, which costs time at probed rows instead of memory
PART = 1 << 24  # entries that are fetched, or exchanged, at a time


def on_host(tensors: Sequence[torch.Tensor]) -> bool:
    return sum(tensor.numel() for tensor in tensors if tensor.is_cuda) > ON_HOST


def room_for(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For one copy of each: pinned, where it is on the host."""
    if not on_host(tensors):
        return [torch.empty_like(tensor) for tensor in tensors]
    return [torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda) for tensor in tensors]


def kept(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A copy of each."""
    copies = room_for(tensors)
    keep(copies, tensors)
    return copies


def keep(copies: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """The values of ``tensors`` into ``copies``."""
    if tensors:
        torch._foreach_copy_(list(copies), list(tensors), non_blocking=True)  # pyright: ignore


def parts(copies: Sequence[torch.Tensor], device: torch.device) -> Iterator[list[torch.Tensor | None]]:
    """The copies on ``device``, as many at a time as may be there, with None for the others."""
    if all(copy.device == device for copy in copies) and not on_host(copies):
        yield list(copies)
        return
    nothing: list[torch.Tensor | None] = [None] * len(copies)
    part, held = nothing.copy(), 0
    for place, copy in enumerate(copies):
        part[place] = copy.to(device, non_blocking=True)
        held += copy.numel()
        if held > PART or place + 1 == len(copies):
            yield part
            part, held = nothing.copy(), 0


@contextmanager
def parameters_set(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Iterator[None]:
    """``values`` in place of the parameters, and meanwhile these in place of ``values``, so that no copy of all of them
    is needed; both come back bit for bit. ``.data``: a kept graph must not notice."""
    data = [tensor.data for tensor in tensors]
    _exchange(data, values)
    try:
        yield
    finally:
        _exchange(data, values)


def _exchange(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    pairs, held = [], 0
    for number, pair in enumerate(zip(some, others, strict=True), start=1):
        pairs.append(pair)
        held += pair[0].numel()
        if held > PART or number == len(some):
            own, other = (list(side) for side in zip(*pairs, strict=True))
            kept = [tensor.clone() for tensor in own]
            torch._foreach_copy_(own, other)  # pyright: ignore
            torch._foreach_copy_(other, kept)  # pyright: ignore
            pairs, held = [], 0
