"""BranchNorm, Figure 4, and its claims C37 and C47, on made-up losses over the training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_memory import remembered
from judged import SEEDS, SPREAD, Loss, flat, models, verdict
from making import load, make_run

from stabilitylab.reports.base import MissingRuns, Panel, Picture
from stabilitylab.reports.claims import CLAIMS, judge
from stabilitylab.reports.collection import Record, Runs
from stabilitylab.reports.figures.branchnorm.figure_4 import QualityOverUpdates, first_update
from stabilitylab.reports.measures.quality import mean_nll
from stabilitylab.store.evaluation import write_evaluation

AT = (0, 10, 30, 100)  # updates at which the loss is measured


def curve(arch: str, seed: int, nll: Sequence[float], *, T: int = 100, **more: Any) -> Record:
    record = remembered(f"{arch}-{T}-{seed}-{more}", arch=arch, seed=seed, **more,
                        settings={"model": {"T": T}, "train": {"steps": AT[-1]}})  # fmt: skip
    frame = record.run.metrics.iloc[[0] * len(nll)].copy()
    frame["step"], frame["held_out_nll"] = AT[: len(nll)], nll
    record.run.metrics = frame  # type: ignore[misc]
    return record


def drawn(*records: Record) -> tuple[dict[str, Panel], Picture]:
    picture = QualityOverUpdates().picture(Runs(records))
    return {panel.title: panel for panel in picture.panels}, picture


def test_the_mean_over_updates_is_the_area_under_the_curve() -> None:
    # trapezoids by hand: 10 * 7.5 + 20 * 6 + 70 * 4.5 = 510 over 100 updates
    assert mean_nll(curve("deepnorm", 3, (8, 7, 5, 4))) == pytest.approx(5.1)
    straight = [8 - 0.04 * step for step in AT]  # of a straight line it is the middle, however it is measured
    assert mean_nll(curve("deepnorm", 3, straight)) == pytest.approx(6.0)
    assert mean_nll(curve("deepnorm", 3, (8, 7, 5, 4), verdict="diverged")) == math.inf
    assert math.isnan(mean_nll(curve("deepnorm", 3, (8,))))


def test_the_first_update_lies_between_measurements() -> None:
    run = curve("deepnorm", 3, (8, 7, 5, 6))
    assert [first_update(run, level) for level in (9, 8, 7.5, 7, 6, 5.5)] == [0, 0, 5, 10, 20, 25]
    assert math.isnan(first_update(run, 4.9))


def test_the_picture_is_the_loss_and_who_is_ahead() -> None:
    def seeds(arch: str, nll: Sequence[float], **more: Any) -> list[Record]:
        return [curve(arch, seed, [value + (seed - 3) for value in nll], **more) for seed in (3, 4)]

    panels, picture = drawn(
        *seeds("deepnorm", (8, 7, 5, 4)), *seeds("branchnorm", (8, 7.5, 5, 3.5)),
        *seeds("branchnorm", (8, 6, 4, 3), T=1),
    )  # fmt: skip
    assert [*panels] == ["Held-out loss", "Against DeepNorm", "Updates until a loss is reached"]
    loss, ahead, reached = panels.values()
    assert [line.arch for line in loss.series] == ["deepnorm", "branchnorm"]
    assert [line.arch for line in picture.controls[0].series] == ["deepnorm", "branchnorm", "branchnorm T=1"]
    assert loss.series[1].y == pytest.approx([8.5, 8, 5.5, 4])
    assert [(line.arch, line.x) for line in ahead.series] == [("branchnorm", [*AT])]
    assert [line.arch for line in picture.controls[1].series] == ["branchnorm", "branchnorm T=1"]
    assert ahead.series[0].y == ahead.series[0].low == pytest.approx([0, 0.5, 0, -0.5])  # seeds' levels cancel
    assert [(one.value, one.label) for one in ahead.references] == [(0.0, "equal to DeepNorm")]
    # all six runs come down from at least 8 to at most 5: 7.5, 7, ..., 5
    assert reached.ticks == [5, 5.5, 6, 6.5, 7, 7.5]
    deepnorm = dict(zip(reached.series[0].x, reached.series[0].y, strict=True))
    assert deepnorm[5] == pytest.approx((30 + 100) / 2)  # seed 3 at 30, seed 4 at the end
    assert deepnorm[7] == pytest.approx((10 + 20) / 2)
    assert picture.finding == (
        "Held-out loss down to 6 nats: DeepNorm after 25, BranchNorm after 26, BranchNorm T=1 after 15; to 5 nats: "
        "DeepNorm after 65, BranchNorm after 53, BranchNorm T=1 after 25 updates. At the end BranchNorm -0.500 "
        "[-0.500, -0.500] nats from DeepNorm (2 seeds); BranchNorm T=1 -1.000 [-1.000, -1.000] nats from DeepNorm "
        "(2 seeds)."
    )
    assert "T = 100. Lines are means over seeds" in picture.notes[0]


def test_runs_that_failed_are_no_difference() -> None:
    good = [curve("deepnorm", seed, (8, 7, 5, 4)) for seed in (3, 4)]
    stuck = curve("branchnorm", 4, (8,) * 4, verdict="stuck")
    panels, picture = drawn(*good, curve("branchnorm", 3, (8, 7, 5, 3)), stuck)
    assert panels["Against DeepNorm"].series[0].y == [0, 0, 0, -1]
    assert panels["Updates until a loss is reached"].series[1].seeds == 1
    assert panels["Held-out loss"].series[1].seeds == 2
    assert any("those of the runs that trained" in note for note in picture.notes)
    assert any("Without the ablation BranchNorm T=1" in note for note in picture.notes)
    lost, picture = drawn(*good, *(curve("branchnorm", seed, (8,) * 4, verdict="stuck") for seed in (3, 4)))
    assert [*lost] == ["Held-out loss", "Updates until a loss is reached"]
    assert picture.finding.endswith("No two runs of one seed both trained.")


def test_bleu_is_drawn_where_the_runs_were_evaluated(tmp_path: Path) -> None:
    for arch, score in (("deepnorm", 20.0), ("branchnorm", 25.0)):
        metrics = {"held_out_nll": [8.0, 5.0], "held_out_accuracy": [0.1, 0.2]}
        path = make_run(tmp_path, arch, arch=arch, layers=2, metrics=metrics, metric_steps=(0, 100))
        write_evaluation(path, {"bleu": score, "row": 100})
    panel = QualityOverUpdates().picture(load(tmp_path)).panels[-1]
    assert (panel.title, panel.y) == ("BLEU after training", "BLEU")
    assert [(one.kind, one.x, one.y) for one in panel.series] == [("points", [100], [20.0]), ("points", [100], [25.0])]
    (tmp_path / "branchnorm" / "evaluation.json").unlink()
    assert all(panel.y != "BLEU" for panel in QualityOverUpdates().picture(load(tmp_path)).panels)


def test_without_a_pair_it_names_the_command() -> None:
    with pytest.raises(MissingRuns) as missing:
        QualityOverUpdates().picture(Runs([curve("deepnorm", 3, (8, 7, 5, 4)), curve("branchnorm", 4, (8, 7, 5, 4))]))
    assert missing.value.command == "stabilitylab sweep branchnorm:4 --scale tiny"


@pytest.mark.parametrize(
    ("gap", "expected"),
    [
        (lambda n, s: 5 - 0.1 + SPREAD[s], "reproduced"),
        (lambda n, s: 5 + 0.1 + SPREAD[s], "contradicted"),
        (lambda n, s: 5 + (0.1 if n == 6 else -0.3) + SPREAD[s], "reproduced"),  # what counts is the mean over depths
        (lambda n, s: 5 + SPREAD[s], "not reproduced"),  # lower by less than .01
        (lambda n, s: 5 + 10 * SPREAD[s], "inconclusive"),
    ],
)
def test_c37_final_loss(gap: Loss, expected: str) -> None:
    depths = (6, 12)
    found = verdict("C37", models("branchnorm", gap, depths=depths), models("deepnorm", flat, depths=depths))
    assert found.verdict == expected
    means = {n: np.mean([gap(n, s) - 5 for s in SEEDS]) for n in depths}
    assert [effect["mean"] for effect in found.effects] == pytest.approx(
        [np.mean([*means.values()]), means[6], means[12]]
    )


def test_c37_prints_the_ablation_which_decides_nothing() -> None:
    good = models("branchnorm", lambda n, s: 4.9)
    ablation = models("branchnorm", lambda n, s: 4.5, seeds=(3,), settings={"model": {"T": 1}})
    found = verdict("C37", good, ablation, models("deepnorm", flat))
    assert found.verdict == "reproduced"
    assert [(e["effect"], e["mean"], e["n"], e["verdict"]) for e in found.effects] == [
        ("difference, mean over depths", pytest.approx(-0.1), 4, "reproduced"),
        ("BranchNorm - DeepNorm at 6L", pytest.approx(-0.1), 4, ""),
        ("BranchNorm - BranchNorm T=1 at 6L", pytest.approx(0.4), 1, ""),
        ("BranchNorm T=1 - DeepNorm at 6L", pytest.approx(-0.5), 1, ""),
    ]


def test_c37_compares_runs_of_the_protocols_ramp() -> None:
    long = {"settings": {"model": {"T": 80}}}
    found = verdict("C37", models("branchnorm", lambda n, s: 4.9, **long), models("deepnorm", flat))
    assert found.verdict == "not testable"
    assert found.why == (
        "BranchNorm ramped for 80 of 160 updates: architectures are compared with a ramp of 4 % of the run"
    )
    right = models("branchnorm", lambda n, s: 5.2)
    found = verdict("C37", models("branchnorm", lambda n, s: 4.9, **long), right, models("deepnorm", flat))
    assert (found.verdict, found.effects[0]["n"]) == ("contradicted", 4)
    assert "T = 6 (3.75 %)" in found.effects[0]["conditions"]


def test_c37_each_arm_at_its_own_rate() -> None:
    fast = {"settings": {"train": {"lr": 2e-3}}}
    own = [models("branchnorm", lambda n, s: 4.9, **fast), models("deepnorm", flat)]
    found = verdict("C37", *own)
    assert (found.verdict, found.effects[0]["n"]) == ("reproduced", 4)
    assert "lr 0.0003 (DeepNorm), 0.002 (BranchNorm)" in found.effects[0]["conditions"].replace(
        "lr 0.002 (BranchNorm), 0.0003 (DeepNorm)", "lr 0.0003 (DeepNorm), 0.002 (BranchNorm)"
    )


def test_c37_takes_the_longest_training_with_enough_seeds() -> None:
    def at(steps: int, loss: float, seeds: Sequence[int]) -> list[Record]:
        settings = {"train": {"steps": steps}}
        return [
            *models("branchnorm", lambda n, s: loss, seeds=seeds, settings=settings),
            *models("deepnorm", flat, seeds=seeds, settings=settings),
        ]

    found = verdict("C37", at(100, 6.0, SEEDS), at(200, 4.0, SEEDS[:3]), at(300, 6.0, SEEDS[:1]))
    assert (found.verdict, found.effects[0]["n"]) == ("reproduced", 3)


def test_c37_two_ramps_are_not_mixed() -> None:
    rare = models("branchnorm", lambda n, s: 9.0, seeds=SEEDS[:2], settings={"model": {"T": 7}})
    found = verdict("C37", models("branchnorm", lambda n, s: 4.9), models("deepnorm", flat), rare)
    assert (found.verdict, found.effects[0]["n"]) == ("reproduced", 4)


def test_c37_from_run_directories(tmp_path: Path) -> None:
    for arch, loss in (("branchnorm", 4.9), ("deepnorm", 5.0)):
        for seed in (1, 3, 4, 5):  # 1 was a pilot at this width
            metrics = {"held_out_nll": [8.0, loss + seed / 1000], "held_out_accuracy": [0.1, 0.2]}
            make_run(tmp_path, f"{arch}-{seed}", arch=arch, seed=seed, layers=2, metrics=metrics)
    found = judge(CLAIMS["C37"], load(tmp_path))
    assert (found.verdict, found.effects[0]["seeds"]) == ("reproduced", [3, 4, 5])
    assert found.effects[0]["mean"] == pytest.approx(-0.1)


def test_c37_without_runs() -> None:
    found = verdict("C37", models("branchnorm", flat))
    assert (found.verdict, found.command) == ("not testable", "stabilitylab sweep branchnorm:4 --scale tiny")


@pytest.mark.parametrize(
    ("middle", "expected"),
    [
        (lambda seed: 4.9 + SPREAD[seed], "reproduced"),
        (lambda seed: 5.1 + SPREAD[seed], "contradicted"),
        (lambda seed: 5.0 + SPREAD[seed], "not reproduced"),
    ],
)
def test_c47_is_decided_by_the_whole_course_and_not_by_its_end(middle: Callable[[int], float], expected: str) -> None:
    deepnorm = [curve("deepnorm", seed, (8, 7, 5, 4)) for seed in SEEDS]
    branchnorm = [curve("branchnorm", seed, (8, 7, middle(seed), 4)) for seed in SEEDS]
    ablation = [curve("branchnorm", seed, (8, 7, 4, 4), T=1) for seed in SEEDS]
    found = verdict("C47", deepnorm, branchnorm, ablation)
    assert found.verdict == expected
    effect, _, ramp, alpha = found.effects
    # the third measurement weighs half of what lies between the second and the last: 90 of 100 updates
    assert effect["mean"] == pytest.approx(0.45 * (np.mean([middle(seed) for seed in SEEDS]) - 5))
    assert effect["effect"] == "mean difference, mean over depths"
    assert (ramp["mean"] + alpha["mean"], alpha["mean"]) == pytest.approx((effect["mean"], -0.45))


@pytest.mark.parametrize("id", ["C37", "C47"])
def test_a_depth_at_which_branchnorm_diverged_leaves_the_claim_open(id: str) -> None:
    ahead = [curve(arch, seed, (8, 7, 6, end), layers=6) for arch, end in (("deepnorm", 4), ("branchnorm", 1))
             for seed in SEEDS]  # fmt: skip
    assert verdict(id, ahead).verdict == "reproduced"
    deep = [curve("deepnorm", seed, (8, 7, 6, 4), layers=50) for seed in SEEDS]
    lost = [curve("branchnorm", seed, (8, 7, 6, 4), layers=50, verdict="diverged") for seed in SEEDS]
    found = verdict(id, ahead, deep, lost)
    assert (found.verdict, len(found.effects)) == ("inconclusive", 3)


def test_the_ablation_beside_c37_is_of_the_same_settings() -> None:
    long = [record for arch in ("deepnorm", "branchnorm")
            for record in models(arch, flat, settings={"train": {"steps": 1200}})]  # fmt: skip
    short = [*models("deepnorm", flat), *models("branchnorm", flat, settings={"model": {"T": 1}})]
    assert len(verdict("C37", long, short).effects) == 2


def test_c47_needs_both() -> None:
    deepnorm = [curve("deepnorm", seed, (8, 7, 5, 4)) for seed in SEEDS]
    assert verdict("C47", deepnorm).command == "stabilitylab sweep branchnorm:4 --scale tiny"
