"""BranchNorm, Figure 5: quality against depth, on made-up losses and scores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from making import load, make_run

from stabilitylab.reports.base import MissingRuns, Panel, Picture
from stabilitylab.reports.collection import spared
from stabilitylab.reports.figures.branchnorm.figure_5 import QualityAgainstDepth
from stabilitylab.reports.measures.quality import quality
from stabilitylab.store.evaluation import write_evaluation

HOW = {"row": 100, "beam": 4, "length_penalty": 0.6, "penalty_kind": "gnmt", "signature": "s", "data": "d"}


def make_model(
    folder: Path,
    arch: str,
    depth: int,
    *,
    seed: int = 3,
    share: float = 1.0,
    nll: float = 5.0,
    bleu: float | None = None,
    how: Mapping[str, Any] = HOW,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    **facts: Any,
) -> Path:
    """A run of 100 updates that ends at ``nll``, evaluated where ``bleu`` is given."""
    name = f"{arch}-{depth}-{share}-{seed}"
    own = {"data": {"fraction": share}, **(settings or {})}
    metrics = {"held_out_nll": [8.0, nll], "held_out_accuracy": [0.1, 0.2]}
    path = make_run(folder, name, arch=arch, seed=seed, layers=depth, settings=own, metrics=metrics,
                    metric_steps=(0, 100), **facts)  # fmt: skip
    if bleu is not None:
        write_evaluation(path, {"bleu": bleu, "sentences": 10, **how})
    return path


def drawn(folder: Path) -> tuple[list[Panel], Picture]:
    picture = QualityAgainstDepth().picture(load(folder))
    return [*picture.panels], picture


def test_the_picture_is_the_loss_at_each_depth_and_size(tmp_path: Path) -> None:
    for share, pairs in ((0.01, 217), (1.0, 21_712)):
        for seed in (3, 4):
            for depth in (2, 6):
                for arch, gain in (("deepnorm", 1.0), ("branchnorm", -1.0 if share < 1 else 2.0)):
                    nll = 5.0 + 0.1 * seed - gain * depth / 10
                    make_model(tmp_path, arch, depth, seed=seed, share=share, nll=nll, data={"train": pairs})
    (few, many), picture = drawn(tmp_path)
    assert [few.title, many.title] == ["1% of data: 217 pairs", "100% of data: 21,712 pairs"]
    assert (few.log_x, few.ticks, few.y) == (True, [2, 6], "held-out nll [nats/token]")
    deepnorm, branchnorm = few.series
    assert (deepnorm.arch, deepnorm.x, deepnorm.seeds) == ("deepnorm", [2, 6], 2)
    assert deepnorm.y == pytest.approx([5.15, 4.75])
    assert (deepnorm.low, deepnorm.high) == (pytest.approx([5.1, 4.7]), pytest.approx([5.2, 4.8]))
    assert branchnorm.y == pytest.approx([5.55, 5.95])
    assert many.series[1].y == pytest.approx([4.95, 4.15])
    assert picture.finding == (
        "From 2 to 6 layers a side: DeepNorm -0.40 nats on 1%, -0.40 nats on 100% of the data; "
        "BranchNorm +0.40 nats on 1%, -0.80 nats on 100% of the data (2 seeds)."
    )
    assert any("stands in for BLEU" in note for note in picture.notes)


def test_bleu_is_drawn_where_every_model_of_a_panel_has_five(tmp_path: Path) -> None:
    for depth, score in ((2, 20.0), (6, 25.0)):
        make_model(tmp_path, "deepnorm", depth, bleu=score)
        make_model(tmp_path, "deepnorm", depth, share=0.1, bleu=score - 16)  # 4 and 9
    (few, many), picture = drawn(tmp_path)
    assert (many.y, many.series[0].y) == ("BLEU", [20.0, 25.0])
    assert (few.y, few.series[0].y) == ("held-out nll [nats/token]", [5.0, 5.0])
    assert "+0.00 nats on 10%, +5.00 BLEU on 100%" in picture.finding


def test_the_axis_says_that_sources_were_cut(tmp_path: Path) -> None:
    for depth in (2, 6):
        make_model(tmp_path, "deepnorm", depth, bleu=20.0, how={**HOW, "truncated": 3})
    assert quality(load(tmp_path)).axis == "BLEU, 3 of 10 sources cut"
    make_model(tmp_path, "deepnorm", 18, bleu=20.0, how={**HOW, "truncated": 0})
    assert quality(load(tmp_path)).axis == "held-out nll [nats/token]"  # what was cut otherwise does not compare


@pytest.mark.parametrize("how", [{**HOW, "beam": 1}, {**HOW, "row": 50}, {**HOW, "data": "other"}, {"bleu": None}])
def test_scores_that_cannot_be_compared_are_not_drawn(tmp_path: Path, how: dict[str, Any]) -> None:
    make_model(tmp_path, "deepnorm", 2, bleu=20.0)
    make_model(tmp_path, "deepnorm", 6, bleu=25.0, how=how)
    (panel,), _ = drawn(tmp_path)
    assert panel.y == "held-out nll [nats/token]"


def test_a_damaged_evaluation_is_not_taken_for_none(tmp_path: Path) -> None:
    """The report lists its run as unreadable, as it does for every damaged file, and draws the others."""
    kept = make_model(tmp_path, "deepnorm", 2, bleu=20.0)
    damaged = make_model(tmp_path, "deepnorm", 6, bleu=25.0)
    (damaged / "evaluation.json").write_text('{"bleu": 2')
    broken: list[tuple[Path, str]] = []
    found, left = spared(load(tmp_path), broken, quality)
    assert (found.is_bleu, [run.run.path for run in left]) == (True, [kept])
    assert [path for path, why in broken if "evaluation.json is damaged" in why] == [damaged]


def test_a_score_from_before_the_last_updates_is_not_drawn(tmp_path: Path) -> None:
    make_model(tmp_path, "deepnorm", 2, bleu=20.0, how={**HOW, "row": 50})
    (panel,), _ = drawn(tmp_path)
    assert panel.y == "held-out nll [nats/token]"


def test_runs_that_failed_are_crosses(tmp_path: Path) -> None:
    for depth in (2, 6):
        make_model(tmp_path, "deepnorm", depth, nll=5.0 - depth / 10)
    make_model(tmp_path, "postln", 2, nll=4.9)
    make_model(tmp_path, "postln", 6, nll=6.5, verdict="stuck")
    make_model(tmp_path, "postln", 6, seed=4, nll=math.nan, verdict="diverged", state="diverged")
    make_model(tmp_path, "deepnorm", 6, seed=4, nll=6.4, verdict="stuck")
    (panel,), picture = drawn(tmp_path)
    assert {series.arch for series in panel.series} == {"deepnorm"}
    line, crosses = (series for series in picture.controls[0].series if series.arch == "postln")
    assert (line.x, line.y) == ([2], [4.9])
    assert crosses.kind == "crosses"
    assert [*zip(crosses.x, crosses.y, strict=True)] == [(6, 6.5), (6, 6.5)]  # the diverged one has no value
    assert picture.finding == (
        "From 2 to 6 layers a side: DeepNorm -0.40 nats on 100% of the data (2 seeds); "
        "3 of 6 runs diverged or are stuck."
    )
    assert any("diverged" in note and "worst" in note for note in picture.notes)


def test_crosses_count_the_seeds_of_their_own_architecture(tmp_path: Path) -> None:
    for seed in (3, 4, 5):
        make_model(tmp_path, "deepnorm", 2, seed=seed)
    make_model(tmp_path, "branchnorm", 2, nll=6.5, verdict="stuck", settings={"model": {"T": 4}})
    (panel,), _ = drawn(tmp_path)
    assert {series.kind: series.seeds for series in panel.series} == {"line": 3, "crosses": 1}


def test_failures_without_translation_have_no_bleu(tmp_path: Path) -> None:
    make_model(tmp_path, "deepnorm", 2, bleu=20.0)
    make_model(tmp_path, "deepnorm", 6, bleu=21.0)
    make_model(tmp_path, "postln", 6, verdict="stuck", bleu=0.3)
    make_model(tmp_path, "postln", 2, verdict="diverged", nll=math.nan)
    (panel,), picture = drawn(tmp_path)
    assert panel.y == "BLEU"
    crosses = picture.controls[0].series[0]
    assert (crosses.kind, [*zip(crosses.x, crosses.y, strict=True)]) == ("crosses", [(2, 0.0), (6, 0.3)])


def test_where_all_diverged_crosses_stand_at_the_unigram_baseline(tmp_path: Path) -> None:
    make_model(tmp_path, "postln", 6, verdict="diverged", nll=math.nan, unigram={"cross_entropy": 6.25})
    (panel,), picture = drawn(tmp_path)
    assert [series.y for series in panel.series] == [(6.25,)]
    assert "no architecture trained" in picture.finding


def test_one_run_is_drawn_and_the_sweep_named(tmp_path: Path) -> None:
    make_model(tmp_path, "branchnorm", 3, nll=4.5)
    (panel,), picture = drawn(tmp_path)
    assert [(line.x, line.y) for line in panel.series] == [([3], [4.5])]
    assert picture.finding == "At 3 layers a side, one depth: BranchNorm 4.50 nats on 100% of the data (one seed)."
    assert any("stabilitylab sweep branchnorm:5" in note for note in picture.notes)


def test_a_depth_sweep_wins_over_more_runs_of_one_depth(tmp_path: Path) -> None:
    for seed, share in itertools.product((3, 4, 5), (0.1, 1.0)):
        make_model(tmp_path / "wide", "deepnorm", 2, seed=seed, share=share, settings={"train": {"lr": 1e-3}})
    for depth in (2, 6):
        make_model(tmp_path / "deep", "deepnorm", depth)
    (panel,), picture = drawn(tmp_path)
    assert panel.series[0].x == [2, 6]
    assert "Not drawn: 6 runs with other settings, or without an end." in picture.notes


def test_an_unfinished_run_is_no_point(tmp_path: Path) -> None:
    make_model(tmp_path, "deepnorm", 2)
    make_model(tmp_path, "deepnorm", 6, state="interrupted", verdict="")
    (panel,), picture = drawn(tmp_path)
    assert panel.series[0].x == [2]
    assert "Not drawn: 1 run with other settings, or without an end." in picture.notes


def test_dropout_may_go_with_the_size_of_the_data(tmp_path: Path) -> None:
    """As at the papers' size; within one size the commonest dropout alone is drawn."""
    for share, dropout in ((0.1, 0.4), (1.0, 0.1)):
        for depth in (2, 6):
            make_model(tmp_path, "deepnorm", depth, share=share, settings={"model": {"dropout": dropout}})
    make_model(tmp_path, "deepnorm", 6, seed=4, nll=9.0, settings={"model": {"dropout": 0.0}})
    panels, _ = drawn(tmp_path)
    assert [panel.title for panel in panels] == ["10% of data", "100% of data"]
    assert [panel.series[0].y for panel in panels] == [[5.0, 5.0]] * 2


def test_uneven_stacks_have_no_depth(tmp_path: Path) -> None:
    make_model(tmp_path, "deepnorm", 2, settings={"model": {"encoder_layers": 12}})
    with pytest.raises(MissingRuns):
        QualityAgainstDepth().picture(load(tmp_path))


def test_without_runs_it_names_the_command(tmp_path: Path) -> None:
    make_run(tmp_path, "bare", layers=2)
    with pytest.raises(MissingRuns) as missing:
        QualityAgainstDepth().picture(load(tmp_path))
    assert "stabilitylab sweep branchnorm:5" in missing.value.command
    assert "held-out loss" in missing.value.sentence
