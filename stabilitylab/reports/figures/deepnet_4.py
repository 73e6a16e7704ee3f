"""DeepNet, Figure 4: the model update, the inputs of the norms and the gradient in the first updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ...experiments import command
from .. import style
from ..base import Figure, MissingRuns, Panel, Picture, Reference, Series, Spread, figure
from ..claims import Effect, Share, claim
from ..collection import Record, Runs, spans
from ..statistics import Region, signed_rank

FIRST = 30  # updates that the paper draws
DEPTH = 18  # layers a side of the paper's figure
TABLES = ("model_update", "ln_input", "grad_norm")
Values = Callable[[Record], dict[int, float]]
DASHES = {True: "solid", False: "dashed"}  # without and with warm-up
BRANCH_DASHES = {True: "dashdot", False: "dotted"}


def warmup(record: Record) -> int:
    return int(record.settings.get("train.warmup", 0))


def _ramp(updates: int) -> str:
    return f"warm-up {updates}" if updates else "no warm-up"


def _name(label: str, updates: int) -> str:
    return f"{style.title(label)}, {_ramp(updates)}"


def update(record: Record) -> dict[int, dict[str, float]]:
    """Step -> cumulative and one_update of the last stack's output, ||dF|| per token."""
    data = record.frame("model_update", ["cumulative", "one_update"])
    stacks = data["stack_name"].unique().tolist()
    data = data[data["stack_name"] == ("decoder" if "decoder" in stacks else stacks[0])]
    return {
        int(step): {"cumulative": a, "one_update": b}
        for step, a, b in zip(data["step"], data["cumulative"], data["one_update"], strict=True)
    }


def whole(record: Record, table: str = "model_update") -> bool:
    """Is each of the first 30 updates on record?"""
    return {*range(FIRST + 1)} <= {*record.frame(table)["step"].tolist()}


def moved(record: Record) -> dict[int, float]:
    """Step -> ||dF|| since the start."""
    return {step: values["cumulative"] for step, values in update(record).items()}


def norm_inputs(record: Record, column: str, ffn: bool | None = None) -> dict[int, float]:
    """Step -> mean over norms (behind feed-forward networks, attention, or all) of the token norm, over sqrt(d)."""
    data = record.frame("ln_input", [column])
    if ffn is not None:
        data = data[(data["sublayer"] == "ffn") if ffn else data["sublayer"].isin(["self_attn", "cross_attn"])]
    means = data[data["layer"] > 0].groupby("step")[column].mean() / math.sqrt(record.width)
    return {int(step): float(value) for step, value in means.items()}


@figure("deepnet:4", title="The first updates: model update, norm inputs, gradient", source="DeepNet, Figure 4")
class FirstUpdates(Figure):
    """(a) ||F(x; theta_i) - F(x; theta_0)|| per token at the decoder's output; (b, c) mean input of the norms behind
    feed-forward networks and attention over sqrt(d), and of the branch alone; (d) gradient norm by decoder layer.

    Inferred: "input from FFN to LN" may be the sum or the branch alone, so both are drawn.
    """

    def picture(self, runs: Runs) -> Picture:
        groups = runs.where(lambda run: bool(update(run)), kind="train", table=TABLES).groups("train.warmup")
        if not groups:
            raise MissingRuns("no training run with model_update, ln_input and grad_norm", command(self.id))
        group = max(groups, key=lambda g: (any(map(whole, g)), len({(r.label, warmup(r)) for r in g}), len(g)))
        arms = [(label, w) for label in group.labels for w in sorted({warmup(r) for r in group.where(label=label)})]
        own = {arm: group.where(label=arm[0], train__warmup=arm[1]) for arm in arms}
        saturation = math.sqrt(2 * group[0].width)
        references = [Reference(saturation, f"√(2d) = {saturation:.1f}: unrelated outputs")]
        panels = [
            Panel(
                "Model update", "update", "||dF|| (L2 per token)",
                [_over_steps(own[arm], arm, moved) for arm in arms],
                references,
            ),
            _inputs(own, ffn=True),
            _inputs(own, ffn=False),
            _gradients(own),
        ]  # fmt: skip
        notes = [f"Drawn: {group.describe()}. Lines are means over seeds (d: geometric), bands their range."]
        if others := sum(map(len, groups)) - len(group):
            notes.append(f"Not drawn: {others} run{'s' if others > 1 else ''} with other settings.")
        if any(record.label == "deepnorm" for record in group):
            notes.append("DeepNorm's norm inputs are its shortcut factor times √d by construction.")
        if any(style.family(record.label) == "branchnorm" for record in group):
            notes.append("BranchNorm's branch alone is F before it is multiplied by alpha.")
        return Picture(panels, _finding(own), notes)


def _over_steps(runs: Runs, arm: tuple[str, int], values: Values, dash: str = "", detail: str = "") -> Series:
    spread = Spread()
    for record in runs:
        points = {step: value for step, value in values(record).items() if step <= FIRST}
        spread.add([*points], [*points.values()])
    label, updates = arm
    return spread.series(
        style.title(label), arch=label, dash=dash or DASHES[updates == 0], detail=detail or _ramp(updates)
    )


def _inputs(own: dict[tuple[str, int], Runs], ffn: bool) -> Panel:
    lines = []
    for arm, runs in own.items():
        lines.append(_over_steps(runs, arm, lambda r: norm_inputs(r, "value", ffn)))
        name = f"branch alone, {_ramp(arm[1])}"
        lines.append(_over_steps(runs, arm, lambda r: norm_inputs(r, "branch", ffn), BRANCH_DASHES[arm[1] == 0], name))
    return Panel(
        f"Norm inputs, {'feed-forward' if ffn else 'attention'}", "update", "mean token norm / √d", lines, log_y=True
    )


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
    """||dF|| at the last of the first 30 updates that every run has."""
    curves = {arm: [moved(record) for record in runs] for arm, runs in own.items()}
    shared = set.intersection(*(set(curve) for found in curves.values() for curve in found))
    last = max((step for step in shared if step <= FIRST), default=0)
    if not last:
        return "These runs have no update in common."
    means = {arm: float(np.mean([curve[last] for curve in found])) for arm, found in curves.items()}
    order = sorted(means, key=lambda arm: -means[arm])
    seeds = {len(runs) for runs in own.values()}
    count = "one seed" if seeds == {1} else f"{' to '.join(map(str, sorted({min(seeds), max(seeds)})))} seeds"
    return f"||dF|| after {last} updates: {', '.join(f'{_name(*arm)} {means[arm]:.2g}' for arm in order)} ({count})."


def _arms(runs: Runs, *wanted: tuple[str, bool], tables: Sequence[str] = TABLES[:1]) -> list[dict[int, Record]]:
    """For each (label, without warm-up?) seed -> run: comparable 18L-18L runs with the first 30 updates on record."""
    ready = runs.where(kind="train", layers=(DEPTH, DEPTH), table=tables)
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


@claim(
    "C13",
    figure="deepnet:4",
    paper="DeepNet",
    sentence="Without warm-up Post-LN's update explodes at once and then freezes",
    source="DeepNet, Fig. 4a",
    statistic="||dF|| after two updates over sqrt(2d), 18L-18L; mean change per update in 10-30 over that of the first",
    threshold="R: > .6 and < .05; X: the second > .2",
    sweep="deepnet:4",
)
def explodes_then_freezes(runs: Runs) -> list[Effect]:
    jump: dict[int, float] = {}
    later: dict[int, float] = {}
    for seed, record in _arms(runs, ("postln", True))[0].items():
        points = update(record)
        jump[seed] = points[2]["cumulative"] / math.sqrt(2 * record.width)
        moves = [points[step]["one_update"] for step in range(10, FIRST + 1)]
        later[seed] = float(np.mean(moves)) / points[1]["one_update"]
    return [
        Effect("||dF||(2) / sqrt(2d)", jump, Region(low=0.6), log=True),
        Effect("later change / first", later, Region(high=0.05), Region(low=0.2), log=True),
    ]


def _thirty(first: dict[int, Record], second: dict[int, Record]) -> dict[int, float]:
    """Seed -> ||dF|| after 30 updates of the first over that of the second."""
    both = sorted(first.keys() & second.keys())
    return {seed: moved(first[seed])[FIRST] / moved(second[seed])[FIRST] for seed in both}


@claim(
    "C14",
    figure="deepnet:4",
    paper="DeepNet",
    sentence="Warm-up reduces the early update",
    source="DeepNet, Fig. 4a",
    statistic="||dF|| after 30 updates of Post-LN, with warm-up over without",
    threshold="R: < .8; X: > 1 (the plan names no X: ours)",
    sweep="deepnet:4",
)
def warmup_reduces_the_update(runs: Runs) -> list[Effect]:
    warm, cold = _arms(runs, ("postln", False), ("postln", True))
    ratio = _thirty(warm, cold)
    p = signed_rank([math.log(value) for value in ratio.values()])
    return [Effect("with / without warm-up", ratio, Region(high=0.8), Region(low=1), log=True, p=p)]


@claim(
    "C15",
    figure="deepnet:4",
    paper="DeepNet",
    sentence="The early update is ordered: no warm-up > warm-up > Post-LN-init with warm-up",
    source="DeepNet, Fig. 4a",
    statistic="ratios of ||dF|| after 30 updates",
    threshold="R: both > 1; X: either < 1",
    sweep="deepnet:4",
)
def order_of_updates(runs: Runs) -> list[Effect]:
    cold, warm, init = _arms(runs, ("postln", True), ("postln", False), ("postln-init", False))
    return [
        Effect("no warm-up / warm-up", _thirty(cold, warm), Region(low=1), Region(high=1), log=True),
        Effect("warm-up / init with warm-up", _thirty(warm, init), Region(low=1), Region(high=1), log=True),
    ]


@claim(
    "C16",
    figure="deepnet:4",
    paper="DeepNet",
    sentence="Without warm-up or init the inputs of the norms become much larger than sqrt(d)",
    source="DeepNet, Figs. 4b and 4c",
    statistic="mean token norm of all norm inputs over sqrt(d) at update 30, Post-LN without warm-up; Post-LN-init",
    threshold="R: > 2, and < 1.3 with init; X: < 1.5",
    sweep="deepnet:4",
    pilot="1.3 at step 0",
)
def large_norm_inputs(runs: Runs) -> list[Effect]:
    arms = _arms(runs, ("postln", True), ("postln-init", False), tables=["ln_input"])
    cold, init = ({seed: norm_inputs(record, "value")[FIRST] for seed, record in arm.items()} for arm in arms)
    return [
        Effect("Post-LN, no warm-up", cold, Region(low=2), Region(high=1.5), log=True),
        Effect("Post-LN-init, warm-up", init, Region(high=1.3), log=True),
    ]


@claim(
    "C18",
    figure="deepnet:4",
    paper="DeepNet",
    sentence="First the update jumps, then the norm inputs grow, then the gradient is lost",
    source="DeepNet, Sec. 3",
    statistic="share of Post-LN runs without warm-up where ||dF||, norm inputs and -log(first / last decoder "
    "activation gradient) first cross half of their own maximum in this order (equality allowed)",
    threshold="R: > .8; X: < .5 (the plan names no X: ours)",
    sweep="deepnet:4",
)
def order_of_events(runs: Runs) -> list[Share]:
    tables = ("model_update", "ln_input", "activation_grad_norm")
    times = [_times(record) for record in _arms(runs, ("postln", True), tables=tables)[0].values()]
    kept = sum(a <= b <= c for a, b, c in times)
    return [Share("runs in this order", kept, len(times), Region(low=0.8), Region(high=0.5))]


def _times(record: Record) -> tuple[int, int, int]:
    data = record.frame("activation_grad_norm", ["value"])
    data = data[(data["stack_name"] == "decoder") & (data["sublayer"] == "ffn")]
    ends = data.pivot_table(index="step", columns="layer", values="value")
    with np.errstate(divide="ignore"):
        lost = -np.log(ends[ends.columns.min()] / ends[ends.columns.max()])
    lost -= lost.iloc[0]  # what is lost since the start; it vanishes at initialisation, too
    inputs = norm_inputs(record, "value")
    grown = {step: value - inputs[min(inputs)] for step, value in inputs.items()}
    return _crossing(moved(record)), _crossing(grown), _crossing(dict(zip(lost.index, lost, strict=True)))


def _crossing(values: dict[int, float]) -> int:
    """The first step at half of the maximum; steps without a number left out."""
    known = {step: value for step, value in values.items() if not math.isnan(value)}
    half = max(known.values()) / 2
    return min(step for step, value in known.items() if value >= half)
