"""Curvature of two ranks is that of one process, to 1e-4; and the ranks train as if nobody looked."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from rank_curvature import NAMES, train

ROUGH = ("residual", "converged", "products", "exact")  # how good a number is, and how it came about


@cache
def alone() -> dict[str, Any]:
    return train("one")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ddp", "fsdp", "ddp_split", "columns", "hsdp", "fsdp_split"])
def test_two_ranks_have_the_numbers_of_one_process(ranks: Any, case: str) -> None:
    several, one = ranks(f"curvature_{case}")[0]["rows"], alone()["rows"]
    assert {name for _, name in one} == set(NAMES)
    assert several.keys() == one.keys()
    for (row, name), expected in one.items():
        own = several[row, name]
        parts = ("least", "most") if "split" in case else ()  # whose thirds are those of a rank's one number
        for column in expected.keys() - {*ROUGH, *parts}:
            assert own[column] == pytest.approx(expected[column], rel=1e-4, nan_ok=True), (row, name, column)
        if name != "critical_sharpness":
            assert own["exact"] == (0 if case.partition("_")[0] != "ddp" else 1)


@pytest.mark.slow
def test_they_train_as_without(ranks: Any) -> None:
    assert ranks("curvature_bitwise")[0] == {"ddp": True, "fsdp": True}


def test_a_loss_that_raises_on_one_rank_ends_the_table_on_both(ranks: Any) -> None:
    first, second = ranks("curvature_fails")
    assert first.keys() == second.keys() == {"critical_sharpness"}
    assert "raised on another rank" in first["critical_sharpness"]
    assert "no loss on this rank" in second["critical_sharpness"]
