"""The layout of parameters on ranks as the caller describes it, for code that splits a model by hand (as Megatron
does)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import nn

from ...errors import UsageError
from .layouts import Layout, ModelLayout, whole_layout


@dataclass(frozen=True)
class SplitOver:
    """A parameter of which each rank of a process group holds another part.

    ``group``: the process group. ``same_batch``: True if the ranks of the group work on one batch, as in tensor
    parallelism; False if each rank has a batch of its own, as with experts that are spread over data-parallel ranks.
    """

    group: Any
    same_batch: bool = True


Share: TypeAlias = Callable[[str, nn.Parameter], Any]


def layout_by(model: nn.Module, share: Share) -> ModelLayout:
    """Return the layout that ``share`` describes. ``share`` is called with each parameter's name in
    ``named_parameters()`` and the parameter. ``share`` returns the process group that the parameter is split over (or a
    :class:`SplitOver`), or None for a parameter that all ranks hold.

    Raises UsageError for an answer of another kind, for a group without this rank, for a group whose size does not
    divide the number of ranks, and for several groups whose ranks work on one batch.
    """
    layouts: dict[Any, Layout] = {}
    together: dict[str, Any] = {}  # parameter -> group whose ranks work on one batch
    size = dist.get_world_size()
    for name, parameter in model.named_parameters():
        split = _asked(name, parameter, share)
        if split is None:
            layouts[parameter] = whole_layout(parameter, 1 / size)
            continue
        rank, ranks = _place(name, split.group)
        layouts[parameter] = whole_layout(parameter, ranks / size, rank)
        if split.same_batch:
            together.setdefault(name, split.group)
    groups = {tuple(dist.get_process_group_ranks(group)): group for group in together.values()}
    if len(groups) > 1:
        raise UsageError(
            f"share= splits parameters over several process groups that work on one batch ({_few(together)}): the "
            "probes know one, so give SplitOver(group, same_batch=False) where ranks have batches of their own."
        )
    group = next(iter(groups.values()), None)
    tensor = 1 if group is None else dist.get_world_size(group)
    return ModelLayout(layouts, data=size // tensor, tensor=tensor, group=group, said=True)


def _asked(name: str, parameter: nn.Parameter, share: Share) -> SplitOver | None:
    told = share(name, parameter)
    if told is None or isinstance(told, SplitOver):
        return told
    if isinstance(told, dist.ProcessGroup) or told == dist.GroupMember.NON_GROUP_MEMBER:
        return SplitOver(told)
    raise UsageError(
        f"share= returns {told!r} for {name!r}: return the process group that the parameter is split over, "
        "stabilitylab.probes.SplitOver(group, same_batch=False), or None for a parameter that all ranks hold."
    )


def _place(name: str, group: Any) -> tuple[int, int]:
    """Return this rank's number in a group, and the number of ranks in the group; raise UsageError for a group that
    does not fit."""
    try:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"share= gives no process group for {name!r} ({error}): return one of torch's.") from error
    if rank < 0:
        raise UsageError(
            f"share= splits {name!r} over a process group that this rank is not in: return the group that holds this "
            "rank's part."
        )
    if dist.get_world_size() % ranks:
        raise UsageError(
            f"share= splits {name!r} over {ranks} ranks, which do not divide the {dist.get_world_size()} of all: "
            "split it over groups of one size."
        )
    return rank, ranks


def _few(names: dict[str, Any]) -> str:
    return ", ".join(list(names)[:2])
