"""The training loss."""

from __future__ import annotations

import numpy as np

from ..signal import Places, signal


@signal("loss", column="loss", kinds=("z", "drift"), rank=10)
def loss(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """the training loss"""
    return values, places


@signal("loss.progress", column="loss", kinds=("rise", "stall"), rank=220)
def progress(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """the training loss over its lowest level"""
    return values, places
