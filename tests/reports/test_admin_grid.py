"""Admin's grid: how runs end at each setting, and its two claims, from made-up runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from in_memory import remembered
from rest_slow import slow

from stabilitylab.experiments import command, experiments
from stabilitylab.labels import label
from stabilitylab.reports import FIGURES, MissingRuns, Panel, Picture, Runs, figures
from stabilitylab.reports.base import DIVERGED, STUCK, Map
from stabilitylab.reports.claims import CLAIMS, Finding, judge
from stabilitylab.reports.collection import Record

assert figures
LRS, BETAS, SEEDS = (1e-3, 2e-3, 3e-3, 4e-3, 5e-3), (0.99, 0.995, 0.999), (3, 4, 5)
Ends = Callable[[str, int, int, int], tuple[str, float]]  # of arch, rows down, columns right, seed: verdict and nll


def run(arch: str, lr: float, beta2: float, seed: int = 3, **how: Any) -> Record:
    train = {"lr": lr, "beta2": beta2, "warmup": 1, "schedule": "linear"} | how.pop("train", {})
    return remembered(f"{arch}-{lr:g}-{beta2:g}-{seed}", arch=arch, seed=seed, settings={"train": train}, **how)


def grid(ends: Ends, archs: tuple[str, ...] = ("postln", "preln"), **how: Any) -> Runs:
    found = []
    for arch in archs:
        for i, lr in enumerate(LRS):
            for j, beta2 in enumerate(BETAS):
                for seed in SEEDS:
                    verdict, nll = ends(arch, i, j, seed)
                    found.append(run(arch, lr, beta2, seed, verdict=verdict, nll=nll, **how))
    return Runs(found)


def draw(runs: Runs) -> Picture:
    return FIGURES["admin:grid"]().picture(runs)


def table(panel: Panel) -> Map:
    assert panel.map is not None
    return panel.map


def verdict(id: str, runs: Runs) -> Finding:
    return judge(CLAIMS[id], runs)


def test_the_tables_hold_the_mean_of_the_seeds_that_converged_and_how_the_others_ended() -> None:
    states = {
        (0, 0): ("learning", "trained", "trained"),
        (0, 1): ("trained", "trained", "stuck"),
        (0, 2): ("trained", "stuck", "diverged"),
        (1, 0): ("stuck", "stuck", "trained"),
        (1, 1): ("stuck", "stuck", "stuck"),
        (1, 2): ("diverged", "stuck", "diverged"),
    }

    def ends(arch: str, i: int, j: int, seed: int) -> tuple[str, float]:
        if arch == "preln":
            return "trained", 6.0
        return states.get((i, j), ("trained",) * 3)[seed - 3], i + j / 10 + seed / 2

    picture = draw(grid(ends))
    assert [panel.title for panel in picture.panels] == ["Post-LN", "Pre-LN", "Post-LN minus Pre-LN"]
    heat = table(picture.panels[0])
    assert (heat.y_names, heat.x_names) == (["0.001", "0.002", "0.003", "0.004", "0.005"], ["0.99", "0.995", "0.999"])
    np.testing.assert_allclose(heat.z[:2], [[-4.0, -4.15, -4.3], [-2.5, math.nan, math.nan]])  # less the baseline's 6
    np.testing.assert_allclose(heat.z[2:], [[i + j / 10 - 4 for j in range(3)] for i in (2, 3, 4)])
    assert (heat.centre, np.unique(np.asarray(heat.seeds)).tolist()) == (0, [3])
    assert heat.finding[:2].tolist() == [[0, 0, DIVERGED], [STUCK, STUCK, DIVERGED]]
    assert not heat.finding[2:].any()
    assert np.asarray(heat.text)[:2].tolist() == [
        ["(-4.00)", "-4.15\n1/3 lost", "-4.30\n2/3 lost"],
        ["-2.50\n2/3 lost", "stuck", "failed"],
    ]
    gaps = table(picture.panels[2])
    np.testing.assert_allclose(gaps.z[:2], [[-4.0, -4.15, -4.3], [-2.5, math.nan, math.nan]])
    assert np.asarray(gaps.text)[0].tolist() == ["-4.00", "-4.15", "-4.30"]
    assert not gaps.finding.any()
    assert picture.finding == (
        "Runs that diverged or stayed stuck: Post-LN 11 of 45 (15 settings), Pre-LN 0 of 45 (15 settings), 3 seeds. "
        "Where both converged, Post-LN ends below Pre-LN in 28 of 34 pairs."
    )


def test_a_setting_without_runs_is_empty() -> None:
    some = [run("admin", lr, beta2) for lr, beta2 in ((1e-3, 0.9), (2e-3, 0.9), (1e-3, 0.95))]
    (panel,) = draw(Runs(some)).panels
    heat = table(panel)
    assert panel.title == "Admin"
    assert (math.isnan(heat.z[1, 1]), heat.finding[1, 1], np.asarray(heat.text)[1, 1]) == (True, 0, "")


def test_runs_of_another_recipe_are_left_out() -> None:
    one = grid(lambda *_: ("trained", 4.0))
    other = grid(lambda *_: ("stuck", 9.0), archs=("postln",), train={"steps": 400})
    picture = draw(Runs([*other, *one]))
    assert picture.notes[-1] == "Not drawn: 45 runs with other settings, or repeated."
    assert not table(picture.panels[0]).finding.any()


@pytest.mark.parametrize("axis", ["lr", "beta2"])
def test_one_axis_alone_is_no_grid(axis: str) -> None:
    runs = Runs([run("postln", lr, beta2) for lr, beta2 in zip(LRS, BETAS * 2, strict=False)])
    flat = [record for record in grid(lambda *_: ("trained", 4.0)) if record.settings[f"train.{axis}"] in (1e-3, 0.99)]
    assert draw(runs).panels
    with pytest.raises(MissingRuns, match="several learning rates and several beta2") as missing:
        draw(Runs(flat))
    assert missing.value.command == command("admin:grid")


def test_the_figure_draws_the_runs_of_its_own_sweep() -> None:
    made = [
        remembered(each.name, arch=label(each.config.model), seed=each.config.train.seed,
                   settings={"train": each.config.train.model_dump()})
        for each in experiments("admin:grid")
    ]  # fmt: skip
    picture = draw(Runs(made))
    assert [table(panel).z.shape for panel in picture.panels] == [(5, 3)] * 3
    assert all(np.isfinite(table(panel).z).all() for panel in picture.panels)
    (share, _) = verdict("C54", Runs(made)).effects
    assert (share["n"], share["values"]["3"]) == (3, "0/15")


def failing(postln: int, preln: int = 0) -> Ends:
    """So many of the 45 runs fail, settings of the largest learning rates first."""

    def ends(arch: str, i: int, j: int, seed: int) -> tuple[str, float]:
        rank = 44 - (9 * i + 3 * j + seed - 3)
        lost = rank < (postln if arch == "postln" else preln)
        return (("diverged", "stuck")[rank % 2] if lost else "trained"), 4.0

    return ends


@pytest.mark.parametrize(
    ("postln", "preln", "expected"),
    [
        (27, 0, "reproduced"),  # 9 of 15 at each of three seeds: from .26
        (21, 0, "inconclusive"),  # 7 of 15: from .17; counted over runs it was .32
        slow(21, 15, "inconclusive"),
        slow(0, 0, "inconclusive"),  # 45 runs, but three seeds: up to .31
        slow(27, 20, "reproduced"),  # Pre-LN's stands beside it
    ],
)
def test_preln_survives(postln: int, preln: int, expected: str) -> None:
    finding = verdict("C54", grid(failing(postln, preln)))
    assert finding.verdict == expected
    first, second = finding.effects
    assert (first["effect"], first["mean"], second["mean"]) == ("Post-LN failed", postln / 45, preln / 45)
    assert (first["n"], second["verdict"]) == (3, "")
    assert first["values"]["3"] == f"{-(-postln // 3)}/15"


def test_only_settings_that_both_have_count() -> None:
    runs = grid(failing(21))
    some = [r for r in runs if r.label == "postln" or r.settings["train.lr"] > 2.5e-3]
    assert {effect["values"]["4"].partition("/")[2] for effect in verdict("C54", Runs(some)).effects} == {"9"}
    few = [r for r in runs if r.settings["train.lr"] < 2.5e-3 and r.settings["train.beta2"] < 0.999 and r.seed == 3]
    assert verdict("C54", Runs(few)).verdict == "inconclusive"  # four pairs


@pytest.mark.parametrize("id", ["C54", "C55"])
def test_warmup_and_a_lone_architecture_say_nothing(id: str) -> None:
    warm = grid(failing(21), train={"warmup": 40})
    alone = grid(failing(21), archs=("postln",))
    for runs in (warm, alone):
        finding = verdict(id, runs)
        assert (finding.verdict, finding.command) == ("not testable", command("admin:grid"))


@pytest.mark.parametrize(
    ("worse", "expected"),
    [(0, "reproduced"), (24, "contradicted"), (10, "inconclusive")],  # of 24 pairs in which both converged
)
def test_postln_beats_preln_where_it_converges(worse: int, expected: str) -> None:
    alive = failing(21)

    def ends(arch: str, i: int, j: int, seed: int) -> tuple[str, float]:
        state, _ = alive(arch, i, j, seed)
        rank = 9 * i + 3 * j + seed - 3  # those that fail come last, and would beat Pre-LN if they counted
        return state, 4.0 if arch == "preln" else 4.1 if rank < worse else 3.9

    finding = verdict("C55", grid(ends))
    assert finding.verdict == expected
    (effect,) = finding.effects
    assert (effect["n"], effect["mean"], effect["values"]["3"][-2:]) == (3, pytest.approx(1 - worse / 24), "/8")


def test_without_a_converged_pair_there_is_nothing_to_compare() -> None:
    finding = verdict("C55", grid(failing(45)))
    assert (finding.verdict, "both converged" in finding.why) == ("not testable", True)
