"""The stability table's rows: counts, means and ranges over seeds, on made-up runs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from in_memory import remembered

from stabilitylab.reports.collection import Record, Runs
from stabilitylab.reports.stability import COLUMNS, COUNTS, brief, cell, markdown, stability_table, table_groups, wide


def ended(
    arch: str, layers: int, seed: int, verdict: str, gap: float | None = None, name: str = "", **more: Any
) -> Record:
    """A run that ended with this verdict, ``gap`` above the unigram baseline."""
    known = {"arch": arch, "layers": layers, "seed": seed, "verdict": verdict, **more}
    return remembered(name or f"{arch}-{layers}-{seed}", gap=math.nan if gap is None else gap, **known)


def rows(records: list[Record]) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in stability_table(Runs(records)).itertuples(index=False)]


def counted(row: tuple[Any, ...]) -> dict[str, int]:
    """The states of a row that any seed has, and how many have each."""
    values = dict(zip(COLUMNS, row, strict=True))
    return {column: values[column] for column in COUNTS.values() if values[column]}


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
    assert [row[:3] for row in found] == [("postln", 12, 1), ("postln", 36, 2), ("deepnorm", 36, 3)]
    assert [counted(row) for row in found] == [
        {"trained": 1},
        {"stuck": 1, "diverged": 1},
        {"trained": 2, "learning": 1},
    ]
    assert found[0][-3:] == (-0.5, -0.5, -0.5)
    assert found[1][-3:] == (0.01, 0.01, 0.01)  # the value of a run that diverged is no quality
    assert found[2][-3:] == pytest.approx((-0.9, -1.5, -0.2))


def test_where_all_diverged_there_is_no_value() -> None:
    (row,) = rows([ended("postln", 50, seed, "diverged", math.nan) for seed in (3, 4)])
    assert row[:3] == ("postln", 100, 2)
    assert counted(row) == {"diverged": 2}
    assert all(math.isnan(value) for value in row[-3:])


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
    (row,) = found
    assert (row[:3], row[-3:]) == (("deepnorm", 12, 1), (-1.0, -1.0, -1.0))
    assert counted(row) == {"trained": 1}


def test_without_runs_it_is_empty_and_keeps_its_columns() -> None:
    table = stability_table(Runs([]))
    assert (len(table), tuple(table.columns)) == (0, COLUMNS)


def test_a_group_has_one_recipe_but_for_what_a_paper_insists_on() -> None:
    warm = {"train": {"warmup": 40}}
    common = [ended(arch, 6, 3, "trained", -1.0, settings=warm) for arch in ("postln", "deepnorm")]
    own = ended("tfixup", 6, 3, "trained", -1.0, settings={"train": {"warmup": 0}})
    other = [ended("deepnorm", 6, 3, "stuck", 0.0, "cold", settings={"train": {"warmup": 0}}),
             ended("tfixup", 6, 3, "stuck", 0.0, "hot", settings={"train": {"warmup": 0, "lr": 1.0}})]  # fmt: skip
    first, second = table_groups(Runs([*common, own, *other]))
    assert [run.name for run in first] == ["postln-6-3", "deepnorm-6-3", "tfixup-6-3"]
    assert [run.name for run in second] == ["cold", "tfixup-6-3"]  # no warm-up is everybody's there
    assert [run.name for run in table_groups(Runs([own]))[0]] == ["tfixup-6-3"]


def test_groups_differ_in_settings_and_most_cells_come_first() -> None:
    few = [
        ended("deepnorm", 6, seed, "trained", -1.0, f"few{seed}", settings={"train": {"lr": 1.0}}) for seed in range(9)
    ]
    many = [ended("deepnorm", n, 3, "trained", -1.0) for n in (6, 18)]
    uneven = ended("deepnorm", 6, 3, "trained", -1.0, "u", settings={"model": {"decoder_layers": 2}})
    groups = table_groups(Runs([*few, *many, uneven]))
    assert [len(group) for group in groups] == [2, 9]
    assert table_groups(Runs([uneven])) == []


def test_of_two_ramps_that_nearest_to_the_protocols_counts() -> None:
    runs = [ended("branchnorm", 6, seed, "trained", -1.0, f"{T}-{seed}", settings={"model": {"T": T}})
            for T, seeds in ((100, (3, 4, 5)), (7, (6, 7)), (200, (5, 6, 7))) for seed in seeds]  # fmt: skip
    (group,) = table_groups(Runs(runs))
    assert group.seeds == [6, 7]


def row(gap: float = -0.5, **states: int) -> dict[str, Any]:
    counts = {column: states.get(column, 0) for column in COUNTS.values()}
    return {**counts, "seeds": sum(counts.values()), "nll_gap": gap}


@pytest.mark.parametrize(
    ("cell_row", "long", "short"),
    [
        (row(trained=3), "-0.50", "-0.50"),
        (row(learning=3, gap=0.1), "+0.10, learning", "(+0.10)"),
        (row(trained=2, learning=1), "-0.50, 1 of 3 learning", "(-0.50)"),
        (row(descending=2, trained=1), "-0.50, 2 of 3 descending", "(-0.50)"),
        (row(cannot_tell=3, gap=0.1), "+0.10, cannot tell", "(+0.10)"),
        (row(trained=1, stuck=2), "-0.50, 2 of 3 stuck", "-0.50 2/3 stuck"),
        (row(learning=1, stuck=1, diverged=1), "-0.50, 1 of 3 learning, 1 of 3 stuck, 1 of 3 diverged",
         "(-0.50) 2/3 failed"),
        (row(stuck=3, gap=0.0), "stuck", "stuck"),
        (row(diverged=3, gap=math.nan), "diverged", "diverged"),
        (row(stuck=1, diverged=2), "-0.50, 1 of 3 stuck, 2 of 3 diverged", "failed"),
    ],
)  # fmt: skip
def test_a_cell_says_what_not_all_seeds_did(cell_row: dict[str, Any], long: str, short: str) -> None:
    assert (cell(cell_row), brief(cell_row)) == (long, short)


def test_bleu_stands_in_for_the_loss_in_a_cell() -> None:
    assert brief(row(trained=1, stuck=1), "21.3") == "21.3 1/2 stuck"


def test_the_wide_table_and_markdown() -> None:
    table = stability_table(
        Runs([ended("postln", 6, 3, "trained", -1.0), ended("postln", 50, 3, "stuck", 0.1),
              ended("deepnorm", 50, 3, "trained", -2.0)])
    )  # fmt: skip
    assert wide(table).to_numpy().tolist() == [["Post-LN", "-1.00", "stuck"], ["DeepNorm", "", "-2.00"]]
    assert markdown(table) == (
        "| arch | 12 | 100 |\n| --- | --- | --- |\n| Post-LN | -1.00 | stuck |\n| DeepNorm |  | -2.00 |\n"
    )
