"""The stability table as a figure, on made-up runs."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from in_memory import remembered
from making import load, make_run

from stabilitylab.reports import paper
from stabilitylab.reports.base import DIVERGED, FIGURES, STUCK, Map, MissingRuns, Picture
from stabilitylab.reports.collection import Record, Runs
from stabilitylab.reports.figures.table.stability import StabilityTable
from stabilitylab.store.evaluation import write_evaluation

OPTIONS = {"beam": 4, "length_penalty": 0.6, "penalty_kind": "gnmt", "signature": "s", "data": "d", "sentences": 9}


def ended(arch: str, layers: int, seed: int, verdict: str, gap: float, **more: Any) -> Record:
    known = {"arch": arch, "layers": layers, "seed": seed, "verdict": verdict, **more}
    return remembered(f"{arch}-{layers}-{seed}", gap=gap, **known)


def nine() -> list[Record]:
    """DeepNorm trains at both depths; Post-LN at 6 a side, where one is learning, and two of three are lost at 50."""
    return [
        *(ended("deepnorm", layers, seed, "trained", -layers / 10 - seed) for layers in (6, 50) for seed in (3, 5)),
        ended("postln", 6, 3, "learning", -0.1),
        ended("postln", 6, 5, "trained", -0.5),
        ended("postln", 50, 3, "stuck", 0.2),
        ended("postln", 50, 4, "diverged", 9.0),
        ended("postln", 50, 5, "trained", -0.4),
    ]


def drawn(records: list[Record]) -> tuple[Map, Picture]:
    picture = StabilityTable().picture(Runs(records))
    (panel,) = picture.panels
    assert panel.map is not None
    return panel.map, picture


def test_a_cell_is_the_mean_over_seeds_and_its_text_has_the_counts() -> None:
    table, picture = drawn(nine())
    assert (table.y_names, table.x_names) == (["Post-LN", "DeepNorm"], ["12", "100"])
    assert table.z == pytest.approx(np.array([[-0.3, -0.1], [-4.6, -9.0]]))
    assert table.text is not None
    assert table.text.tolist() == [["(-0.30)", "-0.10 2/3 failed"], ["-4.60", "-9.00"]]
    assert table.finding.tolist() == [[0, DIVERGED], [0, 0]]  # one stuck and one diverged: the worse of two equals
    assert table.unit == "nll - unigram [nats/token]"
    assert (table.centre, np.asarray(table.seeds).tolist()) == (0, [[2, 3], [2, 2]])
    assert picture.key.startswith("(in parentheses): a seed not 0.25 nats below the baseline")
    assert picture.finding == (
        "At 100 layers 1 of 2 architectures were below the unigram baseline with every seed (2 to 3 seeds). "
        "2 of 9 runs diverged or are stuck."
    )
    assert any("2 to 3 seeds a cell" in note for note in picture.notes)


def test_a_model_that_ignores_its_source_is_below_the_baseline_and_not_trained() -> None:
    unread = [ended("branchnorm", 50, seed, "ignores its source", -1.0) for seed in (3, 5)]
    table, picture = drawn([*nine(), *unread])
    assert table.text is not None
    assert table.text[table.y_names.index("BranchNorm")].tolist() == ["", "(-1.00)"]
    assert picture.key.startswith("(in parentheses): a seed not 0.25 nats below the baseline, or one that ignores its")
    assert picture.finding.startswith("At 100 layers 2 of 3 architectures were below the unigram baseline")


def test_more_than_half_of_the_seeds_mark_a_cell() -> None:
    stuck = [ended("postln", 6, seed, "stuck", 0.1) for seed in (3, 4)]
    half = [ended("postln", 18, seed, state, -0.5) for seed, state in ((3, "stuck"), (4, "trained"))]
    table, picture = drawn([*stuck, *half])
    assert table.finding.tolist() == [[STUCK, 0]]
    assert picture.finding.startswith("At 36 layers 0 of 1 architectures")
    _, picture = drawn(stuck)
    assert "Post-LN diverged or got stuck with every seed" in picture.finding


def test_the_table_is_a_file_that_pandas_reads_and_one_in_markdown(tmp_path: Path) -> None:
    _, picture = drawn(nine())
    files = paper.write(picture, tmp_path, "table-stability")
    data = pd.read_csv(files["table.csv"])
    assert data.loc[1, ["arch", "depth", "seeds", "trained", "learning", "stuck", "diverged"]].tolist() == [
        *("postln", 100, 3, 1, 0, 1, 1),
    ]
    assert data.loc[1, ["nll_gap", "low", "high"]].tolist() == pytest.approx([-0.1, -0.4, 0.2])
    assert "| Post-LN |" in files["table.md"].read_text()
    assert files["table.csv"].name == "table-stability-table.csv"
    assert files.keys() == paper.paths(tmp_path, "table-stability", picture).keys()


def test_a_depth_without_runs_is_an_empty_cell() -> None:
    table, _ = drawn([run for run in nine() if (run.label, run.depth) != ("deepnorm", 50)])
    assert table.text is not None
    assert (table.text[1, 1], math.isnan(table.z[1, 1]), table.finding[1, 1]) == ("", True, 0)


def test_bleu_stands_where_every_trained_run_was_evaluated_alike(tmp_path: Path) -> None:
    for layers, seed, bleu in ((6, 3, 20.0), (6, 4, 22.0), (18, 3, 30.0)):
        metrics = {"held_out_nll": [8.0, 5.0], "held_out_accuracy": [0.1, 0.2]}
        path = make_run(tmp_path, f"{layers}-{seed}", arch="deepnorm", layers=layers, seed=seed, metrics=metrics,
                        metric_steps=(0, 100))  # fmt: skip
        write_evaluation(path, {"bleu": bleu, "row": 100, **OPTIONS})
    make_run(tmp_path, "lost", arch="deepnorm", layers=18, seed=4, verdict="stuck", metrics=metrics,
             metric_steps=(0, 100))  # fmt: skip
    picture = StabilityTable().picture(load(tmp_path))
    table = picture.panels[0].map
    assert table is not None
    assert (table.unit, table.z.tolist()) == ("BLEU", [[21.0, 30.0]])
    assert table.text is not None
    assert table.text.tolist() == [["21.0", "30.0 1/2 stuck"]]
    assert pd.read_csv(io.StringIO(picture.extra["table.csv"]))["bleu"].tolist() == [21.0, 30.0]


def test_a_recipe_that_a_paper_insists_on_is_said() -> None:
    own = ended("tfixup", 6, 3, "trained", -1.0)
    assert (own.settings["train.warmup"], nine()[0].settings["train.warmup"]) == (0, 40)
    table, picture = drawn([*nine(), own])
    assert table.y_names[-1] == "T-Fixup *"
    assert picture.key.endswith("* T-Fixup: train.warmup = 0")
    assert "T-Fixup with the recipe that its paper insists on: train.warmup = 0." in picture.notes
    plain, without = drawn(nine())
    assert not any("insists" in note for note in without.notes)
    assert not any("*" in name for name in (*plain.y_names, without.key))


def test_what_is_not_drawn_is_counted() -> None:
    other = [ended("deepnorm", 6, seed, "trained", -1.0, settings={"train": {"lr": 1.0}}) for seed in (7, 8)]
    assert "Not drawn: 2 runs with other settings." in drawn([*nine(), *other])[1].notes


def test_without_runs_it_names_the_command() -> None:
    assert FIGURES["table"] is FIGURES["table:stability"] is StabilityTable
    with pytest.raises(MissingRuns) as missing:
        StabilityTable().picture(Runs([]))
    assert missing.value.command == "stabilitylab sweep table"
    open_ = remembered("open", verdict="")
    with pytest.raises(MissingRuns, match="has ended with a verdict"):
        StabilityTable().picture(Runs([open_]))
