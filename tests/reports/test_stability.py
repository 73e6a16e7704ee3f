"""The stability table's rows: counts, means and ranges over seeds, on made-up runs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from in_memory import remembered

from stabilitylab.reports.collection import Record, Runs
from stabilitylab.reports.stability import COLUMNS, stability_table


def ended(
    arch: str, layers: int, seed: int, verdict: str, gap: float | None = None, name: str = "", **more: Any
) -> Record:
    """A run that ended with this verdict, ``gap`` above the unigram baseline."""
    record = remembered(name or f"{arch}-{layers}-{seed}", arch=arch, layers=layers, seed=seed, verdict=verdict, **more)
    record.status.facts["verdict"]["nll_gap"] = gap
    return record


def rows(records: list[Record]) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in stability_table(Runs(records)).itertuples(index=False)]


def test_each_cell_counts_its_seeds_and_their_range() -> None:
    found = rows(
        [
            ended("deepnorm", 18, 3, "trained", -1.5),
            ended("deepnorm", 18, 4, "trained", -1.0),
            ended("deepnorm", 18, 5, "learning", -0.2),
            ended("postln", 6, 3, "trained", -0.5),
            ended("postln", 18, 3, "stuck", 0.01),
            ended("postln", 18, 4, "diverged", 5.0),
        ]
    )
    assert [row[:7] for row in found] == [
        ("postln", 12, 1, 1, 0, 0, 0),
        ("postln", 36, 2, 0, 0, 1, 1),
        ("deepnorm", 36, 3, 2, 1, 0, 0),
    ]
    assert found[0][7:] == (-0.5, -0.5, -0.5)
    assert found[1][7:] == (0.01, 0.01, 0.01)  # the value of a run that diverged is no quality
    assert found[2][7:] == pytest.approx((-0.9, -1.5, -0.2))


def test_where_all_diverged_there_is_no_value() -> None:
    (row,) = rows([ended("postln", 50, seed, "diverged", math.nan) for seed in (3, 4)])
    assert row[:7] == ("postln", 100, 2, 0, 0, 0, 2)
    assert all(math.isnan(value) for value in row[7:])


def test_depth_counts_both_stacks_whatever_they_are() -> None:
    uneven = {"model": {"encoder_layers": 12, "decoder_layers": 2}}
    single = {"model": {"stack": "decoder", "encoder_layers": 0, "decoder_layers": 7}}
    found = rows([ended("preln", 1, 3, "trained", -1.0, "u", settings=uneven),
                  ended("preln", 1, 3, "trained", -1.0, "s", settings=single)])  # fmt: skip
    assert [row[1] for row in found] == [7, 14]


def test_only_training_runs_that_ended_count() -> None:
    open_ = ended("deepnorm", 6, 4, "")
    onestep = ended("deepnorm", 6, 5, "trained", -1.0)
    onestep.kind = "onestep"
    interrupted = ended("deepnorm", 6, 6, "trained", -1.0)
    interrupted.status = replace(interrupted.status, state="interrupted")
    (row,) = rows([ended("deepnorm", 6, 3, "trained", -1.0), open_, onestep, interrupted])
    assert row[:4] == ("deepnorm", 12, 1, 1)


def test_of_two_runs_with_one_seed_the_last_by_name_counts() -> None:
    found = rows([ended("deepnorm", 6, 3, "trained", -1.0, "b"), ended("deepnorm", 6, 3, "stuck", 0.0, "a")])
    assert found == [("deepnorm", 12, 1, 1, 0, 0, 0, -1.0, -1.0, -1.0)]


def test_without_runs_it_is_empty_and_keeps_its_columns() -> None:
    table = stability_table(Runs([]))
    assert (len(table), tuple(table.columns)) == (0, COLUMNS)
