"""Order of execution within a step: which recorded number comes into being before which."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..schema import Row

# "between": after the update of the step before and outside of this step's passes. The reference pass of row t runs
# theta_t after its backward pass and before the optimizer's step.
PHASES = ("between", "setting", "forward", "loss", "backward", "reference", "optimizer")
TABLES = {
    "ln_input": "forward",
    "branch_variance": "reference",
    "activation_sparsity": "reference",
    "cosine_similarity": "reference",
    "model_update": "reference",
    "activation_grad_norm": "backward",
    "grad_norm": "backward",
    "update_ratio": "optimizer",
}
SETTINGS = ("lr", "learning_rate", "alpha", "tokens", "epoch")
CLOCKS = ("tokens_per_second", "memory_bytes", "seconds")  # differ between any two runs and say nothing about them


def phase_of_table(name: str) -> str:
    """Known tables by name; of a probe of the user's own the name is all that a run directory tells."""
    if name in TABLES:
        return TABLES[name]
    return "backward" if "grad" in name else "optimizer" if "update" in name else "forward"


def phase_of_metric(name: str) -> str:
    if name in SETTINGS:
        return "setting"
    if name.startswith("held_out"):
        return "reference"
    return "backward" if name.startswith("grad") else "loss"


def rank(phase: str) -> int:
    return PHASES.index(phase)


def first_place(bad: np.ndarray, phase: str) -> int:
    """The row that is computed first among those that are ``bad``: the lowest on the way up, the highest on the way
    down. Tables list their rows from the input to the output."""
    rows = np.flatnonzero(bad)
    return int(rows[-1] if phase == "backward" else rows[0])


def describe(row: Row | None) -> str:
    """Such as ``layer 3 of encoder (self_attn)``, or the site's own name outside the layers."""
    if row is None:
        return "the whole model"
    if row.layer < 1:
        return row.site or row.stack or "the whole model"
    part = f" ({row.sublayer})" if row.sublayer else ""
    return f"layer {row.layer}{f' of {row.stack}' if row.stack else ''}{part}"


def gathered(rows: Sequence[Row], chosen: Sequence[int]) -> list[str]:
    """The chosen places by name; a layer all of whose places are chosen comes once, without its sub-layers."""
    picked = {rows[place] for place in chosen}
    whole = {(row.stack, row.layer) for row in picked if row.layer}
    whole -= {(row.stack, row.layer) for row in rows if row not in picked}
    names = [
        describe(Row("", r.stack, r.layer) if (r.stack, r.layer) in whole else r) for r in map(rows.__getitem__, chosen)
    ]
    return list(dict.fromkeys(names))


def listed(names: Sequence[str], most: int = 3) -> str:
    """``a, b and 4 more``."""
    shown = list(names[:most])
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")
