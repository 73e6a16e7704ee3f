"""The critical rate of the first update against depth, for six architectures and their controls: the
need for a warm-up by initialisation."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ....decisive import decisive
from ....experiments import Experiment, Recipe, command, one_step, probing, protocol, sweep
from ... import style
from ...arrange import apart
from ...base import Figure, MissingRuns, Panel, Picture, Reference, figure
from ...collection import LAYERS, Record, Runs
from ...measures.by_label import by_label
from ...measures.comparison import counted
from ...measures.provenance import provenance
from ...measures.quality import even
from ...statistics import slope

SHOWN = (
    ("critical_sharpness", "critical_rate", "Critical rate of Adam's first update", "learning rate"),
    ("preconditioned_sharpness", "to_edge", "Adam's edge at the run's full rate", "preconditioned sharpness / edge"),
    ("sharpness", "value", "The Hessian's own largest eigenvalue", "1 / learning rate"),
)
TABLES = tuple(table for table, *_ in SHOWN)


@sweep("curvature:depth", scales=("tiny", "paper"), minutes=120)
def from_initialisation(ask: Recipe) -> Iterator[Experiment]:
    """Steps once with six architectures and their controls, 3 to 25 layers a side, six seeds; at scale paper to 100."""
    depths = (3, 6, 12, 25) if ask.tiny else (6, 12, 18, 25, 50, 100)
    yield from ask.runs(
        one_step.ARCHS, depths, one_step.size(ask), probing("default", *TABLES), seeds=protocol.SEEDS, kind="onestep"
    )


@figure("curvature:depth", title="Critical rate at initialisation against depth", source="2601.16979, 2207.14484")
class CriticalRateAgainstDepth(Figure):
    """The largest rate at which the first update of AdamW does not raise the loss of its own batch, by depth. Two more
    quantities have axes of their own: preconditioned sharpness over Adam's edge at the full rate, and the Hessian's
    sharpness. Float64, dropout off. No paper draws this: ours."""

    def picture(self, runs: Runs) -> Picture:
        groups = runs.where(even, kind="onestep", table="critical_sharpness").groups(*LAYERS)
        if not groups:
            raise MissingRuns("no one-step run with critical_sharpness", command("curvature:depth"))
        group = max(groups, key=lambda g: (len(g.depths), len(g.labels), len(g)))
        rate = float(group[0].settings["train.lr"])
        panels = []
        for table, column, title, unit in SHOWN:

            def at_depth(run: Record, table: str = table, column: str = column) -> dict[float, float]:
                return {run.depth: value} if (value := number(run, table, column)) > 0 else {}

            lines = by_label(group.where(table=table), at_depth, log=True)
            marks = {"critical_rate": [Reference(rate, f"full rate {rate:g}")], "to_edge": [Reference(1, "edge")]}
            if lines:
                panels.append(
                    Panel(title, "layers a side", unit, lines, marks.get(column, []), log_x=True, log_y=True,
                          ticks=group.depths)
                )  # fmt: skip
        notes = [f"Drawn: {group.describe()}, float64. Lines are geometric means over seeds, bands their range."]
        for table, column, title, _ in SHOWN:
            own = group.where(table=table)
            if lost := sum(not math.isfinite(number(record, table, column)) for record in own):
                notes.append(f"{title}: {lost} of {len(own)} runs are left out, whose number was not found.")
        panels, controls = apart(panels, [label for label in group.labels if style.family(label) == label])
        return Picture(
            panels, _finding(group, rate), notes, columns=min(3, len(panels)), controls=controls,
            provenance=provenance(group),
        )  # fmt: skip


def number(record: Record, table: str, column: str) -> float:
    """Return a number of the only row; NaN if it is missing or not decisive."""
    known = [
        name for name in ("residual", "converged", "state", "low", "high") if name in record.run.table(table).columns
    ]
    data = record.at(table, 0, list(dict.fromkeys((column, *known))))
    if not len(data):
        return math.nan
    chosen = decisive(table, column, lambda name: data[name].to_numpy(float) if name in known else None)
    return float(data[column].iloc[0]) if chosen is None or chosen[0] else math.nan


def _finding(group: Runs, rate: float) -> str:
    """Say which architectures need a warm-up by this measure, and how critical rate and sharpness depend on depth."""
    deepest = max(group.depths)
    below = []
    for label in group.labels:
        own = group.where(depth=deepest, label=label)
        at = [value for run in own if (value := number(run, "critical_sharpness", "critical_rate")) > 0]
        if at and float(np.exp(np.mean(np.log(at)))) < rate:
            below.append(style.title(label))
    whose = f"of {', '.join(below)} already the first update" if below else "of no architecture the first update"
    return (
        f"At the full rate {rate:g} and {deepest} layers a side, {whose} raises the loss of its own batch "
        f"({counted(len(group.seeds))}): what a warm-up is for shows "
        f"{'here' if below else 'later than at initialisation'}."
        f"{_goes(group, 'critical_sharpness', 'critical_rate', 'critical rate')}"
        f"{_goes(group, 'sharpness', 'value', 'largest eigenvalue')}"
    )


def _goes(group: Runs, table: str, column: str, name: str) -> str:
    """Name the architectures with the least and the largest power of the number of layers."""
    powers = {}
    for label in group.labels:
        points = [(run.depth, number(run, table, column)) for run in group.where(label=label, table=table)]
        points = [(math.log(depth), math.log(value)) for depth, value in points if value > 0]
        if len({depth for depth, _ in points}) > 1:
            powers[style.title(label)] = slope(*map(list, zip(*points, strict=True)))
    if not powers:
        return ""
    ends = [f"N^{power:.2f} ({label})" for label, power in sorted(powers.items(), key=lambda item: item[1])]
    return f" The {name} goes as {' to '.join(dict.fromkeys((ends[0], ends[-1])))}."
