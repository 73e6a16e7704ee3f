"""Models that their forward changes, on two ranks: watched and not, and why passes ended."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_toys import ListSink
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from stabilitylab.probes import Watcher


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.norm(x)).tanh()


class Model(nn.Module):
    """``how``: "batch norm"; "one rank", where the second rank alone writes an attribute from the first pass on, or
    "late", from the third; "shards", where both halve what they hold of a weight."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.how, self.calls = how, itertools.count(1)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.first = nn.BatchNorm1d(4) if how == "batch norm" else nn.Identity()
        self.memory = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.memory
        if not self.training:
            self.change(next(self.calls))
        for layer in self.layers:
            x = layer(x)
        return x

    @torch.no_grad()
    def change(self, call: int) -> None:
        if self.how == "shards":
            weight: Any = self.layers[0].out.weight
            getattr(weight, "to_local", lambda: weight)().data.mul_(0.5)
        elif dist.get_rank() == 1 and (self.how == "one rank" or (self.how == "late" and call >= 3)):
            self.memory.data += 1


def trained(kind: str, how: str, watched: bool, probes: str = "output_norm,grad_norm") -> dict[str, Any]:
    model: Any = Model(how)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in model.layers:
            fully_shard(layer)
    if kind == "fsdp":
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sink, losses = ListSink(), []
    curvature = {"curvature_loss": lambda: model(torch.ones(6, 4)).square().mean(-1), "curvature_every": 1}
    options: dict[str, Any] = {"probes": probes, "every": 1, "update_every": 1, "optimizer": optimizer} | curvature
    options["reference"] = None if "sharpness" in probes else "first batch"
    watcher = Watcher(model, sink, **options) if watched else None
    for row in range(5):
        draw = torch.Generator().manual_seed(10 * row + dist.get_rank())
        loss = model(torch.randn(6, 4, generator=draw)).square().mean()
        loss.backward()
        if watcher is not None:
            watcher.step(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if watcher is not None:
        watcher.finish()
        watcher.close()
    state = {n: getattr(t, "to_local", lambda t=t: t)().detach().clone() for n, t in model.state_dict().items()}
    found = {"losses": torch.stack(losses), **state}
    if watcher is not None:
        found |= {"ended": dict(watcher.ended), "marks": [*watcher.not_neutral], "audit": dict(watcher.audit)}
        found["rows"] = {t: [r for r, _, tables in sink.rows if t in tables] for t in sink.tables}
    return found


def neutral(folder: Path) -> Any:
    """(kind, how, what is probed) -> what differs from an unwatched run, and what the watcher says."""
    cases = [("ddp", "batch norm"), ("ddp", "one rank"), ("ddp", "late"), ("fsdp", "shards")]
    found = {}
    for kind, how in cases:
        plain = trained(kind, how, watched=False)
        for probes in ("output_norm,grad_norm", "critical_sharpness,grad_norm"):
            own = trained(kind, how, watched=True, probes=probes)
            differing = [name for name, value in plain.items() if not torch.equal(value, own[name])]
            told = {key: own[key] for key in ("ended", "marks", "audit", "rows")}
            found[kind, how, probes.partition(",")[0]] = {"differing": differing, **told}
    return found


NEUTRAL_CASES: dict[str, Callable[[Path], Any]] = {"neutral": neutral}
