"""DeepNet, Figure 7: one setting at a time about a baseline, and claims C50 and C51, on made-up losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
from in_memory import rejudge, remembered

from stabilitylab.config import merge
from stabilitylab.reports.base import MissingRuns, Picture
from stabilitylab.reports.claims import CLAIMS, Finding, judge
from stabilitylab.reports.collection import Record, Runs
from stabilitylab.reports.figures.deepnet.figure_7 import OneSettingAtATime

SEEDS = (3, 4, 5)
BASE = {"train": {"lr": 1e-3, "steps": 160}, "data": {"sentences": 16}}
RATES = {5e-4: -1, 1e-3: 0, 2e-3: 1}  # value -> doublings above the baseline
BATCHES = {8: -1, 16: 0, 32: 1}
WIDTHS = {(32, 64, 1): -1, (64, 128, 2): 0, (128, 256, 4): 1}
AXES = ("lr", "batch", "width")
Loss = Callable[[str, float, int], float]  # of what varies, its doublings, and the seed


def settings(axis: str, value: Any) -> Mapping[str, Any]:
    width = dict(zip(("d_model", "d_ffn", "heads"), value, strict=True)) if axis == "width" else {}
    return {
        "lr": {"train": {"lr": value}},
        "batch": {"data": {"sentences": value}},
        "width": {"model": width},
    }[axis]


def sweep(
    loss: Loss, axes: Sequence[str] = ("lr", "batch", "width"), arch: str = "deepnorm",
    seeds: Iterable[int] = SEEDS, **more: Any,
) -> list[Record]:  # fmt: skip
    """The baseline once, and each other value alone; a run's losses are two above, one above, and at ``loss``."""
    found = []
    values = {"lr": RATES, "batch": BATCHES, "width": WIDTHS}
    for axis in axes:
        for value, doublings in values[axis].items():
            if doublings == 0 and axis != axes[0]:
                continue
            for seed in seeds:
                last = loss(axis, doublings, seed)
                metrics = {"held_out_nll": [last + 2, last + 1, last], "held_out_accuracy": [0.1] * 3}
                own = merge(BASE, settings(axis, value))
                found.append(remembered(f"{arch}-{axis}-{doublings}-{seed}", arch=arch, layers=18, seed=seed,
                                        settings=own, metrics=metrics, **more))  # fmt: skip
    return found


def faster(axis: str, doublings: float, seed: int) -> float:
    return 5.0 - {"lr": 0.3, "batch": 0.2, "width": 0.1}[axis] * doublings + 0.001 * seed


def drawn(records: Sequence[Record]) -> Picture:
    return OneSettingAtATime().picture(Runs(records))


def verdict(id: str, records: Sequence[Record]) -> Finding:
    return judge(CLAIMS[id], Runs(records))


def test_each_panel_varies_one_setting_about_the_baseline() -> None:
    picture = drawn(sweep(faster))
    assert [panel.title for panel in picture.panels] == ["Learning rate", "Batch", "Width"]
    names = [[line.label for line in panel.series] for panel in picture.panels]
    assert names == [
        ["lr 0.0005", "lr 0.001", "lr 0.002"],
        ["8 sentences", "16 sentences", "32 sentences"],
        ["32-64-1", "64-128-2", "128-256-4"],
    ]
    for panel, step in zip(picture.panels, (0.3, 0.2, 0.1), strict=True):
        for line, doublings in zip(panel.series, (-1, 0, 1), strict=True):
            assert (line.x, line.seeds) == ([0, 1, 2], 3)
            assert line.y == pytest.approx(
                [7.004 - step * doublings, 6.004 - step * doublings, 5.004 - step * doublings]
            )
        assert len({line.colour for line in panel.series}) == len({line.marker for line in panel.series}) == 3
    assert picture.finding == (
        "5.30 at lr 0.0005, 5.00 at lr 0.001, 4.70 at lr 0.002; "
        "5.20 at 8 sentences, 5.00 at 16 sentences, 4.80 at 32 sentences; "
        "5.10 at 32-64-1, 5.00 at 64-128-2, 4.90 at 128-256-4 (3 seeds): none of 21 runs failed."
    )


def test_the_baseline_looks_the_same_in_every_panel() -> None:
    wider = [run for run in sweep(faster) if not run.name.startswith("deepnorm-width--1")]  # its width is the smallest
    looks = [{line.label: (line.colour, line.marker) for line in panel.series} for panel in drawn(wider).panels]
    assert looks[0]["lr 0.001"] == looks[1]["16 sentences"] == looks[2]["64-128-2"]
    assert looks[0]["lr 0.002"] == looks[1]["32 sentences"] == looks[2]["128-256-4"] != looks[2]["64-128-2"]


def test_micro_batches_count_as_sentences() -> None:
    runs = [remembered(f"{a}", arch="deepnorm", seed=3, nll=5.0 - a / 10, settings={"train": {"accumulate": a}})
            for a in (1, 4)]  # fmt: skip
    picture = drawn(runs)
    assert [line.label for line in picture.panels[0].series] == ["16 sentences", "64 sentences"]
    assert any("Nothing varies in learning rate and width" in note for note in picture.notes)


def test_a_run_that_differs_in_two_settings_is_in_no_panel() -> None:
    both = merge(BASE, {"train": {"lr": 5e-4}, "data": {"sentences": 8}})
    stray = remembered("stray", arch="deepnorm", layers=18, nll=1.0, settings=both)
    assert drawn([*sweep(faster), stray]).finding.endswith("none of 21 runs failed.")


def test_the_baseline_about_which_most_varies_is_drawn() -> None:
    other = [remembered(f"o{lr}{s}", arch="deepnorm", layers=6, seed=s, nll=3.0, settings={"train": {"lr": lr}})
             for lr in (1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 6e-4) for s in range(3, 13)]  # fmt: skip
    assert drawn([*sweep(faster), *other]).finding.endswith("none of 21 runs failed.")
    assert drawn(other).finding.endswith("none of 60 runs failed.")


def test_failures_are_counted_and_have_no_part_in_the_ends() -> None:
    runs = sweep(faster, ["lr"])
    lost = [remembered(f"z{s}", arch="deepnorm", layers=18, seed=s, nll=math.nan, verdict="diverged",
                       settings=merge(BASE, {"train": {"lr": 8e-3}})) for s in SEEDS]  # fmt: skip
    finding = drawn([*runs, *lost]).finding
    assert "none left at lr 0.008" in finding
    assert finding.endswith("3 of 12 runs diverged or are stuck.")


def test_without_runs_it_names_the_command() -> None:
    for runs in ([], sweep(faster, arch="postln"), sweep(faster, ["lr"])[:3]):
        with pytest.raises(MissingRuns) as missing:
            drawn(runs)
        assert missing.value.command == "stabilitylab sweep deepnet:7 --scale tiny"


@pytest.mark.parametrize(
    ("seeds", "lost", "expected"),
    [
        (range(3, 9), 0, "reproduced"),  # 42 runs of six seeds
        (SEEDS, 0, "inconclusive"),  # 21 of three: up to .54
        (SEEDS, 2, "inconclusive"),
        (range(3, 9), 24, "contradicted"),
    ],
)
def test_c50_counts_failures_in_all_settings_by_seed(seeds: Sequence[int], lost: int, expected: str) -> None:
    runs = sorted(sweep(faster, seeds=seeds), key=lambda run: run.name.rpartition("-")[0])
    for run in runs[:lost]:
        rejudge(run, "stuck")
    found = verdict("C50", runs)
    assert found.verdict == expected
    (share,) = found.effects
    assert (share["n"], share["mean"]) == (len(seeds), pytest.approx(lost / len(runs)))
    assert share["values"]["3"].endswith("/7")


def wavering(axis: str, doublings: float, seed: int) -> float:
    return faster(axis, doublings * (seed - 4 if axis == "width" else 1), seed)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (faster, "reproduced"),
        (lambda axis, d, s: faster(axis, -d if axis == "width" else d, s), "contradicted"),
        (wavering, "inconclusive"),
    ],
)
def test_c51_is_the_slope_of_the_mean_loss(loss: Loss, expected: str) -> None:
    found = verdict("C51", sweep(loss))
    assert found.verdict == expected
    assert [effect["effect"].split("the ")[1] for effect in found.effects] == [
        *("largest", "learning rate", "batch", "width")
    ]
    if expected == "reproduced":
        assert [effect["mean"] for effect in found.effects] == pytest.approx([-0.1, -0.3, -0.2, -0.1])


def test_c51_a_seed_without_a_value_is_left_out_and_divergence_decides_nothing() -> None:
    runs = [run for run in sweep(faster) if run.name != "deepnorm-width--1-5"]
    assert [effect["seeds"] for effect in verdict("C51", runs).effects] == [[3, 4], [3, 4, 5], [3, 4, 5], [3, 4]]
    for run in (runs := sweep(faster)):
        if run.name.startswith("deepnorm-lr-1"):
            rejudge(run, "diverged")
    found = verdict("C51", runs)
    assert found.verdict == "inconclusive"
    assert math.isnan(found.effects[0]["mean"])


@pytest.mark.parametrize("id", ["C50", "C51"])
def test_two_axes_do_not_test_three(id: str) -> None:
    found = verdict(id, sweep(faster, ["lr", "batch"]))
    assert found.verdict == "not testable"
    assert "several values of width" in found.why
    assert found.command == "stabilitylab sweep deepnet:7 --scale tiny"
