"""A model on several ranks: the part of a parameter that a rank holds, and sums of a row's numbers over all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ...errors import StabilityLabError, UsageError
from ...schema import Cells, Table
from ..places.sites import Sites
from ..rules import Rule
from .layouts import Layout, ModelLayout, layout_of
from .processes import Processes
from .shards import ActivationShards
from .sharing import Share, layout_by

Parallel = Literal["auto", "later", "ddp", "off"]
ROUNDING = 1e-3  # relative difference up to which the numbers of ranks that share a layer count as equal
T = TypeVar("T")


@dataclass(frozen=True)
class RankShare:
    """A table, a metric, or a number set aside (a metric and a number: one row, one column), before its rules finish
    it. The numbers are this rank's part, or the sum over all ranks.

    ``own``: the number is this rank's and stays so. ``ended``: the probe measures no more on this rank. ``copies``:
    each rank that shares a layer has all of the numbers. ``flags``: None before ranks are added up; then, on the
    device, the number of ranks that have a number for each cell, and behind these numbers the number of ranks on which
    the probe ended.
    """

    kind: Literal["table", "metric", "aside"]
    name: str
    columns: Sequence[tuple[Rule, torch.Tensor]]  # each (rows, width) float64
    seen: np.ndarray  # (rows, columns): the cells for which this rank has a number
    own: bool = False
    ended: bool = False
    copies: bool = False
    flags: torch.Tensor | None = None  # (rows * columns + 1,)

    def finished(self) -> torch.Tensor:
        """Return the finished columns one after the other, with the flags behind them."""
        parts = [rule.finish(numbers) for rule, numbers in self.columns]
        return torch.cat(parts if self.flags is None else [*parts, self.flags])


class Ranks(Processes):
    """The processes that train one model. DDP and FSDP2 average its gradients over all ranks; in tensor parallelism
    each rank has a part of every layer; FSDP2 may stand around tensor parallelism.

    Sums and counts add up over ranks in one all-reduce a row. Maxima, if there are any, take a second all-reduce. All
    ranks must make their watcher, call ``step`` and read rows at the same time.
    """

    alone = False
    alike = True  # each rank has every metric

    def __init__(self, model: nn.Module, parallel: Parallel = "auto", share: Share | None = None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.apart: dict[str, str] = {}
        self.shards = None
        self._model, self._averaged, self.late = model, parallel == "ddp", parallel == "later"
        self._found: ModelLayout | None = None
        if share is not None:
            self._found = layout_by(model, share)
        elif not self.late:
            self._found = layout_of(model, self._averaged)
        self._tables: dict[str, Table] = {}
        self._compared: set[str] = set()  # tables that were compared between ranks that share a layer
        self._metrics: dict[tuple[str, ...], dict[str, Rule]] = {}  # by the tables that they travel with

    @property
    def found(self) -> ModelLayout:
        """The layout of the model on the ranks: read when this object was made, or at the first forward
        (parallel='later')."""
        if self._found is None:
            self._found = layout_of(self._model, self._averaged, self.late)
        return self._found

    @property
    def known(self) -> bool:
        return self._found is not None

    @property
    def sharded(self) -> bool:
        return bool(self.found.sharded) or self.found.tensor > 1

    @property
    def replicated(self) -> bool:
        return self.found.cuts is None

    @property
    def loss_share(self) -> float:
        """The share of this rank's loss in the loss of all ranks, which is the mean over different batches."""
        return 1 / self.found.data

    def layout(self, parameter: torch.Tensor) -> Layout:
        return self.found.of[parameter]

    def share(self, parameter: torch.Tensor) -> float:
        """Return the share that this rank adds of a parameter; 1 / ranks for a tensor that is no parameter of the
        model."""
        layout = self.found.of.get(parameter)
        return 1 / self.size if layout is None else layout.share

    def shards_of(self, sites: Sites) -> ActivationShards | None:
        """Return the object that makes activations whole; None if each rank has whole activations."""
        if self.shards is None and self.found.tensor > 1:
            self.shards = ActivationShards(sites, self.found.cuts or {})
        return self.shards

    def close(self) -> None:
        if self.shards is not None:
            self.shards.close()

    def reshard(self) -> None:
        """Free the parameters that a forward without a backward left unsharded. The optimizer would move the shards
        alone, and the next forward would still use the old weights."""
        for module in self.found.sharded:
            module.reshard()

    def check_alike(self, tables: Sequence[Table]) -> None:
        """Raise UsageError on every rank if their tables differ: sums would then mix numbers of different places."""
        self._tables = {table.name: table for table in tables}
        layout = repr([(table.name, table.columns, table.rows) for table in tables])
        if len(set(self.gathered(hashlib.sha256(layout.encode()).hexdigest()))) > 1:
            raise UsageError(
                "the ranks watch different models, sites or probes: watch the same on every rank "
                "(pipeline stages, say, each with parallel='off')."
            )

    def differing(self, numbers: torch.Tensor) -> torch.Tensor:
        """True for each number that differs between ranks that share a layer, beyond rounding: (n,) bool."""
        largest, smallest = numbers.clone(), -numbers
        for extreme in (largest, smallest):
            dist.all_reduce(extreme, dist.ReduceOp.MAX, group=self.found.group)
        return (largest + smallest).abs() > ROUNDING * largest.abs().maximum(smallest.abs())

    def _alike(self, shares: Sequence[RankShare], device: torch.device) -> list[RankShare]:
        """Sort the shares, and add an empty one for each metric that only other ranks have."""
        own = {share.name: share for share in shares if share.kind == "metric"}
        others = sorted((share for share in shares if share.kind != "metric"), key=lambda one: (one.kind, one.name))
        key = tuple(share.name for share in others)
        if key not in self._metrics:
            self._metrics[key] = self._agreed_metrics(own)
        rules = self._metrics[key]
        metrics = [self._metric(name, rule, own.get(name), device) for name, rule in rules.items()]
        metrics += [own[name] for name in sorted(own.keys() - rules.keys())]  # given on every rank by the caller
        return [*others, *metrics]

    def _agreed_metrics(self, own: Mapping[str, RankShare]) -> dict[str, Rule]:
        """Map each metric that any rank has to its rule. A rank may lack one: the loss, a kind of parameter on a stage
        of a pipeline, or what a probe that failed would have given."""
        mine = {name: (share.columns[0][0], bool(share.seen.all())) for name, share in own.items()}
        rules: dict[str, Rule] = {}
        known = self.gathered(mine)
        for told in (True, False):  # a rank without a number does not know the rule either
            for each in known:
                for name, (rule, seen) in each.items():
                    if seen is told:
                        rules.setdefault(name, rule)
        return dict(sorted(rules.items()))

    def _metric(self, name: str, rule: Rule, own: RankShare | None, device: torch.device) -> RankShare:
        """Return this rank's share of a metric. One that is missing, where all ranks should have it, spoils the sum."""
        if own is not None and own.seen.all():
            return own
        spoilt = own is None and self.alike
        columns = [(rule, nothing(rule, 1, device))]
        return RankShare("metric", name, columns, np.zeros((1, 1), dtype=bool), ended=spoilt)

    def gathered(self, own: T) -> list[T]:
        return gathered(own)

    def any(self, told: bool, device: torch.device) -> bool:
        number = torch.tensor([float(told)], device=device)
        dist.all_reduce(number)
        return bool(number.item())

    def mean(self, numbers: torch.Tensor, device: torch.device, failed: bool = False) -> torch.Tensor:
        told = torch.cat((numbers, numbers.new_full((1,), float(failed)))).to(device)
        dist.all_reduce(told)
        if told[-1] and not failed:
            raise RuntimeError("the loss of the fixed batch raised on another rank")
        return told[:-1] / self.size

    def sum(self, number: torch.Tensor, device: torch.device) -> torch.Tensor:
        number = number.to(device, torch.float64)
        dist.all_reduce(number)
        return number

    def _check_copies(self, shares: Sequence[RankShare]) -> None:
        """Compare each table once between the ranks that share a layer, at its first number; raise UsageError if they
        differ. A difference means that a rank saw a part of the value that nothing marks, or drew another dropout. If
        the caller describes the layout with ``share=``, the table ends instead, with the reason in :attr:`apart`."""
        new = [share for share in shares if share.name not in self._compared and share.seen.any()]
        self._compared |= {share.name for share in new}
        for share in new:
            own = torch.cat([parts for rule, parts in share.columns if rule.width <= 2], dim=1).nan_to_num()
            names = [row.site for row in self._tables[share.name].rows]
            apart = self.differing(own.flatten()).view_as(own).any(dim=1).tolist()
            wrong = [name for name, differs in zip(names, apart, strict=True) if differs]
            if wrong := [name for name in wrong if self.shards is None or not self.shards.by_heads(name)]:
                why = (
                    f"{share.name} at {wrong[0]!r} differs between ranks of one layer: what is there is a part that "
                    "nothing marks, or their dropout differs; leave the place out with sites= or the table with "
                    f"probes='-{share.name}'"
                )
                if not self.found.said:
                    raise UsageError(f"{why}.")
                self.apart[share.name] = why

    def add_up(self, shares: Sequence[RankShare], device: torch.device) -> list[RankShare]:
        """Add up all additive numbers and the flags of seen cells in one SUM over ranks; take maxima in one MAX, if
        there are any.

        All numbers are float64. A MAX need not keep a NaN, so a flag in the SUM carries each NaN. All ranks add up the
        same numbers in the same order, even if a probe failed on one of them.
        """
        shares = self._alike(shares, device)
        tensor = self.found.tensor
        if tensor > 1:
            self._check_copies([share for share in shares if share.copies])
            shares = [_one_of(share, tensor) if share.copies else share for share in shares]
            shares = [replace(share, ended=share.ended or share.name in self.apart) for share in shares]
        columns = [(rule, parts) for share in shares for rule, parts in share.columns]
        sums = [parts.flatten() for rule, parts in columns if rule.additive]
        maxima = [parts.flatten() for rule, parts in columns if not rule.additive]
        known = [np.append(share.seen.ravel(), share.ended).astype(np.float64) for share in shares]
        flags = torch.from_numpy(np.concatenate(known))
        flags = flags.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else flags.to(device)
        top = torch.cat(maxima) if maxima else flags.new_empty(0)
        total = torch.cat([*sums, flags, top.isnan().double()])
        dist.all_reduce(total)
        *added, flags, spoilt = total.split([*(s.numel() for s in sums), flags.numel(), top.numel()])
        if maxima:
            top = torch.where(top.isnan(), -torch.inf, top)
            dist.all_reduce(top, dist.ReduceOp.MAX)
            top = torch.where(spoilt > 0, torch.nan, top)
        pools = {True: iter(added), False: iter(top.split([m.numel() for m in maxima]))}
        cells = iter(flags.split([own.size for own in known]))
        return [
            replace(
                share,
                columns=[(rule, next(pools[rule.additive]).view(-1, rule.width)) for rule, _ in share.columns],
                flags=next(cells),
            )
            for share in shares
        ]


def has_process_group() -> bool:
    """Return True if this process has a default group of processes, in which each has a rank."""
    return dist.is_available() and dist.is_initialized()


def gathered(own: T) -> list[T]:
    """Return the ``own`` of every rank of the default group; all ranks must call this."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def nothing(rule: Rule, rows: int, device: torch.device) -> torch.Tensor:
    """Return what a rule adds up where there is no number: (rows, width) float64."""
    fill = 0.0 if rule.additive else -torch.inf
    return torch.full((rows, rule.width), fill, dtype=torch.float64, device=device)


def on_first_rank(action: Callable[[], T]) -> T | None:
    """Return ``action()`` on rank 0, and None on the other ranks. A StabilityLabError is raised on all ranks. After any
    other error of rank 0 the other ranks raise a StabilityLabError, so that no rank waits."""
    if not has_process_group():
        return action()
    result, failure = None, None
    if dist.get_rank() == 0:
        try:
            result = action()
        except StabilityLabError as error:
            failure = error
        except BaseException:
            failure = StabilityLabError("rank 0 failed; its own message says why.")
            from_first_rank(failure)
            raise
    failure = from_first_rank(failure)
    if failure is not None:
        raise failure
    return result


def is_first_rank() -> bool:
    return not has_process_group() or dist.get_rank() == 0


class NullSink:
    """Takes the rows on all ranks but the first, and drops them."""

    def open(self, tables: Sequence[Table]) -> None: ...

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None: ...

    def close(self) -> None: ...


def from_first_rank(value: T) -> T:
    """Return rank 0's ``value``, on every rank."""
    if not has_process_group():
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def _one_of(share: RankShare, ranks: int) -> RankShare:
    """Return the share of one rank, if each of ``ranks`` ranks has all of the numbers: additive numbers are divided by
    ``ranks``."""
    columns = [(rule, parts / ranks if rule.additive else parts) for rule, parts in share.columns]
    return replace(share, columns=columns)
