"""The 30 correct set-ups. Each is a function that returns the arguments of ``check_ranks`` on its rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import HEAD, LENGTH, ROWS, VOCAB, WIDTH, Convolutions, Gpt, SplitNet, is_split
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

assert WIDTH % HEAD == 0
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    name: str
    make: Callable[[], Arguments]
    ranks: int = 2


SETUPS: list[Setup] = []


def setup(name: str, ranks: int = 2) -> Callable[[Callable[[], Arguments]], Callable[[], Arguments]]:
    def added(make: Callable[[], Arguments]) -> Callable[[], Arguments]:
        SETUPS.append(Setup(name, make, ranks))
        return make

    return added


# what set-ups have in common


def tokens(number: int | None = None, rows: int = ROWS, vocab: int = VOCAB) -> Tensor:
    """The tokens of a data rank, by default of this rank."""
    draw = torch.Generator().manual_seed(100 + (dist.get_rank() if number is None else number))
    return torch.randint(vocab, (rows, LENGTH + 1), generator=draw)


def floats(number: int | None = None, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(200 + (dist.get_rank() if number is None else number))
    return torch.randn(*(shape or (ROWS, LENGTH, WIDTH)), generator=draw)


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 0.5).square().mean()


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def ddp(model: nn.Module, **options: Any) -> Arguments:
    wrapped = DistributedDataParallel(model, **options)
    return {"model": wrapped, "batch": tokens(), "loss_fn": next_token, "optimizer": adamw(wrapped)}


def seeded(number: int | None = None) -> None:
    """Give this rank a random stream of its own, or of its number."""
    torch.manual_seed(500 + (dist.get_rank() if number is None else number))


def sharded(
    model: Gpt, *, mesh: Any = None, batch: Tensor | None = None, root: Any = None, **options: Any
) -> Arguments:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options, **({} if root is None else {"reshard_after_forward": root}))
    return {
        "model": model,
        "batch": tokens() if batch is None else batch,
        "loss_fn": next_token,
        "optimizer": adamw(model),
    }


def held_out(model: nn.Module) -> None:
    """An evaluation as loops have it: eval mode, no gradients, training mode again."""
    model.eval()
    with torch.no_grad():
        next_token(model, tokens(77))
    model.train()


def averaged(group: Any = None) -> Callable[[nn.Module], None]:
    """The mean of gradients over a group, as loops have it that do without DistributedDataParallel."""

    def average(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= dist.get_world_size(group)

    return average


def summed_norms(group: Any, share: float = 1.0) -> Callable[[nn.Module], None]:
    """The sum of the gradients of norms over a tensor group, as sequence parallelism needs it."""

    def add(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad *= share

    return add


def by_hand(group: Any = None, number: int = 0, **options: Any) -> Arguments:
    """A model that is split by hand over a group, on the batch of data rank ``number``."""
    group = dist.group.WORLD if group is None else group
    model = SplitNet(group, **options)
    return {
        "model": model,
        "batch": floats(number),
        "loss_fn": squared,
        "optimizer": adamw(model),
        "share": lambda name, parameter: group if is_split(name) else None,
    }


LAYER = {
    **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
    "attention.out": RowwiseParallel(),
    "ffn.fc1": ColwiseParallel(),
    "ffn.fc2": RowwiseParallel(),
}
IN_SEQUENCE = {
    **LAYER,
    "attention_norm": SequenceParallel(),
    "ffn_norm": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "ffn.fc2": RowwiseParallel(output_layouts=Shard(1)),
}
WHOLE = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
WHOLE_IN_SEQUENCE = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def parallelized(mesh: Any, of_model: Any, of_layer: Any) -> Gpt:
    model = Gpt()
    parallelize_module(model, mesh, of_model)
    for layer in model.layers:
        parallelize_module(layer, mesh, of_layer)
    return model


# DistributedDataParallel


@setup("DDP")
def _ddp() -> Arguments:
    return ddp(Gpt())


@setup("DDP, weights of each rank drawn from another seed")
def _ddp_seeds() -> Arguments:
    return ddp(Gpt(seed=dist.get_rank()))


@setup("DDP, dropout, a seed per rank")
def _ddp_dropout() -> Arguments:
    given = ddp(Gpt(dropout=0.1))
    seeded()
    return given


@setup("DDP, embedding and head tied")
def _ddp_tied() -> Arguments:
    return ddp(Gpt(tied=True))


@setup("DDP, embedding frozen")
def _ddp_frozen() -> Arguments:
    model = Gpt()
    model.embedding.requires_grad_(False)
    given = ddp(model)
    given["optimizer"] = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return given


@setup("DDP, BatchNorm, buffers broadcast")
def _ddp_batch_norm() -> Arguments:
    return ddp(Convolutions(nn.BatchNorm1d)) | {"batch": floats(None, ROWS, 6, LENGTH), "loss_fn": squared}


@setup("DDP, GroupNorm, a regression")
def _ddp_group_norm() -> Arguments:
    return ddp(Convolutions(nn.GroupNorm)) | {"batch": floats(None, ROWS, 6, LENGTH), "loss_fn": squared}


@setup("DDP, two micro-batches, the first under no_sync")
def _ddp_micro() -> Arguments:
    def accumulated(model: Any, parts: tuple[Tensor, Tensor]) -> Tensor:
        with model.no_sync():
            first = next_token(model, parts[0])
        return (first + next_token(model, parts[1])) / 2

    rank = dist.get_rank()
    return ddp(Gpt()) | {"batch": (tokens(2 * rank), tokens(2 * rank + 1)), "loss_fn": accumulated}


@setup("DDP, batches of 3 and 5 rows")
def _ddp_uneven() -> Arguments:
    return ddp(Gpt()) | {"batch": tokens(rows=3 + 2 * dist.get_rank())}


@setup("DDP, loss per token of all ranks")
def _ddp_per_token() -> Arguments:
    def per_token(model: nn.Module, batch: Tensor) -> Tensor:
        counted = batch[:, 1:].masked_fill(batch[:, 1:] < 3 + 9 * dist.get_rank(), -100)
        count = (counted != -100).sum()
        dist.all_reduce(count)
        logits = model(batch[:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits, counted.flatten(), reduction="sum") * dist.get_world_size() / count

    return ddp(Gpt()) | {"loss_fn": per_token}


@setup("DDP, bfloat16 by autocast")
def _ddp_autocast() -> Arguments:
    def cast(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return next_token(model, batch)

    return ddp(Gpt()) | {"loss_fn": cast}


@setup("DDP, a model in bfloat16")
def _ddp_bf16() -> Arguments:
    return ddp(Gpt().bfloat16())


@setup("DDP, two optimizers")
def _ddp_two() -> Arguments:
    given = ddp(Gpt())
    own = list(given["model"].parameters())
    given["optimizer"] = [
        torch.optim.SGD([p for p in own if p.dim() > 1], lr=0.1, momentum=0.9),
        torch.optim.AdamW([p for p in own if p.dim() < 2], lr=1e-3),
    ]
    return given


@setup("DDP, ZeroRedundancyOptimizer")
def _ddp_zero() -> Arguments:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which compiles a script, with a warning

    given = ddp(Gpt())
    given["optimizer"] = ZeroRedundancyOptimizer(given["model"].parameters(), torch.optim.AdamW, lr=1e-3)
    return given


@setup("DDP, gradients as views of buckets, unused parameters looked for")
def _ddp_views() -> Arguments:
    return ddp(Gpt(), gradient_as_bucket_view=True, find_unused_parameters=True)


@setup("DDP, layers computed again in the backward pass")
def _ddp_again() -> Arguments:
    given = ddp(Gpt(again=True, dropout=0.1))
    seeded()
    return given


@setup("DDP, no weight decay on vectors, a rate of 0 for norms")
def _ddp_groups() -> Arguments:
    given = ddp(Gpt())
    own = dict(given["model"].named_parameters())
    norms = [p for name, p in own.items() if "norm" in name]
    given["optimizer"] = torch.optim.AdamW(
        [
            {"params": [p for name, p in own.items() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for name, p in own.items() if p.dim() < 2 and "norm" not in name], "weight_decay": 0.0},
            {"params": norms, "lr": 0.0},
        ],
        lr=1e-3,
    )
    return given


@setup("DDP on four ranks", ranks=4)
def _ddp_four() -> Arguments:
    return ddp(Gpt())


@setup("gradients averaged by hand")
def _by_hand() -> Arguments:
    model = Gpt()
    return {
        "model": model,
        "batch": tokens(),
        "loss_fn": next_token,
        "optimizer": adamw(model),
        "after_backward": averaged(),
    }


# FSDP2


@setup("FSDP2")
def _fsdp() -> Arguments:
    return sharded(Gpt())


@setup("FSDP2, embedding and head tied")
def _fsdp_tied() -> Arguments:
    return sharded(Gpt(tied=True))


@setup("FSDP2, mixed precision, uneven shards")
def _fsdp_mixed() -> Arguments:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharded(Gpt(vocab=23), mp_policy=policy, batch=tokens(vocab=23))


@setup("FSDP2, an evaluation that reshards")
def _fsdp_reshards() -> Arguments:
    def evaluate(model: Any) -> None:
        held_out(model)
        model.reshard()

    return sharded(Gpt(dropout=0.0)) | {"evaluate": evaluate}


@setup("FSDP2, reshard_after_forward at the root, an evaluation")
def _fsdp_root() -> Arguments:
    return sharded(Gpt(), root=True) | {"evaluate": held_out}


@setup("HSDP, two replicas of two shards", ranks=4)
def _hsdp() -> Arguments:
    return sharded(Gpt(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


# tensor parallelism


@setup("tensor parallel")
def _tensor() -> Arguments:
    model = parallelized(init_device_mesh("cpu", (2,)), WHOLE, LAYER)
    return {"model": model, "batch": tokens(0), "loss_fn": next_token, "optimizer": adamw(model)}


@setup("FSDP2 around tensor parallel", ranks=4)
def _sharded_tensor() -> Arguments:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelized(mesh["tensor"], WHOLE, LAYER)
    return sharded(model, mesh=mesh["data"], batch=tokens(mesh["data"].get_local_rank()))


@setup("tensor and sequence parallel")
def _sequence() -> Arguments:
    model = parallelized(init_device_mesh("cpu", (2,)), WHOLE_IN_SEQUENCE, IN_SEQUENCE)
    return {"model": model, "batch": tokens(0), "loss_fn": next_token, "optimizer": adamw(model)}


@setup("split by hand, sequence parallel norms, dropout on each rank's tokens")
def _hand_sequence() -> Arguments:
    given = by_hand(sequence=True, dropout=0.1) | {"after_backward": summed_norms(dist.group.WORLD)}
    seeded()
    return given


@setup("split by hand in two data ranks, dropout alike on tensor ranks", ranks=4)
def _hand_data() -> Arguments:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    number = mesh["data"].get_local_rank()
    given = by_hand(mesh["tensor"].get_group(), number, dropout=0.1)
    seeded(number)
    return given | {"after_backward": averaged(mesh["data"].get_group())}
