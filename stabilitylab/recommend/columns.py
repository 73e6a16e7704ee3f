"""The evidence of a recommendation: one measured number a column, what it is, and who proposed it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

UPDATES = 30  # of the recipe, from initialisation
BREAK = 0.5  # nats of the held-out loss over its minimum: the rise that `check` calls a failure too
PER_DECADE, RATES, BELOW = 10, 45, 30  # of the range test: rates a decade, rates in all, and lr over the first rate
EPS_SHARE = 0.5  # of a layer's entries at Adam's floor

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Column:
    """``name`` of the number in a measurement. ``better`` says how it is ranked: "" is not at all, "near 0" by size."""

    name: str
    title: str
    better: Literal["smaller", "larger", "near 0", ""]
    sentence: str

    def badness(self, numbers: Numbers) -> float:
        """What is sorted by, ascending; inf for what is not finite or not defined, which ranks last."""
        value = numbers.get(self.name, math.nan)
        if not math.isfinite(value):
            return math.inf
        return {"larger": -value, "near 0": abs(value)}.get(self.better, value)


COLUMNS = (
    Column(
        "gradient", "gradient decades", "smaller",
        "log10 of max / min over a stack's layers of ||dE/dx|| at initialisation, worse stack (Admin, Fig. 3).",
    ),
    Column(
        "update", "update / sqrt(2d)", "smaller",
        "||dF|| of Adam's first update at the full lr over sqrt(2) ||F||; 1: unrelated outputs (DeepNet, Sec. 4.2).",
    ),
    Column("update_vo_ffn", "v o ffn", "", "The same for an update of the v, out, fc1 and fc2 weights alone."),
    Column("update_ln", "norms", "", "The same for the norms' gains and biases alone."),
    Column("update_embedding", "embedding", "", "The same for the embeddings alone."),
    Column("growth_start", "growth at start", "", "The next column's number at initialisation."),
    Column(
        "growth", "growth decades", "near 0",
        f"log10 of the last over the first layer's norm input (without norms: residual stream) after {UPDATES} "
        "updates, worse stack (DeepNet, Fig. 4; Sun et al. 2025).",
    ),
    Column(
        "sensitivity", "sensitivity", "smaller",
        "rms change of the output / std when weights change by 1e-4 times a random sign (Admin, Fig. 4).",
    ),
    Column(
        "headroom", "headroom / lr", "larger",
        f"range test: the learning rate, over lr, that takes the held-out loss {BREAK:g} nats over its minimum; "
        "> where none did (Smith 2017).",
    ),
    Column(
        "progress", "progress nats/update", "larger",
        f"fall of the held-out loss over {UPDATES} updates of the recipe, warm-up within them.",
    ),
    Column("seconds", "CPU s / update", "", "median CPU time of an update (on a GPU: wall time)."),
    Column("parameters", "parameters", "", "number of parameters."),
)  # fmt: skip
RANKED = tuple(column for column in COLUMNS if column.better)
