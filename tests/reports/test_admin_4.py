"""Output change under perturbed weights, and the claims on its growth, against made-up runs whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import Made, load, make_run, sublayer_rows
from rest_slow import slow

from stabilitylab.experiments import command
from stabilitylab.models.archs.deepnorm import deepnorm_constants
from stabilitylab.reports import FIGURES, MissingRuns, Picture
from stabilitylab.reports.base import Series
from stabilitylab.reports.claims import CLAIMS, Finding, judge
from stabilitylab.reports.figures.admin.figure_4 import deepnorm_beta
from stabilitylab.reports.statistics import aic
from stabilitylab.schema import Row

OUTPUT = [Row(stack, stack, 0, "output") for stack in ("encoder", "decoder")]
SEEDS = (3, 4, 5)
DEPTHS = (3, 6, 12, 50)


def places(layers: int) -> list[Row]:
    """Two sub-layers for the encoder to be read at, and both outputs: all that the statistics need."""
    return [*(row for row in sublayer_rows(min(layers, 2), ("encoder",))), *OUTPUT]


def one_step(
    folder: Path,
    arch: str,
    layers: int,
    change: float,
    *,
    seed: int = 3,
    share: float | None = None,
    settings: Any = None,
    kind: str = "onestep",
) -> None:
    """The encoder's output moves by ``change`` (along the gradient by half of it), sub-layer i by i hundredths of it;
    the decoder's, which is not read, by 99. ``share``: beta_ii^2 of each of its sub-layers."""
    rows = places(layers)

    def perturbed(step: int, row: Row) -> Sequence[float]:
        value = 99.0 if row.stack == "decoder" else change if not row.layer else change * (rows.index(row) + 1) / 100
        return value, value / 2

    tables = {"perturbation": Made(rows, ("random", "gradient"), perturbed, total="")}
    if share is not None:
        parts = Made(sublayer_rows(1), ("total", "branch"), lambda step, row: (2.0, 2 * share), total="mean")
        tables["branch_variance"] = parts
    name = f"{arch}-{layers}-{seed}-{kind}" + ("-set" if settings else "")
    make_run(folder, name, arch=arch, seed=seed, layers=layers, tables=tables, kind=kind, settings=settings)


def draw(folder: Path) -> Picture:
    return FIGURES["admin:4"]().picture(load(folder))


def lines(picture: Picture, panel: int) -> dict[str, Series]:
    return {line.arch: line for line in picture.panels[panel].series}


def verdict(id: str, folder: Path) -> Finding:
    return judge(CLAIMS[id], load(folder))


def test_the_figure_shows_output_against_depth_and_the_way_through_the_deepest(tmp_path: Path) -> None:
    for layers in (3, 6):
        one_step(tmp_path, "postln", layers, 1e-3 * layers, seed=3)
        one_step(tmp_path, "postln", layers, 4e-3 * layers, seed=4)
        one_step(tmp_path, "admin", layers, 1e-4, seed=3)
    one_step(tmp_path, "deepnorm", 12, 1e-5)
    picture = draw(tmp_path)
    assert [panel.title for panel in picture.panels] == [
        "Final output, random, 1e-4",
        "Final output, along the gradient, 1e-6",
        "Along a 6-layer encoder, random, 1e-4",  # the deepest that has most of the paper's own architectures
        "Along a 6-layer encoder, along the gradient, 1e-6",
    ]
    final, gradient, along, along_gradient = (lines(picture, panel) for panel in range(4))
    assert (list(final["postln"].x), list(final["postln"].y)) == ([6, 12], pytest.approx([6e-3, 12e-3]))
    assert list(final["postln"].low or ()) == pytest.approx([3e-3, 6e-3])
    assert list(gradient["postln"].y) == pytest.approx([3e-3, 6e-3])
    assert {*final} == {"postln", "admin"}
    control = {line.arch: line for line in picture.controls[0].series}["deepnorm"]
    assert (list(control.x), list(control.y)) == ([24], pytest.approx([1e-5]))
    assert list(along["admin"].y) == pytest.approx([1e-6, 2e-6, 3e-6, 4e-6])
    assert list(along_gradient["postln"].x) == [1, 2, 3, 4]
    assert list(along_gradient["postln"].y) == pytest.approx([6e-5, 12e-5, 18e-5, 24e-5])
    assert "deepnorm" not in along
    assert all(panel.log_x and panel.log_y for panel in picture.panels)
    assert picture.finding == (
        "Mean square change of a 6-layer encoder's output under random perturbation: Post-LN 1.5e-02, Admin 1.0e-04 "
        "(2 seeds)."
    )


def test_the_finding_is_the_exponent_where_there_are_depths_for_one(tmp_path: Path) -> None:
    for layers in DEPTHS:
        one_step(tmp_path, "postln", layers, 1e-3 * layers**1.5)
        one_step(tmp_path, "preln", layers, 1e-3 * layers**0.25)
    assert draw(tmp_path).finding == (
        "Under random perturbation the output's change goes with depth: Post-LN as N^1.50, Pre-LN as N^0.25 (one seed)."
    )


def test_one_run_is_drawn_and_other_settings_are_left_out(tmp_path: Path) -> None:
    one_step(tmp_path, "postln", 3, 1e-3)
    assert [len(panel.series) for panel in draw(tmp_path).panels] == [1, 1, 1, 1]
    one_step(tmp_path, "preln", 3, 1e-3)
    one_step(tmp_path, "postln", 3, 5.0, settings={"model": {"d_model": 128}})
    picture = draw(tmp_path)
    assert max(picture.panels[0].series[0].y) == pytest.approx(1e-3)
    assert picture.notes[-1] == "Not drawn: 1 run with other settings, or repeated."


def test_an_encoder_that_cannot_move_is_said_and_not_drawn(tmp_path: Path) -> None:
    one_step(tmp_path, "postln", 3, 1e-3)
    one_step(tmp_path, "branchnorm", 3, 0.0, settings={"model": {"alpha": 0.0}})
    picture = draw(tmp_path)
    assert "Exactly 0 throughout, so not drawn: BranchNorm alpha=0." in picture.notes
    assert [[line.arch for line in panel.series] for panel in picture.panels] == [["postln"]] * 4


def test_ramps_of_two_lengths_are_not_averaged(tmp_path: Path) -> None:
    for seed in SEEDS:
        one_step(tmp_path, "branchnorm", 3, 1e-3, seed=seed)
    one_step(tmp_path, "branchnorm", 3, 1.0, settings={"model": {"T": 4000}})
    assert list(lines(draw(tmp_path), 0)["branchnorm"].y) == pytest.approx([1e-3])


def test_training_runs_and_decoders_alone_are_no_one_step_runs(tmp_path: Path) -> None:
    one_step(tmp_path, "postln", 3, 1.0, kind="train")
    with pytest.raises(MissingRuns, match="one-step") as missing:
        draw(tmp_path)
    assert missing.value.command == command("admin:4")
    for id in ("C27", "C28", "C29"):
        finding = verdict(id, tmp_path)
        assert (finding.verdict, finding.command) == ("not testable", command("claims:fast"))


def test_akaike_by_hand() -> None:
    """y = 1, 0, 2 over x = 0, 1, 2: the line is .5 + .5 x, residuals .5, -1, .5, mean square .5."""
    x, y = np.array([0.0, 1.0, 2.0]), np.array([1.0, 0.0, 2.0])
    assert aic(x, y) == pytest.approx(3 * math.log(0.5) + 6)


def test_akaike_is_minus_twice_the_likelihood_plus_twice_the_parameters() -> None:
    noise = np.random.default_rng(0)
    x = np.arange(1.0, 9.0)
    y = 2 * x + noise.standard_normal(8)
    fit = np.polyfit(x, y, 1)
    residual = y - np.polyval(fit, x)
    variance = np.mean(residual**2)
    likelihood = -0.5 * np.sum(np.log(2 * np.pi * variance) + residual**2 / variance)
    assert aic(x, y) == pytest.approx(-2 * likelihood + 2 * 3 - 8 * (math.log(2 * np.pi) + 1))  # constants left out


ROUGH = {3: 1.03, 6: 0.98, 12: 1.02, 50: 0.99}  # no measurement lies on its line


def grow(folder: Path, arch: str, shape: Callable[[int, int], float]) -> None:
    for place, seed in enumerate(SEEDS):
        for layers in DEPTHS:
            rough = ROUGH[layers] if place % 2 else 2 - ROUGH[layers]
            one_step(folder, arch, layers, 1e-4 * shape(layers, seed) * rough, seed=seed)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (lambda n, seed: n, "reproduced"),
        slow(lambda n, seed: n**0.5, "not reproduced"),
        (lambda n, seed: n**1.6, "contradicted"),  # grows, but faster than N
        slow(lambda n, seed: n ** (0.6 * seed - 1.1), "inconclusive"),
    ],
)
def test_postln_grows_linearly(tmp_path: Path, shape: Callable[[int, int], float], expected: str) -> None:
    grow(tmp_path, "postln", shape)
    finding = verdict("C27", tmp_path)
    assert finding.verdict == expected
    if expected == "reproduced":
        assert finding.effects[0]["mean"] == pytest.approx(1, abs=0.01)
        assert finding.effects[1]["mean"] > 4


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (lambda n, seed: 0.2 + math.log(n), "reproduced"),
        (lambda n, seed: n, "contradicted"),
        slow(lambda n, seed: n ** (0.14 * seed), "inconclusive"),
    ],
)
def test_preln_and_admin_grow_logarithmically(
    tmp_path: Path, shape: Callable[[int, int], float], expected: str
) -> None:
    grow(tmp_path, "preln", lambda n, seed: 0.2 + math.log(n))
    assert verdict("C28", tmp_path).verdict == "not testable"
    grow(tmp_path, "admin", shape)
    finding = verdict("C28", tmp_path)
    assert finding.verdict == expected
    smaller, preln, admin, *exponents = (effect["mean"] for effect in finding.effects)
    assert preln > 4
    assert smaller <= min(preln, admin) + 1e-9
    assert len(exponents) == 2
    assert {effect["verdict"] for effect in finding.effects[1:]} == {""}


def test_growth_needs_four_depths(tmp_path: Path) -> None:
    for layers in (3, 6, 12):
        one_step(tmp_path, "postln", layers, layers)
    assert "four" in verdict("C27", tmp_path).why or "4 depths" in verdict("C27", tmp_path).why


@pytest.mark.parametrize(("n", "m"), [(6, 6), (50, 3), (12, 0)])
def test_the_gain_is_the_models(n: int, m: int) -> None:
    assert deepnorm_beta(n, m) == pytest.approx(deepnorm_constants("encoder", n, m)[1])


# beta_ii^2 of a sub-layer, by depth; two sub-layers are read, so sum beta_ii^2 is twice that
SHARES = {"postln": 0.4, "preln": 0.2, "admin": 0.1, "deepnorm": 0.02, "branchnorm T=1": 0.01}


def proportional(folder: Path, constant: Callable[[str, int, int], float], seeds: Sequence[int] = (3, 4)) -> None:
    for seed in seeds:
        for name, share in SHARES.items():
            for layers in (3, 6):
                arch = name.split()[0]
                gain = deepnorm_constants("encoder", layers, layers)[1] if arch in ("deepnorm", "branchnorm") else 1.0
                own = share / layers
                change = 2 * own / gain**2 * constant(name, layers, seed)
                settings = {"model": {"T": 1}} if "T=1" in name else None
                one_step(folder, arch, layers, change, seed=seed, share=own, settings=settings)


@pytest.mark.parametrize(
    ("constant", "expected"),
    [
        (lambda name, layers, seed: 1e-4 * (1 + layers / 100), "reproduced"),
        (lambda name, layers, seed: 1.0 if name == "admin" and layers == 3 else 1e-4, "contradicted"),
        slow(
            lambda name, layers, seed: 2e-4 if name in ("postln", "admin") else 0.7e-4,
            "not reproduced",
        ),
    ],
)
def test_change_follows_dependency(tmp_path: Path, constant: Callable[[str, int, int], float], expected: str) -> None:
    proportional(tmp_path, constant)
    finding = verdict("C29", tmp_path)
    assert finding.verdict == expected
    if expected == "reproduced":
        fitted = np.array([1.03, 1.06] * 5)
        assert finding.effects[0]["mean"] == pytest.approx(fitted.std(ddof=1) / fitted.mean())
        assert finding.effects[1]["mean"] > 0.999


def test_what_is_drawn_with_equal_weights_counts_once(tmp_path: Path) -> None:
    """postln+beta is branchnorm T=1 at the start, postln-init has no single gain: neither belongs to the fit."""
    proportional(tmp_path, lambda name, layers, seed: 1e-4 * layers, seeds=[3])
    before = [effect["mean"] for effect in verdict("C29", tmp_path).effects]
    one_step(tmp_path, "postln-init", 3, 7.0, share=0.1)
    one_step(tmp_path, "postln", 3, 7.0, share=0.1, settings={"model": {"init": "deepnorm"}})
    one_step(tmp_path, "postln", 60, 7.0, share=0.1)
    assert [effect["mean"] for effect in verdict("C29", tmp_path).effects] == before
    assert before[0] > 0.1
