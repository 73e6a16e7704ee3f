"""A model that parallelize_module cuts, its plans, and a loop that trains it on one process or on several."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_toys import ListSink
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from stabilitylab.probes import Watcher
from stabilitylab.probes.parameters.layouts import local

VOCAB, WIDTH, INNER, HEAD, ROWS, LENGTH = 22, 8, 16, 4, 4, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.q_norm = nn.LayerNorm(HEAD)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, HEAD)) for each in (self.q, self.k, self.v))  # (B, T, H, d)
        q, k, v = (each.transpose(1, 2) for each in (self.q_norm(q), k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.ffn = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    """WIDTH is INNER on one of two ranks, so that widths alone do not tell the two apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


LAYER = {
    **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
    "attention.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),  # other heads on each rank
    "attention.out": RowwiseParallel(),
    "ffn.fc1": ColwiseParallel(),
    "ffn.fc2": RowwiseParallel(),
}
IN_SEQUENCE = {
    "attention_norm": SequenceParallel(),
    "ffn_norm": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "ffn.fc2": RowwiseParallel(output_layouts=Shard(1)),
}
ROWWISE = RowwiseParallel(input_layouts=Replicate())
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the model, of each layer
    "columns": ({"embedding": ROWWISE, "head": ColwiseParallel(output_layouts=Replicate())}, LAYER),
    "loss": ({"head": ColwiseParallel(use_local_output=False)}, LAYER),
    "sequence": (
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
        {**LAYER, **IN_SEQUENCE},
    ),
}


class Heard(logging.Handler):
    """The lines of the log meanwhile."""

    def __enter__(self) -> Heard:
        self.lines: list[str] = []
        logging.getLogger("stabilitylab").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("stabilitylab").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def cut(model: Decoder, plan: str, mesh: Any) -> Decoder:
    of_model, of_layer = PLANS[plan]
    parallelize_module(model, mesh, of_model)
    for layer in model.layers:
        parallelize_module(layer, mesh, of_layer)
    return model


def train_cut(
    plan: str,
    when: str = "after",
    steps: int = 3,
    around: str = "",
    dtype: torch.dtype = torch.float64,
    watched: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Trains on the same batches whatever the plan ("one": a single process); ``when`` watch comes, before or after
    parallelize_module; ``around``: "fsdp" shards the model over two of four ranks too, each pair having half a batch.
    """
    model = Decoder().to(dtype)
    data, tensor = (dist.get_world_size() // 2, 2) if plan != "one" else (1, 1)
    sink, real = ListSink(), torch.arange(LENGTH)[None] < torch.tensor([6, 4, 3, 5])[:, None]
    now, rank, watcher = real, 0, None

    def share_out() -> None:
        nonlocal rank
        if plan != "one":
            mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
            cut(model, plan, mesh["tensor"])
            rank = mesh["data"].get_local_rank()
            if around == "fsdp":
                for layer in model.layers:
                    fully_shard(layer, mesh=mesh["data"])
                fully_shard(model, mesh=mesh["data"])

    def part(whole: Tensor) -> Tensor:
        return whole.chunk(data)[rank]

    def batch(seed: int) -> Tensor:
        return torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))

    def watch(**more: Any) -> Watcher:
        return Watcher(
            model,
            sink,
            every=1,
            update_every=1,
            mask=lambda: now,
            strict=True,
            **more,
            **{"probes": "all", **options},
        )

    def reference() -> dict[str, Tensor]:
        nonlocal now
        now = real  # the same sentences on all ranks
        return {"held_out": model(batch(99)).double().square().mean()}

    if not watched:
        share_out()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    elif when == "before":
        watcher = watch(reference=reference, parallel="auto" if plan == "one" else "later")
        share_out()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    else:
        share_out()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        watcher = watch(reference=reference, optimizer=optimizer)
    for step in range(steps):
        tokens, now = part(batch(step)), part(real)
        target = torch.where(now, (tokens * 5 + 1) % VOCAB, -100).flatten()
        weight = data / float(real.sum())
        with loss_parallel() if plan == "loss" else nullcontext():
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), target, reduction="sum") * weight
            loss.backward()
        if watcher is not None:
            watcher.step(loss=loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    if watcher is not None:
        watcher.finish()
        watcher.close()
    own = [local(p.detach()) for p in model.parameters()]
    return {"tables": sink.tables, "rows": sink.rows, "parameters": [p.clone() for p in own]}
