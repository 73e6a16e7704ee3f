"""The arms of the comparison of KEEL with DeepNorm and BranchNorm, and what is asked: fixed before any run.

Decoders. KEEL (2601.19895), Eqs. 8 and 28: alpha = 2M sub-layers, a norm in front of each branch, Xavier's weights.
``keel-no-inner`` leaves that norm out (the ablation of its Eq. 24).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from own_rates import DECODERS, Settings, Study

from stabilitylab.config import merge
from stabilitylab.experiments import Experiment

LAYERS = (12, 36)
UPDATES = 1000
DEEP, DEEP_SEEDS, DEEP_RATES, DEEP_UPDATES = 200, (3, 4, 5), (1e-3, 3e-4), 300
DEEP_ARMS = ("keel", "deepnorm", "branchnorm")
SHARED = merge(DECODERS, {"train": {"weight_decay": 0.01, "beta2": 0.95}})


def ramp(updates: int) -> int:
    """Return BranchNorm's T: 4 % of the run, as 4,000 of the paper's 100,000 updates."""
    return max(1, round(0.04 * updates))


def arms(layers: int) -> dict[str, dict[str, Any]]:
    """Return the model settings of each arm; the ablation stands beside them up to 36 layers."""
    updates = DEEP_UPDATES if layers == DEEP else UPDATES
    found: dict[str, dict[str, Any]] = {
        "keel": {"arch": "keel"},
        "deepnorm": {"arch": "deepnorm"},
        "branchnorm": {"arch": "branchnorm", "T": ramp(updates)},
    }
    if layers != DEEP:
        found["keel-no-inner"] = {"arch": "keel", "options": {"inner": False}}
    return found


STUDY = Study(SHARED, arms, LAYERS, UPDATES)


def deep(data: Settings) -> Iterator[tuple[str, float, int, Experiment]]:
    """Yield (arm, rate, seed, run) at 200 layers: the higher rate of all first, seed by seed."""
    for rate in DEEP_RATES:
        for seed in DEEP_SEEDS:
            for arm in DEEP_ARMS:
                yield arm, rate, seed, STUDY.experiment(arm, DEEP, rate, seed, data, DEEP_UPDATES)
