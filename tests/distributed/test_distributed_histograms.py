"""Counts of several ranks are those of one process: whole numbers, entry by entry."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from rank_pipeline import train_stages
from rank_tensor import PLANS, train_cut
from rank_toys import train
from rest_slow import rest_slow

from stabilitylab.histograms import COLUMNS, TABLES

ROUNDING = -40  # entries below 2^-40 are rounding: a gradient of exactly 0 in theory has another sign on two ranks


@cache
def alone() -> dict[str, Any]:
    return train("one", steps=2, accumulate=2, probes=["histograms"])


def check(several: dict[str, Any], one: dict[str, Any], rows: int = 2) -> None:
    assert set(several["tables"]) >= set(TABLES)
    assert several["tables"] == one["tables"]
    small = [f"{sign}2^{power}" for sign in "-+" for power in range(-64, ROUNDING)] + ["-below", "+below", "zero"]
    noise = np.isin(COLUMNS, small)
    for (step, _, tables), (_, _, others) in list(zip(several["rows"], one["rows"], strict=True))[:rows]:
        for name in TABLES:
            ours, theirs = tables[name].values, others[name].values
            np.testing.assert_array_equal(tables[name].absent, others[name].absent)
            assert (ours[~tables[name].absent] % 1 == 0).all(), (step, name)
            np.testing.assert_array_equal(ours[:, ~noise], theirs[:, ~noise], f"{name}, row {step}")
            np.testing.assert_array_equal(ours.sum(1), theirs.sum(1), f"{name}, row {step}")
            assert np.nansum(ours) > 0


@pytest.mark.parametrize("kind", rest_slow(["ddp", "fsdp", "columns", "hsdp"], {"fsdp"}))
def test_histograms_of_replicas_and_shards(ranks: Any, kind: str) -> None:
    several, other = ranks(f"{kind}_histograms")
    check(several, alone())
    assert other["rows"] == []


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_histograms_under_tensor_parallelism(ranks: Any, plan: str) -> None:
    several, other = (found[plan] for found in ranks("cut_histograms"))
    check(several, train_cut("one", steps=2, probes=["histograms"]))
    assert other["rows"] == []


def test_histograms_and_cosines_of_the_stages_of_a_pipeline(ranks: Any) -> None:
    several, other = ranks("stages_histograms")
    one = train_stages("one", probes="histograms,gradient_alignment")
    check(several, one, rows=1)
    for (_, _, tables), (_, _, others) in zip(several["rows"], one["rows"], strict=True):
        if "gradient_alignment" in tables:
            ours, theirs = (found["gradient_alignment"].values for found in (tables, others))
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    assert other["rows"] == []
