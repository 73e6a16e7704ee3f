"""Pipeline parallelism: the tables of all stages together are those of one process on the whole batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from rank_pipeline import train_stages
from test_distributed_tables import worst


@cache
def alone(**options: Any) -> dict[str, Any]:
    return train_stages("one", **options)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("stages_1F1B", {}),
        ("stages_GPipe", {}),
        ("stages_uneven", {}),
        ("stages_summed", {"scale_grads": False}),
    ],
)
def test_every_table_is_that_of_one_process(ranks: Any, case: str, options: dict[str, Any]) -> None:
    """From the first row on, before which the schedule runs each stage once more, on values that mean nothing."""
    first, second = ranks(case)
    assert worst(first, alone(**options)) < 1e-9
    assert [row for row, *_ in first["rows"]] == [0, 1, 2]
    assert second["rows"] == []
    assert all(metrics["loss"] is not None for _, metrics, _ in first["rows"])  # which the last stage alone knows


def test_a_watched_run_equals_an_unwatched_one(ranks: Any) -> None:
    for watched, plain in zip(ranks("stages_1F1B"), ranks("stages_unwatched"), strict=True):
        for name, parameter in plain["parameters"].items():
            assert torch.equal(watched["parameters"][name], parameter), name


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("interleaved", "ScheduleInterleaved1F1B gives a process several stages, .* use Schedule1F1B or ScheduleGPipe"),
        ("another model", "must be the stage's own module"),
        ("the same names", "two stages of the pipeline have .* as a ModuleDict whose keys are the numbers"),
        ("mask", "mask= does not tell which micro-batch"),
        ("reference", "has no held-out pass of its own: leave reference= out"),
        ("compiled", "leave torch.compile out"),
        ("nothing to find", "probe 'branch_variance' needs a held-out pass of the whole model, of which a stage"),
        ("no schedule", "the schedule if this is a stage of a pipeline"),
    ],
)
def test_what_a_stage_cannot_do_is_refused(ranks: Any, asked: str, message: str) -> None:
    for found in ranks("stages_refused"):
        with pytest.raises(AssertionError, match=f"^UsageError: .*{message}"):
            raise AssertionError(found[asked])


def test_a_run_directory_holds_all_stages(ranks: Any) -> None:
    for found in ranks("stages_directory"):
        assert (found["status"], found["layers"]) == ("finished", [0, 1, 2, 3, 4])
        assert {"model_update", "cosine_similarity"} <= set(found["dropped"])
