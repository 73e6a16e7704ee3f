#!/usr/bin/env python
"""Trains every cell for 160 updates and on to 1600, and keeps what the states are judged by.

    python results/states/make.py --data PATH/multi30k [--runs runs/states]

``runs.csv``: one line a run; ``course.csv``: its held-out loss at every evaluation up to update 160, and then 50 times
to update 1600. What stands in ``runs.csv`` is not made again, so that a stopped call goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from cells import LATER, UPDATES, Cell, order
from shared import Lines, multi30k

from stabilitylab import train
from stabilitylab.config import Config, parse_set, resolve
from stabilitylab.store import Run

HERE = Path(__file__).parent
RUN = (
    *("cell", "seed", "cause", "arch", "layers", "lr", "warmup", "T", "schedule", "init", "updates", "later"),
    *("unigram", "validation_unigram", "sentences", "nll_160", "accuracy_160", "nll_1600", "accuracy_1600"),
    *("unigram_accuracy", "non_finite", "commit", "torch", "cpu"),
)
COURSE = ("cell", "seed", "step", "nll", "accuracy")


def config(cell: Cell, seed: int, data: Path) -> Config:
    settings = [f"model.arch={cell.arch}", f"train.seed={seed}", f"data.seed={seed}", f"train.steps={UPDATES}"]
    settings += [*(f"data.{key}={value}" for key, value in multi30k(data).items()), 'probes.names=["none"]']
    return resolve(parse_set([*settings, "train.warmup=40", *cell.settings]), depth=cell.layers)


def course(run: Run, after: int) -> list[tuple[int, float, float]]:
    """step, held-out loss, accuracy of the evaluations after row ``after``."""
    data = run.arrow("metrics", columns=["held_out_nll", "held_out_accuracy"]).to_pydict()
    rows = zip(data["step"], data["held_out_nll"], data["held_out_accuracy"], strict=True)
    return [(step, nll, share) for step, nll, share in rows if nll is not None and step > after]


def make(cell: Cell, seed: int, data: Path, folder: Path) -> tuple[dict[str, Any], list[tuple[int, float, float]]]:
    """One run, and the same run resumed: its line, and its course."""
    path = folder / f"{cell.name}-{seed}"
    shutil.rmtree(path, ignore_errors=True)  # begun, and not in runs.csv
    settings = config(cell, seed, data)
    ends, found = [], []
    for updates in (UPDATES, LATER):
        if updates == UPDATES:
            train.start(train.plan(settings), folder, path.name)
        else:
            train.resume(path, updates)
        run = Run.open(path)
        last = run.arrow("metrics").to_pylist()[-1]
        ends.append((last["validation_nll"], last["validation_accuracy"]))
        found += course(run, found[-1][0] if found else -1)
        verdict = run.verdict
    own, base = settings.model, run.manifest["validation_unigram"]
    values = (
        *(cell.name, seed, cell.cause, cell.arch, cell.layers, settings.train.lr, settings.train.warmup, own.T),
        *(settings.train.schedule, own.init, UPDATES, LATER, run.manifest["unigram"]["cross_entropy"]),
        *(base["cross_entropy"], run.manifest["data"]["validation"], *ends[0], *ends[1], base["accuracy"]),
        *(
            verdict.reason if verdict and verdict.state == "diverged" else "",
            run.manifest["git_revision"],
            torch.__version__,
        ),
        torch.backends.cpu.get_cpu_capability(),
    )
    shutil.rmtree(path)  # its weights are of no further use
    return dict(zip(RUN, values, strict=True)), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of Multi30k")
    parser.add_argument("--runs", type=Path, default=Path("runs/states"))
    parser.add_argument("--out", type=Path, default=HERE, help="folder of runs.csv and course.csv")
    parser.add_argument("--half", type=int, choices=(0, 1), help="every other run, for two processes at once")
    given = parser.parse_args()
    runs, courses = Lines(given.out / "runs.csv", RUN), Lines(given.out / "course.csv", COURSE)
    for number, (cell, seed) in enumerate(order()):
        if given.half is not None and number % 2 != given.half:
            continue
        if runs.has(cell.name, seed):
            continue
        line, found = make(cell, seed, given.data, given.runs)
        courses.add(*((cell.name, seed, *row) for row in found))
        runs.add(line)
        print(f"{cell.name} {seed}: {line['nll_160'] - line['validation_unigram']:+.3f} after {UPDATES}", flush=True)


if __name__ == "__main__":
    main()
