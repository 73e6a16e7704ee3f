"""Layer dependency: the definition against vectors that are followed through the layers, and its claims."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from branching import run
from making import load, make_run
from rest_slow import slow

from stabilitylab.experiments import command
from stabilitylab.reports import FIGURES, MissingRuns, Picture
from stabilitylab.reports.base import NONFINITE
from stabilitylab.reports.claims import CLAIMS, Finding, judge
from stabilitylab.reports.figures.admin._dependency import dependency_map

SEEDS = (3, 4, 5)
EVEN = (0.97, 1.0, 1.03)


def draw(folder: Path) -> Picture:
    return FIGURES["admin:6"]().picture(load(folder))


def verdict(id: str, folder: Path) -> Finding:
    return judge(CLAIMS[id], load(folder))


def uncorrelated(count: int, width: int = 400) -> np.ndarray:
    """``count`` vectors whose mean over d is 0 and whose covariances are 0, of differing variance."""
    draw = np.random.default_rng(5)
    base = np.linalg.qr(np.column_stack([np.ones(width), draw.standard_normal((width, count))]))[0][:, 1:]
    return (base * np.sqrt(width) * draw.uniform(0.3, 2, count)).T


@pytest.mark.parametrize("shortcut", [1.0, 2.5])
def test_postln_shares_are_those_of_vectors_followed_through_the_norms(shortcut: float) -> None:
    """x_i = (s x_{i-1} + a_i) / std; the weight with which a_j stands in x_i, times its own deviation, is beta_ij."""
    vectors = uncorrelated(6)
    x, branches = vectors[0], vectors[1:]
    weights = np.zeros((5, 5))
    found: dict[str, list[float]] = {"branch": [], "total": []}
    for i, branch in enumerate(branches):
        total = shortcut * x + branch
        found["branch"].append(branch.var())
        found["total"].append(total.var())
        weights[i] = shortcut * weights[i - 1] if i else 0
        weights[i, i] = 1
        weights[i] /= total.std()
        x = (total - total.mean()) / total.std()
    expected = weights * branches.std(axis=1)
    beta = dependency_map({key: np.array(value) for key, value in found.items()}, renormalised=True)
    np.testing.assert_allclose(beta, expected, rtol=1e-10, atol=1e-14)


def test_preln_shares_are_those_of_the_stream() -> None:
    vectors = uncorrelated(6)
    stream = np.cumsum(vectors, axis=0)[1:]
    found = {"branch": vectors[1:].var(axis=1), "total": stream.var(axis=1)}
    beta = dependency_map(found, renormalised=False)
    for i in range(5):
        for j in range(5):
            in_it = abs(np.dot(stream[i], vectors[j + 1])) / 400 / vectors[j + 1].std() / stream[i].std()
            assert beta[i, j] == pytest.approx(in_it, abs=1e-12)
    embedding = vectors[0].var() / stream.var(axis=1)
    np.testing.assert_allclose((beta**2).sum(1) + embedding, 1)


def test_the_figure_shows_both_ends_of_training(tmp_path: Path) -> None:
    for seed, own in ((3, 0.25), (4, 0.81)):
        run(tmp_path, "postln", lambda step, i, own=own: own if step else 0.04, seed=seed, kind="train")
    run(tmp_path, "preln", lambda step, i: 0.5 if step else 0.09, kind="train")
    picture = draw(tmp_path)
    titles = [f"{name}, {when}" for name in ("Post-LN", "Pre-LN") for when in ("initial", "trained")]
    assert [panel.title for panel in picture.panels] == titles
    first, trained, stream, _ = (panel.map for panel in picture.panels)
    assert first is not None
    assert trained is not None
    assert stream is not None
    assert list(first.x) == list(first.y) == [1, 2, 3, 4, 5, 6]
    assert np.isnan(first.z[np.triu_indices(6, 1)]).all()
    np.testing.assert_allclose(first.z[4, :5], [0.2 * math.sqrt(0.96) ** (4 - j) for j in range(5)])
    means = [np.mean([0.5 * math.sqrt(0.75) ** k, 0.9 * math.sqrt(0.19) ** k]) for k in range(4)]
    np.testing.assert_allclose(trained.z[3, 3::-1], means)
    np.testing.assert_allclose(stream.z[5], 0.3)
    assert not first.finding.any()
    assert not first.log
    assert (first.square, first.seeds, stream.seeds) == (True, 2, 1)
    assert first.colours == stream.colours is not None  # one bar
    assert picture.finding == (
        "Share (beta_ii^2) of a sub-layer's own branch in the upper half, from initialisation to the end of training: "
        "Post-LN 0.04 to 0.53, Pre-LN 0.09 to 0.5 (2 seeds)."
    )


def test_what_no_map_of_the_paper_shows_is_a_control(tmp_path: Path) -> None:
    for arch in ("postln", "deepnorm"):
        run(tmp_path, arch, lambda step, i: 0.25)
    picture = draw(tmp_path)
    assert [panel.title for panel in picture.panels] == ["Post-LN, initial"]
    assert [panel.title for panel in picture.controls] == ["DeepNorm, initial"]


def test_the_papers_architectures_are_drawn_where_others_are_many(tmp_path: Path) -> None:
    for arch in ("postln", "preln"):
        run(tmp_path / "few", arch, lambda step, i: 0.25, kind="train")
    for arch, seed in itertools.product(("deepnorm", "branchnorm", "postln-init"), (3, 4)):
        how = {"kind": "train", "settings": {"train": {"warmup": 77}}}
        run(tmp_path / "many", arch, lambda step, i: 0.25, seed=seed, **how)
    picture = draw(tmp_path)
    titles = [f"{name}, {when}" for name in ("Post-LN", "Pre-LN") for when in ("initial", "trained")]
    assert [panel.title for panel in picture.panels] == titles


def test_the_figure_checks_that_shares_add_up(tmp_path: Path) -> None:
    run(tmp_path, "postln", lambda step, i: 0.5, layers=1, shortcut=2.0)
    picture = draw(tmp_path)
    # beta^2 sums to 1 - .5^2 at the upper of two; (branch + shortcut) / sum = (2 + 2 + 2) / 4
    assert "at initialisation: Post-LN 0.75 and 1.50" in picture.notes[1]
    assert [panel.title for panel in picture.panels] == ["Post-LN, initial"]


def test_runs_that_failed_are_not_called_trained(tmp_path: Path) -> None:
    run(tmp_path, "postln", lambda step, i: 0.1, kind="train", verdict="stuck")
    assert [panel.title for panel in draw(tmp_path).panels] == ["Post-LN, initial"]


def test_a_control_alone_is_drawn(tmp_path: Path) -> None:
    run(tmp_path, "branchnorm", lambda step, i: 0.1, settings={"model": {"T": 1}})
    assert [panel.title for panel in draw(tmp_path).panels] == ["BranchNorm T=1, initial"]


def test_numbers_that_are_not_finite_are_marked(tmp_path: Path) -> None:
    run(tmp_path, "postln", lambda step, i: math.nan if i == 3 else 0.1, layers=2)
    (panel,) = draw(tmp_path).panels
    assert panel.map is not None
    assert (panel.map.finding[:2] == 0).all()
    assert panel.map.finding[2, :3].tolist() == [NONFINITE] * 3
    assert (panel.map.finding[np.triu_indices(4, 1)] == 0).all()


def test_without_branches_the_figure_names_the_command(tmp_path: Path) -> None:
    make_run(tmp_path, "bare")
    with pytest.raises(MissingRuns, match="branch_variance of an encoder of 1 to 10 layers") as missing:
        draw(tmp_path)
    assert missing.value.command == command("admin:6")


@pytest.mark.parametrize(
    ("exponent", "spread", "expected"),
    [(1.0, 0.02, "reproduced"), (0.2, 0.02, "contradicted"), (0.7, 0.02, "not reproduced"), (1.0, 0.4, "inconclusive")],
)
def test_admins_shares(tmp_path: Path, exponent: float, spread: float, expected: str) -> None:
    run(tmp_path, "admin", lambda step, i: 0.5, layers=2)  # not the deepest
    run(tmp_path, "admin", lambda step, i: 0.5, layers=5, kind="train")  # a one-step run is there
    for place, seed in enumerate(SEEDS):
        own = exponent + spread * (place - 1)
        run(tmp_path, "admin", lambda step, i, own=own: 0.5 * i**-own, layers=4, seed=seed)
    finding = verdict("C30", tmp_path)
    assert finding.verdict == expected
    assert (finding.effects[0]["mean"], finding.effects[0]["effect"]) == (pytest.approx(-exponent), "slope, 4L")


@pytest.mark.parametrize(
    ("initial", "trained", "expected"),
    [
        slow(4.0, 1.5, "reproduced"),
        (0.5, 1.5, "reproduced"),  # what is so at initialisation is described
        (4.0, 0.8, "contradicted"),
        slow(4.0, 1.1, "not reproduced"),
    ],
)
def test_postln_relies_on_its_own_branch(tmp_path: Path, initial: float, trained: float, expected: str) -> None:
    for seed, factor in zip(SEEDS, EVEN, strict=True):
        # only the upper half of the sub-layers counts
        run(tmp_path, "postln", lambda step, i, f=factor: 0.1 * initial * f if i > 18 else 0, layers=18, seed=seed)
        run(tmp_path, "preln", lambda step, i: 0.1 if i > 18 else 0.9, layers=18, seed=seed)
    assert verdict("C31", tmp_path).verdict == "not testable"
    for seed, factor in zip(SEEDS, EVEN, strict=True):
        run(tmp_path, "postln", lambda step, i, f=factor: 0.1 * trained * f if step else 0.9, seed=seed, kind="train")
        run(tmp_path, "preln", lambda step, i: 0.1 if step else 0.9, seed=seed, kind="train")
    finding = verdict("C31", tmp_path)
    assert finding.verdict == expected
    root = math.prod(EVEN) ** (1 / 3)
    assert [effect["mean"] for effect in finding.effects] == pytest.approx([trained * root, initial * root])
    assert [effect["role"] for effect in finding.effects] == ["primary", "descriptive"]


def test_without_one_step_runs_the_trained_ones_decide_alone(tmp_path: Path) -> None:
    for seed in SEEDS:
        for arch, share in (("postln", 0.3), ("preln", 0.1)):
            run(tmp_path, arch, lambda step, i, s=share: s, seed=seed, kind="train")
    finding = verdict("C31", tmp_path)
    assert (finding.verdict, len(finding.effects)) == ("reproduced", 1)


def test_models_that_did_not_train_are_no_trained_ones(tmp_path: Path) -> None:
    for arch in ("postln", "preln"):
        run(tmp_path, arch, lambda step, i: 0.1, layers=18)
        run(tmp_path, arch, lambda step, i: 0.1, kind="train", verdict="learning")
    finding = verdict("C31", tmp_path)
    assert (finding.verdict, "trained" in finding.why) == ("not testable", True)
