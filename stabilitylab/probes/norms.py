"""Sums of squares of thousands of tensors in a few operator calls, from 1e-38 to 1e38."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors

SMALL = 1024  # entries up to which tensors of one shape are stacked instead of visited one by one
CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}  # entries that are flattened at a time: a cache full; few launches

Cut = tuple[int, slice | None]  # which tensor, which of its rows
Values = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class _Plan:
    """For one pattern of absent tensors: the cuts that are stacked by shape, the others, and where results go."""

    stacks: tuple[tuple[Cut, ...], ...]
    others: tuple[Cut, ...]
    places: torch.Tensor


class Squares:
    """Sum of squares of each cut of some tensors, float64; those of an absent tensor (None) are 0.

    ``shares``, one for each cut, weights them where several ranks hold the same entries.
    """

    def __init__(
        self,
        cuts: Sequence[Cut],
        like: Sequence[torch.Tensor],
        device: torch.device,
        shares: torch.Tensor | None = None,
    ) -> None:
        self._cuts, self._like, self._device, self._shares = tuple(cuts), tuple(like), device, shares
        self._plans: dict[tuple[bool, ...], _Plan] = {}

    def __call__(self, values: Values) -> torch.Tensor:
        present = tuple([value is not None for value in values])
        plan = self._plans.get(present) or self._plans.setdefault(present, self._plan(present))
        # float64 inside too: a float32 norm of entries below 1e-23 is exactly 0, of entries above 1e19 it is inf
        norms = [torch.linalg.vector_norm(_stacked(values, s), dim=1, dtype=torch.float64) for s in plan.stacks]
        if others := [_dense(_cut(values, index, part)) for index, part in plan.others]:
            norms.append(torch.stack(torch._foreach_norm(others, 2, dtype=torch.float64)))  # pyright: ignore
        result = torch.zeros(len(self._cuts), dtype=torch.float64, device=self._device)
        if norms:
            result.index_copy_(0, plan.places, torch.cat(norms)).square_()
        return result if self._shares is None else result.mul_(self._shares)

    def _plan(self, present: tuple[bool, ...]) -> _Plan:
        shapes: dict[object, list[int]] = {}
        for place, (index, part) in enumerate(self._cuts):
            if present[index]:
                tensor = _cut(self._like, index, part)
                if not tensor.numel():  # a rank may hold nothing of a sharded parameter
                    continue
                key = (tensor.shape, tensor.dtype) if tensor.numel() <= SMALL else None
                shapes.setdefault(key, []).append(place)
        others = shapes.pop(None, [])
        places = [place for group in (*shapes.values(), others) for place in group]
        return _Plan(
            tuple(tuple(self._cuts[place] for place in group) for group in shapes.values()),
            tuple(self._cuts[place] for place in others),
            torch.tensor(places, dtype=torch.int64, device=self._device),
        )


def flattened(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The entries of all tensors, a bounded number at a time."""
    held: list[torch.Tensor] = []
    size, limit = 0, CHUNK.get(tensors[0].device.type, 1 << 22) if tensors else 0
    for tensor in tensors:
        held.append(_dense(tensor) if tensor.is_sparse else tensor)
        size += tensor.numel()
        if size >= limit:
            yield _flatten_dense_tensors(held)
            held, size = [], 0
    if held:
        yield _flatten_dense_tensors(held)


def _cut(values: Values, index: int, part: slice | None) -> Any:
    value = values[index]
    return value if value is None or part is None else value[part]


def _stacked(values: Values, cuts: Sequence[Cut]) -> torch.Tensor:
    rows = [_cut(values, index, part) for index, part in cuts]
    return torch.stack([row.to_dense() if row.is_sparse else row for row in rows]).reshape(len(cuts), -1)


def _dense(value: torch.Tensor) -> torch.Tensor:
    """Sparse gradients (of embeddings) have zeros where they have no values."""
    return value.coalesce().values() if value.is_sparse else value
