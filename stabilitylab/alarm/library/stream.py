"""The residual stream and what enters norms."""

from __future__ import annotations

import numpy as np

from ..signal import Places, signal


@signal("ln_input", table="ln_input", column="value", rank=60)
def ln_input(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """the norm of what enters a norm"""
    return values, places


@signal("residual", table="residual_norm", column="value", rank=70)
def residual(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """the norm of the residual stream"""
    return values, places


@signal("kurtosis", table="outliers", column="pearson_kurtosis", rank=130)
def kurtosis(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """the kurtosis of a layer's output"""
    return values, places
