"""DeepNet, Figure 4: the model update, the inputs of the norms and the gradient in the first updates."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ...experiments import command
from .. import style
from ..base import Figure, MissingRuns, Panel, Picture, Reference, Series, Spread, figure
from ..collection import Record, Runs, spans
from .gains import beside

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
        if beside([label for label, _ in own], arm[0]):
            continue  # so that the panel can be read
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
