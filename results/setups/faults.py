"""The 15 published bugs, each put into a small set-up. ``make(fault)`` returns the arguments of ``check_ranks`` with
the bug, or without it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Gpt
from setups import (
    Arguments,
    adamw,
    averaged,
    by_hand,
    ddp,
    floats,
    held_out,
    next_token,
    seeded,
    sharded,
    summed_norms,
    tokens,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Fault:
    """``source``: the published bug; ``checks``: the questions of which one must answer first."""

    name: str
    source: str
    checks: tuple[str, ...]
    make: Callable[[bool], Arguments]
    ranks: int = 2


FAULTS: list[Fault] = []
Make = Callable[[bool], Arguments]


def fault(name: str, source: str, *checks: str, ranks: int = 2) -> Callable[[Make], Make]:
    def added(make: Make) -> Make:
        FAULTS.append(Fault(name, source, checks, make, ranks))
        return make

    return added


@fault("replicas of HSDP drawn from a seed per rank", "allenai/OLMo-core#319", "replicas", ranks=4)
def _replicas(fault: bool) -> Arguments:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return sharded(Gpt(seed=dist.get_rank() if fault else 0), mesh=mesh)


@fault("buffers that DDP does not broadcast", "pytorch/pytorch#111138", "buffers")
def _buffers(fault: bool) -> Arguments:
    model = Gpt(seed=dist.get_rank() if fault else 0)
    model.register_buffer("directions", torch.randn(4, 4))
    return ddp(model, broadcast_buffers=False)


@fault("tensor ranks that draw their shards from one seed", "modelscope/ms-swift#7944", "copied shards")
def _shards(fault: bool) -> Arguments:
    return by_hand(alike=fault)


@fault("the last norm is not summed over tensor ranks", "NVIDIA/Megatron-LM#1446", "gradient copies")
def _last_norm(fault: bool) -> Arguments:
    def add(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if "norm" in name and not (fault and name.startswith("norm")):
                dist.all_reduce(parameter.grad)

    return by_hand(sequence=True) | {"after_backward": add}


@fault("norms are averaged over tensor ranks, not summed", "EleutherAI/gpt-neox#1259", "gradient scale")
def _averaged_norms(fault: bool) -> Arguments:
    return by_hand(sequence=True) | {"after_backward": summed_norms(dist.group.WORLD, 0.5 if fault else 1.0)}


@fault("every data rank draws the same samples", "openspeech-team/openspeech#149", "same batch")
def _same_batch(fault: bool) -> Arguments:
    return ddp(Gpt()) | {"batch": tokens(0 if fault else None)}


@fault("tensor ranks of one data rank get other samples", "huggingface/accelerate#3092", "tensor batch")
def _tensor_batch(fault: bool) -> Arguments:
    return by_hand() | {"batch": floats(dist.get_rank() if fault else 0)}


@fault("one seed for the dropout of all data ranks", "huggingface/transformers#31412", "dropout on data ranks")
def _dropout_alike(fault: bool) -> Arguments:
    given = ddp(Gpt(dropout=0.1))
    seeded(0 if fault else None)
    return given


@fault("the loader of one tensor rank draws a number", "NVIDIA/Megatron-LM#206", "dropout on tensor ranks")
def _dropout_apart(fault: bool) -> Arguments:
    given = by_hand(dropout=0.1)
    seeded(0)
    if fault and dist.get_rank() == 0:
        torch.randint(1000, ())
    return given


@fault("gradients are summed over data ranks", "TianhongDai/hindsight-experience-replay#4", "gradient scale")
def _summed(fault: bool) -> Arguments:
    def add(model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    model = Gpt()
    return {
        "model": model,
        "batch": tokens(),
        "loss_fn": next_token,
        "optimizer": adamw(model),
        "after_backward": add if fault else averaged(),
    }


@fault("a loss over tokens of all ranks that is averaged again", "verl-project/verl-SpeCo#29", "gradient scale")
def _divided_twice(fault: bool) -> Arguments:
    def per_token(model: nn.Module, batch: Tensor) -> Tensor:
        losses = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        count = torch.tensor(batch[:, 1:].numel())
        dist.all_reduce(count)
        if not fault:
            return losses * dist.get_world_size() / count
        dist.all_reduce(losses.data)  # autograd does not see it
        return losses / count

    return ddp(Gpt()) | {"loss_fn": per_token}


@fault("the loss goes around DistributedDataParallel", "jingyaogong/minimind#853", "gradient copies")
def _bypassed(fault: bool) -> Arguments:
    def inner(model: nn.Module, batch: Tensor) -> Tensor:
        bare = model.module if fault and isinstance(model, DistributedDataParallel) else model
        return next_token(bare, batch)

    return ddp(Gpt()) | {"loss_fn": inner}


@fault("the optimizer is made after a forward of FSDP2", "pytorch/pytorch#149205", "optimizer misses")
def _stale_optimizer(fault: bool) -> Arguments:
    given = sharded(Gpt())
    if fault:
        with torch.no_grad():
            next_token(given["model"], tokens())
        given["optimizer"] = adamw(given["model"])
    return given


@fault("a tied weight stands twice in the optimizer", "pytorch/pytorch#40967", "optimizer doubles")
def _doubled(fault: bool) -> Arguments:
    given = ddp(Gpt(tied=True))
    own = list(given["model"].parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given["optimizer"] = torch.optim.SGD([*own, *([own[0]] if fault else [])], lr=0.1)
    return given


@fault("an evaluation of FSDP2 before the optimizer's step", "pytorch/pytorch#149029", "evaluation")
def _evaluation(fault: bool) -> Arguments:
    def evaluate(model: Any) -> None:
        held_out(model)
        if not fault:
            model.reshard()

    return sharded(Gpt()) | {"evaluate": evaluate}
