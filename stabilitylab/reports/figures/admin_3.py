"""Admin, Figure 3: how the gradient of the activations falls from layer to layer at initialisation."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ...experiments import command
from .. import style
from ..base import Figure, MissingRuns, Panel, Picture, Spread, figure
from ..claims import Effect, Share, claim
from ..collection import LAYERS, Record, Runs
from ..layerwise import STACKS, layer_values
from ..statistics import Region, r_squared, slope
from .branchnorm_5 import failed

TABLE = "activation_grad_norm"
DEPTH = 18  # layers a side of the paper's models
FAST = "claims:fast"


def gradients(record: Record, stack: str) -> dict[int, float]:
    """Layer -> ||dE/dx_l|| at step 0, x_l the layer's output (that of its feed-forward sub-layer)."""
    data = record.at(TABLE, 0, ["value"])
    data = data[(data["stack"] == stack) & (data["sublayer"] == "ffn")]
    return dict(zip(data["layer"].tolist(), data["value"].tolist(), strict=True))


def first_over_last(record: Record, stack: str) -> float:
    """The gradient at the lowest layer over that at the highest; NaN without such a stack."""
    values = gradients(record, stack)
    return values[min(values)] / values[max(values)] if values else math.nan


@figure("admin:3", title="Relative gradient by layer at initialisation", source="Admin, Figure 3 and Table 1")
class RelativeGradient(Figure):
    """||dE/dx_l|| over the largest of its stack at step 0, by layer; 1 everywhere where nothing vanishes or explodes.

    From one-step runs (float64), or the first row of training runs. Inferred: the batch; the paper's is its first one.
    """

    def picture(self, runs: Runs) -> Picture:
        groups = runs.where(table=TABLE).groups()
        if not groups:
            raise MissingRuns(f"no run with {TABLE}", command("admin:4"))
        group = max(groups, key=lambda g: (len(g.labels), -abs(g[0].depth - DEPTH), len(g)))
        panels = []
        for stack in STACKS:
            lines = []
            for label in group.labels:
                spread = Spread(log=True)
                for record in group.where(label=label):
                    values = gradients(record, stack)
                    if (largest := max(values.values(), default=0.0)) > 0:  # 0: an encoder behind alpha = 0
                        spread.add([*values], [value / largest for value in values.values()])
                if spread.points:
                    lines.append(spread.series(style.title(label), arch=label))
            if lines:
                panels.append(Panel(stack.capitalize(), "layer", "gradient / largest of its stack", lines, log_y=True))
        return Picture(panels, _finding(group), [f"Drawn: {group.describe()}, at initialisation."])


def _finding(group: Runs) -> str:
    words = []
    for label in group.labels:
        ratios = [first_over_last(record, "decoder") for record in group.where(label=label)]
        if ratios and all(value > 0 for value in ratios):
            words.append(f"{style.title(label)} {math.exp(np.mean(np.log(ratios))):.2g}")
    return f"Gradient at the first over the last decoder layer: {', '.join(words)}." if words else "No decoder."


def _ratios(runs: Runs, label: str, stack: str, depth: int) -> dict[int, float]:
    own = runs.where(lambda run: run.depth == depth, label=label, table=TABLE)
    chosen = own.where(kind="onestep") or own
    if not chosen:
        raise MissingRuns(f"needs {label} of {depth} layers a side with {TABLE} at initialisation")
    return {seed: first_over_last(record, stack) for seed, record in chosen.by_seed().items()}


@claim(
    "C01",
    figure="admin:3",
    paper="Admin",
    sentence="Gradients of a Post-LN decoder vanish at initialisation",
    source="Admin, Fig. 3 and Table 1; DeepNet, Fig. 4d",
    statistic="activation gradient at the first over the last decoder layer, 18L-18L",
    threshold="R: < .05; X: > .3",
    sweep=FAST,
    pilot=".003",
)
def postln_decoder_vanishes(runs: Runs) -> list[Effect]:
    return [
        Effect("first / last", _ratios(runs, "postln", "decoder", DEPTH), Region(high=0.05), Region(low=0.3), log=True)
    ]


@claim(
    "C02",
    figure="admin:3",
    paper="Admin",
    sentence="Gradients of a Post-LN encoder do not vanish",
    source="Admin, Theorem 1",
    statistic="activation gradient at the first over the last encoder layer, 18L-18L",
    threshold="R: in [.3, 10]; X: < .1",
    sweep=FAST,
    pilot="2.0",
)
def postln_encoder_does_not(runs: Runs) -> list[Effect]:
    values = _ratios(runs, "postln", "encoder", DEPTH)
    return [Effect("first / last", values, Region(0.3, 10), Region(high=0.1), log=True)]


@claim(
    "C03",
    figure="admin:3",
    paper="BranchNorm",
    sentence="The vanishing grows exponentially with the decoder's depth",
    source="BranchNorm, Eqs. 4 and 14",
    statistic="straight line through log(first / last) of the Post-LN decoder against N, 6 to 50: slope and R^2",
    threshold="R: slope < -.1 nat a layer and R^2 > .95; X: slope > 0 (the plan names no X: ours)",
    sweep=FAST,
    pilot="-.30 to -.33 nat a layer",
)
def exponential_in_depth(runs: Runs) -> list[Effect]:
    best: dict[int, list[tuple[int, float]]] = {}
    for group in runs.where(label="postln", table=TABLE).groups(*LAYERS):
        points = {
            seed: [(r.depth, math.log(first_over_last(r, "decoder"))) for r in group if r.seed == seed and r.depth >= 6]
            for seed in group.seeds
        }
        best = max(best, {s: p for s, p in points.items() if len(p) > 2}, key=lambda b: sum(map(len, b.values())))
    if not best:
        raise MissingRuns("needs Post-LN at three depths or more from 6 layers a side")
    lines = {seed: tuple(zip(*sorted(points), strict=True)) for seed, points in best.items()}
    return [
        Effect("slope [nat/layer]", {s: slope(*xy) for s, xy in lines.items()}, Region(high=-0.1), Region(low=0)),
        Effect("R^2", {s: r_squared(*xy) for s, xy in lines.items()}, Region(low=0.95)),
    ]


@claim(
    "C04",
    figure="admin:3",
    paper="DeepNet",
    sentence="In Pre-LN the gradients at the bottom are larger than at the top",
    source="DeepNet, Sec. 1",
    statistic="parameter gradient norm of the first over the last encoder layer, 18L-18L",
    threshold="R: > 1.5; X: < 1",
    sweep=FAST,
    pilot="2.8",
)
def preln_bottom_heavy(runs: Runs) -> list[Effect]:
    own = runs.where(lambda run: run.depth == DEPTH, label="preln", table="grad_norm")
    chosen = own.where(kind="onestep") or own
    if not chosen:
        raise MissingRuns(f"needs preln of {DEPTH} layers a side with grad_norm at initialisation")
    ratio = {}
    for seed, record in chosen.by_seed().items():
        values = layer_values(record, "grad_norm", "value", "encoder", 0)
        ratio[seed] = values[min(values)] / values[max(values)]
    return [Effect("first / last", ratio, Region(low=1.5), Region(high=1), log=True)]


@claim(
    "C05",
    figure="admin:3",
    paper="Admin",
    sentence="A Pre-LN decoder cures the vanishing, but with a Post-LN encoder the model diverges all the same",
    source="Admin, Table 1",
    statistic="first / last activation gradient of the Pre-LN decoder above a Post-LN encoder, 18L-18L; "
    "share of such models that diverged or are stuck after 3,000 updates",
    threshold="R: > .3, and at least 4 of 5 failed; X: < .1, or less than half failed (the plan names no X: ours)",
    sweep=FAST,
)
def preln_decoder_cures_vanishing(runs: Runs) -> list[Effect | Share]:
    ratio = _ratios(runs, "postln/preln", "decoder", DEPTH)
    long = runs.where(lambda run: run.depth == DEPTH and _steps(run) >= 3000, kind="train", label="postln/preln")
    return [
        Effect("first / last, decoder", ratio, Region(low=0.3), Region(high=0.1), log=True),
        Share("mixed models that failed", sum(map(failed, long)), len(long), Region(low=0.8 - 1e-9), Region(high=0.5)),
    ]


def _steps(record: Record) -> int:
    return int(record.settings.get("train.steps", 0))


@claim(
    "C06",
    figure="admin:3",
    paper="BranchNorm",
    sentence="DeepNorm's gradients are nearly uniform over the layers",
    source="BranchNorm, Eq. 6",
    statistic="max / min over decoder layers of the activation gradient at initialisation, N = 18 and 50",
    threshold="R: < 1.5 at both; X: > 5 at either",
    sweep=FAST,
    pilot="1.04",
)
def deepnorm_uniform(runs: Runs) -> list[Effect]:
    return [
        Effect(f"max / min, {depth}L", _spread(runs, depth), Region(high=1.5), Region(low=5), log=True)
        for depth in (18, 50)
    ]


def _spread(runs: Runs, depth: int, of: Callable[[Record, str], dict[int, float]] = gradients) -> dict[int, float]:
    own = runs.where(lambda run: run.depth == depth, label="deepnorm", table=TABLE)
    chosen = own.where(kind="onestep") or own
    if not chosen:
        raise MissingRuns(f"needs deepnorm of {depth} layers a side with {TABLE} at initialisation")
    values = {seed: of(record, "decoder").values() for seed, record in chosen.by_seed().items()}
    return {seed: max(each) / min(each) for seed, each in values.items()}
