"""Updates, and the moments that Adam makes them of."""

from __future__ import annotations

import numpy as np

from ..signal import Places, signal


@signal("update", table="update_ratio", column="value", kinds=("z", "drift", "all", "level"), rank=90)
def update(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """a sub-layer's relative update"""
    return values, places


@signal("update_rms", table="adam", column="update_rms", rank=100)
def update_rms(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """the update that Adam makes of its moments"""
    return values, places


@signal("rms_t", table="adam", column="rms_t", kinds=("z", "drift", "all", "level"), rank=110)
def rms_t(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """the RMS of g / sqrt(v)"""
    return values, places


@signal("eps_floor", table="adam", column="eps_floor", kinds=("level",), rank=180)
def eps_floor(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """the share of a sub-layer's entries below ten eps"""
    return values, places
