"""Environment variables by which one process of this package tells another something.

It imports nothing, so that the probes can read a variable without the package's settings.
"""

from __future__ import annotations

RUNS_PER_DEVICE = "STABILITYLAB_RUNS_PER_DEVICE"  # set by a sweep, read by each run's own check of memory
