"""What two ranks do, case by case; each returns what its test looks at."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from rank_toys import ListSink, extra_probes, train

from stabilitylab.probes import Watcher

CASES: dict[str, Callable[[Path], Any]] = {}


def case(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    CASES[function.__name__] = function
    return function


def run(rank: int, folder: Path, names: list[str]) -> None:
    """One rank: every case in turn; what it returned, or its traceback, goes to the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = CASES[name](folder)
        except Exception:
            results[name] = traceback.format_exc()
            break  # the other rank may be waiting: it ends when this process does
        finally:
            torch.save(results, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


def counted(action: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What the action returns, and the all-reduces that Python called meanwhile (DDP's own are not among them)."""
    calls: list[str] = []
    before = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *rest: Any, **options: Any) -> Any:
        calls.append(str(op).rpartition(".")[2])
        return before(tensor, op, *rest, **options)

    dist.all_reduce = all_reduce
    try:
        return action(), calls
    finally:
        dist.all_reduce = before


for kind in ("ddp", "fsdp"):
    CASES[f"{kind}_start"] = lambda folder, kind=kind: train(kind, torch.float32, steps=1)
    CASES[f"{kind}_updates"] = lambda folder, kind=kind: train(kind)
    CASES[f"{kind}_accumulated"] = lambda folder, kind=kind: train(kind, steps=2, accumulate=2)
    CASES[f"{kind}_split_reference"] = lambda folder, kind=kind: train(kind, steps=2, split_reference=True)
CASES["hsdp_updates"] = lambda folder: train("hsdp", steps=3)
CASES["hsdp-flat_updates"] = lambda folder: train("hsdp-flat", steps=3)


@case
def maxima(folder: Path) -> Any:
    with extra_probes():
        recorded, calls = counted(lambda: train("fsdp", steps=2))
    return {"recorded": recorded, "calls": calls}


@case
def bf16(folder: Path) -> Any:
    gathered: list[float] = []

    def watch(watcher: Watcher) -> None:
        ours = watcher.step

        def step(**metrics: Any) -> Any:
            whole = [p.grad.full_tensor() for p in model_of(watcher).parameters() if p.grad is not None]
            gathered.append(float(torch.stack([g.double().square().sum() for g in whole]).sum().sqrt()))
            return ours(**metrics)

        watcher.step = step  # type: ignore[method-assign]

    return {"recorded": train("bf16", torch.float32, steps=2, before=watch), "gathered": gathered}


def model_of(watcher: Watcher) -> torch.nn.Module:
    return watcher._training.model


class Experts(torch.nn.Module):
    """Two experts, of which each rank calls one; both get gradients, since both are multiplied in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.experts = torch.nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mine = self.experts[dist.get_rank()]
        other = self.experts[1 - dist.get_rank()]
        return mine(x) + 0 * sum(p.sum() for p in other.parameters())


class Expert(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.fc1, self.fc2 = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(self.fc1(self.norm(x)).relu())


@case
def expert(folder: Path) -> Any:
    model = torch.nn.parallel.DistributedDataParallel(Experts())
    sink = ListSink()
    with Watcher(model, sink, probes="ln_input") as watcher:
        loss = model(torch.randn(2, 3, 4)).square().mean()
        loss.backward()
        watcher.step(loss=loss)
    if dist.get_rank():
        return None, None
    cells = sink.rows[0][2]["ln_input"]
    return cells.values[:, 0], cells.absent
