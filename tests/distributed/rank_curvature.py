"""Curvature on two ranks: the rows of one process, whatever holds the parameters and however the batch is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_toys import ListSink, Uneven, part, translation, wrapped
from torch import Tensor

from stabilitylab.probes import Watcher

NAMES = ("critical_sharpness", "preconditioned_sharpness", "sharpness")


def train(kind: str, split: bool = False, fails: int = 0) -> dict[str, Any]:
    """Three updates in float64; ``split``: each rank's loss is that of its own sentences. ``fails``: the call of the
    loss that raises, on the second rank alone."""
    torch.manual_seed(0)
    rank = None if kind == "one" else dist.get_rank()
    ranks = 1 if rank is None else dist.get_world_size()
    plain = Uneven("preln").double()
    model = wrapped(plain, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    whole = translation(99)
    fixed = part(whole, rank if split else None)
    called = 0

    def each(inputs: dict[str, Tensor]) -> Tensor:
        logits, real = model(**inputs), inputs["target_mask"]
        return F.cross_entropy(logits[real], inputs["target"][real], reduction="none")

    def loss() -> Tensor:
        nonlocal called
        called += 1
        if called == fails and rank == 1:
            raise ValueError("no loss on this rank")
        return each(fixed) if not split else each(fixed).sum()[None] * ranks / whole["target_mask"].sum()

    sink = ListSink()
    probes = NAMES[:1] if fails else NAMES
    watcher = Watcher(model, sink, probes=probes, optimizer=optimizer, curvature_every=1, curvature_loss=loss)
    losses = []
    for t in range(3):
        inputs = translation(t)
        mine = part(inputs, rank)
        value = each(mine).sum() * ranks / inputs["target_mask"].sum()
        value.backward()
        watcher.step(loss=value.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    watcher.finish()
    watcher.close()
    own = [p.detach().to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()]
    rows = {
        (step, name): dict(zip(sink.tables[name].columns, cells.values[0].tolist(), strict=True))
        for step, _, tables in sink.rows
        for name, cells in tables.items()
    }
    return {"rows": rows, "ended": dict(watcher.ended), "parameters": [p.clone() for p in own], "losses": losses}


def unwatched(kind: str) -> list[Tensor]:
    torch.manual_seed(0)
    plain = Uneven("preln").double()
    model = wrapped(plain, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    for t in range(3):
        inputs = translation(t)
        mine = part(inputs, dist.get_rank())
        logits, real = model(**mine), mine["target_mask"]
        losses = F.cross_entropy(logits[real], mine["target"][real], reduction="none")
        (losses.sum() * dist.get_world_size() / inputs["target_mask"].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    own = [p.detach().to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()]
    return [p.clone() for p in own]


def _bitwise(folder: Path) -> dict[str, bool]:
    return {
        kind: all(torch.equal(a, b) for a, b in zip(train(kind)["parameters"], unwatched(kind), strict=True))
        for kind in ("ddp", "fsdp")
    }


CURVATURE_CASES = {
    **{f"curvature_{kind}": lambda folder, kind=kind: train(kind) for kind in ("ddp", "fsdp", "columns", "hsdp")},
    **{f"curvature_{kind}_split": lambda folder, kind=kind: train(kind, split=True) for kind in ("ddp", "fsdp")},
    "curvature_bitwise": _bitwise,
    "curvature_fails": lambda folder: train("ddp", fails=9)["ended"],
}
