"""Gradient norms, and their unevenness over layers."""

from __future__ import annotations

import math

import numpy as np

from ...schema import Row
from ..signal import Places, log, signal


def inside(values: np.ndarray, places: Places, layers: bool = True) -> tuple[np.ndarray, Places]:
    """Return the numbers of places inside layers; ``layers=False``: of those outside."""
    keep = np.array([bool(place and place.layer) is layers for place in places], bool)
    return values[keep], [place for place, own in zip(places, keep, strict=True) if own]


@signal("gradient", column="grad_norm_total", kinds=("z", "drift"), rank=20)
def gradient(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """the total gradient norm"""
    return values, places


@signal("grad_norm", table="grad_norm", column="value", rank=30)
def grad_norm(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """the gradient norm of a sub-layer"""
    return inside(values, places)


@signal("embedding_gradient", table="grad_norm", column="value", rank=40)
def embedding_gradient(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """the embedding's gradient norm"""
    return inside(values, places, layers=False)


@signal("activation_gradient", table="activation_grad_norm", column="value", rank=50)
def activation_gradient(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """the gradient norm of a layer's output"""
    return values, places


@signal("uniformity", table="grad_norm", column="value", kinds=("level", "drift"), rank=210)
def uniformity(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """the unevenness of gradients over layers

    The standard deviation of the log gradient norms inside the layers of a stack (DeepNet's balance), of the stack
    where it is largest."""
    logs, stacks = log(values), [place.stack if place and place.layer else "" for place in places]
    found = [(_spread(logs[[own == stack for own in stacks]]), stack) for stack in dict.fromkeys(stacks) if stack]
    known = [(value, stack) for value, stack in found if math.isfinite(value)]
    if not known:
        return np.array([math.nan]), [None]
    value, stack = max(known)
    return np.array([value]), [Row("", stack)]


def _spread(values: np.ndarray) -> float:
    """Return the standard deviation of the finite values; NaN for fewer than two."""
    values = values[np.isfinite(values)]
    return float(values.std()) if len(values) > 1 else math.nan
