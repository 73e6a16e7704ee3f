"""What two ranks do, case by case; each returns what its test looks at."""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))

from rank_broken import BROKEN_CASES
from rank_compiled import COMPILED_CASES
from rank_curvature import CURVATURE_CASES
from rank_explain import EXPLAIN_CASES, SLOW_EXPLAIN, rounding
from rank_neutral import NEUTRAL_CASES
from rank_pipeline import PIPELINE_CASES
from rank_runs import RUN_CASES
from rank_setups import FOUR_SETUPS, SETUP_CASES, SLOW_SETUPS
from rank_shares import SHARE_CASES
from rank_taps import TAP_CASES
from rank_tensor_cases import FOUR_CASES, TENSOR_CASES
from rank_toys import ListSink, extra_probes, sentence, train

from stabilitylab.api import watch
from stabilitylab.probes import Watcher
from stabilitylab.probes.parameters.ranks import Ranks
from stabilitylab.store import Run

CASES: dict[str, Callable[[Path], Any]] = {}
SLOW = frozenset(  # asked for by tests of the slow set alone
    {
        *BROKEN_CASES,
        *COMPILED_CASES,
        *FOUR_CASES,
        *FOUR_SETUPS,
        *SLOW_SETUPS,
        *SLOW_EXPLAIN,
        "explain_rounding",
        *(f"curvature_{case}" for case in ("ddp", "fsdp", "ddp_split", "columns", "hsdp", "fsdp_split", "bitwise")),
        *(f"cut_{case}" for case in ("bitwise", "fingerprint", "histograms", "loss_after")),
        *(f"cut_{plan}_before" for plan in ("columns", "sequence", "loss")),
        *("cut_columns_after", "cut_start", "ddp_start", "fsdp_start", "ddp_accumulated", "fsdp_split_reference"),
        *("bf16", "ddp_fingerprint", "ddp_histograms"),
        *("explain_foreign", "explain_forward"),
        *(f"{kind}_{case}" for kind in ("columns", "hsdp") for case in ("fingerprint", "histograms")),
        *(f"{kind}_updates" for kind in ("columns", "hsdp", "hsdp-flat")),
        *("ddp_admin", "fsdp_admin", "fsdp_branchnorm", "ddp_resumed", "fsdp_resumed", "found"),
        *(f"{kind}_{case}" for kind in ("ddp", "fsdp") for case in ("checkpointed", "timed")),
    }
)


def case(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    CASES[function.__name__] = function
    return function


def every_case(size: int) -> dict[str, Callable[[Path], Any]]:
    """Those of so many ranks."""
    if size == 4:
        return {**FOUR_CASES, "explain_rounding": rounding, **FOUR_SETUPS}
    # the trainer last: it flushes denormal numbers from then on
    return (
        CASES
        | NEUTRAL_CASES
        | BROKEN_CASES
        | EXPLAIN_CASES
        | SHARE_CASES
        | SETUP_CASES
        | CURVATURE_CASES
        | TENSOR_CASES
        | PIPELINE_CASES
        | COMPILED_CASES
        | RUN_CASES
        | TAP_CASES
    )


def run(rank: int, folder: Path, names: list[str], size: int) -> None:
    """One rank: every case in turn; what it returned, or its traceback, goes to the folder, and where a crash came."""
    crash = (folder / f"crash-{rank}.txt").open("w")
    faulthandler.enable(crash, all_threads=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    results: dict[str, Any] = {}
    for name in names:
        print(f"case {name}", file=crash, flush=True)
        try:
            results[name] = every_case(size)[name](folder)
        except Exception:
            results[name] = traceback.format_exc()
            break  # the other rank may be waiting: it ends when this process does
        finally:
            torch.save(results, folder / f"rank-{rank}.pt")
    print("case none: after the last one", file=crash, flush=True)
    dist.destroy_process_group()
    os._exit(0)  # what was found is written; threads of the library may end in any order without an interpreter


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
    CASES[f"{kind}_histograms"] = lambda folder, kind=kind: train(kind, steps=2, accumulate=2, probes=["histograms"])
    CASES[f"{kind}_alignment"] = lambda folder, kind=kind: train(kind, steps=3, probes="gradient_alignment")
for kind in ("ddp", "fsdp", "columns", "hsdp"):
    CASES[f"{kind}_fingerprint"] = lambda folder, kind=kind: train(
        kind, steps=2, accumulate=2, shares=(3, 3), probes="fingerprint"
    )
for kind in ("columns", "hsdp"):
    CASES[f"{kind}_histograms"] = lambda folder, kind=kind: train(kind, steps=2, accumulate=2, probes=["histograms"])
CASES["columns_updates"] = lambda folder: train("columns", steps=3)
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
    return watcher._watched.model


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
    model = DistributedDataParallel(Experts())
    sink = ListSink()
    with Watcher(model, sink, probes="ln_input") as watcher:
        loss = model(torch.randn(2, 3, 4)).square().mean()
        loss.backward()
        watcher.step(loss=loss)
    if dist.get_rank():
        return None, None
    cells = sink.rows[0][2]["ln_input"]
    return cells.values[:, 0], cells.absent


@case
def bitwise(folder: Path) -> Any:
    """(kind, what was changed) -> names of what a watched run trained differently."""
    found = {}
    for kind in ("ddp", "fsdp"):
        unwatched = train(kind, steps=3, watched=False)
        found[kind, ""] = differences(unwatched, train(kind, steps=3))
        if kind == "fsdp":
            reshard, Ranks.reshard = Ranks.reshard, lambda self: None
            found[kind, "no reshard"] = differences(unwatched, train(kind, steps=3))
            Ranks.reshard = reshard
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    keys = ("losses", "parameters")
    return [key for key in keys for a, b in zip(one[key], other[key], strict=True) if not torch.equal(a, b)]


@case
def collectives(folder: Path) -> Any:
    """All-reduces of four rows, of which two are probed, and the last reference row; without maxima and with them."""
    cases = [(kind, probes) for kind in ("ddp", "fsdp") for probes in ("default", "all")]
    return [counted(lambda k=kind, p=probes: train(k, steps=4, every=2, probes=p))[1] for kind, probes in cases]


class Small(torch.nn.Module):
    """Two layers, and a loop's worth of state around them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = torch.nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def backward(model: torch.nn.Module) -> torch.Tensor:
    loss = model(torch.ones(2, 3, 4) * (1 + dist.get_rank())).square().mean()
    loss.backward()
    return loss


@case
def reading(folder: Path) -> Any:
    """A row's metrics before and after the optimizer's step; who averages what."""
    model = DistributedDataParallel(Small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = Watcher(model, ListSink(), optimizer=optimizer, every=2)
    loss, rank = backward(model), dist.get_rank()
    row = watcher.step(loss=loss, mine=rank + 1.0, half=None if rank else 4.0, none=None)
    early = sentence(lambda: row["loss"])
    optimizer.step()
    watcher.note(own=10.0 + rank)
    first = dict(row)
    backward(model)
    unprobed = dict(watcher.step(loss=loss))  # nothing is owed: the row is whole before the optimizer's step
    watcher.close()
    return {"early": early, "loss": float(loss), "first": first, "unprobed": unprobed}


@case
def failing(folder: Path) -> Any:
    """One rank alone fails, before or after the optimizer's step: it must not wait for the other."""
    rows = []
    for after in (False, True):
        model = DistributedDataParallel(Small())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sink = ListSink()
        watcher = Watcher(model, sink, optimizer=optimizer, every=1)
        loss = backward(model)
        try:
            with watcher:
                watcher.step(loss=loss)
                if after:
                    optimizer.step()
                raise ZeroDivisionError if dist.get_rank() == 0 else TimeoutError
        except (ZeroDivisionError, TimeoutError):
            rows.append([row for row, *_ in sink.rows])
    return rows


@case
def refusals(folder: Path) -> Any:
    """Layouts that the probes do not know -> what they say."""
    mesh = init_device_mesh("cpu", (2,))
    colwise = {"layers.0.fc1": ColwiseParallel(), "layers.0.fc2": RowwiseParallel()}
    halves = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    compiled: Any = parallelize_module(Small(), mesh, colwise)
    compiled.layers[0].compile(backend="eager")
    outside: Any = parallelize_module(Small(), mesh, colwise)
    fully_shard(outside.layers[1], mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"])
    summed = fully_shard(Small())
    summed.set_gradient_divide_factor(1.0)
    half = Small()
    fully_shard(half.layers[0], mesh=mesh)
    partial = Small()
    partial.layers[0].norm.weight = torch.nn.Parameter(
        DTensor.from_local(torch.ones(4), mesh, [Partial()]), requires_grad=False
    )
    inside = Small()
    inside.layers[0] = DistributedDataParallel(inside.layers[0])
    mixed = Small()
    fully_shard(mixed.layers[0], mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    fully_shard(mixed, mesh=mesh)
    groups = [dist.new_group([rank]) for rank in range(2)]
    alone = fully_shard(Small(), mesh=DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("a", "b"))["b"])
    models = {
        "tensor parallel over a part of the ranks": parallelize_module(Small(), halves["tensor"], colwise),
        "tensor parallel over two meshes": parallelize_module(
            parallelize_module(Small(), mesh, colwise),
            halves["data"],
            {"layers.1.fc1": ColwiseParallel(), "layers.1.fc2": RowwiseParallel()},
        ),
        "tensor parallel and compiled": compiled,
        "tensor parallel beside fully_shard": outside,
        "tensor parallel, said to be averaged": parallelize_module(Small(), mesh, colwise),
        "a part of the ranks": alone,
        "partial": partial,
        "replicated in part": mixed,
        "DDP of a part of the ranks": DistributedDataParallel(Small(), process_group=groups[dist.get_rank()]),
        "replicated": distribute_module(Small(), mesh),
        "half sharded": half,
        "half in DDP": inside,
        "not averaged": Small(),
        "summed": summed,
        "FSDP1": FullyShardedDataParallel(Small(), device_id=torch.device("cpu")),
        "sharded, said to be off": fully_shard(Small()),
    }
    found = {}
    for name, model in models.items():
        parallel = "off" if name.endswith("off") else "ddp" if name.endswith("averaged") else "auto"
        parallel = "auto" if name == "not averaged" else parallel
        found[name] = sentence(lambda m=model, p=parallel: Watcher(m, ListSink(), probes="grad_norm", parallel=p))
    different = "grad_norm" if dist.get_rank() else "ln_input"
    found["different probes"] = sentence(
        lambda: Watcher(DistributedDataParallel(Small()), ListSink(), probes=different)
    )
    offloaded = fully_shard(Small(), mesh=mesh)
    used: Any = next(offloaded.parameters()).device_mesh
    used._device_type = "cuda"  # as if the shards of a GPU lay in the host's memory
    found["offloaded"] = sentence(lambda: Watcher(offloaded, ListSink(), probes="grad_norm"))
    used._device_type = "cpu"  # meshes that are equal are one
    return found


@case
def unwrapped(folder: Path) -> Any:
    """The gradient norms of a loop that averages by itself, and of ranks that train a model each."""
    found: dict[str, Any] = {}
    for parallel in ("ddp", "off"):
        model, sink = Small(), ListSink()
        watcher = Watcher(model, sink, probes="grad_norm", parallel=parallel)
        backward(model)
        if parallel == "ddp":
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= 2
        row = watcher.step()
        found[parallel] = row["grad_norm_total"], float(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
        watcher.flush()
        watcher.close()
        found[f"{parallel} rows"] = len(sink.rows)
    return found


@case
def directory(folder: Path) -> Any:
    """``watch`` on both ranks: one directory, and one answer where it exists."""
    model = DistributedDataParallel(Small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, out=folder / "run", every=1, optimizer=optimizer, config={"rank": dist.get_rank()}) as watcher:
        for _ in range(2):
            loss = backward(model)
            watcher.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    again = sentence(lambda: watch(model, out=folder / "run"))
    nameless = sentence(lambda: watch(model, out=folder / "other", probes="attention_entropi"))
    alarm = folder / f"rank-{dist.get_rank()}.json"  # read by the first rank alone, and there is none
    fileless = sentence(lambda: watch(model, out=folder / "other", alarm=alarm))
    dist.barrier()
    run = Run.open(folder / "run")
    return {
        "again": again,
        "nameless": nameless,
        "fileless": fileless,
        "left": sorted(path.name for path in folder.iterdir() if path.is_dir()),
        "rank": run.config["rank"],
        "status": run.status.state,
        "steps": run.metrics["step"].tolist(),
    }
