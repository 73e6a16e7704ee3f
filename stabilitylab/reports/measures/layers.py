"""Lines and differences of the values of a run's layers, and the held-out loss beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from .. import style
from ..arrange import alike
from ..base import Panel, Series, Spread
from ..collection import Record, Runs
from .by_label import by_label

STACKS = ("encoder", "decoder")
PROFILES = (1, 10, 100)  # steps
NEAR = 0.1  # a profile is drawn at a probed step that differs from the one in PROFILES by at most this share of it


def layer_values(record: Record, table: str, column: str, stack: str, step: int | None = None) -> dict[int, float]:
    """Map layer to value at the probed step nearest to ``step`` (None: the last); rows outside the layers are left
    out."""
    data = record.at(table, step, [column], by="layer")
    data = data[(data["stack_name"] == stack) & (data["layer"] > 0)]
    return dict(zip(data["layer"].tolist(), data[column].tolist(), strict=True))


def above_zero(runs: Iterable[Record]) -> str:
    """Return the word for FFN activations > 0: "nonzero" if all these models have ReLU, else "positive"."""
    return "nonzero" if all(run.settings.get("model.activation") == "relu" for run in runs) else "positive"


def by_layer(
    group: Runs,
    table: str,
    column: str,
    stack: str,
    *,
    step: int | None = None,
    first: int = 1,
    log: bool = False,
    of: Callable[[float], float] = float,
) -> list[Series]:
    """Draw a line for each label: the function ``of`` of a stack's values, from layer ``first`` on, over seeds."""

    def values(record: Record) -> dict[float, float]:
        found = layer_values(record, table, column, stack, step)
        return {layer: of(value) for layer, value in found.items() if layer >= first}

    return by_label(group, values, log=log)


def stack_panels(
    group: Runs,
    table: str,
    column: str,
    x: str,
    y: str,
    *,
    first: int = 1,
    log: bool = False,
    of: Callable[[float], float] = float,
) -> list[Panel]:
    """Draw a panel for each stack with values: the function ``of`` of those of its layers from ``first`` on. The
    panels have one y axis."""
    found = ((stack, by_layer(group, table, column, stack, first=first, of=of)) for stack in STACKS)
    return alike(Panel(stack.capitalize(), x, y, lines, log_y=log) for stack, lines in found if lines)


def held_out_panel(group: Runs) -> Panel:
    """Draws held-out cross-entropy against updates."""
    lines = []
    for label in group.labels:
        curves = [
            dict(zip(data["step"].tolist(), data["held_out_nll"].tolist(), strict=True))
            for record in group.where(label=label)
            if len(data := record.held_out())
        ]
        spread = Spread()
        for curve in curves:
            # if a run ended early at a step that no other has, a mean of it alone would be a kink
            shared = [x for x in curve if all(x in other or x > max(other) for other in curves)]
            spread.add(shared, [curve[x] for x in shared])
        if spread.points:
            lines.append(spread.series(style.title(label), arch=label))
    return Panel("Held-out loss", "update", "cross-entropy [nats/token]", lines)


def gradient_panel(group: Runs) -> Panel:
    """Draw the parameter gradient norm of each encoder layer at the last probed step, or of each decoder layer if there
    is no encoder."""
    with_gradients = group.where(table="grad_norm")
    for stack in STACKS:
        lines = by_layer(with_gradients, "grad_norm", "value", stack, log=True)
        if lines:
            break
    return Panel(f"Gradient, {stack}, last probed step", f"{stack} layer", "gradient norm (L2)", lines, log_y=True)


def differences(
    first: Record, second: Record, table: str, column: str, step: int | None = None, lowest: int = 1
) -> dict[str, np.ndarray]:
    """Subtract the values of ``second`` from those of ``first``, at each layer from ``lowest`` on that both have, by
    stack."""
    found = {}
    for stack in STACKS:
        one, other = (layer_values(record, table, column, stack, step) for record in (first, second))
        layers = [layer for layer in sorted(one.keys() & other.keys()) if layer >= lowest]
        found[stack] = np.array([one[layer] - other[layer] for layer in layers])
    return found


def profiles(group: Runs) -> list[Panel]:
    """Draw each layer's gradient norm at steps 1, 10 and 100, or at probed steps close to these: a panel for each stack
    and step. The panels of a stack have one y axis."""
    found: dict[tuple[str, str, int, int], Spread] = {}
    for record in group:
        steps = _probed(record.probed("grad_norm"))
        data = record.at("grad_norm", tuple(steps.values()), ["value"], by="layer")
        data = data.loc[data["layer"] > 0]
        for meant, step in steps.items():
            for stack, own in data.loc[data["step"] == step].groupby("stack_name", observed=True):
                spread = found.setdefault((str(stack), record.label, meant, step), Spread(log=True))
                spread.add(own["layer"].tolist(), own["value"].tolist())
    panels = []
    for stack in STACKS:
        lines: dict[int, list[Series]] = {}
        for (place, label, _, step), spread in found.items():
            if place == stack:
                lines.setdefault(step, []).append(spread.series(style.title(label), arch=label))
        title, axes = f"{stack.capitalize()} layers, step", (f"{stack} layer", "gradient norm (L2)")
        panels += alike(Panel(f"{title} {step}", *axes, drawn, log_y=True) for step, drawn in sorted(lines.items()))
    return panels


def _probed(steps: Sequence[int] | np.ndarray) -> Mapping[int, int]:
    """Map each step in PROFILES to the nearest probed step, if that is near enough."""
    nearest = {meant: int(min(steps, key=lambda step: abs(step - meant))) for meant in PROFILES if len(steps)}
    return {meant: step for meant, step in nearest.items() if abs(step - meant) <= NEAR * meant}
