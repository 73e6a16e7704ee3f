"""The effect of the first updates on a model: ‖ΔF‖, and the inputs of its norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from .. import style
from ..base import MissingRuns, Panel, Reference
from ..collection import LAYERS, Record, Runs
from .by_label import by_label
from .gains import shown_dash
from .quality import even

FIRST = 30  # updates that DeepNet's figure draws
DEPTH = 18  # layers a side of that figure
EARLY = 10  # the update at which training runs of several depths are compared, before saturation ...
LATER = 100  # ... and one more, where it is on record
TABLES = ("model_update", "ln_input", "grad_norm")
Values = Callable[[Record], dict[int, float]]


def warmup(record: Record) -> int:
    return int(record.settings.get("train.warmup", 0))


def update(record: Record) -> dict[int, dict[str, float]]:
    """Maps step to cumulative and one_update of the last stack's output, ‖ΔF‖ per token."""
    data = record.frame("model_update", ["cumulative", "one_update"])
    stacks = data["stack_name"].unique().tolist()
    data = data[data["stack_name"] == ("decoder" if "decoder" in stacks else stacks[0])]
    return {
        int(step): {"cumulative": a, "one_update": b}
        for step, a, b in zip(data["step"], data["cumulative"], data["one_update"], strict=True)
    }


def whole(record: Record, table: str = "model_update") -> bool:
    """True if each of the steps 0 to 30 was recorded."""
    return {*range(FIRST + 1)} <= {*record.frame(table)["step"].tolist()}


def moved(record: Record) -> dict[int, float]:
    """Maps step to ‖ΔF‖ since the start."""
    return {step: values["cumulative"] for step, values in update(record).items()}


def norm_inputs(record: Record, column: str, ffn: bool | None = None) -> dict[int, float]:
    """Maps step to the mean over norms (behind feed-forward networks, attention, or all) of the token norm, over
    sqrt(d)."""
    data = record.frame("ln_input", [column])
    if ffn is not None:
        data = data[(data["sublayer"] == "ffn") if ffn else data["sublayer"].isin(["self_attn", "cross_attn"])]
    means = data[data["layer"] > 0].groupby("step")[column].mean() / math.sqrt(record.width)
    return {int(step): float(value) for step, value in means.items()}


def first_arms(runs: Runs, *wanted: tuple[str, bool], tables: Sequence[str] = TABLES[:1]) -> list[dict[int, Record]]:
    """Map seed to run for each pair of a label and True for "without warm-up". The runs are comparable, of 18L-18L,
    and recorded at each of the first 30 updates."""
    labels = [label for label, _ in wanted]
    ready = runs.where(kind="train", label=labels, layers=(DEPTH, DEPTH), table=tables)
    fit = ready.where(lambda run: all(whole(run, table) for table in tables))
    found = []
    for group in fit.groups("train.warmup"):
        longest = max(map(warmup, group))
        arms = [group.where(label=label, train__warmup=0 if cold else longest).by_seed() for label, cold in wanted]
        warmed = longest > 0 or all(cold for _, cold in wanted)
        if warmed and set.intersection(*map(set, arms)):
            found.append(arms)
    if not found:
        names = " and ".join(f"{label} {'without' if cold else 'with'} warm-up" for label, cold in wanted)
        raise MissingRuns(f"needs 18L-18L {names}, with the same seeds and probed at each of the first {FIRST} updates")
    return max(found, key=lambda arms: len(set.intersection(*map(set, arms))))


def alphas(group: Runs) -> list[str]:
    """Write a note on the first alpha of runs whose alpha is below 1."""
    at = {record.label: record.metrics["alpha"].iloc[0] for record in group if "alpha" in record.metrics}
    shown = [f"{style.title(label)} {at[label]:g}" for label in group.labels if at.get(label, 1) < 1]
    return [f"alpha of these runs: {', '.join(shown)}; of all others 1."] if shown else []


def early_updates(runs: Runs) -> tuple[list[Panel], Runs]:
    """Draw ‖ΔF‖ after 10 and after 100 updates of training, for architectures with comparable runs of several
    depths."""

    def after(record: Record, updates: int) -> float:
        return moved(record).get(updates, math.nan)

    fit = runs.where(lambda run: even(run) and math.isfinite(after(run, EARLY)), kind="train", table="model_update")
    groups = [group for group in fit.groups(*LAYERS) if len(group.depths) > 1]
    if not groups:
        return [], Runs([])
    group = max(groups, key=lambda g: (len(g.depths), len(g)))
    saturation = math.sqrt(2 * group[0].width)
    panels = []
    for updates in (EARLY, LATER):
        own = group.where(lambda run, n=updates: after(run, n) > 0)
        lines = [
            replace(line, dash=shown_dash(own.labels, line.arch))
            for line in by_label(own, lambda run, n=updates: {run.depth: after(run, n)}, log=True)
            if len(line.x) > 1
        ]
        panel = Panel(
            f"After {updates} updates of training", "layers a side", "‖ΔF‖ (L2 per token)", lines,
            [Reference(saturation, f"√(2d) = {saturation:.1f}")], log_x=True, log_y=True,
            ticks=sorted({depth for line in lines for depth in line.x}),
        )  # fmt: skip
        panels += [panel] if lines else []
    return panels, group


def said_of(panel: Panel) -> str:
    """Write how ‖ΔF‖ of the first updates grows from the shallowest to the deepest model of each line."""
    parts = [
        f"{line.name} from {line.y[0]:.2g} at {line.x[0]:g} to {line.y[-1]:.2g} at {line.x[-1]:g} layers a side"
        for line in panel.series
    ]
    return f"{panel.title}, ‖ΔF‖ goes: {'; '.join(parts)}."


def half_way(record: Record) -> tuple[int, int, int]:
    """Find the steps at which the update, and the growth of norm inputs and of the loss of gradient since the start,
    first reach half of their own maximum."""
    data = record.frame("activation_grad_norm", ["value"])
    data = data[(data["stack_name"] == "decoder") & (data["sublayer"] == "ffn")]
    ends = data.pivot_table(index="step", columns="layer", values="value")
    with np.errstate(divide="ignore"):
        lost = -np.log(ends[ends.columns.min()] / ends[ends.columns.max()])
    lost -= lost.iloc[0]  # the loss of gradient since the start: some is lost at initialisation already
    inputs = norm_inputs(record, "value")
    grown = {step: value - inputs[min(inputs)] for step, value in inputs.items()}
    return _crossing(moved(record)), _crossing(grown), _crossing(dict(zip(lost.index, lost, strict=True)))


def _crossing(values: dict[int, float]) -> int:
    """Finds the first step at half of the maximum; steps without a number are left out."""
    known = {step: value for step, value in values.items() if not math.isnan(value)}
    half = max(known.values()) / 2
    return min(step for step, value in known.items() if value >= half)
