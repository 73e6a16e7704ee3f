"""The arms of the comparison of KEEL with DeepNorm and BranchNorm, and what is asked: fixed before any run.

Decoders. KEEL (2601.19895), Eqs. 8 and 28: alpha = 2M sub-layers, a norm in front of each branch, Xavier's weights.
``keel-no-inner`` leaves that norm out (the ablation of its Eq. 24).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from own_rates import Settings, Study

from stabilitylab.experiments import Experiment

LAYERS = (12, 36)
SEEDS = (3, 4, 5, 6, 7, 8)
UPDATES = 1800
MARGIN = 0.05  # nats/token
WIDTH = 64
DEEP, DEEP_SEEDS, DEEP_RATES, DEEP_UPDATES = 200, (3, 4, 5), (1e-3, 3e-4), 300
DEEP_ARMS = ("keel", "deepnorm", "branchnorm")
SHARED: Mapping[str, Any] = {
    "model": {"design": "llama", "init": "arch", "embedding_scale": "sqrt(d)", "d_model": WIDTH, "heads": 4},
    "data": {"sentences": 8, "max_length": 64},
    "train": {
        "schedule": "linear",
        "weight_decay": 0.01,
        "beta1": 0.9,
        "beta2": 0.95,
        "clip_norm": 1.0,
        "label_smoothing": 0.0,
    },
    "probes": {"names": ("none",)},
}


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


STUDY = Study(SHARED, arms, LAYERS, UPDATES, SEEDS, rates=(2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3))


def deep(data: Settings) -> Iterator[tuple[str, float, int, Experiment]]:
    """Yield (arm, rate, seed, run) at 200 layers: the higher rate of all first, seed by seed."""
    for rate in DEEP_RATES:
        for seed in DEEP_SEEDS:
            for arm in DEEP_ARMS:
                yield arm, rate, seed, STUDY.experiment(arm, DEEP, rate, seed, data, DEEP_UPDATES)
