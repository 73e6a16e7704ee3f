#!/usr/bin/env python
"""Holds forecasts against the edges, one architecture left out at a time, beside rivals that know less.

    python results/forecast/score.py [--write] [--new | --final] [--folder results/forecast]

Reads ``runs.csv``, ``course.csv``, ``predictors.csv`` and ``trials.csv``; prints ``scores.md``, or writes it and
``edges.csv``. ``--new``: seeds 4 and 5 alone, which nobody had seen when the rule of the trials was made
(``new-seeds.md``). ``--final``: the final test, whose runs no fit has seen (``final.md``).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean as mean
from typing import NamedTuple

import numpy as np
import pandas as pd
import truth
from forecasters import (
    COMMAND,
    FINALISTS,
    FORECASTERS,
    FREQUENCY,
    LOSS,
    NINE,
    OURS,
    by_loss,
    covered,
    forecast,
    left_out,
)
from loading import CASE, Tables, load
from measures import DRAWS, QUANTILE, auc, brier, contested, error_by_arch, hit_rate, interval, resampled, spread

HERE = Path(__file__).parent
NEW = truth.SEEDS[1:]  # of which none had been seen when the rule of the trials was made
FINAL = truth.SEEDS[:1]  # of the final test, and of the fits that it was looked at with
FACTOR, SHARE = 2.0, 0.8
GOAL_AUC, GOAL_GAIN = 0.85, 0.1
NOTE = (
    "The last two columns are of architectures with an edge inside the grid: the median over these, each the mean of "
    "its cases."
)
NOTES = {  # where it stands in the table
    FREQUENCY: "`frequency` and `rate` know nothing of an architecture; that their AUC lies at 0 comes of leaving out: "
    "the others fail the less often where the one left out fails.",
    LOSS: "`loss after 30` exists for runs that were made.",
}


class Judged(NamedTuple):
    """``error``: mean over architectures of |log10(predicted / true)|; ``median``: its factor, median; ``within``:
    share within a factor of 2; ``auc``: within cells."""

    error: float
    median: float
    within: float
    auc: float


class Goal(NamedTuple):
    """``best``: the rival of the highest AUC; ``gain``: AUC above it, with its interval."""

    best: str
    gain: tuple[float, float, float]
    reached: bool


@dataclass(frozen=True)
class Scores:
    """The table, and what the goals are about. ``each``: of every forecaster, edges being those of ``archs``
    architectures with one inside the grid; ``goals``: of those of ours."""

    each: Mapping[str, Judged]
    archs: int
    goals: Mapping[str, Goal]
    table: str
    final: bool = False

    @property
    def text(self) -> str:
        first = ["", "**Known architectures at another depth and other rates**"] if self.final else []
        return "\n".join([self.table, *first, *(f"\n{self.told(name)}" for name in self.goals), ""])

    def told(self, name: str) -> str:
        """How one of ours stands to the goals."""
        own, (best, gain, reached) = self.each[name], self.goals[name]
        goal, area, above = f" (goal {SHARE:.0%})", f" (goal {GOAL_AUC})", f" (goal +{GOAL_GAIN}, interval above 0)"
        return (
            f"**By {name} the goals are {'reached' if reached else 'missed'}**: the edge within a factor of 2 for "
            f"{own.within:.0%} of {self.archs} architectures{goal}, AUC {own.auc:.2f}{area}, {_with(gain, '+.2f')} "
            f"above the best rival, {best}{above}."
        )


def scores(
    grid: pd.DataFrame, edges: pd.DataFrame, loss: pd.DataFrame | None = None, lacking: tuple[str, ...] = ()
) -> Scores:
    """Of forecasts as :func:`forecast` gives them; ``loss``: of the rival which only runs have."""
    names = [name for name in FORECASTERS if name in grid]
    areas, drawn = auc(grid, names, DRAWS)
    if loss is not None:
        own = auc(loss, [LOSS], DRAWS)
        areas, drawn = {**areas, **own[0]}, {**drawn, **own[1]}
    errors = {name: error_by_arch(edges, name).to_numpy() for name in names}
    lines = [
        f"{grid['arch'].nunique()} architectures, {len(edges)} cases of architecture x depth x warm-up; "
        f"{edges['true'].notna().sum()} have an edge inside the grid.",
        "",
        "| | AUC within cells | hits at 5 % false alarms | Brier | edge off by a factor of (median) | within 2 |",
        "|---|---|---|---|---|---|",
    ]
    for name in areas:
        some = contested(grid if loss is None or name != LOSS else loss)
        told = [_with((areas[name], *interval(drawn[name]))), f"{hit_rate(some, name):.2f}", f"{brier(some, name):.3f}"]
        error = errors.get(name, np.zeros(0))
        lines.append(f"| {' | '.join([name, *told, _with(median_factor(error)), _with(share_within(error))])} |")
    each = {
        name: Judged(mean(own), median_factor(own)[0], share_within(own)[0], areas[name])
        for name, own in errors.items()
        if len(own)
    }
    rivals = {name: area for name, area in areas.items() if name not in OURS and math.isfinite(area)}
    best = max(rivals, key=lambda name: rivals[name])
    goals = {}
    for name in OURS:
        gain = areas[name] - rivals[best], *interval(drawn[name] - drawn[best])
        own, above = each[name], gain[0] >= GOAL_GAIN and gain[1] > 0
        goals[name] = Goal(best, gain, own.within >= SHARE and own.auc >= GOAL_AUC and above)
    notes = [NOTE, *(text for name, text in NOTES.items() if name in areas)]
    lines += ["", " ".join(notes), "", *(told_by_cover(edges, name) for name in OURS)]
    if lacking:
        lines += ["", f"In no row, since not every predictor has a number: {', '.join(lacking)}."]
    return Scores(each, len(errors[NINE]), goals, "\n".join(lines))


def told_by_cover(edges: pd.DataFrame, name: str) -> str:
    """What the command would have answered at all, and how well."""
    inside = edges[edges[covered(name)]]
    if inside.empty:
        return f"By {name} the command would have said `cannot tell`: the others cover no case."
    off = (inside[name] - inside["true"]).abs().dropna()
    middle, most, all_most = (10**own for own in (off.median(), spread(inside, name), spread(edges, name)))
    return (
        f"By {name} the command would have answered in {len(inside)} of {len(edges)} cases, those that lie within what "
        f"the others cover; there the edge is off by a factor of {middle:.2f} (median of {len(off)} cases), for 80 % "
        f"of them by at most {most:.2f}; of all cases by {all_most:.2f}."
    )


def chosen(found: Scores) -> str:
    """The forecaster of the command: its edges of architectures left out are off by less; the final test was not looked
    at for that."""
    return min(COMMAND, key=lambda name: found.each[name].error)


def median_factor(error: np.ndarray) -> tuple[float, float, float]:
    """Of errors in decades: 10^median, with its interval."""
    low, high = resampled(error, lambda own: float(np.median(own)))
    return (10 ** float(np.median(error)) if len(error) else math.nan), 10**low, 10**high


def share_within(error: np.ndarray) -> tuple[float, float, float]:
    near = error <= math.log10(FACTOR)
    return (float(near.mean()) if len(error) else math.nan), *resampled(near, lambda own: float(own.mean()))


def _with(found: tuple[float, float, float], form: str = ".2f") -> str:
    value, low, high = found
    return f"{value:{form}} [{low:{form}}, {high:{form}}]" if math.isfinite(value) else "-"


def judged(tables: Tables) -> tuple[Scores, pd.DataFrame]:
    """The judgement, and the edges by case, on the runs that fits are made from."""
    own = tables.only(lambda rows: rows["shift"] == 0)
    grid, edges = left_out(own)
    found = scores(grid, edges, by_loss(own), lacking(own))
    return replace(found, table="\n\n".join([found.table, *told_by_seeds(own.edges)])), edges


def told_by_seeds(edges: pd.DataFrame) -> list[str]:
    """How near to each other the edges of two seeds lie: no forecast can be expected to be nearer."""
    apart = [
        abs(one - other)
        for _, own in edges.groupby(CASE)["edge"]
        for one, other in combinations(own, 2)
        if math.isfinite(one - other)
    ]
    if not apart:
        return []
    return [
        f"Two seeds of one case have edges that differ by a factor of {10 ** float(np.median(apart)):.2f} (median of "
        f"{len(apart)} pairs), at most {10 ** max(apart):.2f}."
    ]


def lacking(tables: Tables) -> tuple[str, ...]:
    depths = {*tables.grid["layers"]}
    return tuple(f"{arch} of {layers} layers" for arch, layers in tables.lacking if layers in depths)


def final(tables: Tables) -> Scores:
    """The final test: other depths and other rates, by what was fitted to those of the first stage; whole
    architectures."""
    train = tables.only(lambda rows: (rows["shift"] == 0) & rows["layers"].isin(truth.STAGES["first"][1]))
    test = tables.only(lambda rows: rows["shift"] != 0)
    warmups = test.edges.groupby("arch")["warmup"].nunique()
    whole = warmups.index[warmups == len(truth.WARMUPS)]
    test = test.only(lambda rows: rows["arch"].isin(whole))
    grid, edges = forecast(train, test, FINALISTS)
    found, others = scores(grid, edges, lacking=lacking(test)), left_out(train)[1]
    held = "\n".join(told_by_interval(edges, name, spread(others, name)) for name in OURS)
    return replace(found, table=f"{found.table}\n\n{held}", final=True)


def told_by_interval(edges: pd.DataFrame, name: str, decades: float) -> str:
    """How often the interval of the command, which is to hold 80 % of the edges, would have held them."""
    off = (edges[name] - edges["true"]).abs().dropna()
    return (
        f"By {name} the interval of the critical rate, a factor of {10**decades:.2f} either way, would have held "
        f"{(off <= decades).sum()} of {len(off)} edges, where {QUANTILE:.0%} were to be expected."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write what is printed, and edges.csv")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--new", action="store_true", help="seeds 4 and 5 alone")
    one.add_argument("--final", action="store_true", help="the final test")
    one.add_argument("--layers", type=int, help="one depth alone, with fits of its own; nothing is written")
    parser.add_argument("--folder", type=Path, default=HERE)
    given = parser.parse_args()
    tables = load(given.folder, FINAL if given.final else NEW if given.new else truth.SEEDS)
    if given.layers:
        tables = tables.only(lambda rows: rows["layers"] == given.layers)
    found, edges = (final(tables), None) if given.final else judged(tables)
    print(found.text)
    if not given.write or given.layers:
        return
    name = "final.md" if given.final else "new-seeds.md" if given.new else "scores.md"
    (given.folder / name).write_text(f"<!-- written by score.py -->\n{found.text}")
    if edges is not None and not given.new:
        edges.to_csv(given.folder / "edges.csv", index=False, float_format="%.4f")


if __name__ == "__main__":
    main()
