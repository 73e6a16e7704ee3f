"""Admin, Figure 5: gradients of different parameters range widely, Adam's updates do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ....experiments import Experiment, Recipe, probing, sweep
from ....labels import label as label_of_model
from ....store.arrays import steps_in
from ... import style
from ...base import Figure, MissingRuns, Panel, Picture, Series, Spread, figure
from ...claims import Effect, claim
from ...collection import Frame, Record, Runs
from ...measures.comparison import counted, largest_group, not_drawn
from ...measures.provenance import provenance
from ...statistics import Region
from ..branchnorm.figure_8 import comparison

QUANTITIES = {  # the compared quantities: table, column, dash
    "gradient": ("grad_norm", "value", "solid"),
    "update": ("update_ratio", "rms", "dashed"),
}
TABLES = tuple(table for table, *_ in QUANTITIES.values())
SHOWN = ("postln", "preln", "admin")
MOST_PANELS = 3  # panels of distributions, beside that of the widths
SETTLED = 500  # least updates of a run for the claim, which is about the second half
ENDS = (5, 95)  # percentiles between which a width is measured
PLACES, LEAST = 61, 1e-12  # points of a distribution, and the smallest number over the largest in it


def _values(record: Record, quantity: str) -> Frame:
    """Return step, site and the number of the sub-layers of all layers, which have about equally many entries."""
    table, column, _ = QUANTITIES[quantity]
    data = record.frame(table, [column])
    return data.loc[data["layer"] > 0, ["step", "site", column]].rename(columns={column: "value"})


def settled(record: Record, quantity: str) -> np.ndarray:
    """Return the mean of each sub-layer over the probed steps of the run's second half."""
    return _read(record, quantity)[0]


def _read(record: Record, quantity: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return :func:`settled`, and the steps with the width at each, of one reading of the table."""

    def read() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        data = _values(record, quantity)
        late = data[data["step"] >= data["step"].max() / 2]
        steps = steps_in(data["step"].to_numpy())  # each has all sub-layers
        widths = decades(data["value"].to_numpy().reshape(len(steps), -1)) if len(steps) else np.empty(0)
        return late.groupby("site", observed=True)["value"].mean().to_numpy(), steps, widths

    return record.remember(("admin:5", quantity), read, keep=True)


def decades(values: np.ndarray) -> np.ndarray:
    """Return log10(p95 / p5) of the last axis: infinite if p5 is 0, NaN if a value is."""
    with np.errstate(divide="ignore", invalid="ignore"):  # a sub-layer that never moves has log10(0) = -inf
        low, high = np.percentile(np.log10(values), ENDS, axis=-1)
        return high - low


@figure("admin:5", title="Relative gradient and relative update", source="Admin, Figure 5")
class GradientsAndUpdates(Figure):
    """Cumulative distributions over the sub-layers of all layers: the share of sub-layers whose gradient norm
    ||dE/dtheta_i|| is at most x times the largest, and the same for the update (root mean square over its entries).
    Both are means over the probed steps of the run's second half. Beside them are the widths of the distributions,
    log10(p95 / p5) in decades, from the first update on.

    The paper draws histograms over parameter tensors. For updates it takes the change W_{i+1} - W_i of an epoch, in
    which updates of opposite sign cancel; the tables here hold single updates of sub-layers. Inferred: the steps.
    """

    def picture(self, runs: Runs) -> Picture:
        told = runs.where(_is_told, kind="train", table=TABLES)
        group, notes = largest_group(told.where(label=SHOWN) or told, TABLES, self.id, ended=True)
        labels = group.labels[:MOST_PANELS]
        found = {label: {name: _relative(group.where(label=label), name) for name in QUANTITIES} for label in labels}
        everything = [seed for both in found.values() for values in both.values() for seed in values]
        smallest = min((float(seed[seed > 0].min()) for seed in everything), default=LEAST)
        places = np.geomspace(max(smallest, LEAST), 1, PLACES)
        panels = [_distribution(label, found[label], places) for label in labels]
        drawn = group.where(label=labels)
        panels.append(_widths(drawn))
        notes += _left_out(runs, labels)
        return Picture(panels, _finding(drawn), notes, provenance=provenance(drawn))


def _left_out(runs: Runs, labels: Sequence[str]) -> list[str]:
    """Return notes on architectures that are not drawn, and on runs that diverged."""
    known = runs.where(kind="train", table=TABLES)
    others = [style.title(label) for label in known.labels if label not in labels]
    notes = [f"Not drawn: {', '.join(others)}."] if others else []
    return notes + not_drawn(len(known) - len(known.where(_is_told)), "that diverged")


def _is_told(run: Record) -> bool:
    """True if a run is drawn. A diverged run is not: its numbers are not finite, or belong to a broken model."""
    return run.verdict != "diverged"


def _relative(runs: Runs, quantity: str) -> list[np.ndarray]:
    """Return the values of each run's sub-layers over the largest."""
    found = [values[np.isfinite(values)] for values in (settled(record, quantity) for record in runs)]
    return [values / values.max() for values in found if len(values) and values.max() > 0]


def _distribution(label: str, found: dict[str, list[np.ndarray]], places: np.ndarray) -> Panel:
    lines = []
    for name, (_, _, dash) in QUANTITIES.items():
        spread = Spread()
        for values in found[name]:
            below = np.searchsorted(np.sort(values), places * (1 + 1e-9), side="right")
            spread.add(places.tolist(), (below / len(values)).tolist())
        if spread.points:
            lines.append(spread.series(style.title(label), arch=label, dash=dash, detail=name))
    return Panel(style.title(label), "over the largest", "share at or below", lines, log_x=True)


def _widths(group: Runs) -> Panel:
    lines = [_width(group.where(label=label), label, name) for label in group.labels for name in QUANTITIES]
    return Panel("Width", "update", "p95 over p5 [decades]", [line for line in lines if line], log_x=True)


def _width(runs: Runs, label: str, quantity: str) -> Series | None:
    """Return the width at each probed step; row t shows update t + 1."""
    spread = Spread()
    for record in runs:
        _, steps, widths = _read(record, quantity)
        known = np.isfinite(widths)
        spread.add((steps[known] + 1.0).tolist(), widths[known].tolist())
    dash = QUANTITIES[quantity][-1]
    return spread.series(style.title(label), arch=label, dash=dash, detail=quantity) if spread.points else None


def _finding(group: Runs) -> str:
    words = []
    for label in group.labels:
        own = group.where(label=label)
        wide = [np.mean([decades(settled(record, name)) for record in own]) for name in QUANTITIES]
        words.append(f"{style.title(label)} {wide[0]:.2f} and {wide[1]:.2f}")
    return (
        "From the 5th to the 95th percentile of sub-layers, gradient norms and updates of the second half span, in "
        f"decades: {', '.join(words)} ({counted(len(group.seeds))})."
    )


@claim(
    "C32",
    figure="admin:5",
    stage="first updates",
    paper="Admin",
    sentence="Gradients of different parameters range widely, Adam's updates do not",
    source="Admin, Fig. 5",
    statistic="log10(p95 / p5) over sub-layers of the gradient norm minus that of the update's RMS, means over the "
    "probed steps of the run's second half, Post-LN of 500 updates or more; the paper compares parameter tensors, and "
    "an epoch's change of the weights, of which single updates are the part recorded here",
    threshold="R: > 1 decade; X: < 0 (the plan names no X: ours)",
    sweep="admin:5",
)
def updates_are_narrow(runs: Runs) -> list[Effect]:
    def fit(run: Record) -> bool:
        return run.updates >= SETTLED and _is_told(run)

    groups = runs.where(fit, kind="train", label="postln", table=TABLES).groups()
    if not groups:
        raise MissingRuns(f"needs postln trained for {SETTLED} updates or more with {' and '.join(TABLES)}")
    own = groups[0].by_seed()
    wide = {seed: [float(decades(settled(record, name))) for name in QUANTITIES] for seed, record in own.items()}
    wider = {seed: gradient - update for seed, (gradient, update) in wide.items()}
    return [Effect("decades wider", wider, Region(low=1), Region(high=0), of=own.values())]


@sweep("admin:5", minutes=12, folder={"paper": "branchnorm:8"})
def trained_models(ask: Recipe) -> Iterator[Experiment]:
    """Trains Post-LN, Pre-LN and Admin, 6L-6L, 1200 updates; at full size takes those runs of branchnorm:8 that the
    figure shows, 18 layers a side."""
    if ask.tiny:
        yield from ask.runs(SHOWN, [6], {"train": {"lr": 7e-4, "warmup": 300, "steps": 1200}}, probing("default"))
        return
    for each in comparison(ask):
        if label_of_model(each.config.model) in SHOWN and each.config.model.encoder_layers == 18:
            yield each
