"""Copies of all parameters, which probes keep: beside them, or where a GPU has no room on its host."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ...environment import RUNS_PER_DEVICE

SPARE = 4  # times its size that must be left for a copy: itself, another, and Adam's moments, which may yet come
PART = 1 << 24  # entries that are fetched, or exchanged, at a time


def left(device: torch.device) -> int:
    """Bytes of a GPU that this process has not used so far, if what comes and goes in an update came a second time, as
    memory of recorded updates is theirs alone; of several runs that a sweep puts there each has its part."""
    free, whole = torch.cuda.mem_get_info(device)
    now, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    part = whole // int(os.environ.get(RUNS_PER_DEVICE) or 1)
    return min(free + torch.cuda.memory_reserved(device), part) - most - (most - now)


def on_host(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a copy of all waits on the host, which costs time at probed rows instead of memory."""
    there = [tensor for tensor in tensors if tensor.is_cuda]
    return bool(there) and SPARE * sum(tensor.nbytes for tensor in there) > left(there[0].device)


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


def beside(copies: Sequence[torch.Tensor], device: torch.device) -> bool:
    return all(copy.device == device for copy in copies)


def parts(copies: Sequence[torch.Tensor], device: torch.device) -> Iterator[list[torch.Tensor | None]]:
    """The copies on ``device``, as many at a time as may be there, with None for the others."""
    if beside(copies, device):
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
