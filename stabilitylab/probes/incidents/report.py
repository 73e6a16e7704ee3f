"""The report about the first NaN or inf of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...schema import EVERY_ROW, Cells
from .first_place import Metrics, Phase, RowEvidence, Suspect

OVERFLOW = ", or its entries are finite and their norm is above 1.8e19, where its square overflows float32"
NORMS = ("ln_input", "residual_norm", "output_norm")
Kept = tuple[int, Metrics, Mapping[str, Cells]]


@dataclass(frozen=True)
class Incident:
    """The first place, in order of execution, where a recorded number is NaN or inf.

    ``step``: the step of the row. ``micro_batch`` counts from 0; None if it is not known (several ranks, a row not
    probed). ``kind``: "parameter" (its value), "activation", "gradient" (of a parameter or an activation), "loss",
    "update". ``name``: the name of the parameter or the site; "" if the row was not probed. ``value``: "nan" or "inf".
    ``before``: the last place before this one whose number was finite. ``paragraph``: all of these facts in a few
    sentences.
    """

    step: int
    micro_batch: int | None
    phase: Phase
    kind: str
    name: str
    stack: str
    layer: int
    sublayer: str
    table: str
    value: str
    before: str
    paragraph: str


def paragraph(place: Suspect, evidence: RowEvidence, before: str, earlier: Sequence[Kept]) -> str:
    """Describe the incident in a few sentences: its step, its place, and the numbers of the ``earlier`` rows."""
    number = "NaN" if math.isnan(place.number) else "infinite"
    batch = "" if place.micro_batch is None else f", micro-batch {place.micro_batch}"
    where = f" (stack {place.row.stack}, layer {place.row.layer})" if place.row.layer else ""
    what = {
        "parameter": f"before the forward pass parameter {place.name}{where} holds a value that is {number}",
        "activation": f"in the forward pass the first number that is not finite is {place.table} at "
        f"{place.name}{where}: {number}",
        "loss": f"the loss is {number}"
        + ", though every recorded place of the forward pass is finite" * ("forward" in evidence.recorded),
        "gradient": f"the loss is finite, and in the backward pass the gradient of {place.name}{where} is {number}",
        "update": f"gradients are finite, and the optimizer's update of {place.name}{where} is {number}",
    }[place.kind]
    if place.kind == "gradient" and not place.name:
        what = f"the loss is finite, and the norm of all gradients is {number}"
    if place.phase == "reference":
        what = f"training is finite, and in the held-out pass {place.table} at {place.name}{where} is {number}"
    sentences = [f"Step {evidence.step}{batch}: {what}."]
    if before:
        sentences.append(f"The place before it was finite: {before}.")
    if place.kind == "activation" and place.phase == "forward":
        too_large = place.table in NORMS and number == "infinite"
        sentences.append(
            f"All parameters were finite, so it arose in the computation between the two{OVERFLOW * too_large}."
            if "theta" in evidence.pieces
            else "Whether a parameter was so already is recorded with optimizer= alone (probe update_ratio)."
        )
    if place.kind == "loss" and "theta" in evidence.pieces:
        sentences.append("All parameters were finite.")
    if not place.name and evidence.recorded <= {"reference", "curvature"}:
        sentences.append(f"This row was not probed, so that no place is known: record from here with {EVERY_ROW}.")
    for step, metrics, _ in earlier:
        known = {name: metrics.get(name) for name in ("loss", "grad_norm_total", "lr")}
        numbers = [f"{name} {value:.4g}" for name, value in known.items() if value is not None]
        sentences.append(f"Step {step} had {', '.join(numbers)}." if numbers else "")
    return " ".join(filter(None, sentences))
