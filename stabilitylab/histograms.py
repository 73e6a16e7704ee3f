"""The bins of histograms: a sign and a power of two, what lies beyond these, exact zeros, and what is not finite."""

from __future__ import annotations

LOW, HIGH = -64, 16  # powers of two: 5e-20, far below Adam's eps, to 65536, where fp16 ends
SIZES = ("below", *(f"2^{power}" for power in range(LOW, HIGH)), "above")  # |x| from 2^n up to 2^(n+1)
# From the largest negative number to the largest positive one, then NaN and inf
COLUMNS = (*(f"-{size}" for size in reversed(SIZES)), "zero", *(f"+{size}" for size in SIZES), "nonfinite")
ZERO, NONFINITE = COLUMNS.index("zero"), COLUMNS.index("nonfinite")
TABLES = {
    "histograms": "weights",
    "histograms_gradient": "gradients",
    "histograms_update": "updates",
    "histograms_activation": "activations",
}
