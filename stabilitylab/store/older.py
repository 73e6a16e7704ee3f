"""Facts about tables that run.json did not hold in schema 1. The list is closed: tables of later schemas hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..schema import Phase

# table -> phase, main column, whether it is drawn on a logarithmic axis, and columns that may divide by 0
SCHEMA_1: dict[str, tuple[Phase, str, bool, tuple[str, ...]]] = {
    "activation_grad_norm": ("backward", "value", True, ()),
    "activation_sparsity": ("reference", "nonzero_fraction", False, ()),
    "adam": ("update", "rms_t", True, ()),
    "attention": ("reference", "entropy", False, ()),
    "branch_variance": ("reference", "branch", True, ()),
    "cosine_similarity": ("reference", "raw", False, ("raw", "centred")),
    "grad_norm": ("backward", "value", True, ()),
    "layer_branch": ("reference", "ratio", True, ("ratio",)),
    "ln_gain": ("step", "rms", False, ()),
    "ln_input": ("forward", "value", True, ()),
    "logits": ("reference", "log_z", False, ()),
    "model_update": ("reference", "cumulative", False, ()),
    "outliers": ("reference", "pearson_kurtosis", True, ("max_over_rms", "max_over_median")),
    "output_norm": ("reference", "value", False, ()),
    "rank": (
        *("reference", "token_cosine", False),
        ("token_cosine", "residual_rank_one", "effective_rank", "stable_rank"),
    ),
    "residual_norm": ("forward", "value", True, ()),
    "update_ratio": ("update", "value", True, ("value",)),
    # tables of one step from initialisation
    "lemma41": ("step", "ratio", False, ()),
    "ln_jacobian": ("forward", "frobenius", True, ()),
    "perturbation": ("forward", "random", True, ()),
    "theorem42": ("update", "measured", True, ()),
    "theorem43": ("update", "measured", True, ()),
    "update_rate": ("update", "value", True, ()),
}
# units of the main column, where schema 1 named those of all columns
_UNITS = {
    "adam": "ratio",
    "attention": "nats",
    "layer_branch": "ratio",
    "outliers": "ratio",
    "rank": "cosine",
    "residual_norm": "L2 norm per token",
}


def facts(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return phase, main, log, undefined and unit of a table of schema 1. For an unknown table the name suggests the
    phase."""
    columns = entry["columns"]
    phase: Phase = "backward" if "grad" in name else "update" if "update" in name else "forward"
    phase, main, log, undefined = SCHEMA_1.get(name, (phase, "", None, ()))
    known = main in columns
    return {
        "phase": phase,
        "main": main if known else "",
        "log": log if known else None,
        "undefined": tuple(column for column in undefined if column in columns),
        "unit": _UNITS.get(name, entry["unit"]) if known else entry["unit"],
    }
