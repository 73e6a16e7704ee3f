#!/usr/bin/env python
"""Makes the validation of ``bisect``: effects of the mutants, what bisect and its rivals say of them, and clean pairs.

    python results/bisect/make.py [--out results/bisect] [--seeds 1] [--only TEXT] [--stage NAME]

A line of a ledger after each cell; a stopped call goes on where it was. ``effects`` comes first: it fixes which mutants
count. ``score.py`` makes the tables.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from models import MAKERS, batch, loss_in_bf16, loss_of, made
from mutants import MUTANTS, Mutant
from shared import Lines
from torch import nn

import stabilitylab as sl
from stabilitylab.bisect import LIMIT, PlaceGap, fingerprint_of, redrawn, values_of

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


def note(lines: Lines, *cells: object) -> None:
    """Add a line, and print it."""
    lines.add(cells)
    print(*cells, flush=True)


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
    return max((place.error for place in places if blamed(place) == mutant.where), default=0.0)


def blamed(place: PlaceGap) -> str:
    """The module that a place blames; of a parameter its owner."""
    return place.module if place.phase == "weights" else place.blamed


def named(found: Any) -> str:
    """The module that an answer names."""
    return "" if found.first is None else blamed(found.first)


def by_norms(clean: nn.Module, other: nn.Module, ids: Any, setting: str) -> str:
    """A rival: the first place whose norm differs by more than the limit times the control's."""
    a, b = fingerprint_of(clean, ids, loss_of, "a"), fingerprint_of(other, ids, SETTINGS[setting], "b")
    controls = []
    for number in range(3):
        with redrawn(clean, ULP[setting], number + 1):
            controls.append(fingerprint_of(clean, ids, loss_of, "c"))
    for phase in ("forward", "backward"):
        for name, place in a.passes[phase].items():
            if (other := b.passes[phase].get(name)) is None:
                continue
            own = [abs(c.passes[phase][name].norm - place.norm) for c in controls]
            if abs(place.norm - other.norm) > LIMIT * math.sqrt(sum(x * x for x in own) / len(own)):
                return module_of(name)
    return ""


def module_of(name: str) -> str:
    """The module of a place, NAME:in or NAME:out."""
    return name.rpartition(":")[0]


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
    suspected = "" if found.suspected is None else found.suspected.blamed
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
    ledgers = {name: Lines(given.out / f"{name}.csv", columns) for name, columns in COLUMNS.items()}
    if "effects" in stages:
        for cell in cells(given.seeds, given.only):
            if not ledgers["effects"].has(cell[0].name, *cell[1:]):
                note(ledgers["effects"], cell[0].name, *cell[1:], f"{effect(*cell):.6g}")
    if "mutants" in stages:
        for cell in cells(given.seeds, given.only):
            for setting in SETTINGS:
                if not ledgers["mutants"].has(cell[0].name, *cell[1:], setting):
                    note(ledgers["mutants"], cell[0].name, *cell[1:], setting, *judge(*cell, setting))
    if "clean" in stages:
        for number, (model, seed, kind) in enumerate(clean_pairs()):
            if given.only in f"{model} {kind} {seed}" and not ledgers["clean"].has(number):
                note(ledgers["clean"], number, model, seed, kind, *clean_pair(model, seed, kind))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
