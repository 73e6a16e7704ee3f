"""The answer of a search in sentences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .answer import Bounds, RateAnswer


def sentences(one: RateAnswer) -> list[str]:
    """Return the result first, then how far it goes, then doubts."""
    told = {
        "fails at every rate": _fails,
        "constant": _constant,
        "too early": _too_early,
        "found": _found,
    }[one.outcome](one)
    cost = f"The search took {one.cost:,} updates ({one.cost / one.horizon:.1f} horizons)."
    return [*told, *one.notes, *([cost] if one.cost else [])]


def _tried(one: RateAnswer) -> tuple[float, float]:
    rates = [rate for losses in one.losses.values() for rate in losses]
    return min(rates), max(rates)


def _fails(one: RateAnswer) -> list[str]:
    low, high = _tried(one)
    why = next(iter(one.failures.values()), "")
    return [
        f"{one.name} fails at every rate from {low:.3g} to {high:.3g} ({low:.3g}: {why}): look for the layer with "
        "'stabilitylab check', and for the batch with a single update."
    ]


def _constant(one: RateAnswer) -> list[str]:
    return [
        f"The loss of {one.name} stays at {one.start:.6g} at every rate: check that loss_fn calls the model that it is "
        "given, and that the optimizer holds the model's parameters."
    ]


def _too_early(one: RateAnswer) -> list[str]:
    return [f"No rung has ended, so that no rate can be named: {one.stopped}"]


def _found(one: RateAnswer) -> list[str]:
    assert one.best is not None
    assert one.safe is not None
    seeds = f"{one.seeds} seeds" if one.seeds > 1 else "1 seed"
    lines = [
        f"best rate          {_range(one.best)}",
        f"largest safe rate  {_range(one.safe)}",
    ]
    if one.warmup is not None:
        lines.append(f"least warm-up      {_warmup(one)}")
    lines.append(
        f"By the {one.scores} after {one.updates:,} updates, {seeds}. Safe: no failure, and at most {one.delta:.3g} "
        "above the best loss."
    )
    if one.safe.high is None:
        lines.append(f"No rate failed: {_tried(one)[1]:.3g} is the largest that was tried.")
    lines += _horizon(one)
    if one.stopped:
        lines.append(one.stopped)
    return lines


def _range(bounds: Bounds) -> str:
    if bounds.low is None and bounds.high is None:
        return f"{bounds.value:.3g}"
    if bounds.high is None:
        return f"{bounds.value:.3g}  (at least {bounds.low:.3g})"
    if bounds.low is None:
        return f"{bounds.value:.3g}  (at most {bounds.high:.3g})"
    return f"{bounds.value:.3g}  ({bounds.low:.3g} to {bounds.high:.3g})"


def _warmup(one: RateAnswer) -> str:
    assert one.warmup is not None
    value = f"{one.warmup.value:.0f} updates"
    if not one.warmup.value:
        return f"0  (the planned {one.planned_warmup} are not needed)"
    return f"{value}  ({one.warmup.low:.0f} are not enough)"


def _horizon(one: RateAnswer) -> list[str]:
    """Return how far the safe rate is shown, and its trend."""
    assert one.safe is not None
    rungs = ", ".join(f"{rate:.3g} to {updates:,}" for updates, rate in one.safe_by_rung.items())
    lines = [f"Largest safe rate by rung (1 seed): {rungs} updates."] if len(one.safe_by_rung) > 1 else []
    if one.whole:
        return lines
    shown = f"Safe to {one.updates:,} updates; at the horizon of {one.horizon:,}"
    if one.trend is None:
        return [*lines, f"{shown} nothing is shown, and {len(one.safe_by_rung)} rungs show no trend."]
    there = one.trend.at_horizon
    return [
        *lines,
        f"{shown}, extrapolated from {one.trend.rungs} rungs: {there.value:.2g} ({there.low:.2g} to {there.high:.2g}); "
        "not shown.",
    ]


def loss_text(loss: float) -> str:
    """Return a loss as tables show it."""
    return f"{loss:.3f}" if math.isfinite(loss) else "failed"
