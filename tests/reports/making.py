"""Run directories with made-up numbers, so that figures and claims can be tested against known answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from made_verdict import made_verdict

from stabilitylab.config import Config
from stabilitylab.experiments.recipe import figure_config
from stabilitylab.labels import label
from stabilitylab.probes import PROBES
from stabilitylab.reports.collection import Runs
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import RunWriter

SUBLAYERS = {"encoder": ("self_attn", "ffn"), "decoder": ("self_attn", "cross_attn", "ffn")}
Values = Callable[[int, Row], float | Sequence[float]]  # of a step and a place; one number a column


def by_protocol(base: Mapping[str, Any], settings: Mapping[str, Any]) -> Config:
    """Resolved, with a T of 4 % of the updates where ``settings`` name none."""
    config = figure_config(base, settings)
    if "T" in settings.get("model", {}):
        return config
    return figure_config(base, settings, {"model": {"T": max(2, round(0.04 * config.train.steps))}})


def sublayer_rows(layers: int, stacks: Sequence[str] = ("encoder", "decoder")) -> list[Row]:
    return [
        Row(f"{stack}.layers.{layer - 1}.{sublayer}", stack, layer, sublayer)
        for stack in stacks
        for layer in range(1, layers + 1)
        for sublayer in SUBLAYERS[stack]
    ]


def layer_rows(layers: int, stacks: Sequence[str] = ("encoder", "decoder")) -> list[Row]:
    return [Row(f"{stack}.layers.{n - 1}", stack, n) for stack in stacks for n in range(1, layers + 1)]


@dataclass(frozen=True)
class Made:
    """One table of a made-up run: its places, its columns, and the numbers at each of ``steps``."""

    rows: Sequence[Row]
    columns: Sequence[str]
    values: Values
    steps: Sequence[int] = (0,)
    total: str = "norm"
    unit: str = "L2 norm"


def table(name: str, made: Made) -> Table:
    """With the facts of the probe of that name, where there is one with these columns."""
    if name in PROBES and {*made.columns} <= {*PROBES[name].columns}:
        found = PROBES[name].table(made.rows, made.columns)
        return replace(found, unit=made.unit, definition="", total=made.total)
    return Table(name, tuple(made.columns), tuple(made.rows), made.unit, "", made.total)


def make_run(
    folder: Path,
    name: str,
    *,
    arch: str = "branchnorm",
    seed: int = 3,
    layers: int = 6,
    settings: Mapping[str, Any] | None = None,
    tables: Mapping[str, Made] | None = None,
    metrics: Mapping[str, Sequence[float | None]] | None = None,
    metric_steps: Sequence[int] | None = None,
    verdict: str = "trained",
    gap: float = -1.0,
    state: str = "finished",
    kind: str = "train",
    **facts: Any,
) -> Path:
    """A finished run at ``folder/name``. ``metrics``: column -> one number a step (None: not measured then)."""
    tables, metrics = tables or {}, metrics or {}
    base = {"model": {"arch": arch, "encoder_layers": layers, "decoder_layers": layers}, "train": {"seed": seed}}
    config = by_protocol(base, settings or {})
    defined = [table(name, made) for name, made in tables.items()]
    count = max((len(column) for column in metrics.values()), default=0)
    at = list(metric_steps) if metric_steps is not None else list(range(count))
    steps = sorted({*at, *(step for made in tables.values() for step in made.steps)})
    manifest = {"label": label(config.model), "config": config.model_dump(mode="json"), "kind": kind, **facts}
    with RunWriter.create(folder / name, manifest) as run:
        run.open(defined)
        for step in steps:
            numbers = {key: column[at.index(step)] for key, column in metrics.items() if step in at}
            run.append(step, numbers, {key: _cells(made, step) for key, made in tables.items() if step in made.steps})
        run.set_status(state, steps[-1] if steps else 0, "made up", verdict=made_verdict(verdict, gap))  # type: ignore[arg-type]
    return folder / name


def _cells(made: Made, step: int) -> Cells:
    values = np.array([np.atleast_1d(np.asarray(made.values(step, row), float)) for row in made.rows])
    return Cells(values, np.zeros(len(made.rows), bool))


def load(folder: Path) -> Runs:
    return Runs.load(folder)
