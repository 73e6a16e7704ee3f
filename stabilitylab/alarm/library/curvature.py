"""The distance of the learning rate from the edge of stability."""

from __future__ import annotations

import numpy as np

from ..signal import Places, signal


@signal("headroom", table="critical_sharpness", column="headroom", kinds=("level",), smallest=True, rank=190)
def headroom(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """critical rate over rate"""
    return values, places


@signal("to_edge", table="preconditioned_sharpness", column="to_edge", kinds=("level",), rank=200)
def to_edge(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """preconditioned sharpness over its edge"""
    return values, places
