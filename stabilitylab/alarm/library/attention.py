"""Attention logits."""

from __future__ import annotations

import numpy as np

from ..signal import Places, signal


@signal(
    "heads",
    table="attention_heads",
    column="max_logit",
    kinds=("z", "drift", "all", "level"),
    scale=np.arcsinh,
    rank=80,
)
def heads(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """a head's largest attention logit"""
    return values, places
