"""Copies of all parameters that probes keep: on the same device, or on the host if the GPU has no room."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ...environment import RUNS_PER_DEVICE

SPARE = 4  # a copy needs so many times its size: itself, a second one, and Adam's two moments, which may yet come
PART = 1 << 24  # entries to fetch or exchange at a time


def left(device: torch.device) -> int:
    """Return the bytes of a GPU that are left for this run. The memory is the part of the GPU that belongs to this run
    (a sweep puts RUNS_PER_DEVICE runs there), at most what is free or reserved, less the peak of allocated memory. The
    temporary memory (peak less present) counts a second time: recorded updates have memory of their own."""
    free, whole = torch.cuda.mem_get_info(device)
    now, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    part = whole // int(os.environ.get(RUNS_PER_DEVICE) or 1)
    return min(free + torch.cuda.memory_reserved(device), part) - most - (most - now)


def on_host(tensors: Sequence[torch.Tensor]) -> bool:
    """True if a copy of all tensors is kept on the host, which costs time at probed rows instead of GPU memory."""
    there = [tensor for tensor in tensors if tensor.is_cuda]
    return bool(there) and SPARE * sum(tensor.nbytes for tensor in there) > left(there[0].device)


def room_for(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return an empty tensor for a copy of each tensor; on the host the tensor is pinned."""
    if not on_host(tensors):
        return [torch.empty_like(tensor) for tensor in tensors]
    return [torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda) for tensor in tensors]


def kept(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
    """Return a copy of every tensor. If ``copies`` has earlier copies of the same tensors, they are overwritten."""
    found = list(copies) or room_for(tensors)
    if tensors:
        torch._foreach_copy_(found, list(tensors), non_blocking=True)  # pyright: ignore
    return found


def beside(copies: Sequence[torch.Tensor], device: torch.device) -> bool:
    return all(copy.device == device for copy in copies)


def parts(copies: Sequence[torch.Tensor], device: torch.device) -> Iterator[list[torch.Tensor | None]]:
    """Yield the copies on ``device``, as many at a time as may be there, with None for the others."""
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
    """Put ``values`` in place of the parameters, and the parameters in place of ``values``, so that no further copy of
    all of them is needed. Afterwards both come back bit for bit. The exchange writes to ``.data``: a kept graph must
    not notice."""
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
    torch.clear_autocast_cache()  # a context around the whole update keeps casts of the parameters before it
