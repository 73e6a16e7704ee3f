"""Sentences about the audit of the first row, from run.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def audited(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what was checked of the model and the loop at the first row; () for a run that wrote nothing down.

    A run.json that was written by hand may hold anything: what is no number is left out.
    """
    facts = manifest.get("audit")
    if not isinstance(facts, Mapping):
        return ()
    found: list[str] = []
    if (count := _number(facts, "parameters")) is not None:
        without = _number(facts, "parameters_without_gradient")
        having = f"{without} without a gradient" if without else "each with a gradient"
        found.append(f"{_many(count, 'trainable tensor')}, {having}")
    forwards, backwards = _number(facts, "forwards"), _number(facts, "backwards")
    if forwards:
        told = _many(forwards, "forward") + ("" if not backwards else f" and {_many(backwards, 'backward')}")
        found.append(f"{told} made the update")
    if count := _number(facts, "forwards_broken"):
        found.append(f"{_many(count, 'forward')} that raised {'is' if count == 1 else 'are'} left out")
    if count := _number(facts, "forwards_without_backward"):
        found.append(f"{_many(count, 'forward')} without a backward {'is' if count == 1 else 'are'} left out")
    if count := _number(facts, "passes_discarded"):
        found.append(f"gradients were discarded {_many(count, 'time')}, and the passes behind them are left out")
    for what in ("reference", "curvature"):
        if (count := _number(facts, f"tensors_unchanged_by_{what}")) is not None:
            names = facts.get(f"tensors_changed_by_{what}")
            changed = len(names) if isinstance(names, list) else 0
            found.append(f"the {what} pass changed {changed or 'none'} of {_many(count + changed, 'tensor')}")
    if (ranks := _number(facts, "ranks")) is not None:
        unlike = _number(facts, "gradients_unlike")
        agree = f"differ in {_many(unlike, 'gradient')}" if unlike else "agree on the gradients that they share"
        found.append(f"{ranks} ranks {agree}")
    axes = facts.get("feature_axes")
    if (norms := _number(facts, "norms")) and isinstance(axes, Mapping):
        found.append(f"{_many(norms, 'norm')}, {len(axes) or 'none'} over another dimension than the last")
    if (count := _number(facts, "places_not_called")) is not None:
        found.append(f"{_many(count, 'watched module')} did not run" if count else "every watched module ran")
    return tuple(found)


def _number(facts: Mapping[str, Any], key: str) -> int | None:
    value = facts.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _many(count: int, one: str) -> str:
    return f"{count} {one if count == 1 else one + 's'}"
