"""Claim C45, on made-up losses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from in_memory import remembered

from stabilitylab.reports.claims import CLAIMS, Finding, judge
from stabilitylab.reports.collection import Record, Runs

SEEDS = (3, 4, 5, 6)
SPREAD = dict(zip(SEEDS, (-0.003, -0.001, 0.001, 0.003), strict=True))  # what the seed adds


def verdict(id: str, records: Sequence[Record]) -> Finding:
    return judge(CLAIMS[id], Runs(records))


SHARES = (0.01, 0.1, 1.0)
Gain = Callable[[float, int], float]


def sizes(gain: Gain, arch: str = "branchnorm", **more: Any) -> list[Record]:
    """Quality grows by ``gain`` (of the share and the seed) with each unit of log depth."""
    return [
        remembered(f"{arch}-{share}-{n}-{s}", arch=arch, layers=n, seed=s, nll=9 - gain(share, s) * math.log(n),
                   **({"settings": {"data": {"fraction": share}}} | more))
        for share, n, s in itertools.product(SHARES, (3, 6, 18), SEEDS)
    ]  # fmt: skip


def both(gain: Gain, deepnorm: Gain | None = None, **more: Any) -> list[Record]:
    return [*sizes(gain, **more), *sizes(deepnorm or gain, "deepnorm", **more)]


@pytest.mark.parametrize(
    ("gain", "expected"),
    [
        (lambda share, s: -0.2 + 0.1 * (math.log10(share) + 2) + SPREAD[s], "reproduced"),
        (lambda share, s: 0.1 + 0.1 * (math.log10(share) + 2) + SPREAD[s], "reproduced"),  # little data gains too
        (lambda share, s: -0.2 - 0.1 * math.log10(share) + SPREAD[s], "contradicted"),  # the gain shrinks
        (lambda share, s: -0.2 + 60 * SPREAD[s] * math.log10(share), "inconclusive"),
    ],
)
def test_c45_depth_needs_data(gain: Gain, expected: str) -> None:
    found = verdict("C45", both(gain))
    assert found.verdict == expected
    mean = [np.mean([gain(share, s) for s in SEEDS]) for share in SHARES]
    interaction = (mean[2] - mean[0]) / math.log(100)
    assert [effect["mean"] for effect in found.effects] == pytest.approx([interaction] * 3 + [mean[0]] * 2)


def test_c45_judges_both_architectures() -> None:
    def grows(share: float, seed: int) -> float:
        return -0.2 + 0.1 * (math.log10(share) + 2) + SPREAD[seed]

    def shrinks(share: float, seed: int) -> float:
        return -0.2 - 0.3 * (math.log10(share) + 2) + SPREAD[seed]

    found = verdict("C45", both(grows, shrinks))
    assert found.verdict == "contradicted"
    assert [effect["effect"] for effect in found.effects] == [
        "interaction, mean of both",
        "interaction, DeepNorm",
        "interaction, BranchNorm",
        "slope on the smallest data, DeepNorm",
        "slope on the smallest data, BranchNorm",
    ]
    mean, deepnorm, branchnorm = (effect["mean"] for effect in found.effects[:3])
    assert (mean, deepnorm, branchnorm) == pytest.approx(
        (-0.2 / math.log(100), -0.6 / math.log(100), 0.2 / math.log(100))
    )


def test_c45_compares_the_same_sizes_at_each_seed() -> None:
    runs = both(lambda share, s: -0.2 + 0.1 * (math.log10(share) + 2))
    found = verdict("C45", [run for run in runs if (run.seed, run.settings["data.fraction"]) != (6, 0.01)])
    assert found.effects[0]["seeds"] == [3, 4, 5]


def test_c45_missing_failed_and_another_ramp() -> None:
    one_size = [run for run in both(lambda share, s: 0.1) if run.settings["data.fraction"] == 1.0]
    assert verdict("C45", one_size).verdict == "not testable"
    assert verdict("C45", sizes(lambda share, s: 0.1)).verdict == "not testable"  # DeepNorm is missing
    assert verdict("C45", both(lambda share, s: 0.1, verdict="stuck")).verdict == "not testable"
    half = verdict("C45", both(lambda share, s: 0.1, settings={"model": {"T": 80}}))
    assert "BranchNorm ramped for 80 of 160 updates" in half.why
