"""Admin, Figure 3: the fall of the activations' gradient from layer to layer at initialisation."""

from __future__ import annotations

import math

import numpy as np

from ....experiments import command
from ... import style
from ...arrange import alike, apart
from ...base import Figure, MissingRuns, Panel, Picture, figure
from ...claims import NAMED_LATER, Effect, Share, claim, together
from ...collection import LAYERS, Record, Runs
from ...measures.by_label import by_label
from ...measures.comparison import comparable, counted, hidden, left_out, lost_by_seed, nothing_drawn
from ...measures.gains import FAIRSEQS, OWN, by_gain
from ...measures.initialisation import TABLE, at_initialisation, first_over_last, gradients
from ...measures.layers import STACKS
from ...measures.provenance import provenance
from ...statistics import Region, r_squared, slope

PAPERS = ("postln", "preln", "admin")  # series of the paper
DEPTH = 18  # layers a side of the paper's models
DEPTHS = range(6, 51)  # layers a side over which the vanishing is followed
LONG = 3000  # updates after which a model that is going to fail has failed
FAST = "claims:fast"
MIXED = "postln/preln"
DEEP = 50  # layers a side
SETTING = {OWN: " --set model.init=xavier-1", FAIRSEQS: ""}  # of a sweep
EARLY = 20  # updates within which Adam has to balance the gradients in a deep model


@figure("admin:3", title="Relative gradient by layer at initialisation", source="Admin, Figure 3 and Table 1")
class RelativeGradient(Figure):
    """The norm ||dE/dx_l|| at step 0, divided by the largest of its stack, by layer. It is 1 everywhere if nothing
    vanishes or explodes.

    The numbers come from one-step runs (float64), or from the first row of training runs. Inferred: the batch; the
    paper takes its first one.
    """

    def picture(self, runs: Runs) -> Picture:
        fit = runs.where(lambda run: run.depth > 0, table=TABLE)
        groups = sorted(comparable(fit), key=lambda g: (len(g.labels), -abs(g[0].depth - DEPTH), len(g)), reverse=True)
        group = next((g for g in groups if any(gradients(run, stack) for run in g for stack in STACKS)), None)
        if group is None:
            raise MissingRuns(f"no run with {TABLE} at initialisation", command("admin:4"))
        panels, zero = [], []
        for stack in STACKS:

            def relative(record: Record, stack: str = stack) -> dict[float, float]:
                values = gradients(record, stack)
                if largest := max(values.values(), default=0.0):
                    return {layer: value / largest for layer, value in values.items()}
                zero.extend([f"{style.title(record.label)} ({stack})"] if values else [])  # behind alpha = 0
                return {}

            lines = by_label(group, relative, log=True)
            if lines:
                panels.append(Panel(stack.capitalize(), "layer", "gradient / largest of its stack", lines, log_y=True))
        notes = [f"Drawn: {group.describe()}, at initialisation. Lines are geometric means over seeds."]
        panels, controls = apart(alike(panels), PAPERS)
        return Picture(
            panels,
            _finding(group),
            [*notes, *nothing_drawn([*dict.fromkeys(zero)]), *hidden(panels), *left_out(fit, group)],
            controls=controls,
            provenance=provenance(group),
        )


def _finding(group: Runs) -> str:
    stack = "decoder" if any(gradients(record, "decoder") for record in group) else "encoder"
    words = []
    for label in group.labels:
        ratios = [first_over_last(gradients(record, stack)) for record in group.where(label=label)]
        if all(value > 0 for value in ratios):
            words.append(f"{style.title(label)} {math.exp(np.mean(np.log(ratios))):.2g}")
    found = ", ".join(words) or "zero or not measured in every model"
    return f"Gradient at the first over the last {stack} layer ({counted(len(group.seeds))}): {found}."


def _ratio(
    name: str, runs: Runs, label: str, stack: str, reproduced: Region | None = None, contradicted: Region | None = None
) -> Effect:
    """Return the gradient at the first layer over that at the last of 18 layers a side."""
    found = at_initialisation(runs, label, DEPTH, TABLE)
    ratios = {seed: first_over_last(gradients(record, stack)) for seed, record in found.items()}
    return Effect(name, ratios, reproduced, contradicted, log=True, of=found.values())


@claim(
    "C01",
    figure="admin:3",
    stage="initialisation",
    paper="Admin",
    sentence="Gradients of a Post-LN decoder vanish at initialisation",
    source="Admin, Fig. 3 and Table 1; DeepNet, Fig. 4d",
    statistic="activation gradient at the first over the last decoder layer, 18L-18L",
    threshold="R: < .05; X: > .3",
    sweep=FAST,
    pilot=".003",
)
def postln_decoder_vanishes(runs: Runs) -> list[Effect]:
    return [_ratio("first / last", runs, "postln", "decoder", Region(high=0.05), Region(low=0.3))]


@claim(
    "C02",
    figure="admin:3",
    stage="initialisation",
    paper="Admin",
    sentence="Gradients of a Post-LN encoder do not vanish",
    source="Admin, Theorem 1",
    statistic="activation gradient at the first over the last encoder layer, 18L-18L",
    threshold="R: in [.3, 10]; X: < .1",
    sweep=FAST,
    pilot="2.0",
)
def postln_encoder_does_not(runs: Runs) -> list[Effect]:
    return [_ratio("first / last", runs, "postln", "encoder", Region(0.3, 10), Region(high=0.1))]


@claim(
    "C03",
    figure="admin:3",
    stage="initialisation",
    paper="BranchNorm",
    sentence="The vanishing grows exponentially with the decoder's depth",
    source="BranchNorm, Eqs. 4 and 14",
    statistic="slope of a straight line through log(first / last) of the Post-LN decoder against N, 6 to 50; beside it "
    "the line's R^2",
    threshold="R: slope < -.1 nat a layer; X: slope > 0 (the plan names no X: ours)",
    sweep=FAST,
    pilot="-.30 to -.33 nat a layer",
)
def exponential_in_depth(runs: Runs) -> list[Effect]:
    own = runs.where(lambda run: run.depth in DEPTHS and len(set(run.layers)) == 1, label="postln", table=TABLE)
    best: dict[int, list[tuple[int, float]]] = {}
    of: Runs = own
    for group in own.groups(*LAYERS):
        found: dict[int, list[tuple[int, float]]] = {seed: [] for seed in group.seeds}
        for record in group:
            ratio = first_over_last(gradients(record, "decoder"))
            if ratio > 0:  # 0: too small for a float32, and no point for a line
                found[record.seed].append((record.depth, math.log(ratio)))
        found = {seed: sorted(points) for seed, points in found.items() if len(points) > 2}
        if sum(map(len, found.values())) > sum(map(len, best.values())):
            best, of = found, group
    if not best:
        raise MissingRuns("needs Post-LN at three depths or more, from 6 to 50 layers a side")
    lines = {seed: tuple(zip(*points, strict=True)) for seed, points in best.items()}
    return [
        Effect(
            "slope [nat/layer]", {s: slope(*xy) for s, xy in lines.items()}, Region(high=-0.1), Region(low=0), of=of
        ),
        Effect("R^2", {s: r_squared(*xy) for s, xy in lines.items()}, of=of),
    ]


@claim(
    "C04",
    figure="admin:3",
    stage="initialisation",
    paper="DeepNet",
    sentence="In Pre-LN the gradients at the bottom are larger than at the top",
    source="DeepNet, Sec. 1",
    statistic="parameter gradient norm of the first over the last encoder layer, 18L-18L",
    threshold="R: > 1.5; X: < 1",
    sweep=FAST,
    pilot="2.8",
)
def preln_bottom_heavy(runs: Runs) -> list[Effect]:
    ratio = {}
    found = at_initialisation(runs, "preln", DEPTH, "grad_norm")
    for seed, record in found.items():
        data = record.at("grad_norm", 0, ["value"], by="layer")
        data = data[(data["stack_name"] == "encoder") & (data["layer"] > 0)]
        ratio[seed] = first_over_last(dict(zip(data["layer"].tolist(), data["value"].tolist(), strict=True)))
    return [Effect("first / last", ratio, Region(low=1.5), Region(high=1), log=True, of=found.values())]


@claim(
    "C05",
    figure="admin:3",
    stage="after training",
    must_read=False,
    paper="Admin",
    sentence="A Pre-LN decoder cures the vanishing, but with a Post-LN encoder the model diverges all the same",
    source="Admin, Table 1",
    statistic="share of models of a Post-LN encoder and a Pre-LN decoder, 18L-18L, one a seed, that diverged or are "
    "stuck after 3,000 updates; beside it the first / last activation gradient of their decoder at initialisation",
    threshold="R: more than half failed; X: less than half",
    sweep=FAST,
    after=NAMED_LATER,
)
def preln_decoder_cures_vanishing(runs: Runs) -> list[Effect | Share]:
    ratio = _ratio("first / last, decoder", runs, MIXED, "decoder")
    name, regions = "mixed models that failed", (Region(low=0.5), Region(high=0.5))
    groups = [group for group in _long(runs).groups() if MIXED in group.labels]
    if not groups:  # a share without a value: the ratio alone does not say which models train
        return [Share(f"{name} (no runs of {LONG:,} updates)", {}, *regions), ratio]
    mixed, pure = (groups[0].where(label=label) for label in (MIXED, "preln"))
    found: list[Effect | Share] = [Share(name, lost_by_seed(mixed), *regions, of=mixed), ratio]
    return [*found, Share("Pre-LN models that failed", lost_by_seed(pure), of=pure)] if pure else found


def _long(runs: Runs) -> Runs:
    def fit(run: Record) -> bool:
        return run.updates >= LONG

    return runs.where(fit, kind="train", label=(MIXED, "preln"), layers=(DEPTH, DEPTH))


@claim(
    "C06",
    figure="admin:3",
    stage="initialisation",
    paper="BranchNorm",
    sentence="DeepNorm's gradients are nearly uniform over the layers",
    source="BranchNorm, Eq. 6",
    statistic="max / min over decoder layers of the activation gradient at initialisation, the larger of N = 18 and "
    "50; beside it each",
    threshold="R: < 1.5; X: > 5",
    sweep=FAST,
    pilot="1.04",
    after=NAMED_LATER,
)
def deepnorm_uniform(runs: Runs) -> list[Effect]:
    effects = []
    for depth in (18, 50):
        found = at_initialisation(runs, "deepnorm", depth, TABLE)
        values = {seed: np.array([*gradients(record, "decoder").values()]) for seed, record in found.items()}
        ratio = {seed: float(each.max() / each.min()) if each.all() else math.nan for seed, each in values.items()}
        effects.append(Effect(f"max / min, {depth}L", ratio, log=True, of=found.values()))
    return [together("max / min, the larger", effects, np.max, Region(high=1.5), Region(low=5)), *effects]


@claim(
    "C33",
    figure="admin:3",
    stage="first updates",
    paper="Admin",
    sentence="Adam removes the imbalance of gradients",
    source="Admin, Sec. 3.3",
    statistic="update RMS of the first over the last decoder layer of a 50L-50L Post-LN of Xavier gain 1 (without such "
    "runs of fairseq's gain, which else stand beside it), mean over updates 1-20 (of ratios, not logs: an update lost "
    "to rounding is exactly 0); printed: share of gradient entries below Adam's eps",
    threshold="R: in [1/3, 3]; X: < 1/3, as where gradients fall below Adam's eps, or > 3 (ours)",
    sweep="deepnet:4",
    after="the second X, > 3, came after the runs",
)
@by_gain
def adam_balances(runs: Runs, gain: str) -> list[Effect]:
    label = f"postln{gain}"
    deep = runs.where(kind="train", label=label, layers=(DEEP, DEEP), table="update_ratio")
    groups = deep.where(lambda run: run.updates >= EARLY).groups()
    if not groups:
        raise MissingRuns(
            f"needs a {DEEP}L-{DEEP}L {label} of {EARLY} updates with update_ratio",
            f"stabilitylab sweep --grid arch=postln depth={2 * DEEP} seed=3..7 steps={EARLY}{SETTING[gain]}",
        )
    own = groups[0].by_seed()
    ratios = {seed: _balance(record) for seed, record in own.items()}
    outside = Region(low=3) if np.mean([*ratios.values()]) > 1 else Region(high=1 / 3)
    below = [_below_eps(record) for record in own.values()]
    printed = f" ({100 * np.mean(below):.0f} % of gradient entries below eps)" if np.isfinite(below).all() else ""
    name = f"first / last decoder layer{printed}"
    return [Effect(name, ratios, Region(1 / 3, 3), outside, of=own.values())]


def _balance(record: Record) -> float:
    data = record.frame("update_ratio", ["rms"])
    data = data[(data["stack_name"] == "decoder") & (data["layer"] > 0) & (data["step"] < EARLY)]
    squares = data.assign(rms=data["rms"] ** 2).pivot_table("rms", "step", "layer", observed=True)
    ratio = np.sqrt(squares.iloc[:, 0] / squares.iloc[:, -1].replace(0.0, np.nan))
    return float(ratio.mean())


def _below_eps(record: Record) -> float:
    data = record.metrics
    if "grad_under_eps" not in data:
        return math.nan
    return float(data.loc[data["step"] < EARLY, "grad_under_eps"].mean())
