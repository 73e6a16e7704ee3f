"""DeepNet, Figure 5: the size of a model update against depth, and for which parameters it stays constant."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ...experiments import command
from .. import style
from ..base import Figure, MissingRuns, Panel, Picture, Reference, Series, Spread, figure
from ..collection import LAYERS, Record, Runs
from ..statistics import slope
from . import gains
from .deepnet_4 import moved
from .gains import OWN, of_gain_one

GROUPS = {"all": "o", "vo_ffn": "s", "ln": "^", "qk": "v", "bias": "D", "embedding": "P"}
NAMES = {
    "all": "all parameters",
    "vo_ffn": "v, out, FFN (the theorem's)",
    "ln": "LayerNorm",
    "qk": "q, k",
    "bias": "biases",
    "embedding": "embedding",
}
COLOURS = ("#222222", "#0072B2", "#D55E00", "#56B4E9", "#009E73", "#CC79A7")
OPTIMIZERS = {"sgd": ("SGD", "dashed"), "adam": ("Adam", "solid")}
EARLY = 10  # the update at which training runs of several depths are compared, before saturation ...
LATER = 100  # ... and one more, where it is on record


def rate(record: Record, optimizer: str, group: str) -> float:
    """||F(theta - lr u) - F(theta)|| / lr per token for one update of ``group`` at lr = 1e-6; NaN if not measured."""
    data = record.at("update_rate", 0, ["value"])
    found = data.loc[data["site"] == f"{optimizer}.{group}", "value"].to_numpy(float)
    return float(found[0]) if len(found) else math.nan


def one_step_runs(runs: Runs) -> Runs:
    """The richest group of one-step runs that differ in depth, architecture and seed alone."""
    groups = runs.where(kind="onestep", table="update_rate").groups(*LAYERS)
    if not groups:
        raise MissingRuns("no one-step run with update_rate", command("deepnet:5"))
    return max(groups, key=lambda g: (len(g.depths), len(g.labels), len(g)))


@figure("deepnet:5", title="Model update against depth", source="DeepNet, Figure 5 and Theorem 4.3")
class UpdateAgainstDepth(Figure):
    """||dF|| per token of one update from initialisation, in units of the learning rate, by depth; apart by group of
    parameters for DeepNorm; and, from training runs of several depths, ||dF|| after 10 and 100 updates under sqrt(2d).

    Inferred: the paper says "early stage" and no step. ||dF|| saturates at sqrt(2d) within some ten updates, where
    every architecture looks alike, so depths are compared by one update at lr 1e-6 in float64.
    """

    def picture(self, runs: Runs) -> Picture:
        early, trained = _early(runs)
        try:
            group = one_step_runs(runs)
        except MissingRuns:
            if not early:
                raise
            notes = [f"Drawn: {trained.describe()}. Lines are geometric means over seeds, bands their range."]
            return Picture(early, _first_updates(early[0]), notes, columns=len(early))
        panels = [
            Panel(
                "One update of Adam, all parameters", "layers a side", "||dF|| / lr (L2 per token)",
                [_against_depth(group, label) for label in group.labels],
                log_x=True, log_y=True, ticks=group.depths,
            )
        ]  # fmt: skip
        shown = "deepnorm" if "deepnorm" in group.labels else group.labels[0]
        panels.append(_by_group(group.where(label=shown), shown))
        notes = [f"Drawn: {group.describe()}, float64. Lines are geometric means over seeds, bands their range."]
        notes += _alphas(group) + _growth(group.where(label=shown), shown)
        if others := sum(map(len, runs.where(kind="onestep", table="update_rate").groups(*LAYERS))) - len(group):
            notes.append(f"Not drawn: {others} one-step run{'s' if others > 1 else ''} with other settings.")
        panels += early
        return Picture(panels, _finding(group), notes, columns=min(3, len(panels)))


def _against_depth(group: Runs, label: str) -> Series:
    spread = Spread(log=True)
    for record in group.where(label=label):
        spread.add([record.depth], [rate(record, "adam", "all")])
    return spread.series(style.title(label), arch=label, dash=_dash(group, label))


def _dash(group: Runs, label: str) -> str:
    """DeepNet's own Post-LN is a solid line, fairseq's beside it a dashed one; all others look as everywhere."""
    postln = style.family(label) in ("postln", "postln-init")
    return gains.dash(group.labels, label) if postln and label.removesuffix(OWN) in ("postln", "postln-init") else ""


def _by_group(runs: Runs, label: str) -> Panel:
    lines = []
    for (group, marker), colour in zip(GROUPS.items(), COLOURS, strict=True):
        for optimizer, (name, dash) in OPTIMIZERS.items():
            spread = Spread(log=True)
            for record in runs:
                if (value := rate(record, optimizer, group)) > 0:
                    spread.add([record.depth], [value])
            if spread.points:
                look = {"dash": dash, "colour": colour, "marker": marker, "detail": name}
                lines.append(spread.series(NAMES[group], **look))
    title = f"{style.title(label)}, by group of parameters"
    y = "||dF|| / lr (L2 per token)"
    return Panel(title, "layers a side", y, lines, log_x=True, log_y=True, ticks=runs.depths)


def _alphas(group: Runs) -> list[str]:
    """At which alpha the branches stood, where an architecture has one."""
    at = {record.label: record.metrics["alpha"].iloc[0] for record in group if "alpha" in record.metrics}
    shown = [f"{style.title(label)} {at[label]:g}" for label in group.labels if at.get(label, 1) < 1]
    return [f"alpha of these runs: {', '.join(shown)}; of all others 1."] if shown else []


def _growth(runs: Runs, label: str) -> list[str]:
    """The exponent of N for each group of parameters, mean over seeds."""
    found = []
    for optimizer, (name, _) in OPTIMIZERS.items():
        means = {group: _mean_exponent(runs, optimizer, group) for group in GROUPS}
        shown = [f"{NAMES[group]} {mean:.2f}" for group, mean in means.items() if math.isfinite(mean)]
        if shown:
            found.append(f"{style.title(label)}, exponents of N under {name}: {', '.join(shown)}.")
    return found


def _early(runs: Runs) -> tuple[list[Panel], Runs]:
    """||dF|| after 10 and after 100 updates of training runs, where comparable ones of several depths are there."""

    def after(record: Record, updates: int) -> float:
        return moved(record).get(updates, math.nan)

    fit = runs.where(lambda run: math.isfinite(after(run, EARLY)), kind="train", table="model_update")
    groups = [group for group in fit.groups(*LAYERS) if len(group.depths) > 1]
    if not groups:
        return [], Runs([])
    group = max(groups, key=lambda g: (len(g.depths), len(g)))
    saturation = math.sqrt(2 * group[0].width)
    panels = []
    for updates in (EARLY, LATER):
        own = group.where(lambda run, n=updates: after(run, n) > 0)
        lines = []
        for label in own.labels:
            spread = Spread(log=True)
            for record in own.where(label=label):
                spread.add([record.depth], [after(record, updates)])
            lines.append(spread.series(style.title(label), arch=label, dash=_dash(own, label)))
        panel = Panel(
            f"After {updates} updates of training", "layers a side", "||dF|| (L2 per token)", lines,
            [Reference(saturation, f"√(2d) = {saturation:.1f}")], log_x=True, log_y=True, ticks=group.depths,
        )  # fmt: skip
        panels += [panel] if lines else []
    return panels, group


def _first_updates(panel: Panel) -> str:
    """How ||dF|| of the first updates grows from the shallowest to the deepest model, where nothing else is at hand."""
    parts = [
        f"{line.name} from {line.y[0]:.2g} at {line.x[0]:g} to {line.y[-1]:.2g} at {line.x[-1]:g} layers a side"
        for line in panel.series
        if len(line.x) > 1
    ]
    return f"{panel.title}, ||dF|| goes: {'; '.join(parts)}." if parts else f"{panel.title}, at one depth alone."


def exponents(runs: Runs, optimizer: str, group: str, depths: Iterable[int]) -> dict[int, float]:
    """Seed -> exponent k of rate ~ N^k, fitted over those ``depths`` that the seed has; two at least."""
    found = {}
    for seed in runs.seeds:
        own = {run.depth: rate(run, optimizer, group) for run in runs if run.seed == seed and run.depth in set(depths)}
        if len(own) > 1 and all(value > 0 for value in own.values()):
            found[seed] = slope([math.log(n) for n in own], [math.log(value) for value in own.values()])
    return found


def _mean_exponent(runs: Runs, optimizer: str, group: str) -> float:
    found = [*exponents(runs, optimizer, group, runs.depths).values()]
    return round(float(np.mean(found)), 2) + 0.0 if found else math.nan  # no -0.00


def _finding(group: Runs) -> str:
    depths, names = group.depths, ", ".join(map(style.title, group.labels))
    shown = (of_gain_one(group.labels, "postln"), "deepnorm", "branchnorm")
    growth = {label: _mean_exponent(group.where(label=label), "adam", "all") for label in shown}
    pieces = [f"{style.title(label)}'s as N^{mean:.2f}" for label, mean in growth.items() if math.isfinite(mean)]
    if not pieces:
        return f"||dF|| of one update of {names} at {len(depths)} depth{'s' if len(depths) > 1 else ''}, no exponent."
    theorem = _mean_exponent(group.where(label="deepnorm"), "sgd", "vo_ffn")
    scope = f"; in the theorem's scope (SGD on v, out and FFN) DeepNorm's as N^{theorem:.2f}"
    seeds = f"one seed, {group.seeds[0]}" if len(group.seeds) == 1 else f"{len(group.seeds)} seeds"
    ending = f"{scope if math.isfinite(theorem) else ''} (N from {depths[0]} to {depths[-1]}, {seeds})"
    return f"One Adam update from initialisation moves the output: {', '.join(pieces)}{ending}."
