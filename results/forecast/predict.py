#!/usr/bin/env python
"""Measures the predictors of every architecture and depth, and keeps them: ``predictors.csv``, one line each.

    python results/forecast/predict.py STAGE ... --data PATH/multi30k [--out results/forecast]

What stands there is not measured again, so that a stopped call goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import truth
from make import HERE, append, config
from truth import Cell

from stabilitylab.config import Config
from stabilitylab.data import load_data
from stabilitylab.forecast import reference
from stabilitylab.forecast.measuring import probe
from stabilitylab.forecast.ramp import range_test
from stabilitylab.models import canonical
from stabilitylab.train.environment import prepare_process

SEED = 0  # none of those whose edges are looked for
NUMBERS = (
    *("range_end", "range_low", "critical_start", "critical_later", "critical_later_cold", "gradient"),
    *("update", "update_vo_ffn", "update_ln", "growth_start", "growth_later", "growth_later_cold"),
    *("loss_later", "loss_later_cold"),
)
FACTS = ("width", "stacks", "optimizer", "clipping", "precision", "tokens", "classes")
COLUMNS = ("arch", "layers", "seed", *NUMBERS, *FACTS, "cpu_seconds", "update_seconds", "torch", "cpu")


def wanted(stages: list[str]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((cell.arch, cell.layers) for stage in stages for cell in truth.cells(stage)))


def done(path: Path) -> set[tuple[str, int]]:
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {(row["arch"], int(row["layers"])) for row in csv.DictReader(file)}


def line(arch: str, layers: int, settings: Config) -> dict[str, object]:
    dataset = load_data(settings.data, stack=settings.model.stack)
    settings = settings.model_copy(update={"model": canonical(settings.model)})
    candidate, began = reference(settings, dataset, torch.device("cpu")), time.process_time()
    found = probe(candidate, truth.WARMUPS[0])
    ramp = range_test(candidate)
    numbers = {**found.numbers, "range_end": math.log10(ramp.end), "range_low": math.log10(ramp.low)}
    took = time.process_time() - began
    return {
        **{"arch": arch, "layers": layers, "seed": SEED},
        **{name: f"{numbers[name]:.6g}" if name in numbers else "" for name in NUMBERS},
        **{name: found.facts[name] for name in FACTS},
        **{"cpu_seconds": f"{took:.1f}", "update_seconds": f"{found.update_seconds:.4f}"},
        **{"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=[*truth.STAGES])
    parser.add_argument("--data", required=True, help="folder of Multi30k, or synthetic")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of predictors.csv")
    parser.add_argument("--set", action="append", default=[], help="a setting over the protocol's, for a trial")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    prepare_process(1)
    for arch, layers in wanted(given.stages):
        if (arch, layers) in done(given.out / "predictors.csv"):
            continue
        settings = config(Cell(arch, layers, truth.WARMUPS[0], SEED), 0, given.data, given.set)
        append(given.out / "predictors.csv", COLUMNS, line(arch, layers, settings))
        print(f"{arch}, {layers} layers", flush=True)


if __name__ == "__main__":
    main()
