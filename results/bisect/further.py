#!/usr/bin/env python
"""Makes the two further settings of the validation: a compiled candidate, and one that is cut over two processes.

    python results/bisect/further.py [--out results/bisect] [--setting tensor] [--only TEXT]

"compiled": ``sl.bisect`` of the clean model and of the mutant under torch.compile (inductor). "tensor": the mutant is
cut over two processes (gloo) by parallelize_module, each records its row with the probe ``fingerprint``, and the run
that they write together is held against one of the clean model on one process, without a control: the rounding of the
dtype stands in. "tensor-control": the same with three controls, and models of other seeds. A line of ``further.csv`` a
cell; a stopped call goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from make import HERE, cells, named, pair
from models import MAKERS, batch, loss_of, made
from mutants import MUTANTS
from shared import Lines
from torch import nn

import stabilitylab as sl
from stabilitylab.bisect import of_stored, redrawn

COLUMNS = ("mutant", "model", "seed", "setting", "verdict", "where", "factor", "error")
CLEAN = "none: the clean model"
SETTINGS = ("tensor", "compiled", "tensor-control")
FIRST, CLEAN_SEEDS = {"tensor-control": 1}, {"tensor-control": range(105, 110)}  # else 0 and 100 to 104
CONTROLS, ULP = 3, 2.0**-23
Cell = tuple[str, str, int]  # mutant, model, seed


def all_cells(setting: str, only: str) -> Iterator[Cell]:
    """Every mutant in each of its models, then clean models of other seeds."""
    yield from ((mutant.name, model, FIRST.get(setting, 0)) for mutant, model, _ in cells(1, only))
    seeds = CLEAN_SEEDS.get(setting, range(100, 105))
    yield from ((CLEAN, model, seed) for seed in seeds for model in MAKERS if only in f"{CLEAN} {model}")


def candidate(cell: Cell) -> tuple[nn.Module, nn.Module]:
    """Return the clean model and the one that is held against it."""
    name, model, seed = cell
    if name == CLEAN:
        return made(model, seed), made(model, seed)
    return pair(next(mutant for mutant in MUTANTS if mutant.name == name), model, seed)


def compiled(cell: Cell) -> list[object]:
    clean, other = candidate(cell)
    torch._dynamo.reset()
    found = sl.bisect(clean, torch.compile(other), batch(cell[2]), loss_of)
    return [found.verdict, named(found), factor(found), ""]


def factor(found: Any) -> str:
    return "0" if found.first is None else f"{found.first.factor:.4g}"


def record(model: nn.Module, seed: int, out: Path, parallel: Any) -> None:
    """Write a run of one row, without an update."""
    with sl.watch(model, out=out, probes="fingerprint", every=1, parallel=parallel) as watcher:
        loss_of(model.train(), batch(seed)).backward()
        watcher.step()


def cut(model: nn.Module) -> nn.Module:
    """Cut queries, keys, values and the first linears by rows, and the linears behind them by columns, over two."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    by_rows, by_columns = ("q", "k", "v", "fc1", "gate"), ("out", "fc2")
    linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    plan: dict[str, Any] = {}
    for path in linears:
        name = path.rpartition(".")[2]
        if name in by_rows + by_columns:
            plan[path] = ColwiseParallel() if name in by_rows else RowwiseParallel()
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def on_rank(rank: int, wanted: Sequence[Cell], folder: str) -> None:
    """Record each cell on one of two processes; what a cell raised goes into a file beside its run."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    for number, cell in enumerate(wanted):
        own = Path(folder, str(number))
        try:
            record(cut(candidate(cell)[1]), cell[2], own / "cut", "auto")
        except Exception as error:  # a mutant that cannot be cut is no answer of bisect
            if rank == 0:
                (own / "error").write_text(f"{type(error).__name__}: {error}".partition("\n")[0], encoding="utf-8")
        dist.barrier()
    dist.destroy_process_group()


def tensor(wanted: Sequence[Cell], folder: Path, controls: int = 0) -> Iterator[list[object]]:
    """Yield the answers on mutants that are cut over two processes."""

    @cache
    def one(model: str, seed: int) -> tuple[Path, ...]:
        """The runs of the clean model on one process: as it is, then the controls."""
        paths = [folder / f"{model}-{seed}-{number}" for number in range(controls + 1)]
        for number, path in enumerate(paths):
            clean = made(model, seed)
            with redrawn(clean, ULP, number) if number else nullcontext():
                record(clean, seed, path, "off")
        return tuple(paths)

    for number in range(len(wanted)):
        (folder / str(number)).mkdir()
    processes.start_processes(on_rank, (wanted, str(folder)), nprocs=2, start_method="spawn")
    for number, (_, model, seed) in enumerate(wanted):
        error = folder / str(number) / "error"
        if error.exists():
            yield ["", "", "", error.read_text(encoding="utf-8")]
            continue
        clean, *controlling = one(model, seed)
        found = of_stored(clean, folder / str(number) / "cut", controlling)
        yield [found.verdict, named(found), factor(found), ""]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--setting", choices=SETTINGS, action="append")
    parser.add_argument("--only", default="", help="cells whose 'mutant model' has this text")
    given = parser.parse_args(arguments)
    ledger = Lines(given.out / "further.csv", COLUMNS)
    for setting in given.setting or SETTINGS:
        wanted = [cell for cell in all_cells(setting, given.only) if not ledger.has(*cell, setting)]
        with tempfile.TemporaryDirectory() as folder:
            controls = CONTROLS if setting == "tensor-control" else 0
            cut_over_two = setting != "compiled" and wanted
            answers = tensor(wanted, Path(folder), controls) if cut_over_two else map(compiled, wanted)
            for cell, answer in zip(wanted, answers, strict=True):
                ledger.add([*cell, setting, *answer])
                print(*cell, setting, *answer, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
