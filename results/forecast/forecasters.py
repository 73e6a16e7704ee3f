"""What is held against the edges: our forecasts, and rivals that know less."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from loading import CASE, Case, Tables, case_of, cases, ranges, true_edges, weights, x_of
from measures import CELL, share

from stabilitylab.forecast.fitting import FEATURES, TRIAL, Cover, Line, fit

NINE, TRIALS = "nine predictors", "trials"
FREQUENCY, RATE, POSTLN, LOSS, RANGE = "frequency", "rate", "Post-LN fails", "loss after 30", "range test"
ONE_RANGE = ("range_end",)
OURS = (NINE, TRIALS)  # what the goals are about; the others are rivals
COMMAND = {NINE: FEATURES, RANGE: ONE_RANGE, TRIALS: TRIAL}  # of these the command takes the best one


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
        each = test.grid[CASE].drop_duplicates()
        edges = {
            case: line.edge(own) for case, own in zip(cases(each), x_of(test, each).to_dict("records"), strict=True)
        }
        return p, edges

    return told


def by_frequency(train: Tables, test: Tables) -> tuple[np.ndarray, dict[Case, float]]:
    """The share of the others that failed; the median of their edges that lie inside the grid."""
    grid = train.grid.assign(failed=train.grid["fails"] * share(train.grid))
    sums = grid.groupby(CELL)[["failed", "share"]].sum()
    part, overall = sums["failed"] / sums["share"], grid["failed"].sum() / grid["share"].sum()
    p = np.array([part.get(key, overall) for key in test.grid[CELL].itertuples(index=False, name=None)], dtype=float)
    edges = true_edges(train.edges)
    middle, whole = edges.groupby(["layers", "warmup"]).median(), float(edges.median())
    return p, {case: float(middle.get(case[1:], whole)) for case in cases(test.grid[CASE].drop_duplicates())}


def by_name(train: Tables, test: Tables) -> tuple[np.ndarray, dict[Case, float]]:
    return (test.grid["arch"] == "postln").to_numpy(dtype=float), {}


FORECASTERS: Mapping[str, Forecaster] = {
    **{name: by_line(COMMAND[name]) for name in OURS},
    FREQUENCY: by_frequency,
    RATE: by_line(()),
    POSTLN: by_name,
    RANGE: by_line(ONE_RANGE),
}
FINALISTS = {name: one for name, one in FORECASTERS.items() if name != FREQUENCY}  # no rate of the test was seen


def left_out(tables: Tables) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(grid with a column of P(fails) a forecaster, edges by case with a column of edges each): every architecture is
    forecast by what was fitted to the others."""
    grids, edges = [], []
    for arch in sorted(set(tables.grid["arch"])):
        train, test = (tables.only(lambda own, a=arch, k=keep: (own["arch"] == a) == k) for keep in (False, True))
        grid, edge = forecast(train, test, FORECASTERS)
        grids.append(grid)
        edges.append(edge)
    return pd.concat(grids, ignore_index=True), pd.concat(edges, ignore_index=True)


def forecast(train: Tables, test: Tables, by: Mapping[str, Forecaster]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """``covered``: whether every predictor lies within what was fitted, as the command demands."""
    told = {name: each(train, test) for name, each in by.items()}
    grid = test.grid.assign(**{name: p for name, (p, _) in told.items()})
    truths = true_edges(test.edges)
    x = x_of(test, truths.index.to_frame(index=False)).to_dict("records")
    rows = []
    for (at, value), own_x in zip(truths.items(), x, strict=True):
        case = case_of(at)
        own = {name: edges.get(case, math.nan) for name, (_, edges) in told.items()}
        inside = {
            covered(name): not cover(train, names).misses({"layers": case[1]}, own_x, case[2])
            for name, names in COMMAND.items()
        }
        rows.append({**dict(zip(CASE, case, strict=True)), "true": value, **inside, **own})
    return grid, pd.DataFrame(rows, columns=[*CASE, "true", *map(covered, COMMAND), *by])


def covered(name: str) -> str:
    """The column that says whether the command would have told of a case by this forecaster."""
    return f"{name}: covered"


def cover(train: Tables, names: Sequence[str]) -> Cover:
    """What a fit to these predictors covers of depth, warm-up and the predictors themselves."""
    return Cover({}, {}, {name: own for name, own in ranges(train).items() if name in (*names, "layers", "warmup")})


def by_loss(tables: Tables) -> pd.DataFrame:
    """The runs themselves with P(fails) by the loss after 30 updates, each architecture by what was fitted to the
    others."""
    found = []
    for arch in sorted(set(tables.runs["arch"])):
        train, test = (tables.runs[(tables.runs["arch"] == arch) == keep] for keep in (False, True))
        none = np.zeros((len(train), 0))
        line = fit(none, train["early"].to_numpy(), train["fails"].to_numpy(), weights(train), ())
        found.append(test.assign(**{LOSS: [line.probability(line.middle, gap) for gap in test["early"]]}))
    return pd.concat(found, ignore_index=True)
