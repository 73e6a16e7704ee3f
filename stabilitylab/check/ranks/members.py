"""The processes of a training as a check asks them: who holds which part, who has which batch, and what went wrong
where."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from uuid import uuid4

import torch.distributed as dist
from torch import nn

from ...errors import InputError, StabilityLabError, UsageError, first_line, listed
from ...probes.parameters.agreement import ROUNDING, GradientSums, alike
from ...probes.parameters.ranks import gathered
from ...probes.parameters.sharing import Share
from ...probes.parameters.spreading import spread_out
from ...probes.places.naming import parameters_of

T = TypeVar("T")
Part = tuple[int, int, int, int]  # rows from, rows to, columns from, number of the part
PATIENCE = 10.0  # [s] for which a rank that failed waits for the others, which may be inside a collective
LONGEST = 1800.0  # [s] for which a rank that is done waits for the others


class RankFailedError(InputError):
    """A question could not be answered on some rank; all ranks raise it."""


class Members:
    """The processes of the default group.

    ``parameters``: this rank's parameters by full name. ``parts``: the part of each that this rank holds, equal on
    ranks that hold copies. ``data``: the number of each rank's data rank: ranks of one number have one batch.
    ``tensor``: the place of each rank among the ranks of its data rank.
    """

    def __init__(self, model: nn.Module, share: Share | None) -> None:
        from torch.distributed.tensor import DTensor

        spread = share is not None or any(isinstance(own, DTensor) for own in model.parameters())
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._count = 0
        self._id = self.gathered(uuid4().hex)[0]
        self.processes = self.together("the layout", lambda: spread_out(model, "auto" if spread else "ddp", share))
        found = self.processes.found
        self.parameters = parameters_of(model)
        self.parts: dict[str, Part] = {}
        self.shares: dict[str, float] = {}
        for name, own in self.parameters.items():
            layout = self.processes.layout(own)
            self.parts[name] = (layout.start, layout.stop, layout.left, layout.part)
            self.shares[name] = layout.share
        alike = dist.get_process_group_ranks(found.group) if found.group is not None else [self.rank]
        together = self.gathered(sorted(alike))
        firsts = sorted({own[0] for own in together})
        self.data = [firsts.index(own[0]) for own in together]
        self.tensor = [own.index(rank) for rank, own in enumerate(together)]
        self.sharded = list(found.sharded)

    @property
    def data_ranks(self) -> int:
        return max(self.data) + 1

    @property
    def tensor_ranks(self) -> int:
        return max(self.tensor) + 1

    def gathered(self, own: T) -> list[T]:
        """Return the ``own`` of every rank; all ranks must call this."""
        return gathered(own)

    def gather(self, action: Callable[[], T]) -> list[T]:
        """Return ``action()`` of every rank. If it raises on one, raise RankFailedError on all."""
        own, problem = None, ""
        try:
            own = action()
        except Exception as error:
            problem = _first_line(error)
        told = self.gathered((own, problem))
        if failed := [(rank, text) for rank, (_, text) in enumerate(told) if text]:
            raise RankFailedError(f"rank {failed[0][0]} raised {failed[0][1]}")
        return [one for one, _ in told]  # pyright: ignore[reportReturnType]

    def mean(self, numbers: Sequence[float]) -> list[float]:
        """Return the mean over ranks of each number, with the same bits on every rank."""
        return [sum(each) / self.size for each in zip(*self.gathered(list(numbers)), strict=True)]

    def together(self, what: str, action: Callable[[], T]) -> T:
        """Return ``action()``. If it raises on some rank, raise on all of them, with the first message and its rank.

        The ranks agree by the group's store, since others may be inside a collective of the action when one fails: the
        rank that failed waits a few seconds for them and then raises alone. The others leave their collective once its
        process ends.
        """
        result, failed = None, None
        try:
            result = action()
        except Exception as error:
            failed = error
        told = self._exchanged(failed)
        if failures := [(at, rank, is_usage, text) for rank, (at, is_usage, text) in told.items() if text]:
            _, rank, is_usage, text = min(failures)
            raised = UsageError if is_usage else InputError
            raise raised(f"rank {rank}: {what} failed: {text}") from failed
        return result  # pyright: ignore[reportReturnType]

    def _exchanged(self, failed: Exception | None) -> dict[int, tuple[float, bool, str]]:
        """Return (time, True for a UsageError, message) of each rank that has answered; "" is the message of a success.
        ``failed``: the error of this rank."""
        store = dist.distributed_c10d._get_default_store()
        self._count += 1
        text = "" if failed is None else _first_line(failed)
        keys = [f"stabilitylab/{self._id}/{self._count}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], json.dumps([time.time(), type(failed) is UsageError, text]))
        until = time.monotonic() + (LONGEST if failed is None else PATIENCE)
        pause, told = 0.001, {}
        while len(told) < self.size:
            for rank, key in enumerate(keys):
                if rank not in told and store.check([key]):
                    told[rank] = tuple(json.loads(store.get(key)))
            if len(told) == self.size:
                break
            if time.monotonic() > until:
                if failed is None:
                    lost = [rank for rank in range(self.size) if rank not in told]
                    raise InputError(f"{said(lost)} did not answer for {LONGEST:.0f} s: look at their own output.")
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return told


def _first_line(error: Exception) -> str:
    """Return the first line of an error; that of another than ours with its class."""
    text = first_line(error, 400, otherwise="without a message")
    return text if isinstance(error, StabilityLabError) else f"{type(error).__name__}: {text}"


def said(ranks: Sequence[int]) -> str:
    """Return "rank 1", or "ranks 0, 1 and 2"."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > 6:
        return f"ranks {listed(names, 6)}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def holders(each: Sequence[Mapping[str, tuple[Part, Any]]]) -> Iterator[tuple[str, list[tuple[int, Any]]]]:
    """Yield (name, [(rank, value), ...]) for each part of each parameter that several ranks hold. ``each``: of every
    rank, the part and a value by name. A name that a rank lacks has None there."""
    for name in names_of(each):
        by_part: dict[Any, list[tuple[int, Any]]] = {}
        for rank, own in enumerate(each):
            part, value = own.get(name, (None, None))
            by_part.setdefault(part, []).append((rank, value))
        lacking = by_part.pop(None, [])
        for held in by_part.values():
            if len(held) + len(lacking) > 1:
                yield name, sorted([*held, *lacking], key=lambda one: one[0])


def names_of(each: Sequence[Iterable[str]]) -> list[str]:
    """Return the names that some rank has, in the order of the ranks, each once."""
    return list(dict.fromkeys(name for own in each for name in own))


def differing(
    each: Sequence[Mapping[str, tuple[Part, Any]]], same: Callable[[Any, Any], bool] | None = None
) -> tuple[list[str], list[int]]:
    """Return the names whose copies differ, and the ranks that differ from the most. The arguments are those of
    :func:`holders` and :func:`parted`."""
    apart = [(name, ranks) for name, held in holders(each) if (ranks := parted(held, same))]
    return list(dict.fromkeys(name for name, _ in apart)), sorted({rank for _, ranks in apart for rank in ranks})


def same_sums(one: GradientSums | None, other: GradientSums | None, rounding: float = ROUNDING) -> bool:
    """True if two ranks have the same sums, up to rounding; None is the value of a rank that lacks the parameter."""
    return one is other or (one is not None and other is not None and alike(one, other, rounding))


def parted(held: Sequence[tuple[int, Any]], same: Callable[[Any, Any], bool] | None = None) -> list[int]:
    """Return the ranks whose value is not that of the most ranks; [] if all are the same."""
    kinds: list[tuple[Any, list[int]]] = []
    for rank, value in held:
        known = next((own for own in kinds if (same(own[0], value) if same else own[0] == value)), None)
        if known is None:
            kinds.append((value, [rank]))
        else:
            known[1].append(rank)
    most = max(kinds, key=lambda own: len(own[1]))[1] if kinds else []
    return [rank for rank, _ in held if rank not in most]
