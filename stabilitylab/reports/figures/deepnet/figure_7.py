"""DeepNet, Figure 7: training at other learning rates, batches and widths. And claims C50 and C51."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ....config import merge
from ....experiments import SEEDS, Experiment, Recipe, command, probing, sweep
from ....experiments.recipe import BRANCHNORM, Settings
from ...arrange import alike
from ...base import Figure, MissingRuns, Panel, Picture, Series, figure
from ...claims import NAMED_LATER, Effect, Share, claim, together
from ...collection import FREE, Record, Runs
from ...measures.comparison import counted, failed, judged, last_nll, lost_by_seed, one_ramp, states
from ...measures.layers import held_out_panel
from ...measures.provenance import provenance
from ...measures.quality import mean_nll
from ...statistics import Region, slope

LABEL = "deepnorm"
AXES: dict[str, tuple[str, ...]] = {  # the varied quantity of a panel -> its settings
    "learning rate": ("train.lr",),
    "batch": ("data.sentences", "train.accumulate"),
    "width": ("model.d_model", "model.d_ffn", "model.heads"),
}
BASELINE = ("#202020", "o", "solid")  # colour, marker and dash, the same in every panel
BELOW = (("#8a8a8a", "v", "dotted"), ("#b0b0b0", "D", "dotted"), ("#b0b0b0", "P", "dotted"))  # the nearest first
ABOVE = (("#666666", "^", "dashed"), ("#444444", "s", "dashed"), ("#444444", "h", "dashed"))
Value = tuple[Any, ...]
Panels = dict[str, dict[Value, Runs]]  # axis -> value of its settings, smallest first -> runs


def value_of(record: Record, axis: str) -> Value:
    return tuple(record.settings.get(key) for key in AXES[axis])


def amount(value: Value, axis: str) -> float:
    """Return the number that a value stands for: the rate, sentences an update, d_model."""
    return float(value[0]) * (float(value[1] or 1) if axis == "batch" else 1.0)


def one_at_a_time(runs: Runs) -> Panels:
    """Return ended runs of DeepNorm that vary in one setting about one baseline: that with most settings, then most
    runs.

    Raises MissingRuns if nothing varies.
    """
    fit = judged(runs.where(label=LABEL))
    kin: dict[str, dict[str, list[Record]]] = {axis: {} for axis in AXES}
    for axis, keys in AXES.items():
        for run in fit:
            kin[axis].setdefault(_key(run, keys), []).append(run)
    best: Panels = {}
    for baseline in {_key(run, ()): run for run in fit}.values():
        found = {axis: _by_value(Runs(kin[axis][_key(baseline, keys)]), axis) for axis, keys in AXES.items()}
        best = max(best, {axis: values for axis, values in found.items() if len(values) > 1}, key=_richness)
    if not best:
        lacking = f"no runs of {LABEL} that differ in learning rate, batch or width alone"
        raise MissingRuns(lacking, command("deepnet:7"))
    return best


def _by_value(runs: Runs, axis: str) -> dict[Value, Runs]:
    own = one_ramp(runs, *AXES[axis])[0]
    values = sorted({value_of(run, axis) for run in own}, key=lambda value: amount(value, axis))
    return {value: own.where(lambda run, v=value: value_of(run, axis) == v) for value in values}


def _richness(panels: Panels) -> tuple[int, int]:
    return len(panels), sum(len(runs) for values in panels.values() for runs in values.values())


def _key(record: Record, free: Sequence[str]) -> str:
    """Return all settings in which runs must agree, except ``free``."""
    own = {key: value for key, value in record.settings.items() if key not in FREE and key not in free}
    return json.dumps(sorted(own.items()), default=str)


@figure("deepnet:7", title="DeepNorm at other learning rates, batches and widths", source="DeepNet, Figure 7")
class OneSettingAtATime(Figure):
    """The held-out cross-entropy [nats/token] against updates, mean over seeds with their range. Each panel varies one
    setting; all other settings are those of the baseline, which is a line in each panel.

    Inferred: the paper's values, which are printed only in the picture. Its batch counts tokens, ours sentences per
    update.
    """

    def picture(self, runs: Runs) -> Picture:
        found = one_at_a_time(runs)
        panels = alike(_panel(axis, values, baseline(found, axis)) for axis, values in found.items())
        drawn = everything(found)
        seeds = counted(len(drawn.seeds))
        lost = sum(map(failed, drawn))
        finding = "; ".join(_said(axis, values) for axis, values in found.items())
        all_ = f"{lost} of {len(drawn)} runs diverged or are stuck" if lost else f"none of {len(drawn)} runs failed"
        notes = [f"Drawn: {drawn.describe()}. Lines are means over seeds, bands their range.", *states(drawn)]
        if lacking := [axis for axis in AXES if axis not in found]:
            notes.append(f"Nothing varies in {' and '.join(lacking)}: '{command('deepnet:7')}' makes such runs.")
        return Picture(panels, f"{finding} ({seeds}): {all_}.", notes, columns=min(3, len(panels)),
                       provenance=provenance(drawn))  # fmt: skip


def everything(panels: Panels) -> Runs:
    """Return all runs of the panels, the baseline's once."""
    found = {id(run): run for values in panels.values() for runs in values.values() for run in runs}
    return Runs(found.values())


def baseline(panels: Panels, axis: str) -> Value:
    """Return the value that the runs of all other panels have; without another panel, the middle value."""
    for other, values in panels.items():
        if other != axis:
            return value_of(next(iter(values.values()))[0], axis)
    return [*panels[axis]][len(panels[axis]) // 2]


def _panel(axis: str, values: dict[Value, Runs], middle: Value) -> Panel:
    lines: list[Series] = []
    for place, (value, runs) in enumerate(values.items(), start=-[*values].index(middle)):
        side = BELOW if place < 0 else ABOVE
        look = side[(abs(place) - 1) % len(side)] if place else BASELINE
        colour, marker, dash = look
        lines += [
            replace(line, label=name(value, axis), arch="", colour=colour, marker=marker, dash=dash)
            for line in held_out_panel(runs).series
        ]
    return Panel(axis.capitalize(), "update", "held-out nll [nats/token]", lines, direct=True)


def name(value: Value, axis: str) -> str:
    """Return the name of a value, such as ``lr 0.001``, ``16 sentences``, ``64-128-2``."""
    if axis == "learning rate":
        return f"lr {value[0]:g}"
    if axis == "batch":
        return f"{amount(value, axis):g} sentences"
    return "-".join(map(str, value))


def _said(axis: str, values: dict[Value, Runs]) -> str:
    """Say how runs at each value ended, by the mean over the runs that did not fail."""
    ends = []
    for value, runs in values.items():
        last = [last_nll(run) for run in runs if not failed(run)]
        ends.append(f"{np.mean(last):.2f} at {name(value, axis)}" if last else f"none left at {name(value, axis)}")
    return ", ".join(ends)


@claim(
    "C50",
    figure="deepnet:7",
    stage="after training",
    must_read=False,
    paper="DeepNet",
    sentence="DeepNorm trains at every learning rate, batch and width",
    source="DeepNet, Fig. 7",
    statistic="share of DeepNorm's runs, by seed, that diverged or are stuck, over learning rate, batch and width, "
    "each varied alone about one baseline",
    threshold="R: less than a fifth of them; X: more than a fifth (the plan names neither: ours)",
    sweep="deepnet:7",
)
def trains_in_every_setting(runs: Runs) -> list[Share]:
    drawn = everything(_all_axes(runs))
    return [Share("runs that failed", lost_by_seed(drawn), Region(high=0.2), Region(low=0.2), of=drawn)]


@claim(
    "C51",
    figure="deepnet:7",
    stage="after training",
    paper="DeepNet",
    sentence="DeepNorm learns faster with a larger learning rate, batch and width",
    source="DeepNet, Fig. 7",
    statistic="held-out nll, mean over updates (as in C47) [nats]: slope with log2 of the learning rate, of the "
    "sentences an update, of d_model, the largest of the three; beside it each",
    threshold="R: < 0; X: > 0 (the plan names neither: ours)",
    sweep="deepnet:7",
    after=NAMED_LATER,
)
def faster_with_more(runs: Runs) -> list[Effect]:
    effects = []
    for axis, values in _all_axes(runs).items():
        slopes, drawn = {}, everything({axis: values})
        for seed in drawn.seeds:
            points = {amount(value, axis): mean_nll(own) for value, group in values.items()
                      for own in group.where(seed=seed)}  # fmt: skip
            if len(points) == len(values):
                known = all(map(math.isfinite, points.values()))  # a run that diverged leaves the seed undecided
                slopes[seed] = slope([*map(math.log2, points)], [*points.values()]) if known else math.nan
        effects.append(Effect(f"nats a doubling of the {axis}", slopes, of=drawn))
    return [together("nats a doubling, the largest", effects, _largest, Region(high=0), Region(low=0)), *effects]


def _largest(slopes: list[float]) -> float:
    """Return the largest slope; NaN if one is not known."""
    return math.nan if any(map(math.isnan, slopes)) else max(slopes)


def _all_axes(runs: Runs) -> Panels:
    found = one_at_a_time(runs)
    if lacking := [axis for axis in AXES if axis not in found]:
        raise MissingRuns(f"needs {LABEL} at several values of {' and '.join(lacking)}, all else equal")
    return found


# Each setting that varies, one at a time; Inferred: the paper prints its values in a picture alone.
VARIED: dict[str, Settings] = {
    "lr0.0005": {"train": {"lr": 5e-4}},
    "lr0.0015": {"train": {"lr": 1.5e-3}},
    "sentences8": {"data": {"sentences": 8}},
    "sentences32": {"data": {"sentences": 32}},
    "width96": {"model": {"d_model": 96, "d_ffn": 192, "heads": 3}},
    "width128": {"model": {"d_model": 128, "d_ffn": 256, "heads": 4}},
}
VARIED_AT_FULL_SIZE: dict[str, Settings] = {
    "lr0.0005": {"train": {"lr": 5e-4}},
    "lr0.0015": {"train": {"lr": 1.5e-3}},
    "accumulate64": {"train": {"accumulate": 64}},
    "accumulate256": {"train": {"accumulate": 256}},
    "width768": {"model": {"d_model": 768, "d_ffn": 3072, "heads": 12}},
    "width1024": {"model": {"d_model": 1024, "d_ffn": 4096, "heads": 16}},
}


@sweep("deepnet:7", minutes=19)
def one_setting_at_a_time(ask: Recipe) -> Iterator[Experiment]:
    """Varies learning rate, batch and width of an 18L-18L DeepNorm one at a time, 300 updates; at full size long
    enough for width 1024 to overfit, after 10,000 updates."""
    length = {"warmup": 75, "steps": 300} if ask.tiny else {"steps": 20_000}
    recipe = merge({} if ask.tiny else BRANCHNORM, {"train": length})
    for tag, one in {"": {}, **(VARIED if ask.tiny else VARIED_AT_FULL_SIZE)}.items():
        axes = merge({"train": {"lr": 1e-3}}, one)
        yield from ask.runs(["deepnorm"], [18], recipe, probing(), seeds=SEEDS[:3], axes=axes, tag=tag)
