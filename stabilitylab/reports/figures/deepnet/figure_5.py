"""DeepNet, Figure 5: the size of a model update against depth, and the parameters for which it stays constant."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ....config import merge
from ....experiments import SEEDS, Experiment, Recipe, one_gpu, one_step, probing, recipe, sweep
from ... import style
from ...arrange import apart
from ...base import Figure, MissingRuns, Panel, Picture, Series, Spread, figure
from ...claims import NAMED_LATER, Effect, claim, together
from ...collection import LAYERS, Runs, pairs
from ...measures.by_label import by_label
from ...measures.comparison import both
from ...measures.first_updates import alphas, early_updates, said_of
from ...measures.gains import by_gain, of_gain_one, shown_dash
from ...measures.one_step import exponents, growth, of_label, one_step_runs, rate
from ...measures.provenance import provenance
from ...statistics import Region

GROUPS = {"all": "o", "vo_ffn": "s", "ln": "^", "qk": "v", "bias": "D", "embedding": "P"}
NAMES = {
    "all": "all parameters",
    "vo_ffn": "v, out, FFN",
    "ln": "LayerNorm",
    "qk": "q, k",
    "bias": "biases",
    "embedding": "embedding",
}
OPTIMIZERS = {"adam": "Adam", "sgd": "SGD"}
UPDATE = "‖ΔF‖ / lr (L2 per token)"
UNSATURATED = range(6, 26)  # layers a side between which Post-LN's update still grows
COMPARED = range(6, 51)
FITTED = f"N from {COMPARED[0]} to {COMPARED[-1]}, of Post-LN to {UNSATURATED[-1]}"
KEY = f"exponents: {FITTED}"
STEADY = Region(-0.15, 0.15)  # an exponent that counts as independence of depth
FAST = "claims:fast"
GAIN = "; Post-LN of Xavier gain 1, and beside it of fairseq's gain (which decides where there are no runs of gain 1)"


@figure("deepnet:5", title="Model update against depth", source="DeepNet, Figure 5 and Theorem 4.3")
class UpdateAgainstDepth(Figure):
    """The change ‖ΔF‖ per token by one update from initialisation, in units of the learning rate, by depth, and for
    DeepNorm by group of parameters. From training runs of several depths: ‖ΔF‖ after 10 and 100 updates, with its
    ceiling sqrt(2d).

    Inferred: the paper says "early stage" and no step. ‖ΔF‖ saturates at sqrt(2d) within some ten updates, where every
    architecture looks alike, so depths are compared by one update at lr 1e-6 in float64.
    """

    def picture(self, runs: Runs) -> Picture:
        early, trained = early_updates(runs)
        try:
            group = one_step_runs(runs)
        except MissingRuns:
            if not early:
                raise
            notes = [f"Drawn: {trained.describe()}. Lines are geometric means over seeds, bands their range."]
            return Picture(early, said_of(early[0]), notes, columns=len(early), provenance=provenance(trained))
        panels = [whole_panel([line for label in group.labels for line in _against_depth(group, label)], group.depths)]
        shown = "deepnorm" if "deepnorm" in group.labels else group.labels[0]
        panels += [
            group_panel(shown, optimizer, lines, group.depths)
            for optimizer in OPTIMIZERS
            if (lines := _by_group(group.where(label=shown), shown, optimizer))
        ]
        notes = [f"Drawn: {group.describe()}, float64. Lines are geometric means over seeds, bands their range."]
        notes += alphas(group) + _growth(group.where(label=shown), shown)
        if others := sum(map(len, runs.where(kind="onestep", table="update_rate").groups(*LAYERS))) - len(group):
            notes.append(f"Not drawn: {others} one-step run{'s' if others > 1 else ''} with other settings.")
        panels += early
        main, controls = apart(panels, (of_gain_one(group.labels, "postln"), "deepnorm"))
        return Picture(
            main,
            _finding(group),
            notes,
            columns=3,
            controls=controls,
            provenance=provenance(group),
            key=KEY,
        )


def whole_panel(lines: Sequence[Series], depths: Sequence[int]) -> Panel:
    """Return the panel of one update of Adam, of lines that :func:`with_law` has named."""
    title = "Adam, all parameters"
    return Panel(title, "layers a side", UPDATE, lines, log_x=True, log_y=True, ticks=depths, direct=True)


def group_panel(label: str, optimizer: str, lines: Sequence[Series], depths: Sequence[int]) -> Panel:
    """Return the panel of one architecture and optimizer, a line a group of parameters."""
    title = f"{style.title(label)} by group, {OPTIMIZERS[optimizer]}"
    return Panel(title, "layers a side", UPDATE, lines, log_x=True, log_y=True, ticks=depths, direct=True)


def fitted(label: str) -> range:
    """Return the layers a side over which the claims fit the exponent of this architecture."""
    return UNSATURATED if style.family(label) == "postln" else COMPARED


def with_law(line: Series, exponent: float, depths: range) -> list[Series]:
    """Return the line with its exponent in its name, and faintly N^exponent through its geometric middle, over the
    depths of the fit; the line alone without an exponent."""
    if not math.isfinite(exponent):
        return [line]
    line = replace(line, label=f"{line.label}: N^{exponent:.2f}")
    inside = [place for place, depth in enumerate(line.x) if depth in depths]
    x = np.asarray(line.x, float)[inside]
    level = np.exp(np.mean(np.log(np.asarray(line.y)[inside]) - exponent * np.log(x)))
    law = {"x": x.tolist(), "y": (level * x**exponent).tolist(), "seeds": line.counts[inside].tolist()}
    return [line, replace(line, **law, low=None, high=None, detail="slope", faint=True)]


def group_line(group: str, exponent: float, points: Series) -> Series:
    """Return the line of a group of parameters in its look, with its exponent in its name."""
    marker, colour = {g: look for g, *look in zip(GROUPS, GROUPS.values(), style.PARTS, strict=True)}[group]
    power = f": N^{exponent:.2f}" if math.isfinite(exponent) else ""
    return replace(points, label=NAMES[group] + power, dash="solid", colour=colour, marker=marker)


def _against_depth(group: Runs, label: str) -> list[Series]:
    """Return the update over depth, and faintly the power law of its mean exponent through its middle."""
    own = group.where(label=label)
    points = by_label(own, lambda run: {run.depth: rate(run, "adam", "all")}, log=True)
    line = replace(points[0], dash=shown_dash(group.labels, label))
    return with_law(line, _mean_exponent(own, label, "adam", "all"), fitted(label))


def _by_group(runs: Runs, label: str, optimizer: str) -> list[Series]:
    lines = []
    for group in GROUPS:
        spread = Spread(log=True)
        for record in runs:
            if (value := rate(record, optimizer, group)) > 0:
                spread.add([record.depth], [value])
        if spread.points:
            lines.append(group_line(group, _mean_exponent(runs, label, optimizer, group), spread.series("")))
    return lines


def _growth(runs: Runs, label: str) -> list[str]:
    """Return notes on the exponent of N for each group of parameters, mean over seeds."""
    found = []
    for optimizer, name in OPTIMIZERS.items():
        means = {group: _mean_exponent(runs, label, optimizer, group) for group in GROUPS}
        shown = [f"{NAMES[group]} {mean:.2f}" for group, mean in means.items() if math.isfinite(mean)]
        if shown:
            depths = _said(fitted(label))
            found.append(f"{style.title(label)}, exponents of N under {name}, {depths}: {', '.join(shown)}.")
    return found


def _said(depths: range) -> str:
    return f"{depths[0]} to {depths[-1]} layers a side"


def _mean_exponent(runs: Runs, label: str, optimizer: str, group: str) -> float:
    """Return the mean over seeds of the exponent, over the depths of the claims; NaN if no seed has two of them."""
    found = [*exponents(runs, optimizer, group, fitted(label)).values()]
    return round(float(np.mean(found)), 2) + 0.0 if found else math.nan  # no -0.00


def _finding(group: Runs) -> str:
    depths, names = group.depths, ", ".join(map(style.title, group.labels))
    shown = (of_gain_one(group.labels, "postln"), "deepnorm", "branchnorm")
    growth = {label: _mean_exponent(group.where(label=label), label, "adam", "all") for label in shown}
    pieces = [f"{style.title(label)}'s as N^{mean:.2f}" for label, mean in growth.items() if math.isfinite(mean)]
    if not pieces:
        return f"‖ΔF‖ of one update of {names} at {len(depths)} depth{'s' if len(depths) > 1 else ''}, no exponent."
    theorem = _mean_exponent(group.where(label="deepnorm"), "deepnorm", "sgd", "vo_ffn")
    scope = f"; in the theorem's scope (SGD on v, out and FFN) DeepNorm's as N^{theorem:.2f}"
    seeds = f"one seed, {group.seeds[0]}" if len(group.seeds) == 1 else f"{len(group.seeds)} seeds"
    ending = f"{scope if math.isfinite(theorem) else ''} ({FITTED}; {seeds})"
    return f"One Adam update from initialisation moves the output: {', '.join(pieces)}{ending}."


@claim(
    "C19",
    figure="deepnet:5",
    stage="first updates",
    paper="DeepNet",
    sentence="Post-LN's model update grows with depth",
    source="DeepNet, Fig. 5",
    statistic=f"exponent of N in ||dF|| / lr of one Adam update of all parameters, 6 to 25 layers a side{GAIN}",
    threshold="R: > .5; X: < .15 (the plan names no X: ours)",
    sweep=FAST,
    pilot=".7 to 1.0; a plateau beyond 25 layers",
)
@by_gain
def postln_update_grows(runs: Runs, gain: str) -> list[Effect]:
    regions = Region(low=0.5), Region(high=0.15)
    return [growth("exponent", runs, f"postln{gain}", "adam", "all", UNSATURATED, *regions)]


@claim(
    "C20",
    figure="deepnet:5",
    stage="first updates",
    paper="DeepNet",
    sentence="DeepNet's model update does not depend on depth",
    source="DeepNet, Fig. 5 and Theorem 4.3",
    statistic="exponent of N in ||dF|| / lr of one Adam update of all parameters, 6 to 50 layers a side",
    threshold="R: within .15 of 0; X: > .3",
    sweep=FAST,
    pilot=".56",
)
def deepnet_update_is_constant(runs: Runs) -> list[Effect]:
    return [growth("exponent", runs, "deepnorm", "adam", "all", COMPARED, STEADY, Region(low=0.3))]


@claim(
    "C21",
    figure="deepnet:5",
    stage="first updates",
    paper="DeepNet",
    sentence="... for SGD and the v, output and FFN weights: the scope of its theorem",
    source="DeepNet, Theorem 4.3",
    statistic="the same of one SGD update of the v, out, fc1 and fc2 weights",
    threshold="R: within .15 of 0; X: > .3",
    sweep=FAST,
    pilot="-.06",
    kind="implied",
)
def constant_in_the_theorems_scope(runs: Runs) -> list[Effect]:
    return [growth("exponent", runs, "deepnorm", "sgd", "vo_ffn", COMPARED, STEADY, Region(low=0.3))]


@claim(
    "C22",
    figure="deepnet:5",
    stage="first updates",
    paper="DeepNet",
    sentence="DeepNet's model update is much smaller than Post-LN's, at every depth",
    source="DeepNet, Fig. 5",
    statistic="||dF|| / lr of one Adam update of all parameters, Post-LN / DeepNorm, geometric mean over N from 6 to "
    f"50; beside it each N{GAIN}",
    threshold="R: > 3; X: < 1 (the plan names no X: ours)",
    sweep=FAST,
    pilot="10 to 20",
    kind="implied",
    after=NAMED_LATER,
)
@by_gain
def much_smaller_update(runs: Runs, gain: str) -> list[Effect]:
    label = f"postln{gain}"
    first, second = of_label(runs, label), of_label(runs, "deepnorm")
    found = []
    for depth in (n for n in first.depths if n in COMPARED):
        compared = pairs(*(own.where(depth=depth) for own in (first, second)))
        ratio = {seed: rate(a, "adam", "all") / rate(b, "adam", "all") for seed, a, b in compared}
        if ratio:
            found.append(Effect(f"ratio at {depth}L", ratio, log=True, of=both(compared)))
    if len(found) < 2:
        raise MissingRuns(
            f"needs one-step runs of {label} and deepnorm at two depths from 6 to 50, with the same seeds"
        )
    return [together("ratio, mean over depths", found, _geometric, Region(low=3), Region(high=1)), *found]


def _geometric(values: list[float]) -> float:
    return math.exp(np.mean(np.log(values)))


DEEP = (one_step.GAIN_1[0], "postln", "deepnorm", "branchnorm")


@sweep(
    "deepnet:5",
    scales=("tiny", "h200", "paper"),
    minutes=29,
    folder={"tiny": "claims:fast", "paper": "claims:fast"},
)
def steps_by_depth(ask: Recipe) -> Iterator[Experiment]:
    """Takes the one-step runs of admin:4, and steps once 100 layers a side.

    DeepNet's own model is 64-128-2, so all scales are of that size; at scale paper the early training as well, and on
    one GPU the first 100 updates of it alone. Those in float32: an update moves a weight by 1e-5 of itself at first,
    and bfloat16 sees 4e-3; the deepest first, since they take longest.
    """
    if ask.tiny:
        yield from one_step.from_initialisation(ask)
        yield from ask.runs(DEEP, [100], one_step.TINY, seeds=SEEDS[:3], kind="onestep")
    elif ask.one_gpu:
        length = {"train": {"steps": 100}}
        shared = (one_gpu.TEXT, recipe.EARLY, one_gpu.NO_WEIGHTS, length, probing("model_update"))
        for one in one_gpu.by_seed(ask, SEEDS[:3]):
            for layers in (100, 50, 25, 18, 12, 6):
                yield from one.runs(("postln", "deepnorm", "branchnorm", "admin"), [layers], *shared)
    else:
        depths = (6, 12, 18, 25, 50, 100)
        early = merge(recipe.EARLY, {"train": {"steps": 101}})
        yield from ask.runs(one_step.ARCHS, depths, one_step.TINY, kind="onestep", tag="64")
        yield from ask.runs(DEEP, depths, early, probing("model_update", update_every=1), tag="64-train")
