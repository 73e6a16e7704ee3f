"""Optimizers that were given to ``watch`` and that do not step: something else updates their parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from .change import LEDGER, STEPS, Fact, LoopChange, is_first


def optimizer_changes(facts: Sequence[Fact]) -> Iterator[LoopChange]:
    """Yield each optimizer that does not step from an update on, while its parameters move; ``until``: the update in
    which it steps again. An optimizer that has never stepped is no change of the loop: ``from_start``."""
    known: dict[str, list[Fact]] = defaultdict(list)
    for fact in facts:
        if fact["kind"] == "loop" and fact["name"].endswith(f" {STEPS}"):
            known[fact["name"].removesuffix(f" {STEPS}")].append(fact)
    for place, found in known.items():
        for at, fact in enumerate(found):
            if fact["after"] is not False or (at and found[at - 1]["after"] is False):
                continue
            step = fact["step"]
            until = next((one["step"] for one in found[at:] if one["after"] is not False), None)
            if until is None:
                said = f"{place} has not stepped since step {step}, while its parameters move"
            else:
                said = f"{place} did not step from step {step} to {until - 1}, while its parameters moved"
            yield LoopChange(
                "optimizer",
                place,
                step,
                f"{said}: something else updates them",
                f"{LEDGER}, by autograd's count of writes",
                f"Keep the optimizer that stepped before step {step}, with its state and `lr`. If two are meant, make "
                "both before `watch`, and give it both.",
                until=until,
                lasts=True,
                from_start=is_first(fact),
                title="change of optimizer",
            )
