"""A signal of the alarm: how much larger than all others the largest entry of a layer is."""

import numpy as np

from stabilitylab.alarm import signal


@signal("entry_gap", table="largest_entry", column="value", kinds=("level", "drift"))
def entry_gap(values, places):
    """the largest entry of a layer over the median layer's"""
    return values / np.nanmedian(values) if np.isfinite(values).any() else values, places
