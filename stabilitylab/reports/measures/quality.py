"""The quality of a model after and during training: BLEU, or the held-out cross-entropy as a stand-in."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..collection import Record
from .comparison import failed, last_nll

LEAST_BLEU = 5.0  # below it a model does not translate, and BLEU says nothing
SHARE, DROPOUT = "data.fraction", "model.dropout"  # the paper's dropout goes with its size of the data
EVALUATED = ("row", "beam", "length_penalty", "penalty_kind", "signature", "data", "sentences", "truncated")


def curve(record: Record) -> tuple[np.ndarray, np.ndarray]:
    """Reads the updates at which the held-out loss was measured, and the loss there."""
    data = record.held_out()
    return data["step"].to_numpy(float), data["held_out_nll"].to_numpy(float)


def mean_nll(record: Record) -> float:
    """Return the mean of the held-out nll over the updates, by trapezoids [nats/token]; inf for a run that diverged,
    NaN if fewer than two points were measured."""
    if record.verdict == "diverged":
        return math.inf
    from scipy.integrate import trapezoid

    steps, nll = curve(record)
    return float(trapezoid(nll, steps) / (steps[-1] - steps[0])) if len(steps) > 1 else math.nan


@dataclass(frozen=True)
class Quality:
    """The quality of models: BLEU, or the held-out cross-entropy as a stand-in. ``values``: run -> value."""

    is_bleu: bool
    values: dict[str, float]
    cut: str = ""  # words on the axis about sources that were cut

    @property
    def axis(self) -> str:
        return f"BLEU{self.cut}" if self.is_bleu else "held-out nll [nats/token]"

    @property
    def unit(self) -> str:
        return "BLEU" if self.is_bleu else "nats"

    def gain(self, record: Record) -> float:
        """Return the value with the sign by which larger is better."""
        return self.values[record.name] if self.is_bleu else -self.values[record.name]


def quality(runs: Iterable[Record]) -> Quality:
    """Take BLEU if every run that did not fail was evaluated in the same way and reaches 5; else held-out nll."""
    records = list(runs)
    found = {record.name: _evaluation(record) for record in records}
    trained = [found[record.name] for record in records if not failed(record)]
    alike = len({json.dumps([entry.get(key) for key in EVALUATED]) for entry in trained}) == 1
    if alike and all(entry.get("bleu", -math.inf) >= LEAST_BLEU for entry in trained):
        cut, sentences = (trained[0].get(key) for key in ("truncated", "sentences"))
        how = f", {cut:.0f} of {sentences:.0f} sources cut" if cut and sentences else ""
        return Quality(True, {name: entry.get("bleu", 0.0) for name, entry in found.items()}, how)
    return Quality(False, {record.name: last_nll(record) for record in records})


def _evaluation(record: Record) -> dict[str, float]:
    """Read the result of ``stabilitylab evaluate`` in the run's folder; {} if the run was trained further since."""
    found = record.run.evaluation or {}
    scored = found.get("bleu") is not None and found.get("row", record.status.step) == record.status.step
    return found if scored else {}


def share_of(record: Record) -> float:
    return float(record.settings.get(SHARE, 1.0))


def even(record: Record) -> bool:
    """Return True if one number describes the layers: a single stack, or as many encoder as decoder layers."""
    return len({*record.layers} - {0}) == 1
