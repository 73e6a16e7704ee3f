"""The figure of edges, on made-up runs whose edges are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from in_memory import remembered

from stabilitylab.experiments import SWEEPS, Recipe
from stabilitylab.reports import paper
from stabilitylab.reports.base import FIGURES, MissingRuns, Picture
from stabilitylab.reports.collection import Record, Runs
from stabilitylab.reports.figures.table.edge import EdgeTable, edges_of

RATES = (1e-3, 2e-3, 4e-3, 8e-3)


def ended(arch: str, layers: int, seed: int, lr: float, verdict: str, warmup: int = 40, **more: Any) -> Record:
    settings = {"train": {"lr": lr, "warmup": warmup, "schedule": "constant", **more}}
    name = f"{arch}-{layers}-{seed}-{lr}-{warmup}"
    return remembered(name, arch=arch, layers=layers, seed=seed, verdict=verdict, gap=-1.0, settings=settings)


def up_to(arch: str, layers: int, seed: int, last: float, warmup: int = 40, fails: str = "stuck") -> list[Record]:
    return [ended(arch, layers, seed, lr, "trained" if lr <= last else fails, warmup) for lr in RATES]


def all_edges() -> list[Record]:
    found = []
    for layers, last in ((6, 4e-3), (18, 2e-3)):
        found += up_to("postln", layers, 3, last) + up_to("postln", layers, 4, last / 2)
        found += up_to("deepnorm", layers, 3, 4e-3, fails="diverged")
    return [*found, *up_to("postln", 6, 3, 1e-3, warmup=0)]


def drawn(records: list[Record]) -> Picture:
    return EdgeTable().picture(Runs(records))


def test_an_edge_lies_between_what_trained_and_what_failed() -> None:
    picture = drawn(all_edges())
    warm, cold = picture.panels
    assert (warm.title, cold.title) == ("warm-up of 40 updates", "no warm-up")
    lines = {line.label: line for line in warm.series}
    assert lines["DeepNorm"].x == (12, 36)
    assert lines["DeepNorm"].y == pytest.approx([32**0.5 * 1e-3] * 2)
    assert lines["Post-LN"].y == pytest.approx([4e-3, 2e-3])  # two seeds, a factor of 2 apart
    assert lines["Post-LN"].low == pytest.approx([8**0.5 * 1e-3, 2**0.5 * 1e-3])
    assert lines["Post-LN"].high == pytest.approx([32**0.5 * 1e-3, 8**0.5 * 1e-3])
    assert lines["Post-LN"].seeds == [2, 2]
    assert cold.series[0].y == pytest.approx([2**0.5 * 1e-3])
    assert picture.finding == (
        "At 36 layers with a warm-up of 40 updates Post-LN trains up to 0.002, DeepNorm trains up to 0.0057 "
        "(1 to 2 seeds)."
    )


def test_what_trains_above_a_rate_that_does_not_is_beyond_the_edge() -> None:
    for ends, edge in (
        (("trained", "stuck", "trained", "stuck"), (1e-3, 2e-3)),
        (("trained", "learning", "stuck", "stuck"), (1e-3, 4e-3)),
    ):
        runs = [ended("postln", 6, 3, lr, end) for lr, end in zip(RATES, ends, strict=True)]
        assert edges_of(Runs(runs)) == {("postln", 12, 40): {3: edge}}


def test_two_runs_at_one_rate_are_both_looked_at() -> None:
    """Such as the same recipe at two ramps; the second of them fails."""
    tried = ((1e-3, "trained"), (2e-3, "trained"), (2e-3, "stuck"))
    runs = [ended("postln", 6, 3, lr, end) for lr, end in tried]
    assert edges_of(Runs(runs)) == {("postln", 12, 40): {3: (1e-3, 2e-3)}}


def test_where_all_rates_end_alike_there_is_no_edge_and_that_is_said() -> None:
    picture = drawn([*all_edges(), *up_to("preln", 6, 3, 1.0)])
    assert "Without an edge, as all rates tried ended alike: Pre-LN at 12." in picture.notes
    assert [line.label for line in picture.panels[0].series] == ["Post-LN", "DeepNorm"]


def test_runs_of_another_recipe_make_no_edge_with_these() -> None:
    other = [ended("postln", 6, 3, 1e-3, "trained"), ended("postln", 6, 3, 2e-3, "stuck", label_smoothing=0.5)]
    with pytest.raises(MissingRuns) as missing:
        drawn(other)
    assert missing.value.command == "stabilitylab sweep table:edge --scale tiny"


def test_the_sweep_crosses_both_sides_of_every_edge() -> None:
    runs = list(SWEEPS["table:edge"](Recipe("tiny", {})))
    assert len(runs) == len({run.name for run in runs}) == 4 * 2 * 2 * 6 * 3
    assert {run.config.train.schedule for run in runs} == {"constant"}
    assert {run.config.train.warmup for run in runs} == {0, 40}
    assert {run.config.model.T for run in runs} == {40}


def test_it_is_drawn(tmp_path: Path) -> None:
    assert FIGURES["table:edge"] is EdgeTable
    files = paper.write(drawn(all_edges()), tmp_path, "table-edge")
    assert {"png", "csv"} <= files.keys()
