"""A model on several ranks: what this rank holds of a parameter, and how a row's numbers become those of all ranks."""

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
from .shards import ActivationShards
from .sharing import Share, layout_by

Parallel = Literal["auto", "later", "ddp", "off"]
ROUNDING = 1e-3  # relative, up to which ranks that share a layer have the same number
T = TypeVar("T")


@dataclass(frozen=True)
class RankShare:
    """A table, or a metric or a number set aside (one row, one column), before its rules finish it: this rank's part,
    or that of all ranks.

    ``own``: it is this rank's and stays so. ``ended``: its probe measures no more on this rank. ``copies``: ranks that
    share a layer each have all of it. ``flags``: once ranks are added up, on the device, by how many of them each cell
    was seen, and behind these how many ended it.
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
        """The columns one after the other, and the flags behind them."""
        parts = [rule.finish(numbers) for rule, numbers in self.columns]
        return torch.cat(parts if self.flags is None else [*parts, self.flags])


class Ranks:
    """The processes that train one model: with DDP or FSDP2, which average its gradients over all of them, with tensor
    parallelism, in which each has a part of every layer, or with FSDP2 around that.

    Sums and counts add up over ranks in one all-reduce a row, maxima in a second one where there are any. Every rank
    must make its watcher, call ``step`` and read no row at another time than the others.
    """

    def __init__(self, model: nn.Module, parallel: Parallel = "auto", share: Share | None = None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.apart: dict[str, str] = {}  # table -> why the ranks' numbers of it cannot be added up
        self.shards: ActivationShards | None = None
        self._model, self._averaged, self.late = model, parallel == "ddp", parallel == "later"
        self._found: ModelLayout | None = None
        if share is not None:
            self._found = layout_by(model, share)
        elif not self.late:
            self._found = layout_of(model, self._averaged)
        self._tables: dict[str, Table] = {}
        self._compared: set[str] = set()  # tables of which ranks that share a layer were seen to agree

    @property
    def found(self) -> ModelLayout:
        """How the model lies on the ranks: as it was when this was made, or at its first forward."""
        if self._found is None:
            self._found = layout_of(self._model, self._averaged, self.late)
        return self._found

    @property
    def known(self) -> bool:
        """Whether that can be told yet."""
        return self._found is not None

    @property
    def sharded(self) -> bool:
        return bool(self.found.sharded) or self.found.tensor > 1

    @property
    def replicated(self) -> bool:
        """True where parameters are plain tensors, of which other ranks are said to have copies."""
        return self.found.cuts is None

    @property
    def loss_share(self) -> float:
        """Of this rank's loss in the loss of all ranks, whose mean it is over different batches."""
        return 1 / self.found.data

    @property
    def running(self) -> bool:
        """Whether a forward pass now is one of training."""
        return True

    def own_sites(self, sites: Sites) -> Sites:
        """Those that this rank looks at."""
        return sites

    @property
    def tables(self) -> list[Table]:
        """Those of all ranks."""
        return list(self._tables.values())

    def layout(self, parameter: torch.Tensor) -> Layout:
        return self.found.of[parameter]

    def share(self, parameter: torch.Tensor) -> float:
        """What this rank adds of its part of a parameter, or of one that is not the model's."""
        layout = self.found.of.get(parameter)
        return 1 / self.size if layout is None else layout.share

    def shards_of(self, sites: Sites) -> ActivationShards | None:
        """What makes activations whole; None where each rank has whole ones."""
        if self.shards is None and self.found.tensor > 1:
            self.shards = ActivationShards(sites, self.found.cuts or {})
        return self.shards

    def close(self) -> None:
        if self.shards is not None:
            self.shards.close()

    def reshard(self) -> None:
        """Frees what a forward without a backward left unsharded: the optimizer would move the shards alone, and the
        next forward would still use the weights from before."""
        for module in self.found.sharded:
            module.reshard()

    def check_alike(self, tables: Sequence[Table]) -> None:
        """Raises on every rank where their tables differ, which would add numbers of different places."""
        self._tables = {table.name: table for table in tables}
        layout = repr([(table.name, table.columns, table.rows) for table in tables])
        digests: list[Any] = [None] * self.size
        dist.all_gather_object(digests, hashlib.sha256(layout.encode()).hexdigest())
        if len(set(digests)) > 1:
            raise UsageError(
                "the ranks watch different models, sites or probes: watch the same on every rank "
                "(pipeline stages, say, each with parallel='off')."
            )

    def differing(self, numbers: torch.Tensor) -> torch.Tensor:
        """Where the ranks that share a layer do not have the same number, up to rounding: (n,) bool."""
        largest, smallest = numbers.clone(), -numbers
        for extreme in (largest, smallest):
            dist.all_reduce(extreme, dist.ReduceOp.MAX, group=self.found.group)
        return (largest + smallest).abs() > ROUNDING * largest.abs().maximum(smallest.abs())

    def _check_copies(self, shares: Sequence[RankShare]) -> None:
        """Once for each table: raises where ranks that share a layer found other numbers of it, since one of them then
        saw a part of the value that nothing marks, or drew another dropout. Where the caller says how the model is
        split, the table ends instead, in :attr:`apart`."""
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
        """One SUM over ranks of all additive numbers and of which cells were seen, and one MAX where there are maxima.

        float64 throughout. A NaN is passed on beside the maxima, which need not keep it.
        """
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


def on_first_rank(action: Callable[[], T]) -> T | None:
    """``action()`` on rank 0 alone, None on the others; an error of ours is raised on all ranks, so that none waits."""
    if not (dist.is_available() and dist.is_initialized()):
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
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


class NullSink:
    """Takes the rows of all ranks but the first, and drops them."""

    def open(self, tables: Sequence[Table]) -> None: ...

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None: ...

    def close(self) -> None: ...


def from_first_rank(value: T) -> T:
    """Rank 0's ``value``, on every rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def _one_of(share: RankShare, ranks: int) -> RankShare:
    """The share of numbers that so many ranks have all of."""
    columns = [(rule, parts / ranks if rule.additive else parts) for rule, parts in share.columns]
    return replace(share, columns=columns)
