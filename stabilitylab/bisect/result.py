"""The result of a bisection: the first place where two runs or models differ, in sentences and as a mapping."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..errors import listed
from .judging import PlaceGap

Verdict = Literal["identical", "rounding", "different"]
SUSPECTS = {
    "weights": "the parameters differ before anything is computed",
    "forward": "forward pass",
    "backward": "backward pass",
    "gradients": "gradients of parameters",
    "update": "update of the parameters",
}


@dataclass(frozen=True)
class Bisection:
    """The result of comparing two sides, ``a`` and ``b`` (their labels).

    - ``verdict``: "identical" (bit for bit), "rounding" (no place is above ``limit`` times its control), or
      "different".
    - ``places``: all places with their errors, in the order of the data.
    - ``fed``: the places of the forward pass of ``b`` when each of its modules gets the inputs of ``a``; empty if the
      models were not run.
    - ``first``: the first place whose added error is above ``limit`` times its control. It is taken from ``fed`` if
      ``confirmed`` is True. ``suspected``: the first such place by the sums alone.
    - ``control``: a description of the control.
    - ``only_a``, ``only_b``: the places that only one side has, by pass.
    - ``other_batch``: True if the batches of the two models differ bit for bit.
    - ``notes``: further sentences.
    """

    a: str
    b: str
    step: int
    verdict: Verdict
    confirmed: bool
    first: PlaceGap | None
    suspected: PlaceGap | None
    places: tuple[PlaceGap, ...]
    fed: tuple[PlaceGap, ...]
    limit: float
    control: str
    by: str
    only_a: Mapping[str, Sequence[str]] = field(default_factory=dict)
    only_b: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    other_batch: bool = False

    @property
    def exit_code(self) -> int:
        return 1 if self.verdict == "different" else 0

    @property
    def where(self) -> str:
        """The module in which the first difference arises, by its name in ``a``, or "the loss"; "" without a
        difference."""
        if self.from_loss:
            return "the loss"
        return "" if self.first is None else self.first.blamed or "the model itself, outside of its layers"

    @property
    def from_loss(self) -> bool:
        """True if the first difference is the gradient that the loss hands to the end of the model: the forward passes
        agree, and nothing comes before this place in the backward pass."""
        if self.first is None or self.only_a.get("backward") or self.only_b.get("backward"):
            return False
        last = next((place for place in self.places if place.phase == "backward"), None)
        return last is not None and last is self.first and last.enters

    @property
    def largest(self) -> PlaceGap | None:
        """The place with the largest added error over its control, of the fed ones if they have any; None if no place
        has an error that counts."""
        for places in (self.fed, self.places):
            if known := [place for place in places if place.judged and place.factor]:
                return max(known, key=lambda place: place.factor)
        return None

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def sentences(self) -> list[str]:
        """Return the result in sentences: the result, the evidence, then advice."""
        return [self._result(), *self._doubts(), *self._evidence(), *self.notes, *self._advice()]

    def _doubts(self) -> list[str]:
        return ["The two sides have different batches, or one batch in two layouts."] if self.other_batch else []

    def _result(self) -> str:
        pair = f"{self.b} and {self.a}"
        if self.verdict == "identical":
            return f"No difference: {pair} agree bit for bit at all {len(self.places)} places."
        if self.verdict == "rounding":
            return f"Rounding: {pair} differ by no more than {self.limit:g} times the control at any place."
        assert self.first is not None
        if self.first.phase == "weights":
            name = self.first.name
            return f"A difference in what is computed: parameter {name} differs before anything is computed."
        if self.from_loss:
            return "A difference in what is computed enters in the loss (gradient of the model's output, suspected)."
        kind = "confirmed" if self.confirmed else "suspected"
        there = self.first.blamed_there
        also = f"in {self.b} {there}, " if there and there != self.first.blamed else ""
        return f"A difference in what is computed enters in {self.where} ({also}{SUSPECTS[self.first.phase]}, {kind})."

    def _evidence(self) -> list[str]:
        one = self.first or self.largest
        if one is None or self.verdict == "identical":
            return []
        what = f"{side(one)} of {one.module}" if one.name.endswith((":in", ":out")) else one.name
        of = {
            "forward": "The",
            "backward": "The gradient at the",
            "gradients": "The gradient of",
            "update": "The update of",
        }
        what = f"{of.get(one.phase, 'Parameter')} {what}"
        found = [
            f"{what} differs by {percent(one.error)}; the control there is "
            f"{percent(one.control)}, and the added error is {times(one.factor)} the control."
            if math.isfinite(one.error)
            else f"{what} has a number that is not finite on one side, or exists on one side only."
        ]
        if self.verdict == "rounding":
            found[0] = "Largest: " + found[0]
        if one.phase in ("forward", "backward") and not (self.fed and one in self.fed):
            found.append(f"The difference inherited from earlier places is {percent(one.inherited)}.")
        if self.confirmed and one in self.fed:
            found.append("Each module of the second got the input of the same module of the first.")
        found.append(f"Control: {self.control}.")
        return found

    def _advice(self) -> list[str]:
        if self.verdict != "different":
            return []
        assert self.first is not None
        if self.first.phase == "weights":
            return ["Give both the same parameters, then compare again."]
        if self.other_batch:
            return ["Unless it is one batch in two layouts, give both the same batch, then compare again."]
        if self.confirmed:
            return [f"Read the code of {self.where} in both."]
        if self.first.phase == "forward":
            return ["Bisect the two models themselves (PACKAGE.MODULE:FACTORY) to confirm it."]
        if self.from_loss:
            return [
                f"The forward passes agree up to {self.first.module}: compare the labels, the loss (label smoothing, "
                f"weights, reduction), its scale (accumulation, loss scaling), and what follows {self.first.module}."
            ]
        if self.first.phase == "update":
            return [
                f"{self._updates()} Forward pass and gradients agree: compare the optimizers (learning rate, betas, "
                "eps, weight decay, parameter groups, number of steps) and the clipping."
            ]
        return [f"The forward passes agree: read the backward of {self.where}, and what is detached or scaled there."]

    def _updates(self) -> str:
        over = [place.is_over(self.limit) for place in self.places if place.phase == "update" and place.judged]
        return f"The update differs at {sum(over):,} of {len(over):,} parameters."

    def as_dict(self) -> dict[str, Any]:
        def row(place: PlaceGap) -> dict[str, Any]:
            return {**asdict(place), "factor": place.factor, "over": place.is_over(self.limit)}

        return {
            "a": self.a,
            "b": self.b,
            "step": self.step,
            "verdict": self.verdict,
            "confirmed": self.confirmed,
            "where": self.where or None,
            "first": self.first and row(self.first),
            "suspected": self.suspected and row(self.suspected),
            "limit": self.limit,
            "control": self.control,
            "paired_by": self.by,
            "only_a": {phase: list(names) for phase, names in self.only_a.items()},
            "only_b": {phase: list(names) for phase, names in self.only_b.items()},
            "other_batch": self.other_batch,
            "notes": list(self.notes),
            "places": [row(place) for place in self.places],
            "fed": [row(place) for place in self.fed],
        }


def side(place: PlaceGap) -> str:
    return "input" if place.name.endswith(":in") else "output"


def percent(relative: float) -> str:
    """Return a relative error in words: 150 %, 1.2 %, 0.0031 %, 3e-06 %."""
    if not math.isfinite(relative):
        return "more than all"
    return f"{100 * relative:,.0f} %" if relative >= 0.995 else f"{100 * relative:.2g} %"


def times(factor: float) -> str:
    return f"{factor:.2g} times" if math.isfinite(factor) and factor < 1e6 else "more than a million times"


def unmatched(only: Mapping[str, Sequence[str]], label: str) -> str:
    """Say which places only one side has; "" for none."""
    names = list(dict.fromkeys(name for rest in only.values() for name in rest))
    if not names:
        return ""
    return f"Not compared, since only {label} has them: {listed(names)} (--map pairs names)."
