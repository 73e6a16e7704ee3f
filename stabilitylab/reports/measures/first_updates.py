"""Measures what the first updates do to a model: ||dF||, and the inputs of its norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..base import MissingRuns
from ..collection import Record, Runs

FIRST = 30  # updates that DeepNet's figure draws
DEPTH = 18  # layers a side of that figure
TABLES = ("model_update", "ln_input", "grad_norm")
Values = Callable[[Record], dict[int, float]]


def warmup(record: Record) -> int:
    return int(record.settings.get("train.warmup", 0))


def update(record: Record) -> dict[int, dict[str, float]]:
    """Maps step to cumulative and one_update of the last stack's output, ||dF|| per token."""
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
    """Maps step to ||dF|| since the start."""
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
    """Maps seed to run for each (label, without warm-up?): comparable 18L-18L runs with the first 30 updates."""
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
