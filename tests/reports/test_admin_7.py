"""The maps of deep encoders beside those of shallow ones, and the claim on Admin's start and end."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from branching import run
from making import load
from rest_slow import slow

from stabilitylab.experiments import command
from stabilitylab.reports import FIGURES, MissingRuns, Picture
from stabilitylab.reports.claims import CLAIMS, judge
from stabilitylab.reports.figures.admin._dependency import layer_dependency

SEEDS = (3, 4, 5)
EVEN = (0.97, 1.0, 1.03)


def draw(folder: Path, id: str = "admin:7") -> Picture:
    return FIGURES[id]().picture(load(folder))


def layers(picture: Picture) -> set[int]:
    return {len(panel.map.x) // 2 for panel in picture.panels if panel.map is not None}


def test_each_depth_belongs_to_the_map_that_is_nearer_as_a_ratio(tmp_path: Path) -> None:
    """10 / 6 < 18 / 10, but 11 / 6 > 18 / 11."""
    run(tmp_path, "preln", lambda step, i: 0.1, layers=10)
    with pytest.raises(MissingRuns, match="an encoder of 11 to 200 layers") as missing:
        draw(tmp_path)
    assert missing.value.command == command("admin:7")
    run(tmp_path, "preln", lambda step, i: 0.1, layers=11)
    assert layers(draw(tmp_path)) == {11}
    assert layers(draw(tmp_path, "admin:6")) == {10}


def test_the_depth_nearest_to_the_papers_is_drawn(tmp_path: Path) -> None:
    for depth in (14, 17, 25):
        run(tmp_path, "preln", lambda step, i: 0.1, layers=depth)
    picture = draw(tmp_path)
    assert layers(picture) == {17}
    assert picture.notes[-1] == "Not drawn: 2 runs with other settings, or repeated."


def test_admin_stands_beside_preln_and_others_are_named(tmp_path: Path) -> None:
    for arch in ("deepnorm", "preln", "admin"):
        run(tmp_path, arch, lambda step, i: 0.3 if step else 0.1, layers=12, kind="train")
    picture = draw(tmp_path)
    titles = [f"{name}, {when}" for name in ("Admin", "Pre-LN") for when in ("initial", "trained")]
    assert [panel.title for panel in picture.panels] == titles
    assert "Not drawn, though there: DeepNorm." in picture.notes


@pytest.mark.parametrize(
    ("arch", "summed"), [("normformer", True), ("rezero", True), ("periln", True), ("dsinit", False), ("admin", False)]
)
def test_streams_that_are_never_normalised_are_shared_as_preln(tmp_path: Path, arch: str, summed: bool) -> None:
    run(tmp_path, arch, lambda step, i: 0.25, layers=2)
    beta = layer_dependency(load(tmp_path)[0], 0)
    below = [0.5] * 4 if summed else [0.5 * math.sqrt(0.75) ** k for k in (3, 2, 1, 0)]
    np.testing.assert_allclose(beta[3], below)


def test_a_mixture_of_all_layers_has_no_map(tmp_path: Path) -> None:
    run(tmp_path, "dlcl", lambda step, i: 0.25, layers=12)
    with pytest.raises(MissingRuns, match="no run with branch_variance"):
        draw(tmp_path)


@pytest.mark.parametrize(
    ("apart", "trained", "expected"),
    [
        (1.1, 1.6, "reproduced"),
        slow(1 / 1.1, 1.6, "reproduced"),  # which is the larger does not matter
        (1.1, 0.8, "contradicted"),
        slow(1.7, 1.6, "reproduced"),  # how far they are apart at first is described
        slow(1.1, 1.1, "not reproduced"),
    ],
)
def test_admin_starts_as_preln_and_ends_with_more_of_its_own(
    tmp_path: Path, apart: float, trained: float, expected: str
) -> None:
    def admin(step: int, i: int, factor: float) -> float:
        """In shares, of which beta is the root; the lower half counts at the start alone."""
        if step == 0:
            return 0.1 * apart**2
        return 0.1 * trained * factor if i > 18 else 1e-3

    for seed, factor in zip(SEEDS, EVEN, strict=True):
        run(tmp_path, "admin", lambda step, i, f=factor: admin(step, i, f), layers=18, seed=seed, kind="train")
        run(tmp_path, "preln", lambda step, i: 0.1 if step == 0 or i > 18 else 0.9, layers=18, seed=seed, kind="train")
        run(tmp_path, "admin", lambda step, i: 0.9, seed=seed, kind="train")  # another depth
        run(tmp_path, "preln", lambda step, i: 0.1, seed=seed, kind="train")
    finding = judge(CLAIMS["C53"], load(tmp_path))
    assert finding.verdict == expected
    means = [effect["mean"] for effect in finding.effects]
    assert means == pytest.approx([trained * math.prod(EVEN) ** (1 / 3), max(apart, 1 / apart)])


def test_alike_on_average_is_not_alike(tmp_path: Path) -> None:
    """Sub-layers that are twice and half as dependent as Pre-LN's are a factor of 2 apart, not of 1."""
    for seed in SEEDS:
        run(tmp_path, "admin", lambda step, i: 0.4 if i % 2 else 0.025, layers=18, seed=seed, kind="train")
        run(tmp_path, "preln", lambda step, i: 0.1, layers=18, seed=seed, kind="train")
    assert judge(CLAIMS["C53"], load(tmp_path)).effects[1]["mean"] == pytest.approx(2)


@pytest.mark.parametrize("state", ["learning", "stuck", "diverged"])
def test_deep_models_that_did_not_train_decide_nothing(tmp_path: Path, state: str) -> None:
    run(tmp_path, "admin", lambda step, i: 0.1, layers=18, kind="train")
    run(tmp_path, "preln", lambda step, i: 0.1, layers=18, kind="train", verdict=state)
    finding = judge(CLAIMS["C53"], load(tmp_path))
    assert (finding.verdict, finding.command) == ("not testable", command("admin:7"))
    assert "that trained" in finding.why
