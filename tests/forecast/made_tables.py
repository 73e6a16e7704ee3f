"""Tables of results/forecast with made-up architectures, whose edges are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd

ARCHS = tuple("abcdefghij")
Edge = Callable[[dict[str, float], int, int], float]  # (predictors, layers, warm-up) -> log10 of the edge


def predictors(seed: int = 0) -> dict[tuple[str, int], dict[str, Any]]:
    """(architecture, layers) -> made-up numbers; those of one architecture hang together over depths."""
    random = np.random.default_rng(seed)
    found = {}
    for arch in ARCHS:
        own = random.normal(size=5)
        for layers in (12, 36):
            numbers = {
                "range_end": -2 + 0.4 * own[0],
                "critical_start": -0.8 + 0.1 * own[1],
                "critical_later": -1.2 + 0.2 * own[1],
                "critical_later_cold": -1.6 + 0.2 * own[1],
                "gradient": abs(own[2]) * layers / 36,
                "update": -2 + 0.3 * own[3],
                "growth_later": 0.2 * own[2],
                "growth_later_cold": 0.2 * own[2],
                "trial": -2.2 + 0.4 * own[4],
                "trial_cold": -2.5 + 0.4 * own[4],
            }
            facts = {"width": 64, "stacks": 2, "optimizer": "adamw (0.9, 0.98)", "clipping": 0.0}
            facts |= {"precision": "float32", "tokens": 283, "classes": 2000}
            found[arch, layers] = {**numbers, **facts, "arch": arch, "layers": layers}
    return found


def write(folder: Path, truth: ModuleType, edge: Edge, seed: int = 0, shift: float = 0.0) -> None:
    """``runs.csv``, ``course.csv``, ``predictors.csv`` as the scripts leave them: bisected, three seeds."""
    measured, runs, course = predictors(seed), [], []
    for (arch, layers), numbers in measured.items():
        for warmup in (40, 0):
            at = edge(numbers, layers, warmup)
            for run_seed in truth.SEEDS:
                cell, known = truth.Cell(arch, layers, warmup, run_seed, shift), {}
                while (k := truth.wanted(known, 4, truth.FAR)) is not None:
                    rate = cell.rate(k)
                    known[k] = "trains" if math.log10(rate) < at else "fails"
                    key = {"arch": arch, "layers": layers, "warmup": warmup, "seed": run_seed, "shift": shift, "k": k}
                    runs.append({**key, "lr": rate, "outcome": known[k], "unigram": 5.5})
                    losses = [8.0, 5.5 + 0.2 * (known[k] == "fails") - 0.1, 5.5]
                    course.append({**key, "steps": "0 30 150", "losses": " ".join(f"{x:.4f}" for x in losses)})
    pd.DataFrame(runs).to_csv(folder / "runs.csv", index=False)
    pd.DataFrame(course).to_csv(folder / "course.csv", index=False)
    pd.DataFrame(measured.values()).to_csv(folder / "predictors.csv", index=False)


def with_final_test(folder: Path, truth: ModuleType) -> dict[str, pd.DataFrame]:
    """Tables of which a half are rates between those of the grid."""
    write(folder, truth, told_by_the_range_test)
    first = {name: pd.read_csv(folder / f"{name}.csv") for name in ("runs", "course")}
    write(folder, truth, told_by_the_range_test, shift=0.5)
    both = {name: pd.concat([table, pd.read_csv(folder / f"{name}.csv")]) for name, table in first.items()}
    for name, table in both.items():
        table.to_csv(folder / f"{name}.csv", index=False)
    return both


def told_by_the_range_test(numbers: dict[str, float], layers: int, warmup: int) -> float:
    """An edge that the predictors know: the range test's, lower without warm-up and at depth."""
    return numbers["range_end"] - 0.3 * (warmup == 0) - 0.2 * math.log10(layers / 12)


def told_by_nothing(numbers: dict[str, float], layers: int, warmup: int) -> float:
    """An edge that has nothing to do with them."""
    return -2.5 + 0.5 * math.sin(1e4 * numbers["range_end"])
