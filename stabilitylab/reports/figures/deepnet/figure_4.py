"""DeepNet, Figure 4: the model update, the inputs of the norms and the gradient in the first updates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ....experiments import Experiment, Recipe, command, one_step, probing, sweep
from ....experiments.recipe import DEEPNET, EARLY
from ... import style
from ...arrange import alike, apart
from ...base import Figure, MissingRuns, Panel, Picture, Reference, Series, Spread, figure
from ...claims import NAMED_LATER, Effect, Share, claim, together
from ...collection import Record, Runs, spans
from ...measures.comparison import counted, not_drawn
from ...measures.first_updates import (
    DEPTH,
    FIRST,
    TABLES,
    Values,
    first_arms,
    half_way,
    moved,
    norm_inputs,
    update,
    warmup,
    whole,
)
from ...measures.gains import beside, by_gain, of_gain_one
from ...measures.provenance import provenance
from ...statistics import Region

DASHES = {True: "solid", False: "dashed"}  # without and with warm-up
GAIN = "; of Xavier gain 1, and beside it of fairseq's gain (which decides where there are no runs of gain 1)"
BySeed = Mapping[int, Record]


def _ramp(updates: int) -> str:
    return f"warm-up {updates}" if updates else "no warm-up"


def _name(label: str, updates: int) -> str:
    return f"{style.title(label)}, {_ramp(updates)}"


@figure("deepnet:4", title="The first updates: model update, norm inputs, gradient", source="DeepNet, Figure 4")
class FirstUpdates(Figure):
    """The first updates: (a) ‖F(x; theta_i) - F(x; theta_0)‖ per token at the decoder's output; (b, c) the mean input
    of the norms behind feed-forward networks and behind attention, over its value at the start; (d) the gradient norm
    by decoder layer.

    Inferred: "input from FFN to LN" may mean the sum or the branch alone, so the controls show the branch too.
    """

    def picture(self, runs: Runs) -> Picture:
        groups = runs.where(lambda run: bool(update(run)), kind="train", table=TABLES).groups("train.warmup")
        if not groups:
            raise MissingRuns("no run of `probe` with model_update, ln_input and grad_norm", command(self.id))
        group = max(groups, key=lambda g: (any(map(whole, g)), len({(r.label, warmup(r)) for r in g}), len(g)))
        arms = [(label, w) for label in group.labels for w in sorted({warmup(r) for r in group.where(label=label)})]
        own = {arm: group.where(label=arm[0], train__warmup=arm[1]) for arm in arms}
        saturation = math.sqrt(2 * group[0].width)
        references = [Reference(saturation, f"√(2d) = {saturation:.1f}: unrelated outputs")]
        panels = [
            Panel(
                "Model update", "update", "‖ΔF‖ (L2 per token)",
                [_over_steps(own[arm], arm, moved) for arm in arms],
                references,
            ),
            *alike(_inputs(own, ffn=ffn) for ffn in (True, False)),
            _gradients(own),
        ]  # fmt: skip
        main, controls = apart(panels, _papers([label for label, _ in own]))
        branches = alike(_inputs(own, ffn=ffn, branch=True) for ffn in (True, False))
        controls = [*controls, *(panel for panel in branches if panel.series)]
        notes = [f"Drawn: {group.describe()}. Lines are means over seeds (d: geometric), bands their range."]
        notes += not_drawn(sum(map(len, groups)) - len(group), "with other settings")
        if any(record.label == "deepnorm" for record in group):
            notes.append("DeepNorm's norm inputs are its shortcut factor times √d by construction.")
        if any(style.family(record.label) == "branchnorm" for record in group):
            notes.append("BranchNorm's branch alone is F before it is multiplied by alpha.")
        return Picture(main, _finding(own), notes, controls=controls, provenance=provenance(group))


def _papers(labels: Sequence[str]) -> list[str]:
    return [of_gain_one(labels, label) for label in ("postln", "postln-init")]


def _over_steps(runs: Runs, arm: tuple[str, int], values: Values) -> Series:
    spread = Spread()
    for record in runs:
        points = {step: value for step, value in values(record).items() if step <= FIRST}
        spread.add([*points], [*points.values()])
    label, updates = arm
    return spread.series(style.title(label), arch=label, dash=DASHES[updates == 0], detail=_ramp(updates))


def _inputs(own: dict[tuple[str, int], Runs], ffn: bool, branch: bool = False) -> Panel:
    """Return the inputs of the norms behind one kind of sub-layer, or the ``branch`` alone, over their first value."""
    column = "branch" if branch else "value"

    def values(record: Record) -> dict[int, float]:
        found = norm_inputs(record, column, ffn)
        start = found[min(found)] if found else 0.0
        return {step: value / start for step, value in found.items()} if start else {}

    arms = {arm: runs for arm, runs in own.items() if not (branch and beside([label for label, _ in own], arm[0]))}
    lines = [_over_steps(runs, arm, values) for arm, runs in arms.items()]
    what = f"{'Branches alone' if branch else 'Norm inputs'}, {'feed-forward' if ffn else 'attention'}"
    return Panel(what, "update", "mean token norm / that at the start", [line for line in lines if len(line.x)])


def _gradients(own: dict[tuple[str, int], Runs]) -> Panel:
    lines = []
    steps: set[int] = set()
    for arm, runs in own.items():
        spread = Spread(log=True)
        for record in runs:
            data = record.at("grad_norm", FIRST, ["value"], by="layer")
            steps |= set(data["step"].tolist())
            data = data[(data["stack_name"] == "decoder") & (data["layer"] > 0)]
            spread.add(data["layer"].tolist(), data["value"].tolist())
        dash, detail = DASHES[arm[1] == 0], _ramp(arm[1])
        lines.append(spread.series(style.title(arm[0]), arch=arm[0], dash=dash, detail=detail))
    return Panel(f"Gradient at update {spans([*steps])}", "decoder layer", "gradient norm (L2)", lines, log_y=True)


def _finding(own: dict[tuple[str, int], Runs]) -> str:
    """Compare ||dF|| at the last of the first 30 updates that every run has."""
    curves = {arm: [moved(record) for record in runs] for arm, runs in own.items()}
    shared = set.intersection(*(set(curve) for found in curves.values() for curve in found))
    last = max((step for step in shared if step <= FIRST), default=0)
    if not last:
        return "These runs have no update in common."
    means = {arm: float(np.mean([curve[last] for curve in found])) for arm, found in curves.items()}
    order = sorted(means, key=lambda arm: -means[arm])
    count = counted([len(runs) for runs in own.values()])
    return f"‖ΔF‖ after {last} updates: {', '.join(f'{_name(*arm)} {means[arm]:.2g}' for arm in order)} ({count})."


@claim(
    "C13",
    figure="deepnet:4",
    stage="first updates",
    paper="DeepNet",
    sentence="Without warm-up Post-LN's update explodes at once and then freezes",
    source="DeepNet, Fig. 4a",
    statistic="mean change of F per update in 10-30 over that of the first, 18L-18L; beside it ||dF|| after two "
    f"updates over sqrt(2d){GAIN}",
    threshold="R: < .05; X: > .2",
    sweep="deepnet:4",
)
@by_gain
def explodes_then_freezes(runs: Runs, gain: str) -> list[Effect]:
    jump: dict[int, float] = {}
    later: dict[int, float] = {}
    (arm,) = first_arms(runs, (f"postln{gain}", True))
    for seed, record in arm.items():
        points = update(record)
        jump[seed] = points[2]["cumulative"] / math.sqrt(2 * record.width)
        moves = [points[step]["one_update"] for step in range(10, FIRST + 1)]
        later[seed] = float(np.mean(moves)) / points[1]["one_update"]
    return [
        Effect("later change / first", later, Region(high=0.05), Region(low=0.2), log=True, of=arm.values()),
        Effect("||dF||(2) / sqrt(2d)", jump, log=True, of=arm.values()),
    ]


def _thirty(
    name: str,
    first: BySeed,
    second: BySeed,
    reproduced: Region | None = None,
    contradicted: Region | None = None,
) -> Effect:
    """Return ||dF|| of the first over that of the second, after 30 updates."""
    seeds = sorted(first.keys() & second.keys())
    ratio = {seed: moved(first[seed])[FIRST] / moved(second[seed])[FIRST] for seed in seeds}
    of = [own[seed] for own in (first, second) for seed in seeds]
    return Effect(name, ratio, reproduced, contradicted, log=True, of=of)


@claim(
    "C14",
    figure="deepnet:4",
    stage="first updates",
    paper="DeepNet",
    sentence="Warm-up reduces the early update",
    source="DeepNet, Fig. 4a",
    statistic=f"||dF|| after 30 updates of Post-LN, with warm-up over without{GAIN}",
    threshold="R: < .8; X: > 1 (the plan names no X: ours)",
    sweep="deepnet:4",
)
@by_gain
def warmup_reduces_the_update(runs: Runs, gain: str) -> list[Effect]:
    warm, cold = first_arms(runs, (f"postln{gain}", False), (f"postln{gain}", True))
    return [_thirty("with / without warm-up", warm, cold, Region(high=0.8), Region(low=1))]


@claim(
    "C15",
    figure="deepnet:4",
    stage="first updates",
    paper="DeepNet",
    sentence="The early update is ordered: no warm-up > warm-up > Post-LN-init with warm-up",
    source="DeepNet, Fig. 4a",
    statistic="the smaller of two ratios of ||dF|| after 30 updates, no warm-up / warm-up and warm-up / init with "
    f"warm-up; beside it each{GAIN}",
    threshold="R: > 1; X: < 1",
    sweep="deepnet:4",
    after=NAMED_LATER,
)
@by_gain
def order_of_updates(runs: Runs, gain: str) -> list[Effect]:
    wanted = [(f"postln{gain}", True), (f"postln{gain}", False), (f"postln-init{gain}", False)]
    cold, warm, init = first_arms(runs, *wanted)
    each = [_thirty("no warm-up / warm-up", cold, warm), _thirty("warm-up / init with warm-up", warm, init)]
    return [together("the smaller ratio", each, np.min, Region(low=1), Region(high=1)), *each]


@claim(
    "C16",
    figure="deepnet:4",
    stage="first updates",
    paper="DeepNet",
    sentence="Without warm-up or init the inputs of the norms become much larger than sqrt(d)",
    source="DeepNet, Figs. 4b and 4c",
    statistic="growth of the mean token norm of all norm inputs since initialisation, update 30 over step 0, Post-LN "
    f"without warm-up; beside it its size over sqrt(d) at update 30, and that of Post-LN-init with warm-up{GAIN}",
    threshold="R: > 2; X: < 1.5 (those of the size over sqrt(d), which was the claim's first effect)",
    sweep="deepnet:4",
    pilot="1.3 at step 0",
    after=NAMED_LATER,
)
@by_gain
def large_norm_inputs(runs: Runs, gain: str) -> list[Effect]:
    (cold,) = first_arms(runs, (f"postln{gain}", True), tables=["ln_input"])
    found = {seed: norm_inputs(record, "value") for seed, record in cold.items()}
    growth = {seed: sizes[FIRST] / sizes[0] for seed, sizes in found.items()}
    size = {seed: sizes[FIRST] for seed, sizes in found.items()}
    effects = [
        Effect("growth, no warm-up", growth, Region(low=2), Region(high=1.5), log=True, of=cold.values()),
        Effect("size / sqrt(d), no warm-up", size, log=True, of=cold.values()),
    ]
    try:
        (init,) = first_arms(runs, (f"postln-init{gain}", False), tables=["ln_input"])
    except MissingRuns:
        return effects
    size = {seed: norm_inputs(record, "value")[FIRST] for seed, record in init.items()}
    return [*effects, Effect("size / sqrt(d), Post-LN-init, warm-up", size, log=True, of=init.values())]


@claim(
    "C18",
    figure="deepnet:4",
    stage="first updates",
    paper="DeepNet",
    sentence="First the update jumps, then the norm inputs grow, then the gradient is lost",
    source="DeepNet, Sec. 3",
    statistic="share of seeds at which, in Post-LN without warm-up, ||dF||, norm inputs and -log(first / last decoder "
    f"activation gradient) first cross half of their own maximum in this order (equality allowed){GAIN}",
    threshold="R: > .8; X: < .5 (the plan names no X: ours)",
    sweep="deepnet:4",
)
@by_gain
def order_of_events(runs: Runs, gain: str) -> list[Share]:
    tables = ("model_update", "ln_input", "activation_grad_norm")
    (arm,) = first_arms(runs, (f"postln{gain}", True), tables=tables)
    times = {seed: half_way(record) for seed, record in arm.items()}
    kept = {seed: (int(a <= b <= c), 1) for seed, (a, b, c) in times.items()}
    return [Share("seeds in this order", kept, Region(low=0.8), Region(high=0.5), of=arm.values())]


@sweep("deepnet:4", minutes=17)
def first_updates(ask: Recipe) -> Iterator[Experiment]:
    """Records every step of 101 updates, 18L-18L, with and without warm-up; Post-LN without it has ten seeds, since
    C18 counts runs."""
    tables = ("activation_grad_norm", "grad_norm", "ln_input", "model_update")
    shared = (EARLY if ask.tiny else DEEPNET, {"train": {"steps": 101}}, probing(*tables, every=1, update_every=1))
    cold, warm = {"train": {"warmup": 0}}, {"train": {"warmup": 4000}}
    for post, init in (one_step.GAIN_1, ("postln", "postln-init")):
        yield from ask.runs([post], [DEPTH], *shared, cold, seeds=range(3, 13), tag="warmup0")
        yield from ask.runs([init], [DEPTH], *shared, cold, tag="warmup0")
        yield from ask.runs([post, init], [DEPTH], *shared, warm, tag="warmup4000")
    yield from ask.runs(["deepnorm", "branchnorm"], [DEPTH], *shared, warm, tag="warmup4000")
