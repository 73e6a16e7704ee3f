"""Fingerprints of several ranks are those of one process, whichever way batch and parameters are spread over them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from rank_tensor import PLANS, train_cut
from rank_toys import train
from rest_slow import rest_slow

OF_PARAMETERS = {"fingerprint_weight", "fingerprint_weight_gradient", "fingerprint_weight_direction"}
TABLES = {"fingerprint", "fingerprint_gradient", *OF_PARAMETERS}
HEADS = "attention.q_norm"  # each rank of a tensor-parallel model has other heads there


@cache
def alone() -> dict[str, Any]:
    return train("one", steps=2, accumulate=2, probes="fingerprint")


@cache
def uncut(when: str = "after") -> dict[str, Any]:
    return train_cut("one", when, steps=2, probes="fingerprint")


def check(several: dict[str, Any], one: dict[str, Any], cut: bool = False, early: str = "") -> None:
    """Every sum is that of one process, to 1e-9 of the norm of the value: sums may cancel. The order of calls that get
    one and the same gradient is left open. ``cut``: by tensor parallelism, where some places have no number.
    ``early``: one that has none in the first row."""
    assert several["tables"] == one["tables"]
    assert set(one["tables"]) == TABLES
    for number, ((_, _, tables), (_, _, others)) in enumerate(zip(several["rows"], one["rows"], strict=True)):
        for name, theirs in others.items():
            layout, ours = one["tables"][name], tables[name]
            places = [row.site for row in layout.rows]
            without = [HEADS] * cut + [early] * (number == 0 and early != "")
            if name == "fingerprint_gradient" and cut:
                without.append(":in")
            gone = np.array([any(each in place for each in without) for place in places]) & (name not in OF_PARAMETERS)
            np.testing.assert_array_equal(ours.absent, theirs.absent, name)
            np.testing.assert_array_equal(ours.values[:, layout.columns.index("ulp")] == 0, gone, name)
            columns = [place for place, column in enumerate(layout.columns) if column != "call"]
            # a rounding of a gradient counts as far as it reaches eps, 1e-8: the direction of one that is 0 is rounding
            floor, limit = (1.0, 1e-7) if name == "fingerprint_weight_direction" else (1e-12, 1e-9)
            norm = np.maximum(theirs.values[:, [layout.columns.index("norm")]], floor)
            apart = (np.abs(ours.values - theirs.values) / norm)[:, columns][~ours.absent & ~gone]
            assert apart.size > 100
            assert apart.max() < limit, (name, number, np.array(places)[~ours.absent & ~gone][apart.max(1).argmax()])


@pytest.mark.parametrize("kind", rest_slow(["ddp", "fsdp", "columns", "hsdp"], {"fsdp"}))
def test_fingerprints_of_replicas_and_shards(ranks: Any, kind: str) -> None:
    several, other = ranks(f"{kind}_fingerprint")
    check(several, alone())
    assert other["rows"] == []


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_fingerprints_under_tensor_parallelism(ranks: Any, plan: str) -> None:
    several, other = (found[plan] for found in ranks("cut_fingerprint"))
    # without an optimizer the watcher takes eps = 1e-8 for the direction
    one = uncut("before" if plan == "loss" else "after")
    check(several, one, True, "embedding:out" if plan == "sequence" else "")
    assert other["rows"] == []


@pytest.mark.slow
def test_fingerprints_under_both(four_ranks: Any) -> None:
    several, *others = four_ranks("cut_fingerprint_fsdp")
    check(several, uncut(), True, "embedding:out")
    assert [other["rows"] for other in others] == [[], [], []]
