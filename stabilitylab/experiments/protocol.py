"""The runs of Protocol 2, by which architectures are compared: ramps of 4 % of the run, and for each its own rate.

T = warm-up = 4 % of the run, where BranchNorm has 4,000 of 100,000 updates; then a linear decay to 0. Each arm trains
at the learning rate that is best for it on seeds 100 and 101 in runs of a quarter of the length; seeds 3 to 8 are
judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config import resolve
from .recipe import CONTROLS, Experiment, Settings, name_of, probing

RAMP = 0.04  # of the run: warm-up, and BranchNorm's T
ARMS = ("postln gain=1", "branchnorm T=1", "deepnorm", "branchnorm")
ALPHA_ALONE = "deepnorm alpha-only gain=1"  # beside them, at 6 layers a side
LAYERS = (6, 18)  # a side
UPDATES, CHOICE_UPDATES = 6000, 1500
SEEDS, CHOICE_SEEDS = (3, 4, 5, 6, 7, 8), (100, 101)
RATES = (
    5e-4,
    1e-3,
    2e-3,
    4e-3,
)  # the four to choose from; a best one at their edge is followed by another, twice beyond
LEAST_RATE, MOST_RATE = RATES[0] / 16, RATES[-1] * 16


def arms(layers: int) -> tuple[str, ...]:
    """The arms at ``layers`` a side."""
    return (*ARMS, ALPHA_ALONE) if layers == LAYERS[0] else ARMS


def share(updates: int, part: float = RAMP) -> int:
    """``part`` of a run in updates, at least one."""
    return max(1, round(part * updates))


def run(
    arm: str, layers: int, seed: int, rate: float, updates: int, data: Settings, *settings: Settings, tag: str = ""
) -> Experiment:
    """One run of ``arm``, ``layers`` a side, at learning rate ``rate``, whose warm-up and T are 4 % of ``updates``.

    ``settings`` win over these, but not over what makes the arm.
    """
    common: dict[str, Any] = {
        "model": {"T": share(updates), "encoder_layers": layers, "decoder_layers": layers},
        "data": dict(data),
        "train": {"steps": updates, "warmup": share(updates), "schedule": "linear", "lr": rate},
    }
    own = {"model": CONTROLS[arm], "data": {"seed": seed}, "train": {"seed": seed}}
    config = resolve(common, *settings, own)
    return Experiment(name_of(config, *filter(None, (f"lr{rate:g}", tag))), config)


def choice(layers: int, data: Settings, rates: Mapping[str, tuple[float, ...]] | None = None) -> Iterator[Experiment]:
    """The runs from which the rate of each arm is chosen; ``rates``: others than the four."""
    light: Settings = {"train": {"final_checkpoint": False}}
    for seed in CHOICE_SEEDS:
        for arm in arms(layers):
            for rate in RATES if rates is None else rates.get(arm, ()):
                yield run(arm, layers, seed, rate, CHOICE_UPDATES, data, probing(), light)


def best(losses: Mapping[float, float]) -> tuple[float, float | None]:
    """The rate of the smallest loss, and the rate that is to be tried next, where the best one stands at the edge.

    A loss that is not finite counts as the worst. None: the choice is made, or the next rate would lie beyond
    ``LEAST_RATE`` and ``MOST_RATE``.
    """
    chosen = min(losses, key=lambda rate: (not losses[rate] < float("inf"), losses[rate]))
    if chosen == min(losses) and chosen / 2 >= LEAST_RATE:
        return chosen, chosen / 2
    if chosen == max(losses) and chosen * 2 <= MOST_RATE:
        return chosen, chosen * 2
    return chosen, None
