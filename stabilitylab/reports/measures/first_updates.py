"""TODO"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..collection import Record

FIRST = 30  # updates that the paper draws
Values = Callable[[Record], dict[int, float]]


def warmup(record: Record) -> int:
    return int(record.settings.get("train.warmup", 0))


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
