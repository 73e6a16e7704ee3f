"""Passes of our own change no rank: what one rank's forward changes is undone there, and ends the passes of all."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("table", ["output_norm", "critical_sharpness"])
def test_two_ranks_train_as_unwatched_and_end_together(ranks: Any, table: str) -> None:
    both = ranks("neutral")
    for found in both:
        # buffers that DDP broadcasts before a forward are put back without a word
        assert found["ddp", "batch norm", table]["differing"] == []
        assert found["ddp", "batch norm", table]["ended"] == {}
        for kind, how, changed in (("ddp", "one rank", "memory"), ("fsdp", "shards", "layers.0.out.weight")):
            own = found[kind, how, table]
            assert own["differing"] == []
            assert own["marks"] == []
            which = "reference" if table == "output_norm" else "curvature"
            assert own["ended"][table].startswith(f"row 0: the {which} pass changed {changed}, and it was put back")
    first = both[0]
    assert first["ddp", "batch norm", "output_norm"]["rows"]["output_norm"] == [0, 1, 2, 3, 4, 5]
    assert first["ddp", "one rank", "output_norm"]["rows"]["grad_norm"] == [0, 1, 2, 3, 4]


def test_what_one_rank_changes_late_is_marked_on_all(ranks: Any) -> None:
    for found in ranks("neutral"):
        for table, row in (("output_norm", 2), ("critical_sharpness", 0)):
            own = found["ddp", "late", table]
            assert len(own["marks"]) == 1
            assert f"row {row}: " in own["marks"][0]
            assert "pass changed memory, of which no copy was kept" in own["marks"][0]
            assert list(own["ended"]) == [table]
