"""What initialisation tells, in float64: gradient uniformity, one update by group, response to changed weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..config import Config
from ..data import Dataset
from ..onestep.initial_model import Filled, Subject, hooked
from ..onestep.perturbation import Outputs, perturbation
from ..onestep.rates import MEMBERS, directions, rate
from ..onestep.standard_probes import ordinary

GROUPS = {"update": "all", "update_vo_ffn": "vo_ffn", "update_ln": "ln", "update_embedding": "embedding"}


def at_start(config: Config, dataset: Dataset, device: torch.device) -> tuple[dict[str, float], dict[str, Any]]:
    """(numbers by column, evidence) of the model at its initialisation over the first micro-batch of training."""
    subject = Subject.of(config, dataset, device)
    _, tables = ordinary(subject)
    before = Outputs(subject)
    with hooked(before.hooks()):
        start = subject.output()
    by_stack = gradient_decades({table.name: (table, cells) for table, cells in tables}["activation_grad_norm"])
    numbers = {
        "gradient": worst(by_stack),
        **updates(subject, start),
        "sensitivity": sensitivity(perturbation(subject, before)),
    }
    return numbers, {"gradient_by_stack": by_stack, "has_norms": bool(subject.sites.norms)}


def gradient_decades(table: Filled) -> dict[str, float]:
    """Stack -> log10(max / min) over its layers of ||dE/dx|| at the layer's output; stacks whose gradient is 0
    throughout are left out, and inf is one that reaches some of its layers only."""
    layout, cells = table
    by_layer: dict[str, dict[int, float]] = {}
    for row, value in zip(layout.rows, cells.values[:, 0].tolist(), strict=True):
        if row.layer:
            by_layer.setdefault(row.stack, {})[row.layer] = value  # the last of a layer is that of its output
    found = {}
    for stack, layers in by_layer.items():
        low, high = min(layers.values()), max(layers.values())
        if not all(map(math.isfinite, layers.values())):
            found[stack] = math.nan
        elif high > 0:
            found[stack] = math.log10(high / low) if low > 0 else math.inf
    return found


def updates(subject: Subject, start: torch.Tensor) -> dict[str, float]:
    """Column -> ||dF|| of Adam's first update of one group at the configuration's learning rate, over sqrt(2) ||F||.

    Behind a norm of gain 1 ||F|| is sqrt(d), and the unit sqrt(2d). ``start``: F at the real tokens.
    """
    lr, direction = subject.config.train.lr, directions(subject)["adam"]
    unit = math.sqrt(2) * torch.linalg.vector_norm(start, dim=-1).mean().item()
    there = {key: group for key, group in GROUPS.items() if any(map(MEMBERS[group], subject.parameters.pieces))}
    return {key: rate(subject, MEMBERS[group], direction, start, lr) * lr / unit for key, group in there.items()}


def sensitivity(table: Filled) -> float:
    """Root of the mean squared change of the last stack's output / std under random signs."""
    layout, cells = table
    ends = [value for row, value in zip(layout.rows, cells.values[:, 0].tolist(), strict=True) if not row.layer]
    return math.sqrt(ends[-1])


def worst(by_stack: Mapping[str, float]) -> float:
    """The largest; NaN where any is NaN, or where there is none."""
    values = list(by_stack.values())
    return max(values) if values and not any(map(math.isnan, values)) else math.nan
