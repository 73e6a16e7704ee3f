"""Layout of a model's parameters on ranks, read from DistributedDataParallel, fully_shard, parallelize_module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import UsageError

AVERAGES = (
    "watch the DistributedDataParallel or fully_shard model, or give parallel='ddp' if the loop averages, 'later' if "
    "parallelize_module comes after, share= if code of its own splits parameters over process groups, the schedule if "
    "this is a stage of a pipeline, 'off' if each process has a model of its own."
)
KNOWN = (
    "the probes know DDP, FSDP2 (fully_shard, over all ranks, with or without replicas), tensor parallelism "
    "(parallelize_module with one mesh dimension) and FSDP2 around it."
)


@dataclass(frozen=True)
class Layout:
    """The part of a parameter that this rank holds: rows ``start`` to ``stop`` of its first dimension, columns from
    ``left`` on of its second. ``share``: the factor of the squares that this rank adds, so that entries which several
    ranks hold count once. ``part``: the number of the part, if the caller says that the parameter is split into
    parts."""

    start: int
    stop: int
    share: float
    left: int = 0
    part: int = 0


@dataclass(frozen=True)
class BatchPart:
    """The part of each batch that a rank works on: number ``index`` of ``parts``, which ``tensor`` ranks share."""

    index: int = 0
    parts: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class Cut:
    """The cut of a weight by tensor parallelism: along ``dim`` (-1 for replicas), over the ranks of ``mesh``."""

    dim: int
    mesh: Any


@dataclass(frozen=True)
class ModelLayout:
    """The layout of a whole model. ``of``: the layout of each parameter. ``sharded``: the FSDP modules. ``data``: the
    number of ranks with different batches. ``tensor``: the number of ranks with the same batch, which form ``group``.
    ``cuts``: the cuts of tensor parallelism by parameter; None without DTensors. ``said``: True if the caller describes
    the layout with ``share=``."""

    of: Mapping[torch.Tensor, Layout]
    sharded: Sequence[Any] = ()
    data: int = 1
    tensor: int = 1
    group: Any = None
    cuts: Mapping[torch.Tensor, Cut] | None = None
    said: bool = False

    def of_batch(self, rank: int) -> BatchPart:
        """Return the part of each batch that a rank works on: parts are in the order of the ranks, and the ranks of
        one tensor-parallel group have the same."""
        if self.tensor == 1:
            return BatchPart(rank if self.data > 1 else 0, self.data)
        own = dist.get_process_group_ranks(self.group)
        beside = own[1] - own[0] == 1  # else tensor parallelism has the first dimension of the mesh
        return BatchPart(own[0] // self.tensor if beside else own[0], self.data, self.tensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, without communication; any other tensor as it is."""
    shard = getattr(tensor, "to_local", None)
    return tensor if shard is None else shard()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a DTensor, on every rank; any other tensor as it is."""
    gathered = getattr(tensor, "full_tensor", None)
    return tensor if gathered is None else gathered()


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter's gradient that belongs to this rank's shard. Sequence parallelism leaves the
    gradients of norms as parts of a sum. The optimizer adds these parts up, and so does this function."""
    gradient: Any = parameter.grad
    if (placements := getattr(gradient, "placements", None)) is None:
        return gradient
    wanted = getattr(parameter, "placements", None)
    return (gradient if wanted in (None, placements) else gradient.redistribute(placements=wanted)).to_local()


def ddp_wrappers(model: nn.Module) -> list[nn.parallel.DistributedDataParallel]:
    """Return the modules of a model that are DistributedDataParallel."""
    return [module for module in model.modules() if isinstance(module, nn.parallel.DistributedDataParallel)]


def layout_of(model: nn.Module, averaged: bool, late: bool = False) -> ModelLayout:
    """Return the layout of ``model`` on the ranks of the default group. ``averaged``: something unseen here averages
    the gradients. ``late``: a forward pass is under way.

    Raises UsageError on every layout that would be read wrongly.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UsageError("FullyShardedDataParallel flattens parameters, which cannot be watched: use fully_shard.")
    size = dist.get_world_size()
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if late and sharded:
        raise UsageError("fully_shard must come before watch, which parallelize_module alone may follow.")
    for module in sharded:
        module.reshard()  # after a forward a module may still hold the gathered parameters
        _check_averages(module)
    parameters = dict(model.named_parameters())
    spread: dict[str, Any] = {name: p for name, p in parameters.items() if isinstance(p, DTensor)}
    if not spread:
        if not averaged:
            _check_wrapped(model)
        return ModelLayout({p: whole_layout(p, 1 / size) for p in parameters.values()}, data=size)
    managed = {parameter for module in sharded for parameter in module.parameters()}
    data = max((_data_ranks(module) for module in sharded), default=1)
    cuts = {p: cut for name, p in spread.items() if (cut := _cut(name, p, p in managed, data)) is not None}
    meshes = {cut.mesh for cut in cuts.values()}
    tensor = next(iter(meshes)).size() if meshes else 1
    if len(meshes) > 1:
        raise UsageError(f"parallelize_module was given several meshes ({', '.join(map(str, meshes))}): give it one.")
    if cuts and all(cut.dim < 0 for cut in cuts.values()):
        raise UsageError(_unknown(*next((name, p) for name, p in spread.items() if p in cuts)))
    if cuts and ddp_wrappers(model):
        raise UsageError(
            "DistributedDataParallel around a tensor-parallel model cannot be watched: use fully_shard around it."
        )
    layouts: dict[torch.Tensor, Layout] = {}
    for name, p in sorted(parameters.items(), key=lambda item: item[0] not in spread):  # a DTensor's error says more
        if name in spread:
            _check_known(name, p, p in managed or not sharded, data * tensor, bool(cuts))
            layouts[p] = _layout_of_shard(p)
        else:
            if p.requires_grad and size > 1 and sharded:
                raise UsageError(
                    f"parameter {name!r} is not sharded though others are, so its gradient differs from rank to rank: "
                    "call fully_shard on the whole model too."
                )
            layouts[p] = whole_layout(p, 1 / size)
    if not cuts and len({layouts[p].share for p in parameters.values() if p.requires_grad}) > 1:
        raise UsageError("some parameters are sharded over other ranks than others: give fully_shard one mesh.")
    group = next((mesh.get_group() for mesh in meshes), None)
    return ModelLayout(layouts, sharded, size // tensor, tensor, group, cuts)


def whole_layout(parameter: torch.Tensor, share: float, part: int = 0) -> Layout:
    """Return the layout of a parameter that this rank holds as one tensor: all of the parameter, or its ``part``."""
    return Layout(0, parameter.shape[0] if parameter.dim() else 1, share, part=part)


def _layout_of_shard(parameter: Any) -> Layout:
    """Return the layout of a DTensor. Ranks hold the same entries if no dimension of the mesh that shards the parameter
    tells them apart; the share of each is 1 over the number of such ranks."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = parameter.device_mesh, parameter.placements
    parts = math.prod(size for size, place in zip(mesh.shape, placements, strict=True) if not place.is_replicate())
    share = parts / dist.get_world_size()
    if not parameter.dim():
        return whole_layout(parameter, share)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    start, left = (min(at, size) for at, size in zip((*offset, 0)[:2], (*parameter.shape, 0)[:2], strict=True))
    return Layout(start, start + shape[0], share, left)


def _data_ranks(module: Any) -> int:
    """The number of ranks over which fully_shard averages the gradients of a module's own parameters; 1 if it has
    none."""
    return max((group.mesh_info.mesh.size() for group in _groups(module)), default=1)


def _groups(module: Any) -> list[Any]:
    """Return the groups of a module's own parameters, of new and of old versions of fully_shard."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _cut(name: str, parameter: Any, managed: bool, data: int) -> Cut | None:
    """Return the cut of parallelize_module; None if fully_shard alone manages the parameter. Tensor parallelism uses
    the last dimension of the mesh, and fully_shard puts its own dimensions in front. ``managed``: fully_shard has the
    parameter.

    Raises UsageError for a sum in parts, and for a mesh of several dimensions without fully_shard.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    own = mesh.ndim > 1 and mesh.size() > data
    if managed and not own:
        return None
    place = placements[-1]
    if not managed and mesh.ndim > 1:
        raise UsageError(_unknown(name, parameter))
    if place.is_partial():
        raise UsageError(_unknown(name, parameter))
    return Cut(-1 if place.is_replicate() else place.dim, mesh[mesh.mesh_dim_names[-1]] if own else mesh)


def _check_known(name: str, parameter: Any, complete: bool, size: int, tensor: bool) -> None:
    """Raise UsageError for a parameter in a layout that the probes do not know. ``complete``: fully_shard has the
    parameter, or is not used. ``size``: the number of ranks that all layouts found account for."""
    kinds = [*parameter.placements]
    if tensor and not complete:
        raise UsageError(
            f"parameter {name!r} is tensor parallel and fully_shard does not know it, so its gradient differs from "
            "rank to rank: call fully_shard on the whole model too."
        )
    whole = size == dist.get_world_size() and (tensor or parameter.device_mesh.size() == size)
    shards = [place for place in kinds if not place.is_replicate() and not place.is_partial()]
    if not complete or not whole or not (shards or tensor) or any(place.is_partial() for place in kinds):
        raise UsageError(_unknown(name, parameter))
    if parameter.device.type == "cpu" != parameter.device_mesh.device_type:
        raise UsageError("parameters that fully_shard offloads to the CPU cannot be watched: leave out offload_policy.")


def _unknown(name: str, parameter: Any) -> str:
    mesh = parameter.device_mesh
    return (
        f"parameter {name!r} is laid out as {parameter.placements} over {mesh.size()} of {dist.get_world_size()} "
        f"ranks: {KNOWN}"
    )


def _check_wrapped(model: nn.Module) -> None:
    wrappers = ddp_wrappers(model)
    averaged = {parameter for wrapper in wrappers for parameter in wrapper.parameters()}
    if any(dist.get_world_size(wrapper.process_group) != dist.get_world_size() for wrapper in wrappers):
        raise UsageError("DistributedDataParallel spans only a part of the ranks: watch a model that all ranks train.")
    if missing := [name for name, p in model.named_parameters() if p.requires_grad and p not in averaged]:
        raise UsageError(
            f"{dist.get_world_size()} processes run, but nothing here averages the gradient of {missing[0]!r} over "
            f"them: {AVERAGES}"
        )


def _check_averages(module: Any) -> None:
    """Raise UsageError for a module with a gradient divide factor. set_gradient_divide_factor() changes the ratio
    between this rank's gradients of activations and the gradients of the loss of all ranks."""
    if any(getattr(group, "gradient_divide_factor", None) is not None for group in _groups(module)):
        raise UsageError("fully_shard must average gradients over ranks: leave out set_gradient_divide_factor().")
