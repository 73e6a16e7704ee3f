"""Two ranks under DistributedDataParallel that record their updates, and explain them together with fresh objects."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[1] / "explain"))

from loops import Tiny, batch, loss_fn, recorder

import stabilitylab as sl
from stabilitylab.errors import StabilityLabError

STEPS, BEGINS, LAST = 28, 13, 15  # a fault begins at an update of which no sketch is kept
LR, JUMP, RESTED = 1e-2, 30.0, 20  # the rate that jumps does so once a level of the loss is known


def objects() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = DistributedDataParallel(Tiny())
    return model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def trained(out: Path | None, fault: str = "", parts: int = 1) -> tuple[list[Any], list[float]]:
    """Train on each rank's own batches; return parameters and losses. ``out`` None: without a watcher."""
    rank = dist.get_rank()
    model, optimizer = objects()
    torch.manual_seed(5 + rank)
    losses: list[float] = []
    held = nullcontext() if out is None else sl.watch(
        model, out=out, optimizer=optimizer, record=recorder(), probes="none", reference=None
    )  # fmt: skip
    with held as w:
        for t in range(STEPS + (4 if fault == "rate" else 0)):
            own = rank == 1 and t >= BEGINS
            if fault == "rate" and t >= RESTED:
                optimizer.param_groups[0]["lr"] = JUMP * LR
            if fault == "write" and own and t == BEGINS:
                with torch.no_grad():
                    model.module.head.weight.mul_(1.5)
            if fault == "forward" and own and t == BEGINS:
                model.module.blocks[1].norm2.register_forward_hook(lambda module, given, output: output * 1.3)
            total = torch.zeros(())
            for part in range(parts):
                one = batch(1000 * rank + parts * t + part)
                if fault == "data" and own and t <= LAST:
                    one = {**one, "labels": torch.randint(13, one["labels"].shape)}
                if w is not None:
                    w.batch(one)
                with model.no_sync() if part < parts - 1 else nullcontext():
                    loss = loss_fn(model, one) / parts
                    loss.backward()
                total += loss.detach()
            if w is not None:
                w.step(loss=total)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(total))
    return [one.detach().clone() for one in model.parameters()], losses


def explained(folder: Path, fault: str = "", parts: int = 1) -> dict[str, Any]:
    out = folder / f"explain-{fault or parts}"
    trained(out, fault, parts)
    model, optimizer = objects()
    before = copy.deepcopy(model.state_dict())
    found = sl.explain(out, model, loss_fn, optimizer)
    after = model.state_dict()
    assert found.audit is not None
    return {
        "verdict": found.verdict,
        "cause": found.cause,
        "findings": [(one.kind, one.place, one.step, one.accused, str(one)) for one in found.findings],
        "replayed": (found.audit.replayed, found.audit.equal, found.audit.full),
        "same": all(torch.equal(before[name], after[name]) for name in before),
        "files": sorted(str(path.relative_to(out)) for path in (out / "black_box").rglob("*.pt")),
    }


def neutral(folder: Path) -> dict[str, Any]:
    plain, watched = trained(None), trained(folder / "explain-neutral")
    same = all(torch.equal(one, other) for one, other in zip(plain[0], watched[0], strict=True))
    return {"same": same and plain[1] == watched[1]}


def sharded(folder: Path) -> dict[str, Any]:
    """What is said of a model whose parameters lie on several processes."""
    model = Tiny()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    out = folder / "explain-sharded"
    with sl.watch(model, out=out, optimizer=optimizer, record=recorder(), probes="none", reference=None) as w:
        for t in range(2):
            loss = loss_fn(model, w.batch(batch(t)))
            loss.backward()
            w.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    return {"why": sl.Run.open(out).manifest["not_replayable"]}


def foreign(folder: Path) -> dict[str, Any]:
    """What is said where the black box of one rank is lost, and where the model is not wrapped."""
    out, said = folder / "explain-lost", {}
    trained(out)
    model, optimizer = objects()
    for case, given in (("bare", model.module), ("lost", model)):
        if case == "lost" and dist.get_rank() == 1:
            for path in (out / "black_box" / "rank-1").iterdir():
                path.unlink()
        dist.barrier()
        try:
            sl.explain(out, given, loss_fn, optimizer)
        except StabilityLabError as error:
            said[case] = f"{type(error).__name__}: {error}".replace(str(out), "RUN")
    return said


def ready() -> dict[str, Any]:
    """The factory of ``explain --factory`` under torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer = objects()
    return {"model": model, "loss_fn": loss_fn, "optimizer": optimizer}


def rounding(folder: Path) -> dict[str, Any]:
    """Of four ranks, which add up gradients in another order once DistributedDataParallel has made its buckets anew."""
    return explained(folder, parts=1)


EXPLAIN_CASES: dict[str, Callable[[Path], Any]] = {
    "explain_neutral": neutral,
    "explain_sound": explained,
    "explain_forward": lambda folder: explained(folder, "forward"),
    "explain_foreign": foreign,
    "explain_sharded": sharded,
    "explain_write": lambda folder: explained(folder, "write"),
    "explain_data": lambda folder: explained(folder, "data"),
    "explain_parts": lambda folder: explained(folder, parts=2),
    "explain_rate": lambda folder: explained(folder, "rate"),
}
SLOW_EXPLAIN = frozenset({"explain_write", "explain_data", "explain_parts", "explain_rate"})


if __name__ == "__main__":  # under torchrun: record a run for a fresh process
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trained(Path(sys.argv[1]), "forward")
    dist.barrier()
    os._exit(0)
