#!/usr/bin/env python
"""Tries rates of every architecture, depth and warm-up for 150 updates, and keeps all trials: ``trials.csv``.

    python results/forecast/try_rates.py STAGE ... --data PATH/multi30k [--out results/forecast]

What stands there is not tried again, so that a stopped call goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import truth
from make import ALONE, HERE, append, config
from predict import SEED, wanted
from truth import Cell

from stabilitylab.config import Config
from stabilitylab.data import load_data
from stabilitylab.forecast import reference
from stabilitylab.forecast.trials import trials
from stabilitylab.models import canonical
from stabilitylab.train.environment import prepare_process

COLUMNS = ("arch", "layers", "warmup", "seed", "rate", "state", "gap", "updates", "cpu_seconds", "torch", "cpu")


def done(path: Path) -> set[tuple[str, int]]:
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {(row["arch"], int(row["layers"])) for row in csv.DictReader(file)}


def lines(arch: str, layers: int, settings: Config) -> list[dict[str, object]]:
    """All trials of one architecture and depth; ``cpu_seconds`` are of all of them."""
    dataset = load_data(settings.data, stack=settings.model.stack)
    settings = settings.model_copy(update={"model": canonical(settings.model)})
    began = time.process_time()
    found = trials(reference(settings, dataset, torch.device("cpu")), truth.WARMUPS)
    whole = {
        **{"arch": arch, "layers": layers, "seed": SEED, "cpu_seconds": f"{time.process_time() - began:.1f}"},
        **{"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()},
    }
    return [
        {**whole, "warmup": w, "rate": f"{one.rate:g}", "state": one.state.replace(" ", "-"), "gap": f"{one.gap:.4f}"}
        | {"updates": one.updates}
        for w, own in found.items()
        for one in own.each
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=[*truth.STAGES])
    parser.add_argument("--data", required=True, help="folder of Multi30k, or synthetic")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of trials.csv")
    for what in ALONE[:2]:
        parser.add_argument(
            f"--{what}", type=lambda text: text.split(","), help="these alone, with commas between them"
        )
    parser.add_argument("--set", action="append", default=[], help="a setting over the protocol's, for a shorter look")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    prepare_process(1)
    path = given.out / "trials.csv"
    for arch, layers in sorted(wanted(given.stages), key=lambda pair: pair[1]):
        alone = all(str(own) in (chosen or [str(own)]) for own, chosen in ((arch, given.arch), (layers, given.layers)))
        if not alone or (arch, layers) in done(path):
            continue
        settings = config(Cell(arch, layers, truth.WARMUPS[0], SEED), 0, given.data, given.set)
        for line in lines(arch, layers, settings):
            append(path, COLUMNS, line)
        print(f"{arch}, {layers} layers", flush=True)


if __name__ == "__main__":
    main()
