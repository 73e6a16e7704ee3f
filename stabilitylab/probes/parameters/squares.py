"""Sums of squares of thousands of tensors in a few operator calls, from 1e-38 to 1e38."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch._utils import _flatten_dense_tensors

from ..places.attending import Part

PATTERNS = 64  # the first patterns of absent tensors are remembered; experts and skipped layers make ever new ones
SMALL = 1024  # entries up to which tensors of one shape are stacked instead of visited one by one
CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}  # entries per operator call: a cache full on a CPU; few launches on a GPU
DOTTED = 1 << 22  # entries that are widened to float64 at a time for a product
WIDENED = 1 << 18  # largest tensor (entries) for which a CPU keeps a float64 buffer

Cut = tuple[int, Part]  # number of the tensor, part of the tensor
Cuts = tuple[Cut, ...]
Values = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class _Plan:
    """The plan for one pattern of absent tensors: cuts to stack by shape; cuts to widen by shape, a cache full at a
    time; the other cuts; the places of the results."""

    stacks: tuple[Cuts, ...]
    widened: tuple[tuple[Cuts, torch.Tensor, tuple[torch.Tensor, ...]], ...]  # cuts, buffer (n, entries), views by cut
    others: Cuts
    places: torch.Tensor


class Squares:
    """Sum of squares of each cut of some tensors, float64; 0 for an absent tensor (None, or a tensor of whole numbers).

    ``shares``: one factor for each cut, so that entries which several ranks hold count once.
    """

    def __init__(
        self,
        cuts: Sequence[Cut],
        like: Sequence[torch.Tensor],
        device: torch.device,
        shares: torch.Tensor | None = None,
    ) -> None:
        self._cuts, self._like, self._device, self._shares = tuple(cuts), tuple(like), device, shares
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._room = torch.empty(0, dtype=torch.float64, device=device)

    def __call__(self, values: Values) -> torch.Tensor:
        pattern = tuple([1 + value.is_sparse if is_counted(value) else 0 for value in values])
        if (plan := self._plans.get(pattern)) is None:
            plan = self._plan(pattern)
            if len(self._plans) < PATTERNS:
                self._plans[pattern] = plan
        # float64 inside too: a float32 norm of entries below 1e-23 is exactly 0, of entries above 1e19 it is inf
        norms = [torch.linalg.vector_norm(_stacked(values, s), dim=1, dtype=torch.float64) for s in plan.stacks]
        for cuts, room, places in plan.widened:
            torch._foreach_copy_(places, [_cut(values, index, part) for index, part in cuts])  # pyright: ignore
            norms.append(torch.linalg.vector_norm(room, dim=1))
        if others := [_dense(_cut(values, index, part)) for index, part in plan.others]:
            norms.append(torch.stack(torch._foreach_norm(others, 2, dtype=torch.float64)))  # pyright: ignore
        result = torch.zeros(len(self._cuts), dtype=torch.float64, device=self._device)
        if norms:
            result.index_copy_(0, plan.places, torch.cat(norms)).square_()
        return result if self._shares is None else result.mul_(self._shares)

    def dots(self, values: Values, others: Values) -> torch.Tensor:
        """Sum of products of each cut of two lists of tensors, float64; 0 where either tensor is absent."""
        result = torch.zeros(len(self._cuts), dtype=torch.float64, device=self._device)
        for place, (index, part) in enumerate(self._cuts):
            pair = values[index], others[index]
            if all(map(is_counted, pair)):
                whole = [one.to_dense() if one.is_sparse else one for one in pair if one is not None]
                result[place] = _dot(_cut(whole[:1], 0, part), _cut(whole[1:], 0, part))
        return result if self._shares is None else result.mul_(self._shares)

    def _plan(self, pattern: tuple[int, ...]) -> _Plan:
        groups: dict[str, dict[object, list[int]]] = {"stacks": {}, "widened": {}, "others": {}}
        for place, (index, part) in enumerate(self._cuts):
            if pattern[index]:
                tensor = _cut(self._like, index, part)
                way = "stacks" if tensor.numel() <= SMALL else "widened" if widens(tensor) else "others"
                way = "others" if way == "widened" and pattern[index] == 2 else way
                key = (tensor.shape, tensor.dtype) if way == "stacks" else tensor.shape if way == "widened" else None
                groups[way].setdefault(key, []).append(place)
        stacks, widened, others = ([*groups[way].values()] for way in ("stacks", "widened", "others"))
        widened = [part for group in widened for part in self._cache_fulls(group)]
        places = [place for group in (*stacks, *widened, *others) for place in group]
        return _Plan(
            tuple(map(self._chosen, stacks)),
            tuple((self._chosen(group), *self._room_for(group)) for group in widened),
            self._chosen([place for group in others for place in group]),
            torch.tensor(places, dtype=torch.int64, device=self._device),
        )

    def _chosen(self, places: Sequence[int]) -> Cuts:
        return tuple(self._cuts[place] for place in places)

    def _cache_fulls(self, places: list[int]) -> Iterator[list[int]]:
        """Split tensors of one shape into groups whose float64 copies stay in the cache together."""
        count = max(1, CHUNK["cpu"] // _cut(self._like, *self._cuts[places[0]]).numel())
        return (places[start : start + count] for start in range(0, len(places), count))

    def _room_for(self, places: list[int]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return one buffer for a chunk, (n, entries), and a view of it for each tensor. All chunks use the same
        buffer."""
        shape = _cut(self._like, *self._cuts[places[0]]).shape
        if self._room.numel() < len(places) * shape.numel():
            self._room = torch.empty(len(places) * shape.numel(), dtype=torch.float64, device=self._device)
        room = self._room[: len(places) * shape.numel()]
        return room.view(len(places), -1), room.view(len(places), *shape).unbind()


class WideNorm:
    """L2 norm of a tensor in float64. On a CPU the float64 copy goes into a buffer that is kept: this takes a third of
    the time of a new copy, which spends most of its time on fresh memory."""

    def __init__(self) -> None:
        self._rooms: dict[torch.Size, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:  # 0-dim
        if not widens(tensor):  # on a GPU vector_norm with a dtype makes a copy; _foreach_norm makes none
            return torch._foreach_norm([tensor], 2, dtype=torch.float64)[0]  # pyright: ignore
        if (room := self._rooms.get(tensor.shape)) is None:
            if len(self._rooms) > 16:  # shapes change from batch to batch
                self._rooms.clear()
            room = self._rooms[tensor.shape] = torch.empty(tensor.shape, dtype=torch.float64)
        return torch.linalg.vector_norm(room.copy_(tensor))


def widens(tensor: torch.Tensor) -> bool:
    """True if a float64 copy comes first: on a CPU, for a tensor that fits its cache and is not float64 yet."""
    return tensor.is_cpu and tensor.dtype is not torch.float64 and tensor.numel() <= WIDENED


def flattened(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the entries of all tensors, a bounded number at a time: views of a large tensor, a copy of small ones."""
    held: list[torch.Tensor] = []
    size, limit = 0, CHUNK.get(tensors[0].device.type, 1 << 22) if tensors else 0
    for tensor in map(_dense, tensors):
        if tensor.numel() >= limit:
            yield from tensor.reshape(-1).split(limit)
            continue
        held.append(tensor)
        size += tensor.numel()
        if size >= limit:
            yield _flatten_dense_tensors(held)
            held, size = [], 0
    if held:
        yield _flatten_dense_tensors(held)


def is_counted(value: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return True for a tensor that has a norm; one of whole numbers holds codes (quantised weights)."""
    return value is not None and (value.is_floating_point() or value.is_complex())


def _cut(values: Values, index: int, part: Part) -> Any:
    value = values[index]
    value = value if value is None or part is None else value[part]
    return torch.view_as_real(value) if value is not None and value.is_complex() else value


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return <a, b> in float64, 0-dim, a bounded number of entries at a time."""
    a, b = (one[None] if not one.dim() else one for one in (a, b))
    step = max(1, DOTTED * len(a) // max(1, a.numel()))
    return torch.stack(
        [(x.double() * y.double()).sum() for x, y in zip(a.split(step), b.split(step), strict=True)]
    ).sum()


def _stacked(values: Values, cuts: Sequence[Cut]) -> torch.Tensor:
    rows = [_cut(values, index, part) for index, part in cuts]
    return torch.stack([row.to_dense() if row.is_sparse else row for row in rows]).reshape(len(cuts), -1)


def _dense(value: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse tensor (the gradient of an embedding): its other entries are 0. A dense tensor
    stays as it is."""
    return value.coalesce().values() if value.is_sparse else value
