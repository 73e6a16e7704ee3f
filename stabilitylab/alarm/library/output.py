"""Log Z of the output."""

from __future__ import annotations

import numpy as np

from ..signal import Places, signal


@signal("log_z", table="logits", column="log_z", kinds=("z", "drift"), scale=np.arcsinh, rank=120)
def log_z(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """log Z of the output"""
    return values, places


@signal("log_z.tail", table="logits", column="abs_log_z_p99", kinds=("level",), rank=160)
def log_z_tail(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """|log Z| of one token in a hundred"""
    return values, places
