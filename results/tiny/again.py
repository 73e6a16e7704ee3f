#!/usr/bin/env python
"""Makes the runs of the third comparison again, from their committed tables.

    python results/tiny/again.py --out FOLDER --layers 6
    stabilitylab report FOLDER/layers --figure branchnorm:4 --figure branchnorm:8 --figure branchnorm:9
    python results/tiny/again.py --judge     # third/claims.csv: the claims about trained models

A run has no weights. It has its settings, its verdict, its losses wherever the held-out batch was measured, and what
the tables of third/ hold of its probes. In ``layers`` these are similarity and sparsity by layer at the beginning,
where the ramp ends, and after training, and after training beta_ii^2 by layer. In ``activity`` it is the mean sparsity
of each stack at every row (C44). Tables that lack a run leave its probe out.
"""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stabilitylab.experiments import Experiment, Recipe, protocol
from stabilitylab.probes import PROBES
from stabilitylab.reports import CLAIMS, Runs, judge
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import RunWriter
from stabilitylab.sweep import Ledger
from stabilitylab.verdict import Trend, Verdict

TABLES = Path(__file__).parent / "third"
DATA = {"source": "text:train.de.gz,train.en.gz", "valid": "test_2016_flickr.de.gz,test_2016_flickr.en.gz"}
STACKS = ("encoder", "decoder")
COMPARED = (protocol.SMALL, protocol.DEEP, protocol.BRANCH)  # the arms of these claims
CLAIMED = {"layers": ("C37", "C41", "C42", "C43", "C47"), "activity": ("C44",)}  # by what their runs hold
COLUMNS = ("layers", "claim", "verdict", "role", "effect", "mean", "low", "high", "n", "p", "why")
METRICS, EVIDENCE = "metrics.", "evidence."


@dataclass(frozen=True)
class Rows:
    """The numbers of a probe at some steps, by place."""

    table: Table
    at: Mapping[int, np.ndarray]  # step -> (rows, columns)

    def cells(self, step: int) -> Cells:
        values = self.at[step]
        return Cells(values, np.zeros(len(values), bool))


@dataclass(frozen=True)
class Kept:
    """The tables of a folder."""

    folder: Path = TABLES

    @cached_property
    def ledger(self) -> pd.DataFrame:
        return Ledger(self.folder / "ledger.csv").frame()

    @cached_property
    def tables(self) -> Mapping[str, pd.DataFrame]:
        return {name: pd.read_csv(self.folder / f"{name}.csv") for name in ("reading", "layers", "activity", "shares")}

    def line(self, one: Experiment) -> pd.Series | None:
        """Return the line of a run in the ledger; None if the run has not been made."""
        model, train = one.config.model, one.config.train
        data = self.ledger
        own = (data["arch"] == model.arch) & (data["layers"] == model.depth) & (data["seed"] == train.seed)
        own &= (data["lr"] == train.lr) & (data["steps"] == train.steps) & (data["T"] == model.T)
        return data[own].iloc[0] if own.any() else None

    def of(self, name: str, line: pd.Series) -> pd.DataFrame:
        """Return the rows of a table about a run."""
        data = self.tables[name]
        own = (data["arm"] == line["label"]) & (data["layers"] == line["layers"] // 2) & (data["seed"] == line["seed"])
        return data[own & (data["lr"] == line["lr"])]


def by_layer(name: str, column: str, data: pd.DataFrame, kept: str) -> Rows | None:
    """The column ``kept`` of a table, which is ``column`` of the probe ``name``."""
    return of_places(name, (column,), data, lambda own: own[[kept]].to_numpy(float))


def of_places(name: str, columns: Sequence[str], data: pd.DataFrame, values: Any) -> Rows | None:
    """The numbers of a table with columns step, stack_name and layer; None if it is empty."""
    if data.empty:
        return None
    by_step = {int(step): own for step, own in data.groupby("step")}
    first = next(iter(by_step.values()))
    places = list(zip(first["stack_name"], first["layer"].astype(int), strict=True))
    rows = [Row(f"{stack}.layers.{layer - 1}" if layer else stack, stack, layer) for stack, layer in places]
    return Rows(PROBES[name].table(rows, tuple(columns)), {step: values(own) for step, own in by_step.items()})


def layer_probes(kept: Kept, line: pd.Series) -> Iterator[Rows | None]:
    """Similarity, sparsity and beta_ii^2 by layer."""
    layers = kept.of("layers", line)
    yield by_layer("cosine_similarity", "raw", layers, "cosine")
    yield by_layer("activation_sparsity", "nonzero_fraction", layers, "nonzero_fraction")
    shares = kept.of("shares", line).assign(step=int(line["steps"]), total=1.0)
    yield of_places("branch_variance", ("branch", "total"), shares, lambda own: own[["share", "total"]].to_numpy(float))


def stack_probes(kept: Kept, line: pd.Series) -> Iterator[Rows | None]:
    """The mean sparsity of each stack: a row a stack."""
    wide = kept.of("activity", line).reset_index()
    data = wide.melt("step", list(STACKS), "stack_name", "nonzero_fraction").assign(layer=0)
    yield by_layer("activation_sparsity", "nonzero_fraction", data, "nonzero_fraction")


def verdict(line: pd.Series) -> Verdict:
    """The verdict that the ledger has."""
    own = {name.removeprefix(EVIDENCE): value for name, value in line.items() if str(name).startswith(EVIDENCE)}
    trend = Trend(own["trend.fall"], own["trend.low"], own["trend.high"], int(own["trend.evaluations"]))
    return Verdict(
        state=line["verdict"],
        step=int(own["step"]),
        reason="from the ledger of results/tiny/third",
        nll_gap=float(line["nll_gap"]),
        accuracy_gap=float(line["accuracy_gap"]),
        trend=trend,
        sentences=int(own["sentences"]),
        source_worth=own["source_worth"],
        rule=int(own["rule"]),
    )


def write(one: Experiment, kept: Kept, line: pd.Series, probes: Sequence[Rows], out: Path) -> None:
    """Write a run to ``out``."""
    names = ["held_out_nll", "source_worth", "encoder_distance_within", "encoder_distance_between"]
    course = {int(row["step"]): dict(row[names]) for _, row in kept.of("reading", line).iterrows()}
    last = {str(name).removeprefix(METRICS): value for name, value in line.items() if str(name).startswith(METRICS)}
    steps = sorted({*course, *(step for each in probes for step in each.at)})
    ended = verdict(line)
    manifest = {
        "label": line["label"],
        "config": one.config.model_dump(mode="json"),
        "kind": "train",
        "validation_unigram": {
            "cross_entropy": last["validation_nll"] - ended.nll_gap,
            "accuracy": last["validation_accuracy"] - ended.accuracy_gap,
        },
    }
    with RunWriter.create(out / one.name, manifest) as run:
        run.open([each.table for each in probes])
        for step in steps:
            numbers = course.get(step, {}) | (last if step == steps[-1] else {})
            run.append(step, numbers, {each.table.name: each.cells(step) for each in probes if step in each.at})
        run.set_status(line["state"], int(line["step"]), ended.reason, verdict=ended.recorded())


def again(out: Path, kept: Kept, depths: Sequence[int], arms: Sequence[str] = protocol.SEARCHED_ARMS) -> int:
    """Write all runs of these arms that the ledger has; returns their number."""
    count = 0
    for one, line in made(kept, depths, arms):
        count += 1
        for folder, probes in (("layers", layer_probes(kept, line)), ("activity", stack_probes(kept, line))):
            write(one, kept, line, [each for each in probes if each is not None], out / folder)
    return count


def made(kept: Kept, depths: Sequence[int], arms: Sequence[str]) -> Iterator[tuple[Experiment, pd.Series]]:
    """The runs of the comparison that the ledger has, each with its line."""
    for layers in depths:
        for one in protocol.judged(Recipe("tiny", {"data": DATA}), layers, arms):
            if (line := kept.line(one)) is not None:
                yield one, line


def judged(kept: Kept) -> Iterator[tuple[Any, ...]]:
    """The effects of the claims about trained models, as rows of ``claims.csv``: at each depth of which all runs of
    ``COMPARED`` are in, and at both depths together."""
    every = len(COMPARED) * len(protocol.JUDGED_SEEDS)
    whole = [layers for layers in protocol.LAYERS if len([*made(kept, [layers], COMPARED)]) == every]
    for depths in [[layers] for layers in whole] + ([whole] if len(whole) > 1 else []):
        with tempfile.TemporaryDirectory() as folder:
            again(Path(folder), kept, depths, COMPARED)
            for probes, ids in CLAIMED.items():
                runs = Runs.load(Path(folder) / probes)
                for id in ids:
                    yield from effects(" and ".join(map(str, depths)), judge(CLAIMS[id], runs))


def effects(layers: str, found: Any) -> Iterator[tuple[Any, ...]]:
    """The rows of a judgement at ``layers`` a side. A claim that cannot be tested has a row that says why."""
    first = (layers, found.claim.id, found.verdict)
    if found.why:
        yield (*first, "primary", *[""] * 6, found.why)
    for effect in found.effects:
        numbers = (f"{effect[name]:.6g}" for name in ("mean", "low", "high"))
        p = "" if math.isnan(effect["p"]) else f"{effect['p']:.6g}"
        yield (*first, effect["role"], effect["effect"], *numbers, effect["n"], p, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the runs")
    parser.add_argument("--layers", type=int, choices=protocol.LAYERS, help="a side; both unless given")
    parser.add_argument("--judge", action="store_true", help="write third/claims.csv")
    given, kept = parser.parse_args(), Kept()
    if given.out is None and not given.judge:
        parser.error("give --out FOLDER or --judge")
    if given.out is not None:
        count = again(given.out, kept, (given.layers,) if given.layers else protocol.LAYERS)
        print(f"{count} runs in {given.out / 'layers'} and {given.out / 'activity'}")
    if given.judge:
        with (kept.folder / "claims.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(judged(kept))


if __name__ == "__main__":
    main()
