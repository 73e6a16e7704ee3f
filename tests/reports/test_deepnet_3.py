"""DeepNet, Figure 3, and its claims C11 and C12, on made-up gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from making import Made, layer_rows, load, make_run
from rest_slow import slow

from stabilitylab.reports.base import MissingRuns, Panel
from stabilitylab.reports.claims import CLAIMS, Finding, judge
from stabilitylab.reports.figures.deepnet.figure_3 import LargerGradients

SEEDS = (3, 4, 5)
Ratio = Callable[[int, int], float]  # of a seed and a step: last gradient of Post-LN-init over that of Post-LN


def make_gradients(
    folder: Path,
    ratio: Ratio,
    *,
    steps: tuple[int, ...] = (0, 100),
    kind: str = "train",
    depths: tuple[int, ...] = (6, 12),
    seeds: tuple[int, ...] = SEEDS,
    archs: tuple[str, ...] = ("postln", "postln-init"),
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Layer n of the decoder has gradient n (Post-LN, times ``ratio`` in Post-LN-init), of the encoder 100."""
    for arch in archs:
        for depth in depths:
            for seed in seeds:

                def value(step: int, row, arch: str = arch, seed: int = seed) -> float:
                    if row.stack == "encoder":
                        return 100.0
                    return row.layer * (ratio(seed, step) if arch == "postln-init" else 1.0)

                make_run(
                    folder,
                    f"{arch}-{depth}-s{seed}",
                    arch=arch,
                    seed=seed,
                    layers=depth,
                    kind=kind,
                    settings={"train": {"steps": 101}, **(settings or {}).get(arch, {})},
                    tables={"grad_norm": Made(layer_rows(depth), ("value",), value, steps)},
                    metrics={"held_out_nll": [7.0, 6.0 + seed], "held_out_accuracy": [0.1, 0.2]},
                    metric_steps=(0, 100),
                )


def panels_of(folder: Path) -> tuple[dict[str, Panel], str]:
    picture = LargerGradients().picture(load(folder))
    return {panel.title: panel for panel in picture.panels}, picture.finding


def verdict(folder: Path, id: str = "C11") -> Finding:
    return judge(CLAIMS[id], load(folder))


def test_the_picture_is_the_gradients(tmp_path: Path) -> None:
    make_gradients(tmp_path, lambda seed, step: 3.0 if step == 0 else 0.5)
    panels, finding = panels_of(tmp_path)
    profile, last, loss = panels["Decoder of 12L-12L"], panels["Last decoder layer"], panels["Held-out loss"]
    assert [line.label for line in profile.series] == ["Post-LN", "Post-LN-init"]
    assert profile.series[0].x == [*range(1, 13)]
    assert profile.series[1].y == pytest.approx([3.0 * layer for layer in range(1, 13)])
    assert [(line.x, line.y) for line in last.series] == [([6, 12], [6, 12]), ([6, 12], pytest.approx([18, 36]))]
    assert loss.series[0].y == pytest.approx([7.0, 6.0 + 4.0])
    assert (loss.series[0].low, loss.series[0].high) == ([7.0, 9.0], [7.0, 11.0])
    assert "at 2 of 2 depths (ratio 3.00 to 3.00, 3 seeds)" in finding


def test_the_finding_says_when_it_is_the_other_way_round(tmp_path: Path) -> None:
    make_gradients(tmp_path, lambda seed, step: 0.5, kind="onestep", steps=(0,))
    panels, finding = panels_of(tmp_path)
    assert "at 0 of 2 depths (ratio 0.50 to 0.50" in finding
    assert "Held-out loss" not in panels  # one-step runs do not train


def test_one_run_is_drawn(tmp_path: Path) -> None:
    make_gradients(tmp_path, lambda seed, step: 1.0, depths=(2,), seeds=(3,), archs=("postln",))
    panels, finding = panels_of(tmp_path)
    assert panels["Decoder of 2L-2L"].series[0].y == pytest.approx([1, 2])
    assert "needs runs of both" in finding


def test_an_interrupted_run_is_drawn(tmp_path: Path) -> None:
    made = Made(layer_rows(2), ("value",), lambda step, row: float(row.layer))
    make_run(tmp_path, "cut", arch="postln", layers=2, tables={"grad_norm": made}, state="interrupted", verdict="")
    panels, _ = panels_of(tmp_path)
    assert panels["Last decoder layer"].series[0].y == [2.0]


def test_without_runs_it_names_the_command(tmp_path: Path) -> None:
    make_run(tmp_path, "other", arch="deepnorm", layers=2)
    with pytest.raises(MissingRuns) as missing:
        LargerGradients().picture(load(tmp_path))
    assert "stabilitylab sweep deepnet:3" in missing.value.command


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (lambda seed, step: 2.0 + 0.01 * seed, "reproduced"),
        (lambda seed, step: 0.5 + 0.01 * seed, "contradicted"),
        # described
        slow(
            lambda seed, step: 2.0 + 0.01 * seed if step == 0 else 0.5 + 0.01 * seed,
            "reproduced",
        ),
        slow(lambda seed, step: 0.4 if seed == 3 else 2.0, "inconclusive"),
    ],
)
def test_larger_last_gradient(tmp_path: Path, ratio: Ratio, expected: str) -> None:
    make_gradients(tmp_path, ratio)
    assert verdict(tmp_path).verdict == expected


def test_the_mean_over_depths_decides(tmp_path: Path) -> None:
    make_gradients(tmp_path, lambda seed, step: 2.0 + 0.01 * seed)
    mean, *each = verdict(tmp_path).effects
    assert [effect["effect"] for effect in (mean, *each)] == [
        f"{name}, fairseq's gain"
        for name in (
            "ratio at initialisation, mean over depths",
            "ratio at initialisation, 6L",
            "ratio at initialisation, 12L",
            "ratio at step 100, 6L",
            "ratio at step 100, 12L",
        )
    ]
    assert mean["mean"] == pytest.approx(each[0]["mean"])
    assert {effect["verdict"] for effect in each} == {""}


def test_a_run_that_ended_before_step_100_says_nothing_about_it(tmp_path: Path) -> None:
    make_gradients(tmp_path, lambda seed, step: 2.0 + 0.01 * seed, steps=(0, 50))
    assert [effect["n"] for effect in verdict(tmp_path).effects] == [3, 3, 3]


OWN = {"postln": {"model": {"init": "xavier-1"}}, "postln-init": {"model": {"init": "arch-1"}}}


@pytest.mark.slow
def test_deepnets_own_postln_decides_and_is_the_solid_line(tmp_path: Path) -> None:
    make_gradients(tmp_path / "fairseq", lambda seed, step: 0.5 + 0.01 * seed)
    make_gradients(tmp_path / "own", lambda seed, step: 2.0 + 0.01 * seed, settings=OWN)
    found = verdict(tmp_path)
    assert (found.verdict, len(found.effects)) == ("reproduced", 10)
    assert [effect["effect"] for effect in found.effects if "mean over" in effect["effect"]] == [
        "ratio at initialisation, mean over depths, gain 1",
        "ratio at initialisation, mean over depths, fairseq's gain",
    ]
    assert found.effects[5]["mean"] < 1
    panels, finding = panels_of(tmp_path)
    for title in ("Decoder of 12L-12L", "Last decoder layer", "Held-out loss"):
        own = {"Post-LN gain=1": "solid", "Post-LN-init gain=1": "solid"}
        assert {line.label: line.dash for line in panels[title].series} == own
    for panel in LargerGradients().picture(load(tmp_path)).controls:
        assert {line.label: line.dash for line in panel.series} == {
            "Post-LN": "dashed", "Post-LN-init": "dashed", **own
        }  # fmt: skip
    assert "both of gain 1, at 2 of 2 depths" in finding


def test_last_gradient_without_its_runs(tmp_path: Path) -> None:
    make_gradients(tmp_path, lambda seed, step: 2.0, archs=("postln",))
    make_gradients(tmp_path / "shallow", lambda seed, step: 2.0, depths=(2, 3))
    make_gradients(tmp_path / "pilots", lambda seed, step: 2.0, seeds=(0, 1, 2))
    found = verdict(tmp_path)
    assert found.verdict == "not testable"
    assert "sweep deepnet:3" in found.command


def make_long(folder: Path, postln: list[str], init: list[str], *, steps: int = 3000, width: int = 512) -> None:
    settings = {"model": {"d_model": width}, "train": {"steps": steps}}
    for arch, verdicts in (("postln", postln), ("postln-init", init)):
        for seed, state in enumerate(verdicts, 3):
            make_run(folder, f"{arch}-{seed}", arch=arch, seed=seed, layers=18, settings=settings, verdict=state)


def test_convergence(tmp_path: Path) -> None:
    bad, good = ["diverged", "stuck"] * 3, ["trained"] * 6
    make_long(tmp_path / "true", bad, good)
    make_long(tmp_path / "false", good, good)
    make_long(tmp_path / "half", ["stuck", "trained"] * 3, good)
    make_long(tmp_path / "few", bad[:3], good[:3])
    make_long(tmp_path / "short", bad, good, steps=400)
    make_long(tmp_path / "narrow", bad, good, width=64)
    make_long(tmp_path / "alone", bad, [])
    found = {folder.name: verdict(folder, "C12") for folder in tmp_path.iterdir()}
    assert {name: one.verdict for name, one in found.items()} == {
        "true": "reproduced",
        "false": "contradicted",
        "half": "inconclusive",
        "few": "inconclusive",
        "short": "not testable",
        "narrow": "not testable",
        "alone": "not testable",
    }
    assert found["true"].effects[0]["p"] == pytest.approx(0.5**6)  # six of six seeds
    assert [effect["mean"] for effect in found["half"].effects] == [0.5, 0.5, 0.0]
    assert "--scale paper" in found["short"].command
