"""The ledger as tables: runs, edges, every rate of the grid whose end follows, predictors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import truth

from stabilitylab.forecast.fitting import FEATURES, TRIAL, features
from stabilitylab.forecast.trials import Trial, Trials

CASE = ["arch", "layers", "warmup"]
SEED = [*CASE, "seed", "shift"]
EARLY, BLOWN = 30, 1e3  # updates after which a rival looks at the loss; nats, for what is not finite
Case = tuple[str, int, int]


@dataclass(frozen=True)
class Tables:
    """``runs``: those of known edges that are decided; ``edges``: one row a seed; ``grid``: every rate of the grid
    whose end follows from an edge; all with ``share``, 1 / (seeds of that case). ``measured``: (arch, layers) ->
    predictors. ``lacking``: (arch, layers) that have runs, and not a number for
    every predictor."""

    runs: pd.DataFrame
    edges: pd.DataFrame
    grid: pd.DataFrame
    measured: Mapping[tuple[str, int], Mapping[str, float]]
    lacking: tuple[tuple[str, int], ...]

    def only(self, keep: Callable[[pd.DataFrame], pd.Series]) -> Tables:
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        kept = {name: own[name][keep(own[name])].reset_index(drop=True) for name in ("runs", "edges", "grid")}
        return Tables(**{**own, **kept})


def load(folder: Path, seeds: Collection[int] = truth.SEEDS) -> Tables:
    """Of these seeds alone. Raises SystemExit for what two lines of predictors.csv say, and for a run without a
    course."""
    runs = pd.read_csv(folder / "runs.csv").drop_duplicates([*SEED, "k"], keep="last")
    runs = runs[runs["seed"].isin(seeds)]
    predictors = pd.read_csv(folder / "predictors.csv")
    if predictors.duplicated(["arch", "layers"]).any():
        raise SystemExit(f"{folder / 'predictors.csv'} has two lines of one architecture and depth: keep one.")
    tried, none = by_trials(folder / "trials.csv"), dict[str, float]()
    rows = [{**row, **tried.get((row["arch"], int(row["layers"])), none)} for row in predictors.to_dict("records")]
    measured = {(row["arch"], int(row["layers"])): row for row in rows if is_whole(row)}
    runs = runs.merge(
        early(pd.read_csv(folder / "course.csv"), runs), how="left", on=[*SEED, "k"], validate="one_to_one"
    )
    if runs["early"].isna().any():
        raise SystemExit(f"{folder / 'course.csv'} lacks runs of runs.csv: make these again (make.py).")
    pairs = pd.Series([*zip(runs["arch"], runs["layers"], strict=True)], index=runs.index)
    lacking = sorted({(arch, int(layers)) for arch, layers in pairs} - measured.keys())
    runs = runs[[pair in measured for pair in pairs]]
    runs = runs.assign(rate=np.log10(runs["lr"]), fails=(runs["outcome"] == "fails").astype(float))
    edges, grid = [], []
    for key, own in runs.groupby(SEED):
        cell = truth.Cell(str(key[0]), *map(int, key[1:4]), float(key[4]))  # type: ignore[index]
        known = dict(zip(own["k"], own["outcome"], strict=True))
        edge = truth.edge(known)
        if not edge.done:
            continue
        place = dict(zip(SEED, key, strict=True))  # type: ignore[arg-type]
        edges.append({**place, "low": edge.low, "high": edge.high, "edge": cell.middle(edge), "runs": len(own)})
        grid += [
            {**place, "k": k, "rate": math.log10(cell.rate(k)), "fails": float(k >= edge.high)}
            for k in range(truth.LOWEST, truth.HIGHEST + 1)
            if k <= edge.low or k >= edge.high
        ]
    shares = pd.DataFrame(edges)[SEED]
    shares["share"] = 1.0 / shares.groupby([*CASE, "shift"])["seed"].transform("size")
    told = runs[runs["outcome"] != "cannot tell"]
    each = (one.merge(shares, on=SEED) for one in (told, pd.DataFrame(edges), pd.DataFrame(grid)))
    return Tables(*each, measured, tuple(lacking))


def by_trials(path: Path) -> dict[tuple[str, int], dict[str, float]]:
    """(arch, layers) -> ``trial`` and ``trial_cold``; {} without the file."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    if not path.exists():
        return found
    for (arch, layers, warmup), own in pd.read_csv(path).groupby(["arch", "layers", "warmup"]):  # type: ignore[misc]
        each = [
            Trial(row["rate"], row["state"].replace("-", " "), row["gap"], row["updates"])
            for row in own.to_dict("records")
        ]
        name = "trial" if warmup else "trial_cold"
        found.setdefault((str(arch), int(layers)), {})[name] = Trials(int(warmup), each).edge
    return found


def is_whole(row: Mapping[str, Any]) -> bool:
    """Whether every predictor is a number; what has another is not forecast, as the command does not."""
    each = [value for warmup in truth.WARMUPS for value in features(row, int(row["layers"]), warmup).values()]
    return all(map(math.isfinite, each))


def early(course: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """The gap to the baseline at the evaluation nearest to update ``EARLY``; a large one where it is not finite."""
    course = course.drop_duplicates([*SEED, "k"], keep="last")  # a run that was stopped and made again has two lines
    found = course.merge(runs[[*SEED, "k", "unigram"]], on=[*SEED, "k"])
    gaps = []
    for row in found.to_dict("records"):
        steps = np.array([int(step) for step in str(row["steps"]).split()])
        losses = [float(loss) for loss in str(row["losses"]).split()]
        gaps.append(losses[np.abs(steps - EARLY).argmin()] - row["unigram"])
    return found[[*SEED, "k"]].assign(early=[gap if math.isfinite(gap) else BLOWN for gap in gaps])


def x_of(tables: Tables, rows: pd.DataFrame) -> pd.DataFrame:
    """The predictors of each row."""
    own = cases(rows)
    each = {case: features(tables.measured[case[:2]], *case[1:]) for case in {*own}}
    return pd.DataFrame([each[case] for case in own], columns=[*FEATURES, *TRIAL], index=rows.index)


def ranges(tables: Tables) -> dict[str, tuple[float, float]]:
    """What each predictor, depth and warm-up lie between in the runs."""
    x = x_of(tables, tables.runs).drop(columns=["layers", "cold"]).assign(**tables.runs[["layers", "warmup"]])
    return {str(name): (float(own.min()), float(own.max())) for name, own in x.items()}


def weights(rows: pd.DataFrame) -> np.ndarray:
    """1 for each architecture x depth x warm-up."""
    return 1.0 / rows.groupby(CASE)["fails"].transform("size").to_numpy(dtype=float)


def true_edges(edges: pd.DataFrame) -> pd.Series:
    """Of each case the mean over seeds of log10 of the edge; NaN where that of one lies outside the grid."""
    return edges.groupby(CASE)["edge"].agg(lambda own: own.mean(skipna=False))


def case_of(at: Any) -> Case:
    arch, layers, warmup = at
    return str(arch), int(layers), int(warmup)


def cases(rows: pd.DataFrame) -> list[Case]:
    return [case_of(at) for at in zip(rows["arch"], rows["layers"], rows["warmup"], strict=True)]
