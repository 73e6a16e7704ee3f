"""DeepNet, Figure 6: quality against depth by families of architectures, and claim C52, on made-up losses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from in_memory import remembered
from making import load, make_run

from stabilitylab.arch_notes import built_in
from stabilitylab.models import ARCHS
from stabilitylab.reports.base import MissingRuns, Picture
from stabilitylab.reports.claims import CLAIMS, Finding, judge
from stabilitylab.reports.collection import Record, Runs
from stabilitylab.reports.figures.deepnet.figure_6 import QualityOfAll
from stabilitylab.reports.measures.families import families
from stabilitylab.reports.measures.outcomes import unigram
from stabilitylab.store.evaluation import write_evaluation

DEPTHS, SEEDS = (6, 18, 50), (3, 4, 5)
OPTIONS = {"beam": 4, "length_penalty": 0.6, "penalty_kind": "gnmt", "signature": "s", "data": "d", "sentences": 9}


def trained(arch: str, depth: int, seed: int, nll: float, **more: Any) -> Record:
    return remembered(f"{arch}-{depth}-{seed}-{nll}", arch=arch, layers=depth, seed=seed, nll=nll, **more)


def all_of(archs: Sequence[str] = ("postln", "deepnorm", "rezero", "subln")) -> list[Record]:
    return [trained(arch, n, s, 6 - n / 100 + archs.index(arch) / 10 + s / 1000)
            for arch, n, s in itertools.product(archs, DEPTHS, SEEDS)]  # fmt: skip


def drawn(records: Sequence[Record]) -> Picture:
    return QualityOfAll().picture(Runs(records))


def test_every_architecture_has_one_family_and_its_own_look_there() -> None:
    found = families(sorted(ARCHS))
    listed = [arch for archs in found.values() for arch in archs]
    assert sorted(listed) == sorted(ARCHS)
    assert [note.name for note in built_in() if not note.family] == found.get("Others", [])
    assert [*found][:5] == [
        "The papers' own",
        "Smaller or no branches at first",
        "More norms",
        "More streams",
        "Since 2024",
    ]
    from stabilitylab.reports.style import style

    for archs in found.values():
        looks = [style(arch) for arch in archs]
        assert len({look.colour for look in looks}) == len({look.marker for look in looks}) == len(archs)


def test_controls_go_with_their_architecture_and_strangers_come_last() -> None:
    assert families(["branchnorm T=1", "mine", "subln"]) == {
        "The papers' own": ["branchnorm T=1"], "More norms": ["subln"], "Others": ["mine"]
    }  # fmt: skip


def test_a_panel_has_its_family_in_colour_and_all_others_in_grey() -> None:
    picture = drawn(all_of())
    assert [panel.title for panel in picture.panels] == [
        "The papers' own",
        "Smaller or no branches at first",
        "More norms",
    ]
    first, second, third = picture.panels
    assert [line.label for line in first.series] == ["the others"] * 2 + ["Post-LN", "DeepNorm"]
    assert [line.label for line in second.series] == ["the others"] * 3 + ["ReZero"]
    assert [line.label for line in third.series] == ["the others"] * 3 + ["Sub-LN"]
    deepnorm = first.series[-1]
    assert (deepnorm.x, deepnorm.seeds) == ([*DEPTHS], 3)
    assert deepnorm.y == pytest.approx([6.1 + 0.004 - n / 100 for n in DEPTHS])
    assert deepnorm.low is not None
    assert deepnorm.low == pytest.approx([6.103 - n / 100 for n in DEPTHS])
    grey = [tuple(line.y) for line in second.series[:3]]
    assert tuple(deepnorm.y) in grey  # nothing is lost between panels
    assert picture.finding == (
        "Best at 50 layers a side: Post-LN 5.50, DeepNorm 5.60, ReZero 5.70 nats; DeepNorm -0.44 from 6 (3 seeds)."
    )


def test_failures_are_crosses_at_their_depth() -> None:
    lost = [trained("postln", 50, 3, 7.5, verdict="stuck"), trained("postln", 50, 4, math.nan, verdict="diverged")]
    kept = [run for run in all_of() if (run.label, run.depth) != ("postln", 50)]
    picture = drawn([*kept, *lost])
    line, crosses, *_ = (one for one in picture.panels[0].series if one.arch == "postln")
    assert (line.x, crosses.kind) == ([6, 18], "crosses")
    assert [*zip(crosses.x, crosses.y, strict=True)] == [(50, 7.5), (50, 7.5)]
    assert picture.finding.endswith("2 of 35 runs diverged or are stuck.")
    assert any("diverged has no value" in note for note in picture.notes)


def test_bleu_is_drawn_where_all_were_evaluated(tmp_path: Path) -> None:
    for depth, bleu in ((6, 20.0), (18, 25.0)):
        metrics = {"held_out_nll": [8.0, 5.0], "held_out_accuracy": [0.1, 0.2]}
        path = make_run(tmp_path, f"{depth}", arch="deepnorm", layers=depth, metrics=metrics, metric_steps=(0, 100))
        write_evaluation(path, {"bleu": bleu, "row": 100, **OPTIONS})
    picture = QualityOfAll().picture(load(tmp_path))
    assert (picture.panels[0].y, picture.panels[0].series[0].y) == ("BLEU", [20.0, 25.0])
    assert "DeepNorm +5.00 from 6" in picture.finding


def test_other_settings_are_counted_and_one_depth_is_drawn_too() -> None:
    other = [trained("deepnorm", 6, seed, 5.0, settings={"train": {"lr": 1.0}}) for seed in range(3, 40)]
    picture = drawn([*all_of(), *other])
    assert "Not drawn: 37 runs with other settings, or without an end." in picture.notes
    assert drawn(other).finding == "Best at 6 layers a side: DeepNorm 5.00 nats (37 seeds)."


def test_an_architecture_with_a_recipe_of_its_own_is_marked() -> None:
    own = [trained("tfixup", 50, seed, 4.0) for seed in SEEDS]
    picture = drawn([*all_of(), *own])
    assert picture.finding.startswith("Best at 50 layers a side: T-Fixup (own recipe) 4.00, Post-LN 5.50")
    assert "T-Fixup with the recipe that its paper insists on: train.warmup = 0." in picture.notes
    cold = [trained("postln", 50, 3, 5.0, settings={"train": {"warmup": 0}}), own[0]]
    assert "own recipe" not in drawn(cold).finding


def test_without_runs_it_names_the_command() -> None:
    with pytest.raises(MissingRuns) as missing:
        drawn([])
    assert missing.value.command == "stabilitylab sweep table"


def deepnorm(gain: Callable[[int], float], depths: Sequence[int] = DEPTHS, **more: Any) -> list[Record]:
    return [trained("deepnorm", n, s, 7 - gain(s) * math.log(n), **more) for n in depths for s in SEEDS]


@pytest.mark.parametrize(
    ("gain", "expected"),
    [
        (lambda s: 0.2 + s / 100, "reproduced"),
        (lambda s: -0.2 - s / 100, "contradicted"),
        (lambda s: s - 4, "inconclusive"),
    ],
)
def test_c52_is_the_slope_with_log_depth(gain: Callable[[int], float], expected: str) -> None:
    found: Finding = judge(CLAIMS["C52"], Runs(deepnorm(gain)))
    assert found.verdict == expected
    assert found.effects[0]["mean"] == pytest.approx(gain(4))


def test_c52_takes_all_of_the_data_and_the_deepest() -> None:
    up, down = (lambda s: 0.2), (lambda s: -0.2)
    few = deepnorm(down, (6, 18, 90), settings={"data": {"fraction": 0.1}})
    shallow = deepnorm(down, (3, 6, 12, 18), settings={"train": {"steps": 900}})
    found = judge(CLAIMS["C52"], Runs([*few, *shallow, *deepnorm(up)]))
    assert found.effects[0]["mean"] == pytest.approx(0.2)


def test_c52_needs_three_depths_and_a_model_that_failed_at_one_leaves_it_open() -> None:
    found = judge(CLAIMS["C52"], Runs(deepnorm(lambda s: 0.2, (6, 18))))
    assert (found.verdict, found.command) == ("not testable", "stabilitylab sweep table")
    lost = deepnorm(lambda s: 0.2, (90,), verdict="stuck")
    rising = deepnorm(lambda s: 0.2, (6, 18, 50))
    assert judge(CLAIMS["C52"], Runs(rising)).verdict == "reproduced"
    assert judge(CLAIMS["C52"], Runs([*rising, *lost])).verdict == "inconclusive"


def test_where_all_diverged_their_crosses_stand_at_the_unigram_baseline_and_not_at_0() -> None:
    lost = Runs(deepnorm(lambda s: 0.2, verdict="diverged"))
    (panel,) = QualityOfAll().picture(lost).panels
    (crosses,) = [line for line in panel.series if line.kind == "crosses"]
    assert set(crosses.y) == {unigram(lost)} != {0.0}
