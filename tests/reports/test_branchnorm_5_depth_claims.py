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


def sizes(gain: Callable[[float, int], float], **more: Any) -> list[Record]:
    """Quality grows by ``gain`` (of the share and the seed) with each unit of log depth."""
    return [
        remembered(f"{share}-{n}-{s}", layers=n, seed=s, nll=9 - gain(share, s) * math.log(n),
                   settings={"data": {"fraction": share}}, **more)
        for share, n, s in itertools.product(SHARES, (3, 6, 18), SEEDS)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("gain", "expected"),
    [
        (lambda share, s: -0.2 + 0.1 * (math.log10(share) + 2) + SPREAD[s], "reproduced"),
        (lambda share, s: 0.1 + 0.1 * (math.log10(share) + 2) + SPREAD[s], "contradicted"),  # little data gains too
        (lambda share, s: -0.2 - 0.1 * math.log10(share) + SPREAD[s], "contradicted"),  # the gain shrinks
        (lambda share, s: -0.2 + 60 * SPREAD[s] * math.log10(share), "inconclusive"),
    ],
)
def test_c45_depth_needs_data(gain: Callable[[float, int], float], expected: str) -> None:
    found = verdict("C45", sizes(gain))
    assert found.verdict == expected
    interaction, smallest = found.effects
    mean = [np.mean([gain(share, s) for s in SEEDS]) for share in SHARES]
    assert smallest["mean"] == pytest.approx(mean[0])
    assert interaction["mean"] == pytest.approx((mean[2] - mean[0]) / math.log(100))


def test_c45_p_is_that_of_flipped_signs() -> None:
    found = verdict("C45", sizes(lambda share, s: -0.2 + 0.1 * (math.log10(share) + 2) + SPREAD[s]))
    assert found.effects[0]["p"] == pytest.approx(2 / 2 ** len(SEEDS))  # all of one sign: two of 16 as extreme


def test_c45_compares_the_same_sizes_at_each_seed() -> None:
    runs = sizes(lambda share, s: -0.2 + 0.1 * (math.log10(share) + 2))
    found = verdict("C45", [run for run in runs if (run.seed, run.settings["data.fraction"]) != (6, 0.01)])
    assert found.effects[0]["seeds"] == [3, 4, 5]


def test_c45_missing_and_failed() -> None:
    one_size = [run for run in sizes(lambda share, s: 0.1) if run.settings["data.fraction"] == 1.0]
    assert verdict("C45", one_size).verdict == "not testable"
    assert verdict("C45", sizes(lambda share, s: 0.1, verdict="stuck")).verdict == "not testable"
