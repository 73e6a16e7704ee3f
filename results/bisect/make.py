#!/usr/bin/env python
"""Makes the validation of ``bisect``: effects of the mutants, what bisect and its rivals say of them, and clean pairs.

    python results/bisect/make.py [--out results/bisect] [--seeds 1] [--only TEXT] [--stage NAME]

A line of a ledger after each cell; a stopped call goes on where it was. ``effects`` comes first: it fixes which mutants
count. ``score.py`` makes the tables.
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from models import MAKERS, batch, loss_in_bf16, loss_of, made
from mutants import MUTANTS, Mutant
from torch import nn

import stabilitylab as sl
from stabilitylab.bisect.forcing import values_of
from stabilitylab.bisect.judging import LIMIT, blamed, module_of
from stabilitylab.bisect.matching import matched
from stabilitylab.bisect.model_pass import fingerprint_of
from stabilitylab.bisect.rounding import redrawn

HERE = Path(__file__).parent
SETTINGS: dict[str, Callable[[nn.Module, Any], Any]] = {"fp32": loss_of, "bf16": loss_in_bf16}
ULP = {"fp32": 2.0**-23, "bf16": 2.0**-7}
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}  # of the rival by L1: relative, as one would set them by hand
CLEAN = 50
COLUMNS = {
    "effects": ("mutant", "model", "seed", "effect"),
    "mutants": (
        "mutant",
        "model",
        "seed",
        "setting",
        "verdict",
        "confirmed",
        "where",
        "factor",
        "suspected",
        "norms",
        "l1",
    ),
    "clean": ("pair", "model", "seed", "kind", "verdict", "where", "largest", "largest_sums"),
}


class Ledger:
    """A CSV file, a line a cell; a cell that stands in it is not made again."""

    def __init__(self, folder: Path, name: str, keys: int) -> None:
        self.path, self.columns, self._keys = folder / f"{name}.csv", COLUMNS[name], keys
        folder.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            self.path.write_text(",".join(self.columns) + "\n", encoding="utf-8")
        with self.path.open(encoding="utf-8") as file:
            self.rows = list(csv.DictReader(file))

    def has(self, *key: object) -> bool:
        return any([row[c] for c in self.columns[: self._keys]] == [*map(str, key)] for row in self.rows)

    def add(self, *values: object) -> None:
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(values)
        print(*values, flush=True)


def cells(seeds: int, only: str) -> Iterator[tuple[Mutant, str, int]]:
    """Each mutant in each of its models."""
    for mutant in MUTANTS:
        for model in mutant.models:
            for seed in range(seeds):
                if only in f"{mutant.name} {model}":
                    yield mutant, model, seed


def pair(mutant: Mutant, model: str, seed: int) -> tuple[nn.Module, nn.Module]:
    clean = made(model, seed)
    other = copy.deepcopy(clean)
    mutant.edit(other)
    return clean, other


def effect(mutant: Mutant, model: str, seed: int) -> float:
    """The largest error of a fed place, parameter or gradient that the fault's module is blamed for, in float64."""
    clean, other = pair(mutant, model, seed)
    found = sl.bisect(clean.double(), other.double(), batch(seed), loss_of, controls=1)
    places = found.fed if mutant.phase == "forward" else [p for p in found.places if p.phase == mutant.phase]
    named = [p.error for p in places if (module_of(p.name) if p.phase == "weights" else blamed(p)) == mutant.where]
    return max(named, default=0.0)


def named(found: Any) -> str:
    """The module that an answer names; of a parameter its owner."""
    first = found.first
    return "" if first is None else module_of(first.name) if first.phase == "weights" else blamed(first)


def by_norms(clean: nn.Module, other: nn.Module, ids: Any, setting: str) -> str:
    """A rival: the first place whose norm differs by more than the limit times the control's."""
    a, b = fingerprint_of(clean, ids, loss_of, "a"), fingerprint_of(other, ids, SETTINGS[setting], "b")
    controls = []
    for number in range(3):
        with redrawn(clean, ULP[setting], number + 1):
            controls.append(fingerprint_of(clean, ids, loss_of, "c"))
    for p in matched(a, b).pairs:
        if p.phase not in ("forward", "backward"):
            continue
        own = [abs(c.passes[p.phase][p.a.name].norm - p.a.norm) for c in controls]
        if abs(p.a.norm - p.b.norm) > LIMIT * math.sqrt(sum(x * x for x in own) / len(own)):
            return module_of(p.a.name)
    return ""


def by_l1(clean: nn.Module, other: nn.Module, ids: Any, setting: str) -> str:
    """A rival, as torchtitan's compare_numerics: the first output whose mean |a - b| over mean |a| is too large."""
    order = list(fingerprint_of(clean, ids, loss_of, "a").passes["forward"])
    outputs = [name for name in order if name.endswith(":out")]
    a = values_of(clean, ids, loss_of, outputs).held
    b = values_of(other, ids, SETTINGS[setting], outputs).held
    for name in outputs:
        apart = (a[name].double() - b[name].double()).abs().mean() / a[name].double().abs().mean()
        if not float(apart) <= TOLERANCE[setting]:
            return module_of(name)
    return ""


def judge(mutant: Mutant, model: str, seed: int, setting: str) -> list[object]:
    clean, other = pair(mutant, model, seed)
    ids = batch(seed)
    found = sl.bisect(clean, other, ids, (loss_of, SETTINGS[setting]))
    factor = 0.0 if found.first is None else found.first.factor
    suspected = "" if found.suspected is None else blamed(found.suspected)
    rivals = by_norms(clean, other, ids, setting), by_l1(clean, other, ids, setting)
    return [found.verdict, found.confirmed, named(found), f"{factor:.4g}", suspected, *rivals]


def clean_pairs() -> list[tuple[str, int, str]]:
    """Model, seed and kind of 50 pairs that compute the same."""
    kinds = ("autocast", "bfloat16", "float64")
    every = [(model, seed, kind) for seed in range(CLEAN) for model in MAKERS for kind in kinds]
    return every[:CLEAN]


def clean_pair(model: str, seed: int, kind: str) -> list[object]:
    one = made(model, 100 + seed)
    other = copy.deepcopy(one).to({"bfloat16": torch.bfloat16, "float64": torch.float64}.get(kind, torch.float32))
    loss = loss_in_bf16 if kind == "autocast" else loss_of
    found = sl.bisect(one, other, batch(100 + seed), (loss_of, loss))
    largest = [max((p.factor for p in places if p.judged), default=0.0) for places in (found.fed, found.places)]
    return [found.verdict, named(found), *(f"{x:.4g}" for x in largest)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="cells whose 'mutant model' has this text")
    parser.add_argument("--stage", choices=tuple(COLUMNS), action="append")
    given = parser.parse_args(arguments)
    stages = given.stage or list(COLUMNS)
    if "effects" in stages:
        ledger = Ledger(given.out, "effects", 3)
        for cell in cells(given.seeds, given.only):
            if not ledger.has(cell[0].name, *cell[1:]):
                ledger.add(cell[0].name, *cell[1:], f"{effect(*cell):.6g}")
    if "mutants" in stages:
        ledger = Ledger(given.out, "mutants", 4)
        for cell in cells(given.seeds, given.only):
            for setting in SETTINGS:
                if not ledger.has(cell[0].name, *cell[1:], setting):
                    ledger.add(cell[0].name, *cell[1:], setting, *judge(*cell, setting))
    if "clean" in stages:
        ledger = Ledger(given.out, "clean", 1)
        for number, (model, seed, kind) in enumerate(clean_pairs()):
            if given.only in f"{model} {kind} {seed}" and not ledger.has(number):
                ledger.add(number, model, seed, kind, *clean_pair(model, seed, kind))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
