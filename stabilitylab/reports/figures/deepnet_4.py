"""DeepNet, Figure 4: the model update, the inputs of the norms and the gradient in the first updates."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ...experiments import command
from .. import style
from ..base import Figure, MissingRuns, Panel, Picture, Reference, Series, Spread, figure
from ..claims import Effect, Share, claim
from ..collection import Record, Runs
from ..statistics import Region, signed_rank

FIRST = 30  # updates that the paper draws
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
    stacks = data["stack"].unique().tolist()
    data = data[data["stack"] == ("decoder" if "decoder" in stacks else stacks[0])]
    return {
        int(step): {"cumulative": a, "one_update": b}
        for step, a, b in zip(data["step"], data["cumulative"], data["one_update"], strict=True)
    }


def whole(record: Record) -> bool:
    """Is each of the first 30 updates on record?"""
    return {*range(FIRST + 1)} <= update(record).keys()


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
        groups = runs.where(kind="train", table=TABLES).groups("train.warmup")
        if not groups:
            raise MissingRuns("no training run with model_update, ln_input and grad_norm", command(self.id))
        group = max(groups, key=lambda g: (whole(g[0]), len({(r.label, warmup(r)) for r in g}), len(g)))
        arms = [(label, w) for label in group.labels for w in sorted({warmup(r) for r in group.where(label=label)})]
        own = {arm: group.where(label=arm[0], train__warmup=arm[1]) for arm in arms}
        saturation = math.sqrt(2 * group[0].width)
        references = [Reference(saturation, f"√(2d) = {saturation:.1f}: unrelated outputs")]
        panels = [
            Panel(
                "Model update", "update", "||dF|| since the start (L2 per token)",
                [_over_steps(own[arm], arm, moved) for arm in arms],
                references,
            ),
            _inputs(own, ffn=True),
            _inputs(own, ffn=False),
            _gradients(own),
        ]  # fmt: skip
        return Picture(
            panels, _finding(own), [f"Drawn: {group.describe()}. Lines are means, bands the range over seeds."]
        )


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
    for arm, runs in own.items():
        spread = Spread(log=True)
        for record in runs:
            data = record.at("grad_norm", FIRST, ["value"], by="layer")
            data = data[(data["stack"] == "decoder") & (data["layer"] > 0)]
            spread.add(data["layer"].tolist(), data["value"].tolist())
        dash, detail = DASHES[arm[1] == 0], _ramp(arm[1])
        lines.append(spread.series(style.title(arm[0]), arch=arm[0], dash=dash, detail=detail))
    return Panel(f"Gradient at update {FIRST}", "decoder layer", "gradient norm (L2)", lines, log_y=True)


def _finding(own: dict[tuple[str, int], Runs]) -> str:
    means = {}
    for arm, runs in own.items():
        last = [points[max(s for s in points if s <= FIRST)]["cumulative"] for r in runs if (points := update(r))]
        means[arm] = float(np.mean(last))
    order = sorted(means, key=lambda arm: -means[arm])
    return f"||dF|| after {FIRST} updates: " + ", ".join(f"{_name(*arm)} {means[arm]:.1f}" for arm in order) + "."


def _arm(runs: Runs, label: str, cold: bool) -> Runs:
    """The largest group of ``label`` with or without warm-up whose first 30 updates are all on record."""

    def fit(run: Record) -> bool:
        return (warmup(run) == 0) == cold and whole(run)

    groups = runs.where(fit, kind="train", label=label, table=TABLES).groups("train.warmup")
    if not groups:
        raise MissingRuns(
            f"needs {label} {'without' if cold else 'with'} warm-up, probed at each of the first {FIRST} updates"
        )
    return groups[0]


@claim(
    "C13",
    figure="deepnet:4",
    paper="DeepNet",
    sentence="Without warm-up Post-LN's update explodes at once and then freezes",
    source="DeepNet, Fig. 4a",
    statistic="||dF|| after two updates over sqrt(2d); mean change per update in 10-30 over that of the first",
    threshold="R: > .6 and < .05; X: the second > .2",
    sweep="deepnet:4",
)
def explodes_then_freezes(runs: Runs) -> list[Effect]:
    jump: dict[int, float] = {}
    later: dict[int, float] = {}
    for seed, record in _arm(runs, "postln", cold=True).by_seed().items():
        points = update(record)
        jump[seed] = points[2]["cumulative"] / math.sqrt(2 * record.width)
        moves = [points[step]["one_update"] for step in range(10, FIRST + 1)]
        later[seed] = float(np.mean(moves)) / points[1]["one_update"]
    return [
        Effect("||dF||(2) / sqrt(2d)", jump, Region(low=0.6), log=True),
        Effect("later change / first", later, Region(high=0.05), Region(low=0.2), log=True),
    ]


def _at_thirty(runs: Runs) -> dict[int, float]:
    return {seed: update(record)[FIRST]["cumulative"] for seed, record in runs.by_seed().items()}


def _ratio(first: dict[int, float], second: dict[int, float]) -> dict[int, float]:
    return {seed: first[seed] / second[seed] for seed in sorted(first.keys() & second.keys())}


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
    ratio = _ratio(_at_thirty(_arm(runs, "postln", cold=False)), _at_thirty(_arm(runs, "postln", cold=True)))
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
    cold, warm = (_at_thirty(_arm(runs, "postln", cold=cold)) for cold in (True, False))
    init = _at_thirty(_arm(runs, "postln-init", cold=False))
    return [
        Effect("no warm-up / warm-up", _ratio(cold, warm), Region(low=1), Region(high=1), log=True),
        Effect("warm-up / init with warm-up", _ratio(warm, init), Region(low=1), Region(high=1), log=True),
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
    cold = {s: norm_inputs(r, "value")[FIRST] for s, r in _arm(runs, "postln", cold=True).by_seed().items()}
    init = {s: norm_inputs(r, "value")[FIRST] for s, r in _arm(runs, "postln-init", cold=False).by_seed().items()}
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
    arm = _arm(runs.where(table="activation_grad_norm"), "postln", cold=True)
    times = [_times(record) for record in arm]
    kept = sum(a <= b <= c for a, b, c in times)
    return [Share("runs in this order", kept, len(times), Region(low=0.8), Region(high=0.5))]


def _times(record: Record) -> tuple[int, int, int]:
    data = record.frame("activation_grad_norm", ["value"])
    data = data[(data["stack"] == "decoder") & (data["sublayer"] == "ffn")]
    ends = data.pivot_table(index="step", columns="layer", values="value")
    with np.errstate(divide="ignore"):
        lost = -np.log(ends[ends.columns.min()] / ends[ends.columns.max()])
    lost -= lost.iloc[0]  # what is lost since the start; it vanishes at initialisation, too
    inputs = norm_inputs(record, "value")
    grown = {step: value - inputs[min(inputs)] for step, value in inputs.items()}
    return _crossing(moved(record)), _crossing(grown), _crossing(dict(zip(lost.index, lost, strict=True)))


def _crossing(values: dict[int, float]) -> int:
    """The first step at half of the maximum."""
    half = max(values.values()) / 2
    return min(step for step, value in values.items() if value >= half)
