"""A model on several ranks: what this rank holds of a parameter, and how a row's numbers become those of all ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ...errors import StabilityLabError, UsageError
from ...schema import Cells, Table
from ..rules import Rule

Parallel = Literal["auto", "ddp", "off"]
T = TypeVar("T")


@dataclass(frozen=True)
class RankShare:
    """A table, or a metric (one row, one column), before its rules finish it: this rank's part, or that of all ranks.

    ``own``: it is this rank's and stays so. ``ended``: its probe measures no more on this rank. ``flags``: once ranks
    are added up, on the device, by how many of them each cell was seen, and behind these how many ended it.
    """

    kind: Literal["table", "metric"]
    name: str
    columns: Sequence[tuple[Rule, torch.Tensor]]  # each (rows, width) float64
    seen: np.ndarray  # (rows, columns): the cells for which this rank has a number
    own: bool = False
    ended: bool = False
    flags: torch.Tensor | None = None  # (rows * columns + 1,)

    def finished(self) -> torch.Tensor:
        """The columns one after the other, and the flags behind them."""
        parts = [rule.finish(numbers) for rule, numbers in self.columns]
        return torch.cat(parts if self.flags is None else [*parts, self.flags])


@dataclass(frozen=True)
class Layout:
    """What this rank holds of a parameter: rows ``start`` to ``stop`` of its first dimension, and the share of its
    squares that this rank adds, so that the ranks that hold the same entries count them once."""

    start: int
    stop: int
    share: float


class Ranks:
    """The processes that train one model with DDP or FSDP2, which average its gradients over all of them.

    Sums and counts add up over ranks in one all-reduce a row, maxima in a second one where there are any. Every rank
    must make its watcher, call ``step`` and read no row at another time than the others.
    """

    def __init__(self, layouts: Mapping[torch.Tensor, Layout], sharded: Sequence[Any]) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.sharded = bool(sharded)
        self._layouts, self._modules = layouts, tuple(sharded)
        # of what has a gradient; it is the same for all, see ranks_of
        self.gradient_share = next((layout.share for p, layout in layouts.items() if p.requires_grad), 1.0)

    def layout(self, parameter: torch.Tensor) -> Layout:
        return self._layouts[parameter]

    def reshard(self) -> None:
        """Frees what a forward without a backward left unsharded: the optimizer would move the shards alone, and the
        next forward would still use the weights from before."""
        for module in self._modules:
            module.reshard()

    def check_alike(self, tables: Sequence[Table]) -> None:
        """Raises on every rank where their tables differ, which would add numbers of different places."""
        layout = repr([(table.name, table.columns, table.rows) for table in tables])
        digests: list[Any] = [None] * self.size
        dist.all_gather_object(digests, hashlib.sha256(layout.encode()).hexdigest())
        if len(set(digests)) > 1:
            raise UsageError(
                "the ranks watch different models, sites or probes: watch the same on every rank "
                "(pipeline stages, say, each with parallel='off')."
            )

    def add_up(self, shares: Sequence[RankShare], device: torch.device) -> list[RankShare]:
        """One SUM over ranks of all additive numbers and of which cells were seen, and one MAX where there are maxima.

        float64 throughout. A NaN is passed on beside the maxima, which need not keep it.
        """
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


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, without communication; any other tensor as it is."""
    shard = getattr(tensor, "to_local", None)
    return tensor if shard is None else shard()


def ranks_of(model: nn.Module, parallel: Parallel = "auto") -> Ranks | None:
    """How ``model`` is spread over the processes of the default group; None in a single process.

    ``parallel``: "auto" finds DistributedDataParallel and fully_shard; "ddp" says that something else, unseen here,
    averages the gradients over all ranks (a wrapper around ``model``, or the loop itself); "off": this rank's model is
    its own. Raises UsageError on every other layout: tensor parallelism, FSDP1, a part of the ranks.
    """
    if parallel not in ("auto", "ddp", "off"):
        raise UsageError(f"parallel = {parallel!r} is unknown: use 'auto', 'ddp' or 'off'.")
    if not (dist.is_available() and dist.is_initialized()):
        return None
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UsageError("FullyShardedDataParallel flattens parameters, which cannot be watched: use fully_shard.")
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.reshard()  # after a forward the parameters that stand there may be the gathered ones
        _check_averages(module)
    parameters = dict(model.named_parameters())
    if not any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        if parallel == "off" or dist.get_world_size() == 1:
            return None
        if parallel == "auto":
            _check_wrapped(model)
        share = 1 / dist.get_world_size()
        everything: dict[torch.Tensor, Layout] = {p: _all_of(p, share) for p in parameters.values()}
        return Ranks(everything, ())
    if parallel != "auto":
        raise UsageError(f"parallel = {parallel!r} does not fit a model of DTensors: leave it out.")
    managed = {parameter for module in sharded for parameter in module.parameters()}
    layouts: dict[torch.Tensor, Layout] = {}
    for name, p in sorted(parameters.items(), key=lambda item: not isinstance(item[1], DTensor)):  # they tell more
        layouts[p] = _layout(name, p, p in managed)
    if len({layouts[p].share for p in parameters.values() if p.requires_grad}) > 1:
        raise UsageError("some parameters are sharded over other ranks than others: give fully_shard one mesh.")
    return Ranks(layouts, sharded)


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


def _all_of(parameter: torch.Tensor, share: float) -> Layout:
    return Layout(0, parameter.shape[0] if parameter.dim() else 1, share)


def _layout(name: str, parameter: torch.Tensor, managed: bool) -> Layout:
    """Tells what this rank holds of a parameter under fully_shard: Shard on one mesh, or Replicate and Shard."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    size = dist.get_world_size()
    if not isinstance(parameter, DTensor):
        if parameter.requires_grad and size > 1:
            raise UsageError(
                f"parameter {name!r} is not sharded though others are, so its gradient differs from rank to rank: "
                "call fully_shard on the whole model too."
            )
        return _all_of(parameter, 1 / size)
    mesh, placements = parameter.device_mesh, parameter.placements
    kinds = tuple(type(placement) for placement in placements)
    if not managed or kinds not in ((Shard,), (Replicate, Shard)) or mesh.size() != size:
        raise UsageError(
            f"parameter {name!r} is laid out as {placements} over {mesh.size()} of {size} ranks: the probes know "
            "DDP and FSDP2 (fully_shard, over all ranks, with or without replicas), not tensor or pipeline parallelism."
        )
    if parameter.device.type == "cpu" != mesh.device_type:
        raise UsageError("parameters that fully_shard offloads to the CPU cannot be watched: leave out offload_policy.")
    place: Any = placements[-1]
    share = 1 / math.prod(mesh.shape[:-1])
    if place.dim:
        return _all_of(parameter, share)
    length = math.ceil(parameter.shape[0] / mesh.shape[-1])  # as torch.chunk cuts: the last ranks may hold nothing
    start = min(length * mesh.get_local_rank(len(placements) - 1), parameter.shape[0])
    return Layout(start, start + parameter.to_local().shape[0], share)


def _check_wrapped(model: nn.Module) -> None:
    from torch.nn.parallel import DistributedDataParallel

    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    averaged = {parameter for wrapper in wrappers for parameter in wrapper.parameters()}
    if any(dist.get_world_size(wrapper.process_group) != dist.get_world_size() for wrapper in wrappers):
        raise UsageError("DistributedDataParallel spans only a part of the ranks: watch a model that all ranks train.")
    if missing := [name for name, p in model.named_parameters() if p.requires_grad and p not in averaged]:
        raise UsageError(
            f"{dist.get_world_size()} processes run, but nothing here averages the gradient of {missing[0]!r} over "
            "them: watch the DistributedDataParallel or fully_shard model, or give parallel='ddp' if the loop "
            "averages, 'off' if each process has a model of its own."
        )


def _check_averages(module: Any) -> None:
    """set_gradient_divide_factor() changes by how much this rank's activation gradients differ from the whole's."""
    state = module._get_fsdp_state()
    groups: Iterable[Any] = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    if any(getattr(group, "gradient_divide_factor", None) is not None for group in groups):
        raise UsageError("fully_shard must average gradients over ranks: leave out set_gradient_divide_factor().")
