"""Layout of a model on processes, recognised from its wrappers and tensors, or described by the caller."""

from __future__ import annotations

from typing import Any, get_args

import torch.distributed as dist
from torch import nn

from ...errors import UsageError
from .pipeline import Pipeline
from .processes import ALONE, Processes
from .ranks import Parallel, Ranks, has_process_group
from .sharing import Share

WAYS: tuple[str, ...] = get_args(Parallel)


def spread_out(model: nn.Module, parallel: Any = "auto", share: Share | None = None) -> Processes:
    """Return the processes that train ``model``, those of the default group; one alone without a process group, and
    also for "off" and for a single process, if the model has no DTensors.

    ``parallel``: "auto" finds DistributedDataParallel, fully_shard and parallelize_module; "later": parallelize_module
    comes after this call, before the first forward; "ddp": something unseen here averages the gradients over all ranks
    (a wrapper around ``model``, or the loop itself); a schedule of :mod:`torch.distributed.pipelining`: ``model`` is
    its stage here; "off": this rank's model is its own. ``share``: a function that returns the process group that a
    parameter is split over, see :func:`.sharing.layout_by`. Raises UsageError on every other layout, see
    :func:`.layouts.layout_of` and :func:`.pipeline.check_stage`.
    """
    stage = getattr(parallel, "_n_microbatches", None) is not None
    if not stage and parallel not in WAYS:
        ways = ", ".join(map(repr, WAYS[:-1]))
        raise UsageError(f"parallel = {parallel!r} is unknown: use {ways}, {WAYS[-1]!r} or a pipeline's schedule.")
    if share is not None and (stage or parallel not in ("auto", "ddp")):
        raise UsageError(
            f"share= does not go with parallel = {'a schedule' if stage else repr(parallel)}: leave one out."
        )
    if share is not None and not callable(share):
        raise UsageError("share= is a function of a parameter's name and the parameter: see docs/sharded.md.")
    if not has_process_group():
        return ALONE
    if stage:
        return Pipeline(model, parallel)
    from torch.distributed.tensor import DTensor

    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        if parallel in ("ddp", "off") or share is not None:
            given = "share=" if share is not None else f"parallel = {parallel!r}"
            raise UsageError(f"{given} does not fit a model of DTensors: leave it out.")
    elif parallel == "off" or dist.get_world_size() == 1:
        return ALONE
    return Ranks(model, parallel, share)
