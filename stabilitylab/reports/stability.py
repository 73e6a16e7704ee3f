"""The stability table: how the runs of each architecture ended at each depth, counted over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import recipe_of
from ..store.layout import flat
from ..verdict import STATES
from . import style
from .collection import FREE, LAYERS, Record, Runs
from .measures.comparison import judged, one_ramp
from .measures.quality import even

if TYPE_CHECKING:
    import pandas as pd

COUNTS = {state: state.replace(" ", "_") for state in STATES}  # state -> its column
COLUMNS = ("arch", "depth", "seeds", *COUNTS.values(), "nll_gap", "low", "high")
Row = Mapping[str, Any]


def layers_in_all(record: Record) -> int:
    """Counts encoder and decoder layers together, as ``--depth`` does."""
    return sum(record.layers)


def nll_gap(record: Record) -> float:
    """Return the held-out cross-entropy after training minus that of the unigram baseline [nats/token]; NaN for a run
    that diverged or has no verdict."""
    found = record.judged
    return math.nan if found is None or found.state == "diverged" else found.nll_gap


def stability_table(runs: Runs) -> pd.DataFrame:
    """Make one row for each architecture and depth (both stacks together) of the training runs that have ended.

    ``seeds`` counts the runs, one a seed; ``trained``, ``learning``, ``descending``, ``stuck``, ``diverged`` and
    ``cannot_tell`` say how many of them ended so. ``nll_gap`` is the mean over seeds of the held-out cross-entropy
    minus the unigram baseline's [nats/token], ``low`` and ``high`` its range, all without the runs that diverged: NaN
    if every one did. Of several runs of one seed the last by name counts; :func:`table_groups` separates runs with
    other settings.
    """
    import pandas as pd  # here, as whoever lists the table's runs reads this module too

    ended = judged(runs)
    rows = []
    for label in ended.labels:
        own = ended.where(label=label)
        for depth in sorted({*map(layers_in_all, own)}):
            cell = [*own.where(lambda run, d=depth: layers_in_all(run) == d).by_seed().values()]
            counts = [sum(run.verdict == state for run in cell) for state in STATES]
            gaps = np.array([gap for run in cell if math.isfinite(gap := nll_gap(run))])
            ends = (gaps.mean(), gaps.min(), gaps.max()) if len(gaps) else (math.nan,) * 3
            rows.append((label, depth, len(cell), *counts, *map(float, ends)))
    return pd.DataFrame(rows, columns=[*COLUMNS])


def table_groups(runs: Runs) -> list[Runs]:
    """Group ended training runs that differ only in architecture, depth and seed; the group with most cells first.

    Encoder and decoder are equally deep, or one is absent. An architecture whose paper insists on a setting (T-Fixup:
    no warm-up) stands beside the others with that setting.
    """
    fit = judged(runs).where(even)
    apart = {id(run) for run in fit if _own_recipe(run)}
    own = fit.where(lambda run: id(run) in apart)
    groups = [one_ramp(group, *LAYERS)[0] for group in fit.where(lambda run: id(run) not in apart).groups(*LAYERS)]
    joined = [Runs([*group, *(run for run in own if _fits(run, group[0]))]) for group in groups]
    found = joined or [one_ramp(group, *LAYERS)[0] for group in own.groups(*LAYERS)]
    return sorted(found, key=lambda g: (len({(r.label, r.layers) for r in g}), len(g), g[0].updates), reverse=True)


def own_recipes(group: Runs) -> dict[str, str]:
    """Map each label of ``group`` that has a recipe of its own to the settings of that, such as train.warmup = 0."""
    found = {}
    for label in group.labels:
        recipe = _own_recipe(group.where(label=label)[0])
        rest = group.where(lambda run, own=label: run.label != own)
        if differing := [key for key, value in recipe.items() if any(run.settings.get(key) != value for run in rest)]:
            found[label] = ", ".join(f"{key} = {recipe[key]}" for key in differing)
    return found


def recipe_notes(group: Runs) -> list[str]:
    """Write a note on each label of ``group`` that has a recipe of its own."""
    what = "with the recipe that its paper insists on"
    return [f"{style.title(label)} {what}: {recipe}." for label, recipe in own_recipes(group).items()]


def _own_recipe(record: Record) -> dict[str, Any]:
    """Return the settings on which the paper of the run's architecture insists, if the run has them all; else {}."""
    recipe = dict(flat(recipe_of(str(record.settings.get("model.arch", "")))))
    return recipe if all(record.settings.get(key) == value for key, value in recipe.items()) else {}


def _fits(record: Record, other: Record) -> bool:
    """Return True if the runs differ only in architecture, depth, seed and the recipe of ``record``'s architecture."""
    open_ = {*FREE, *LAYERS, *_own_recipe(record)}
    keys = (record.settings.keys() | other.settings.keys()) - open_
    return all(record.settings.get(key) == other.settings.get(key) for key in keys)


def cell(row: Row) -> str:
    """Write a cell of the table: the mean nll_gap, and how many seeds ended in another state than trained."""
    n = int(row["seeds"])
    value = "" if math.isnan(row["nll_gap"]) else f"{row['nll_gap']:+.2f}"
    for state in ("stuck", "diverged"):
        if row[state] == n:
            return state
    others = {state: int(row[column]) for state, column in COUNTS.items() if state != "trained" and row[column]}
    parts = [state if count == n else f"{count} of {n} {state}" for state, count in others.items()]
    return ", ".join(filter(None, [value, *parts]))


def brief(row: Row, value: str = "") -> str:
    """Write a cell of a picture in a few letters: the value, in parentheses if some seeds are neither trained nor
    failed, and how many failed. ``value`` replaces the nll_gap."""
    n, lost = int(row["seeds"]), int(row["stuck"] + row["diverged"])
    value = value or ("" if math.isnan(row["nll_gap"]) else f"{row['nll_gap']:+.2f}")
    shown = f"({value})" if value and int(row["trained"]) + lost < n else value
    word = "stuck" if not row["diverged"] else "diverged" if not row["stuck"] else "failed"
    if lost == n:
        return word
    return f"{shown} {lost}/{n} {word}".strip() if lost else shown


def wide(table: pd.DataFrame) -> pd.DataFrame:
    """Arrange the table as it is printed: a row for each architecture, a column for each depth, each cell as
    :func:`cell`; "" without runs."""
    import pandas as pd

    texts = {(row["arch"], row["depth"]): cell(row) for row in table.to_dict("records")}
    depths = sorted({depth for _, depth in texts})
    archs = list(dict.fromkeys(table["arch"]))
    rows = [[style.title(arch), *(texts.get((arch, depth), "") for depth in depths)] for arch in archs]
    return pd.DataFrame(rows, columns=["arch", *map(str, depths)])


def markdown(table: pd.DataFrame) -> str:
    """Writes :func:`wide` as a Markdown table."""
    data = wide(table)
    rows = [[*data.columns], ["---"] * len(data.columns), *data.to_numpy().tolist()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
