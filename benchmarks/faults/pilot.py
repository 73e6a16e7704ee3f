#!/usr/bin/env python
"""Finds how strong a fault must be, on seeds that are not used afterwards.

    python benchmarks/faults/pilot.py --data PATH/multi30k

``edges.csv``: each subject's edge, the rate at which a ramp from 2e-4 to .4 in 600 updates broke it: its held-out loss
was .25 nats above its lowest in five evaluations one after the other, or a number was not finite; geometric mean of two
seeds. ``pilot.csv``: of each way to fail from within and each architecture, which of its four levels fail at the
smallest size (by bisection, failing being monotone). What stands there is not made again. It was made with runs of 600
updates, when the ramp multiplied the rate by e in 150; :func:`middles` reads what it says of runs of 400.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from families import FAMILIES, RAMP, UPDATES, Family, Plan
from subjects import SUBJECTS
from training import COLUMNS, Course, Recipe, train

HERE = Path(__file__).parent
SEEDS = (100, 101)
LOW, HIGH = 2e-4, 0.4
ROWS, ROWS_OF_E = 600, 150  # of the pilot's runs; of its ramp
LAST = UPDATES - 55  # a failure after this row would not be seen: fifty rows behind the twin, up to the end
BEHIND, IN_A_ROW = 0.25, 5
LIGHT = ("grad_norm",)
EARLY = 50  # rows: a failure before this one could not have been announced
SPREAD = 1.6  # a strength is drawn between the middle / 1.6 and the middle * 1.6


def sweep(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """The rate goes from 2e-4 to .4."""
    plan.rate = lambda row: LOW * (HIGH / LOW) ** (row / ROWS)


SWEEP = Family("sweep", "healthy", "-", (1.0,), sweep, "The rate goes from 2e-4 to .4.")


def breaks(course: Course) -> float:
    """The rate at which a sweep broke; that of its end where it did not."""
    rates, lowest, above = course.rows[:, COLUMNS.index("lr")], math.inf, 0
    for step, nll in course.held_out:
        above = above + 1 if nll > lowest + BEHIND else 0
        lowest = min(lowest, nll)
        if above == IN_A_ROW:
            return float(rates[step - 5 * (IN_A_ROW - 1)])
    return float(rates[-1])


def edges() -> dict[str, float]:
    """The edge of each subject, as ``edges.csv`` has it."""
    found: dict[str, list[float]] = {}
    for line in read(HERE / "edges.csv"):
        found.setdefault(line["subject"], []).append(math.log(float(line["rate"])))
    return {name: math.exp(sum(logs) / len(logs)) for name, logs in found.items()}


def middles() -> dict[tuple[str, str], float]:
    """(architecture, family) -> the strength between the largest level that did not fail and the smallest that did;
    half the smallest where all did, twice the largest where only that failed, and too late; nothing where none did, or
    where the mildest failure came in the first 50 rows, so that nothing could have announced it. Of architectures whose
    pilot is whole. A level that failed too late to be seen in a run of 400 did not fail."""
    found: dict[tuple[str, str], dict[float, int | None]] = {}
    for line in read(HERE / "pilot.csv"):
        step = int(line["step"]) if line["failed"] == "1" else None
        if step is not None and line["family"] == "ramp":  # the same rate in a ramp that climbs faster
            step = round(UPDATES - 100 + (step - ROWS + 100) * RAMP / ROWS_OF_E)
        found.setdefault((line["arch"], line["family"]), {})[float(line["strength"])] = step
    every = {name for name, own in FAMILIES.items() if own.kind == "endogenous"}
    whole = {arch for arch, _ in found if {name for own, name in found if own == arch} == every}
    middle = {}
    for (arch, family), levels in found.items():
        failed = {level: step for level, step in levels.items() if step is not None and step <= LAST}
        late = [level for level, step in levels.items() if step is not None and step > LAST]
        if arch not in whole or (failed and failed[min(failed)] <= EARLY):
            continue
        if failed:
            well = [level for level in levels if level < min(failed)]
            middle[arch, family] = math.sqrt(min(failed) * max(well)) if well else min(failed) / 2
        elif late:
            middle[arch, family] = 2 * max(late)
    return middle


def strength(middle: float, random: np.random.Generator) -> float:
    """One drawn around the middle, evenly in its logarithm."""
    return float(middle * SPREAD ** random.uniform(-1.0, 1.0))


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def add(path: Path, line: dict[str, object]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(line))
        if new:
            writer.writeheader()
        writer.writerow(line)


def smallest() -> Iterator[tuple[str, str]]:
    """Each architecture, and its smallest subject."""
    for arch in dict.fromkeys(subject.arch for subject in SUBJECTS.values()):
        yield arch, next(name for name, subject in SUBJECTS.items() if subject.arch == arch)


def find_edges(text: Path | None) -> None:
    done = {(line["subject"], line["seed"]) for line in read(HERE / "edges.csv")}
    FAMILIES["sweep"] = SWEEP
    for seed in SEEDS:
        for name in SUBJECTS:
            if (name, str(seed)) not in done:
                rate = breaks(train(Recipe(name, seed, "sweep"), 1.0, text, None, ROWS, LIGHT, judged=False))
                add(HERE / "edges.csv", {"subject": name, "seed": seed, "rate": f"{rate:.4g}"})
    del FAMILIES["sweep"]


def find_strengths(text: Path | None) -> None:
    done = {(line["arch"], line["family"]): line for line in read(HERE / "pilot.csv")}
    for arch, name in smallest():
        edge = edges()[name]
        twin = None
        for family in (own for own in FAMILIES.values() if own.kind == "endogenous"):
            if (arch, family.name) in done:
                continue
            if twin is None:
                twin = train(Recipe(name, SEEDS[0], "twin"), edge, text, None, ROWS, LIGHT, judged=False).held_out
            low, high = 0, len(family.levels)  # all below ``low`` are well, all from ``high`` on fail
            lines = []
            while low < high:
                middle = (low + high) // 2
                strength = family.levels[middle]
                recipe = Recipe(name, SEEDS[0], family.name, strength)
                ended = train(recipe, edge, text, twin, ROWS, LIGHT, judged=False).failure
                bad = ended.step is not None
                low, high = (low, middle) if bad else (middle + 1, high)
                lines.append(
                    {
                        "arch": arch,
                        "family": family.name,
                        "strength": strength,
                        "failed": int(bad),
                        "step": "" if ended.step is None else ended.step,
                        "why": ended.why,
                    }
                )
            for line in lines:  # a family is whole or not there
                add(HERE / "pilot.csv", line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of Multi30k; without it, the synthetic task")
    options = parser.parse_args()
    find_edges(options.data)
    find_strengths(options.data)
