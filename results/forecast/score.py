#!/usr/bin/env python
"""Holds forecasts against the edges, one architecture left out at a time, beside rivals that know less.

    python results/forecast/score.py [--write] [--final] [--folder results/forecast]

Reads ``runs.csv``, ``course.csv`` and ``predictors.csv``; prints ``scores.md``, or writes it and ``edges.csv``.
``--final``: the final test, whose runs no fit has seen (``final.md``).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import truth
from measures import CELL, DRAWS, auc, contested, error_by_arch, hit_rate, interval, resampled

from stabilitylab.forecast.fitting import FEATURES, Line, features, fit

HERE = Path(__file__).parent
CASE = ["arch", "layers", "warmup"]
FACTOR, SHARE = 2.0, 0.8
GOAL_AUC, GOAL_GAIN = 0.85, 0.1
EARLY, BLOWN = 30, 1e3  # updates after which a rival looks at the loss; nats, for what is not finite
OURS, FREQUENCY, RATE, POSTLN, LOSS, RANGE = (
    "forecast",
    "frequency",
    "rate",
    "Post-LN fails",
    "loss after 30",
    "range test",
)
ONE_RANGE = ("range_end",)
Case = tuple[str, int, int]


@dataclass(frozen=True)
class Tables:
    """``runs``: those that are decided; ``edges``: one row a seed; ``grid``: every rate of the grid whose end follows
    from an edge; ``measured``: (arch, layers) -> predictors."""

    runs: pd.DataFrame
    edges: pd.DataFrame
    grid: pd.DataFrame
    measured: Mapping[tuple[str, int], Mapping[str, float]]

    def only(self, keep: Callable[[pd.DataFrame], pd.Series]) -> Tables:
        return Tables(
            *(own[keep(own)].reset_index(drop=True) for own in (self.runs, self.edges, self.grid)), self.measured
        )


def load(folder: Path) -> Tables:
    runs, predictors = pd.read_csv(folder / "runs.csv"), pd.read_csv(folder / "predictors.csv")
    measured = {(row["arch"], int(row["layers"])): row for row in predictors.to_dict("records") if is_whole(row)}
    runs = runs.merge(
        early(pd.read_csv(folder / "course.csv"), runs), on=["arch", "layers", "warmup", "seed", "shift", "k"]
    )
    runs = runs[[pair in measured for pair in zip(runs["arch"], runs["layers"], strict=True)]]
    runs = runs.assign(rate=np.log10(runs["lr"]), fails=(runs["outcome"] == "fails").astype(float))
    edges, grid = [], []
    for key, own in runs.groupby([*CASE, "seed", "shift"]):
        cell = truth.Cell(str(key[0]), *map(int, key[1:4]), float(key[4]))  # type: ignore[index]
        known = dict(zip(own["k"], own["outcome"], strict=True))
        edge = truth.edge(known)
        if not edge.done:
            continue
        place = dict(zip([*CASE, "seed", "shift"], key, strict=True))  # type: ignore[arg-type]
        middle = edge.middle + math.log10(truth.RATIO) * cell.shift
        edges.append({**place, "low": edge.low, "high": edge.high, "edge": middle, "runs": len(own)})
        grid += [
            {**place, "k": k, "rate": math.log10(cell.rate(k)), "fails": float(k >= edge.high)}
            for k in range(truth.LOWEST, truth.HIGHEST + 1)
            if k <= edge.low or k >= edge.high
        ]
    told = runs[runs["outcome"] != "cannot tell"].reset_index(drop=True)
    return Tables(told, pd.DataFrame(edges), pd.DataFrame(grid), measured)


def is_whole(row: Mapping[str, Any]) -> bool:
    """Whether every predictor is a number; what has another is not forecast, as the command does not."""
    each = [value for warmup in truth.WARMUPS for value in features(row, int(row["layers"]), warmup).values()]
    return all(map(math.isfinite, each))


def early(course: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """The gap to the baseline at the evaluation nearest to update ``EARLY``; a large one where it is not finite."""
    keys = [*CASE, "seed", "shift", "k"]
    course = course.drop_duplicates(keys, keep="last")  # a run that was stopped and made again has two lines
    found = course.merge(runs[[*keys, "unigram"]], on=keys)
    gaps = []
    for row in found.to_dict("records"):
        steps = np.array([int(step) for step in str(row["steps"]).split()])
        losses = [float(loss) for loss in str(row["losses"]).split()]
        gaps.append(losses[np.abs(steps - EARLY).argmin()] - row["unigram"])
    return found[keys].assign(early=[gap if math.isfinite(gap) else BLOWN for gap in gaps])


def x_of(tables: Tables, rows: pd.DataFrame) -> pd.DataFrame:
    """The predictors of each row."""
    keys = _keys(rows)
    each = {case: features(tables.measured[case[:2]], *case[1:]) for case in {*keys}}
    return pd.DataFrame([each[case] for case in keys], columns=[*FEATURES], index=rows.index)


def weights(rows: pd.DataFrame) -> np.ndarray:
    """1 for each architecture x depth x warm-up."""
    return 1.0 / rows.groupby(CASE)["fails"].transform("size").to_numpy(dtype=float)


def fitted(tables: Tables, names: tuple[str, ...] = FEATURES) -> Line:
    x = x_of(tables, tables.runs)[[*names]].to_numpy(dtype=float).reshape(len(tables.runs), len(names))
    runs = tables.runs
    return fit(x, runs["rate"].to_numpy(), runs["fails"].to_numpy(), weights(runs), names)


Forecaster = Callable[[Tables, Tables], tuple[np.ndarray, dict[Case, float]]]


def by_line(names: tuple[str, ...]) -> Forecaster:
    def told(train: Tables, test: Tables) -> tuple[np.ndarray, dict[Case, float]]:
        line = fitted(train, names)
        x = x_of(test, test.grid).to_dict("records")
        p = np.array([line.probability(line.edge(own), rate) for own, rate in zip(x, test.grid["rate"], strict=True)])
        cases = test.grid[CASE].drop_duplicates()
        edges = {
            case: line.edge(own) for case, own in zip(_keys(cases), x_of(test, cases).to_dict("records"), strict=True)
        }
        return p, edges

    return told


def by_frequency(train: Tables, test: Tables) -> tuple[np.ndarray, dict[Case, float]]:
    share = train.grid.groupby(CELL)["fails"].mean()
    overall = float(train.grid["fails"].mean())
    p = np.array([share.get(key, overall) for key in test.grid[CELL].itertuples(index=False, name=None)], dtype=float)
    middle = train.edges.groupby(["layers", "warmup"])["edge"].median()
    whole = float(train.edges["edge"].median())
    return p, {case: float(middle.get(case[1:], whole)) for case in _keys(test.grid[CASE].drop_duplicates())}


def by_name(train: Tables, test: Tables) -> tuple[np.ndarray, dict[Case, float]]:
    return (test.grid["arch"] == "postln").to_numpy(dtype=float), {}


FORECASTERS: Mapping[str, Forecaster] = {
    OURS: by_line(FEATURES),
    FREQUENCY: by_frequency,
    RATE: by_line(()),
    POSTLN: by_name,
    RANGE: by_line(ONE_RANGE),
}


def _case(at: Any) -> Case:
    arch, layers, warmup = at
    return str(arch), int(layers), int(warmup)


def _keys(rows: pd.DataFrame) -> list[Case]:
    return [_case(at) for at in zip(rows["arch"], rows["layers"], rows["warmup"], strict=True)]


def left_out(tables: Tables) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(grid with a column of P(fails) a forecaster, edges by case with a column of edges each): every architecture is
    forecast by what was fitted to the others."""
    grids, edges = [], []
    for arch in sorted(set(tables.grid["arch"])):
        train, test = (tables.only(lambda own, a=arch, k=keep: (own["arch"] == a) == k) for keep in (False, True))
        grid, edge = forecast(train, test)
        grids.append(grid)
        edges.append(edge)
    return pd.concat(grids, ignore_index=True), pd.concat(edges, ignore_index=True)


def forecast(train: Tables, test: Tables) -> tuple[pd.DataFrame, pd.DataFrame]:
    truth_of = test.edges.groupby(CASE)["edge"].mean()  # over seeds; NaN where one is open
    told = {name: each(train, test) for name, each in FORECASTERS.items()}
    grid = test.grid.assign(**{name: p for name, (p, _) in told.items()})
    rows = []
    for at, value in truth_of.items():
        case = _case(at)
        own = {name: edges.get(case, math.nan) for name, (_, edges) in told.items()}
        rows.append({**dict(zip(CASE, case, strict=True)), "true": value, **own})
    return grid, pd.DataFrame(rows, columns=[*CASE, "true", *FORECASTERS])


def by_loss(tables: Tables) -> tuple[pd.DataFrame, float]:
    """The runs themselves with P(fails) by the loss after 30 updates, each architecture by what was fitted to the
    others."""
    found = []
    for arch in sorted(set(tables.runs["arch"])):
        train, test = (tables.runs[(tables.runs["arch"] == arch) == keep] for keep in (False, True))
        none = np.zeros((len(train), 0))
        line = fit(none, train["early"].to_numpy(), train["fails"].to_numpy(), weights(train), ())
        found.append(test.assign(**{LOSS: [line.probability(line.middle, gap) for gap in test["early"]]}))
    whole = pd.concat(found, ignore_index=True)
    return whole, float(auc(whole, [LOSS])[0][LOSS])


@dataclass(frozen=True)
class Scores:
    """What the goals are about, and the table. ``within``: share of architectures with the edge within a factor of 2;
    ``gain``: AUC above that of the ``best`` rival, with its interval; ``median``: factor by which the edge is off."""

    within: float
    auc: float
    best: str
    gain: tuple[float, float, float]
    median: float
    table: str

    @property
    def reached(self) -> bool:
        return self.within >= SHARE and self.auc >= GOAL_AUC and self.gain[0] >= GOAL_GAIN and self.gain[1] > 0

    @property
    def text(self) -> str:
        return (
            f"{self.table}\n\n**The goals are {'reached' if self.reached else 'missed'}**: the edge within a factor of "
            f"2 for {self.within:.0%} of the architectures (goal {SHARE:.0%}), AUC {self.auc:.2f} (goal {GOAL_AUC}), "
            f"{_with(self.gain, '+.2f')} above the best rival, {self.best} (goal +{GOAL_GAIN}, interval above 0).\n"
        )


def scores(grid: pd.DataFrame, edges: pd.DataFrame, loss_auc: float = math.nan) -> Scores:
    """Of forecasts as :func:`forecast` gives them; ``loss_auc``: that of the rival which only runs have."""
    areas, drawn = auc(grid, list(FORECASTERS), DRAWS)
    errors = {name: error_by_arch(edges, name).to_numpy() for name in FORECASTERS}
    rivals = {name: area for name, area in {**areas, LOSS: loss_auc}.items() if name != OURS and math.isfinite(area)}
    best = max(rivals, key=lambda name: rivals[name])
    gain = areas[OURS] - rivals[best], *interval(drawn[OURS] - drawn.get(best, np.full(DRAWS, rivals[best])))
    lines = [
        f"{grid['arch'].nunique()} architectures, {len(edges)} cases of architecture x depth x warm-up; "
        f"{edges['true'].notna().sum()} have an edge inside the grid.",
        "",
        "| | AUC within cells | hits at 5 % false alarms | Brier | edge off by a factor of (median) | within 2 |",
        "|---|---|---|---|---|---|",
    ]
    some = contested(grid)
    for name, error in errors.items():
        p, fails = some[name].to_numpy(), some["fails"].to_numpy()
        told = [_with((areas[name], *interval(drawn[name]))), f"{hit_rate(fails, p):.2f}"]
        told += [f"{np.mean((p - fails) ** 2):.3f}", _with(median_factor(error)), _with(share_within(error))]
        lines.append(f"| {name} | {' | '.join(told)} |")
    if math.isfinite(loss_auc):
        lines.append(f"| {LOSS} (of the runs that were made) | {loss_auc:.2f} | - | - | - | - |")
    within, median = (of(errors[OURS])[0] for of in (share_within, median_factor))
    return Scores(within, areas[OURS], best, gain, median, "\n".join(lines))


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
    return scores(grid, edges, by_loss(own)[1]), edges


def final(tables: Tables) -> Scores:
    """The final test: other depths and other rates, by what was fitted to the rest."""
    train, test = (tables.only(lambda rows, k=keep: (rows["shift"] == 0) == k) for keep in (True, False))
    return scores(*forecast(train, test))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write scores.md and edges.csv; with --final, final.md")
    parser.add_argument("--final", action="store_true", help="the final test")
    parser.add_argument("--folder", type=Path, default=HERE)
    given = parser.parse_args()
    tables = load(given.folder)
    found, edges = (final(tables), None) if given.final else judged(tables)
    print(found.text)
    if given.write:
        name = "final.md" if given.final else "scores.md"
        (given.folder / name).write_text(f"<!-- written by score.py -->\n{found.text}")
        if edges is not None:
            edges.to_csv(given.folder / "edges.csv", index=False, float_format="%.4f")


if __name__ == "__main__":
    main()
