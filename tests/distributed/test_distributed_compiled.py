"""DDP under torch.compile: the tables of one process where its graph stays whole, and a sentence where it is split."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from rank_compiled import train_compiled
from rest_slow import rest_slow
from test_distributed_tables import worst


@cache
def alone() -> dict[str, Any]:
    return train_compiled("one")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("buckets", "watched"),
    rest_slow(
        [("whole", "it"), ("unsplit", "before"), ("whole", "before"), ("unsplit", "it")],
        [],
        [("whole", "it"), ("unsplit", "before")],
    ),
)
def test_every_table_is_that_of_one_process(ranks: Any, buckets: str, watched: str) -> None:
    found = ranks("compiled_ddp")[0]
    seen, plain = found[buckets, watched], found[buckets, "no"]
    assert worst(seen, alone()) < 1e-9
    assert seen["graphs"] == plain["graphs"] == 1
    assert all(torch.equal(a, b) for a, b in zip(seen["parameters"], plain["parameters"], strict=True))


@pytest.mark.slow
def test_buckets_that_split_the_graph_are_refused_or_said(ranks: Any) -> None:
    for rank, found in enumerate(ranks("compiled_ddp")):
        assert found["several", "no"]["graphs"] > 1
        assert found["several", "it"].startswith("UsageError: DDP splits what is compiled at its buckets")
        assert "optimize_ddp = False" in found["several", "it"]
        trained, plain = found["several", "before"], found["several", "no"]
        assert all(torch.equal(a, b) for a, b in zip(trained["parameters"], plain["parameters"], strict=True))
        if rank == 0:
            assert "there is no number of the forward pass: DDP splits" in found["several", "said"][0]
