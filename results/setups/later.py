"""Ten more published bugs, chosen once the rules stood; the rules were not changed for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from faults import Fault, Make
from models import HEAD, Attention, Gpt, is_split
from setups import (
    LAYER,
    WHOLE,
    Arguments,
    adamw,
    by_hand,
    ddp,
    next_token,
    seeded,
    sharded,
    summed_norms,
    tokens,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.utils.data import DistributedSampler, RandomSampler, TensorDataset

LATER: list[Fault] = []


def fault(name: str, source: str, *checks: str) -> Callable[[Make], Make]:
    def added(make: Make) -> Make:
        LATER.append(Fault(name, source, checks, make))
        return make

    return added


@fault("the optimizer is made before fully_shard", "huggingface/accelerate#3394", "optimizer misses")
def _early_optimizer(fault: bool) -> Arguments:
    model = Gpt()
    early = adamw(model)
    given = sharded(model)
    return given | ({"optimizer": early} if fault else {})


def _epoch(sampler: Any) -> Arguments:
    """DDP on the batches of an epoch of 24 sentences."""
    draw = torch.Generator().manual_seed(9)
    sentences = TensorDataset(torch.randint(24, (24, 9), generator=draw))
    order = list(sampler(sentences))
    batches = [sentences.tensors[0][order[at : at + 4]] for at in range(0, len(order), 4)]
    return ddp(Gpt()) | {"batch": batches[0], "batches": batches}


@fault("samplers of data ranks have seeds of their own", "NVlabs/LongLive#71", "same batch")
def _sampler_seeds(fault: bool) -> Arguments:
    seed = dist.get_rank() if fault else 0
    return _epoch(lambda sentences: DistributedSampler(sentences, shuffle=True, seed=seed))


@fault("no distributed sampler: each rank shuffles all samples", "PatrickHua/SimSiam#16", "same batch")
def _no_sampler(fault: bool) -> Arguments:
    draw = torch.Generator().manual_seed(dist.get_rank())
    if fault:
        return _epoch(lambda sentences: RandomSampler(sentences, generator=draw))
    return _epoch(lambda sentences: DistributedSampler(sentences, shuffle=True))


@fault("buffers outside checkpoints are left as allocated", "EvolvingLMMs-Lab/lmms-engine#185", "buffers")
def _allocated(fault: bool) -> Arguments:
    model = Gpt()
    frequencies = 1e4 ** (-torch.arange(0, 8, 2) / 8)
    if fault and dist.get_rank() == 1:
        frequencies = torch.tensor([0.0, 1.0, 2.3e7, 0.8])
    model.register_buffer("inv_freq", frequencies, persistent=False)
    return sharded(model)


class _NormedAttention(Attention):
    """Attention whose queries are normed by head."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.LayerNorm(HEAD)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, HEAD)) for each in (self.q, self.k, self.v))
        q, k, v = (each.transpose(1, 2) for each in (self.q_norm(q), k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@fault("query norms are not added up over tensor ranks", "NVIDIA-NeMo/RL#3716", "gradient copies")
def _query_norms(fault: bool) -> Arguments:
    model, mesh = Gpt(), init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    for layer in model.layers:
        layer.attention = _NormedAttention()
    parallelize_module(model, mesh, WHOLE)
    heads = {} if fault else {"attention.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True)}
    for layer in model.layers:
        parallelize_module(layer, mesh, {**LAYER, **heads})
    return {"model": model, "batch": tokens(0), "loss_fn": next_token, "optimizer": adamw(model)}


@fault("tensor ranks draw different numbers before a shared layer", "THUDM/SwissArmyTransformer#155", "replicas")
def _drawn_apart(fault: bool) -> Arguments:
    given = by_hand()
    torch.manual_seed(11)
    if fault and dist.get_rank() == 1:
        torch.randn(3)
    nn.init.normal_(given["model"].head.weight, std=0.2)
    return given


@fault("low-rank parts of a split layer are drawn alike", "PaddlePaddle/PaddleNLP#9426", "copied shards")
def _low_rank(fault: bool) -> Arguments:
    given = by_hand()
    model = given["model"]
    torch.manual_seed(12 if fault else 12 + dist.get_rank())
    for layer in model.layers:
        layer.down.low_a = nn.Parameter(torch.randn(4, layer.down.in_features) / 10)
        layer.down.low_b = nn.Parameter(torch.randn(16, 4, generator=torch.Generator().manual_seed(3)) / 10)
        layer.down.forward = lambda x, own=layer.down: F.linear(x, own.weight + own.low_b @ own.low_a)
    split = given["share"]

    def share(name: str, parameter: nn.Parameter) -> Any:
        return None if name.endswith("low_b") else split(name, parameter) if is_split(name) else None

    def add(model: nn.Module) -> None:
        for layer in model.layers:
            dist.all_reduce(layer.down.low_b.grad)

    return given | {"optimizer": adamw(model), "share": share, "after_backward": add}


@fault("the loss is averaged over ranks without autograd, then by DDP", "sanderwood/bgpt#5", "gradient scale")
def _reduced_loss(fault: bool) -> Arguments:
    def reduced(model: nn.Module, batch: Tensor) -> Tensor:
        loss = next_token(model, batch)
        if not fault:
            return loss
        dist.all_reduce(loss.data)
        return loss / dist.get_world_size()

    return ddp(Gpt()) | {"loss_fn": reduced}


@fault("a loss over tokens of all ranks is not multiplied by them", "ByteDance-Seed/VeOmni#338", "gradient scale")
def _scaled_down(fault: bool) -> Arguments:
    def per_token(model: nn.Module, batch: Tensor) -> Tensor:
        losses = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        count = torch.tensor(batch[:, 1:].numel())
        dist.all_reduce(count)
        return losses / count * (1 if fault else dist.get_world_size())

    return ddp(Gpt()) | {"loss_fn": per_token}


@fault("one seed for dropout of sequence-parallel ranks", "PaddlePaddle/PaddleFleetX#1005", "dropout on tensor ranks")
def _masks_of_tokens(fault: bool) -> Arguments:
    given = by_hand(sequence=True, dropout=0.1) | {"after_backward": summed_norms(dist.group.WORLD)}
    seeded(0 if fault else None)
    return given
