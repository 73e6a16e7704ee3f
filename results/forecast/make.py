#!/usr/bin/env python
"""Finds, for every cell, the learning rate between those that train and those that fail, and keeps all that it tried.

    python results/forecast/make.py STAGE ... --data PATH/multi30k [--runs runs/forecast] [--out results/forecast]

``runs.csv``: one line a run; ``course.csv``: its held-out losses. What stands in ``runs.csv`` is not made again, so
that a stopped call goes on where it was, with the run that it was at. ``--data synthetic`` takes the made-up language.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
import truth
from shared import Lines, multi30k, rows_of
from truth import Cell, Judged, Outcome

from stabilitylab import train
from stabilitylab.config import Config, parse_set, resolve
from stabilitylab.store import Run

HERE = Path(__file__).parent
KEY = ("arch", "layers", "warmup", "seed", "shift", "k")
RUN = (
    *(*KEY, "lr", "outcome", "updates", "states", "gaps", "non_finite", "unigram", "validation_unigram"),
    *("sentences", "cpu_seconds", "commit", "torch", "cpu"),
)
COURSE = (*KEY, "steps", "losses")
ALONE = ("arch", "layers", "seed")  # what a call may be confined to


def settings(cell: Cell, k: int, data: str) -> list[str]:
    own = [f"model.arch={cell.arch}", f"model.T={truth.T}", f"train.seed={cell.seed}", f"data.seed={cell.seed}"]
    own += [f"train.lr={cell.rate(k)!r}", f"train.warmup={cell.warmup}", "train.schedule=constant"]
    own += [f"train.steps={truth.JUDGED[0]}", 'probes.names=["none"]']
    if data == "synthetic":
        return [*own, "data.source=synthetic"]
    return [*own, *(f"data.{key}={value}" for key, value in multi30k(Path(data)).items())]


def config(cell: Cell, k: int, data: str, more: Sequence[str] = ()) -> Config:
    return resolve(parse_set([*settings(cell, k, data), *more]), depth=cell.layers)


def make(cell: Cell, k: int, given: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trains at rate ``k`` until it is decided: the lines of runs.csv and course.csv."""
    path = given.runs / f"{cell.arch}-{cell.layers}-w{cell.warmup}-k{k + cell.shift:g}-s{cell.seed}"
    shutil.rmtree(path, ignore_errors=True)  # begun, and not in runs.csv
    began, seen = time.process_time(), list[Judged]()
    what: Outcome | None = None
    for updates in truth.JUDGED:
        if not seen:
            ended = train.start(train.plan(config(cell, k, given.data, given.set)), given.runs, path.name)
        else:
            ended = train.resume(path, updates)
        if ended.verdict is None:
            raise SystemExit("stopped; the same command goes on.")
        seen.append(Judged(updates, ended.verdict.state, ended.verdict.nll_gap))
        if what := truth.outcome(seen):
            break
    shutil.rmtree(path / "checkpoints")  # its weights are of no further use
    run, last = Run.open(path), seen[-1]
    key = dict(zip(KEY, (cell.arch, cell.layers, cell.warmup, cell.seed, cell.shift, k), strict=True))
    line = {
        **key,
        "lr": cell.rate(k),
        "outcome": what,
        "updates": last.updates,
        "states": " ".join(one.state.replace(" ", "-") for one in seen),
        "gaps": " ".join(f"{one.gap:.4f}" for one in seen),
        "non_finite": int(not math.isfinite(last.gap)),
        "unigram": run.manifest["unigram"]["cross_entropy"],
        "validation_unigram": (run.manifest["validation_unigram"] or {}).get("cross_entropy", ""),
        "sentences": run.manifest["data"]["validation"],
        "cpu_seconds": round(time.process_time() - began, 1),
        "commit": run.manifest["git_revision"],
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    data = run.arrow("metrics", columns=["held_out_nll"]).to_pydict()
    course = [(t, x) for t, x in zip(data["step"], data["held_out_nll"], strict=True) if x is not None]
    steps, losses = " ".join(str(t) for t, _ in course), " ".join(f"{x:.4f}" for _, x in course)
    return line, {**key, "steps": steps, "losses": losses}


def known(path: Path) -> dict[Cell, dict[int, Outcome]]:
    """Cell -> number of the rate -> outcome, of what stands in runs.csv."""
    found: dict[Cell, dict[int, Outcome]] = defaultdict(dict)
    for row in rows_of(path):
        layers, warmup, seed, k = (int(row[name]) for name in ("layers", "warmup", "seed", "k"))
        cell = Cell(row["arch"], layers, warmup, seed, float(row["shift"]))
        found[cell][k] = row["outcome"]  # pyright: ignore[reportArgumentType]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=[*truth.STAGES])
    parser.add_argument("--data", required=True, help="folder of Multi30k, or synthetic")
    parser.add_argument("--runs", type=Path, default=Path("runs/forecast"))
    parser.add_argument("--out", type=Path, default=HERE, help="folder of runs.csv and course.csv")
    for what in ALONE:
        commas = "these alone, with commas between them"
        parser.add_argument(f"--{what}", type=lambda text: text.split(","), help=commas)
    parser.add_argument("--set", action="append", default=[], help="a setting over the protocol's, for a trial")
    given = parser.parse_args()
    alone = {what: getattr(given, what) for what in ALONE}
    given.out.mkdir(parents=True, exist_ok=True)
    for stage in given.stages:
        for cell in truth.cells(stage):
            if any(chosen and str(getattr(cell, what)) not in chosen for what, chosen in alone.items()):
                continue
            while True:
                all_known = known(given.out / "runs.csv")
                own = all_known.pop(cell, {})
                if (k := truth.wanted(own, *truth.start(cell, all_known))) is None:
                    break
                line, course = make(cell, k, given)
                Lines(given.out / "course.csv", COURSE).add(course)
                Lines(given.out / "runs.csv", RUN).add(line)
                print(f"{cell} lr {line['lr']:g}: {line['outcome']} ({line['states']})", flush=True)


if __name__ == "__main__":
    main()
