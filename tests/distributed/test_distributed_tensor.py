"""Tensor parallelism: every table is that of one process, whether watch comes before parallelize_module or after."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from rank_tensor import PLANS, train_cut
from rest_slow import rest_slow
from test_distributed_tables import worst


@cache
def alone(**options: Any) -> dict[str, Any]:
    return train_cut("one", **options)


@pytest.mark.parametrize(
    ("plan", "when"),
    rest_slow(product(PLANS, ("before", "after")), {("sequence", "after")}),
)
def test_every_table_is_that_of_one_process(ranks: Any, plan: str, when: str) -> None:
    first, second = ranks(f"cut_{plan}_{when}")
    assert worst(first, alone(when=when)) < 1e-9
    assert len(first["rows"]) == 4
    assert second["rows"] == []


@pytest.mark.slow
def test_step_0_in_float32(ranks: Any) -> None:
    several, one = ranks("cut_start")[0], alone(dtype=torch.float32, steps=1)
    apart, both = "parameter_norm", (several, one)
    tables = [(found["rows"][0][0], found["rows"][0][1], dict(found["rows"][0][2])) for found in both]
    single = [(row, {}, {apart: cells.pop(apart)}) for row, _, cells in tables]
    assert worst(*({**found, "rows": [row]} for found, row in zip(both, tables, strict=True))) < 1e-6
    # how far one small parameter moved is a difference of neighbouring floats
    assert worst(*({**found, "rows": [row]} for found, row in zip(both, single, strict=True))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_fully_shard_around_it(four_ranks: Any, plan: str) -> None:
    first, *others = four_ranks(f"cut_{plan}_fsdp")
    assert worst(first, alone()) < 1e-9
    assert [other["rows"] for other in others] == [[], [], []]


@pytest.mark.slow
def test_a_watched_run_equals_an_unwatched_one(ranks: Any) -> None:
    for found in ranks("cut_bitwise"):
        assert found == dict.fromkeys(PLANS, True)


def test_what_ranks_of_one_layer_do_not_have_alike_is_said_by_name(ranks: Any) -> None:
    for rank, found in enumerate(ranks("cut_apart")):
        assert found["dropout"].startswith("UsageError: residual_norm at 'layers.0' differs between ranks of one layer")
        assert "nothing here averages the gradient of 'embedding.weight'" in found["never cut"]
        assert found["fully_shard"].startswith("UsageError: fully_shard must come before watch")
        assert "optimizer= holds parameters that the model no longer has" in found["an early optimizer"]
        if rank == 0:
            (line,) = found["a gradient"]
            assert "layers.0.attention.q_norm.weight" in line
            assert "train apart" in line
