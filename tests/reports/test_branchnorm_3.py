"""BranchNorm, Figure 3, and its claims C07 to C10, on made-up gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_memory import remembered
from making import Made, layer_rows, load, make_run, sublayer_rows

from stabilitylab.reports.base import MissingRuns, Panel, Picture
from stabilitylab.reports.claims import CLAIMS, Finding, judge
from stabilitylab.reports.collection import Runs
from stabilitylab.reports.figures.branchnorm.figure_3 import Beginning
from stabilitylab.reports.measures.beginning import roughness, total

SEEDS = (3, 4, 5)


def make_beginning(
    folder: Path,
    arch: str,
    seed: int,
    *,
    updates: int = 12,
    probed: Sequence[int] = (0, 1, 10),
    alpha: Callable[[int], float] | None = None,
    level: float = 1.0,
    **facts: Any,
) -> None:
    """Norms 10 (total), 2, 3 and 5 times ``level`` and seed (outside, encoder and decoder branches); nll 7 - t / 100;
    the gradient of layer n is n + t in the encoder and 10 times that in the decoder."""
    rows = range(updates)
    ramp = [None if alpha is None else alpha(t) for t in rows]
    factor = [1.0 if a is None else a for a in ramp]
    columns: dict[str, list[float | None]] = {
        "nll": [7.0 - t / 100 for t in rows],
        "grad_norm_total": [10.0 * level * seed] * updates,
        "grad_norm_nonbranch": [2.0 * level * seed] * updates,
        "grad_norm_branch_encoder": [3.0 * level * seed * a**2 for a in factor],
        "grad_norm_branch_decoder": [5.0 * level * seed * a for a in factor],
        "alpha": [*ramp],
    }
    gradient = Made(
        layer_rows(2), ("value",), lambda t, row: (row.layer + t) * (10.0 if row.stack == "decoder" else 1.0), probed
    )
    metrics = {name: [*values, None] for name, values in columns.items() if any(v is not None for v in values)}
    make_run(folder, f"{arch}-{seed}", arch=arch, seed=seed, layers=2, metrics=metrics, tables={"grad_norm": gradient},
             **facts)  # fmt: skip


def drawn(folder: Path) -> tuple[dict[str, Panel], Picture]:
    picture = Beginning().picture(load(folder))
    return {panel.title: panel for panel in picture.panels}, picture


def test_the_picture_is_the_beginning(tmp_path: Path) -> None:
    for seed in (3, 12):
        make_beginning(tmp_path, "branchnorm", seed, alpha=lambda t: t / 100)
    panels, picture = drawn(tmp_path)
    first, second = panels["Gradient norm"], panels["Training loss"]
    (norm,), (loss,) = first.series, second.series
    assert (first.y, first.log_y, second.y) == ("global gradient norm (L2)", True, "nll [bits/token, base 2]")
    assert norm.x == [*range(12)]  # the row after training has no gradient
    assert norm.y == pytest.approx([60.0] * 12)  # geometric mean of 30 and 120
    assert (norm.low, norm.high) == (pytest.approx([30.0] * 12), pytest.approx([120.0] * 12))
    assert loss.y == pytest.approx([(7.0 - t / 100) / math.log(2) for t in range(12)])
    for stack, scale in (("Encoder", 1.0), ("Decoder", 10.0)):
        first, tenth = panels[f"{stack} layers, step 1"], panels[f"{stack} layers, step 10"]
        assert first.limits == tenth.limits is not None
        (line,) = tenth.series
        assert line.x == [1, 2]
        assert line.y == pytest.approx([11.0 * scale, 12.0 * scale])
    outside, decoder, encoder = panels["Without the factor alpha"].series
    assert outside.y == pytest.approx([12.0] * 12)
    assert decoder.x == encoder.x == [*range(1, 12)]  # not where alpha is 0
    assert decoder.y == pytest.approx([30.0] * 11)
    assert encoder.y == pytest.approx([18.0] * 11)
    assert decoder.detail == "decoder branches / alpha"
    assert "gradient norm and from 10.10 to 9.94 bits within 11 updates (2 seeds)" in picture.finding


def test_a_long_course_is_smoothed_with_the_raw_one_behind_it_and_controls_stand_apart(tmp_path: Path) -> None:
    for arch in ("deepnorm", "branchnorm"):
        make_beginning(tmp_path, arch, 3, updates=40)
    make_beginning(tmp_path, "admin", 3, updates=40)
    panels, picture = drawn(tmp_path)
    norm = panels["Gradient norm"].series
    assert [(line.arch, line.faint) for line in norm] == [
        (arch, faint) for arch in ("deepnorm", "branchnorm") for faint in (True, False)
    ]
    assert {line.arch for line in picture.controls[0].series} == {"deepnorm", "branchnorm", "admin"}
    assert picture.key == "full: mean of 15 updates, faint: the single updates"
    assert picture.provenance == "2L-2L, 64 wide, synthetic data, 160 updates, T 3.75 % of them"


def test_only_archs_with_small_branches_are_taken_apart(tmp_path: Path) -> None:
    for arch in ("postln", "deepnorm"):
        make_beginning(tmp_path, arch, 3)
    panels, _ = drawn(tmp_path)
    assert {line.arch for line in panels["Without the factor alpha"].series} == {"deepnorm"}
    assert [line.y[0] for line in panels["Without the factor alpha"].series] == pytest.approx([6.0, 15.0, 9.0])


def test_profiles_name_the_step_that_was_probed(tmp_path: Path) -> None:
    make_beginning(tmp_path, "postln", 3, updates=110, probed=(0, 1, 5, 50, 97))
    panels, _ = drawn(tmp_path)
    steps = [title.rpartition(" ")[2] for title in panels if title.startswith("Encoder layers, step ")]
    assert steps == ["1", "97"]  # 5 is not 10, and 97 is near 100
    assert panels["Encoder layers, step 97"].series[0].y == pytest.approx([98.0, 99.0])


def test_one_interrupted_run_is_drawn(tmp_path: Path) -> None:
    make_beginning(tmp_path, "admin", 3, updates=2, probed=(0,), state="interrupted", verdict="")
    panels, picture = drawn(tmp_path)
    assert [*panels] == ["Gradient norm", "Training loss"]
    assert picture.finding.startswith("Admin goes from 30 to 30 in gradient norm")
    assert "The run did not end." in picture.notes


def test_a_gradient_of_exactly_zero_is_noted(tmp_path: Path) -> None:
    make_beginning(tmp_path, "branchnorm", 3, level=0.0, alpha=lambda t: 1.0)
    _, picture = drawn(tmp_path)
    assert any("Exactly 0" in note and "BranchNorm (Gradient norm)" in note for note in picture.notes)


def test_without_runs_it_names_the_command(tmp_path: Path) -> None:
    make_run(tmp_path, "bare", layers=2, metrics={"loss": [1.0, 1.0]})
    with pytest.raises(MissingRuns) as missing:
        Beginning().picture(load(tmp_path))
    assert "stabilitylab sweep branchnorm:3" in missing.value.command


def saw(rough: float, updates: int) -> list[float]:
    """A norm whose logarithm goes up and down by ``rough``."""
    return [math.exp(rough * (t % 2)) for t in range(updates)]


def early(*ratios: float, outside: float | None = None, loss: Sequence[float] = (), updates: int = 500) -> Runs:
    """By seed, BranchNorm that is ``ratio`` times as rough as DeepNorm and ``loss`` above it."""
    records = []
    for seed, ratio in enumerate(ratios, 3):
        above = loss[seed - 3] if loss else 0.0
        for arch, rough, part, nll in (("branchnorm", ratio, outside or ratio, above), ("deepnorm", 1.0, 1.0, 0.0)):
            metrics = {"nll": [99.0] + [6.0 + nll] * (updates - 1), "grad_norm_total": saw(0.1 * rough, updates),
                       "grad_norm_nonbranch": saw(0.1 * part, updates)}  # fmt: skip
            records.append(remembered(f"{arch}-{seed}", arch=arch, seed=seed, layers=2, metrics=metrics))
    return Runs(records)


def test_roughness_is_the_deviation_of_log_steps_1_to_200() -> None:
    norms = np.exp(np.random.default_rng(0).normal(size=300))
    (record,) = Runs([remembered("a", metrics={"grad_norm_total": norms.tolist()})])
    moves = [math.log(norms[t + 1] / norms[t]) for t in range(1, 200)]
    mean = sum(moves) / 199
    assert roughness(record, total) == pytest.approx(math.sqrt(sum((m - mean) ** 2 for m in moves) / 198), rel=1e-12)
    (flat,) = Runs([remembered("b", metrics={"grad_norm_total": [1.0] * 300})])
    (broken,) = Runs([remembered("c", metrics={"grad_norm_total": [1.0, 0.0, math.inf] * 100})])
    assert math.isnan(roughness(flat, total))
    assert math.isnan(roughness(broken, total))


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        (early(0.5, 0.55, 0.6, updates=201), "reproduced"),
        (early(1.5, 1.6, 1.7, updates=201), "contradicted"),
        (early(0.5, 0.9, 1.6, updates=201), "inconclusive"),
        (early(0.9, 0.91, 0.92, updates=201), "not reproduced"),  # smoother, by less than a fifth
        (early(0.5, 0.5, 0.5, outside=1.1, updates=201), "reproduced"),  # with the branch weights alone, as beside it
        (early(0.5, 0.5, 0.5, updates=200), "not testable"),
    ],
)
def test_c09_smoothness(runs: Runs, verdict: str) -> None:
    assert judge(CLAIMS["C09"], runs).verdict == verdict


def test_c09_is_the_ratio_of_deviations() -> None:
    whole, part = judge(CLAIMS["C09"], early(0.5, 0.6, 0.7, outside=1.1, updates=201)).effects
    assert (whole["mean"], part["mean"]) == pytest.approx(((0.5 * 0.6 * 0.7) ** (1 / 3), 1.1))
    assert (whole["role"], part["verdict"]) == ("primary", "")


@pytest.mark.parametrize(("T", "verdict"), [(20, "reproduced"), (4000, "reproduced"), (100, "not testable")])
def test_c09_another_ramp_than_the_protocols_is_refused(T: int, verdict: str) -> None:
    """4 % of 500 updates, or one that the run does not finish."""
    records = [
        remembered(run.name, arch=run.label, seed=run.seed, layers=2,
                   metrics=run.metrics.drop(columns="step").to_dict("list"),
                   settings={"model": {"T": T}, "train": {"steps": 500}})
        for run in early(0.5, 0.55, 0.6, updates=201)
    ]  # fmt: skip
    found = judge(CLAIMS["C09"], Runs(records))
    assert found.verdict == verdict
    if T == 100:
        assert found.why == (
            "BranchNorm ramped for 100 of 500 updates: architectures are compared with a ramp of 4 % of the run"
        )


@pytest.mark.parametrize(
    ("loss", "updates", "verdict"),
    [
        ((-0.1, -0.11, -0.12), 500, "reproduced"),
        ((0.1, 0.11, 0.12), 500, "contradicted"),
        ((-0.1, 0.1, 0.0), 500, "inconclusive"),
        ((-0.1, -0.1, -0.1), 499, "not testable"),
    ],
)
def test_c10_early_loss(loss: Sequence[float], updates: int, verdict: str) -> None:
    found = judge(CLAIMS["C10"], early(1, 1, 1, loss=loss, updates=updates))
    assert found.verdict == verdict
    if found.effects:
        assert found.effects[0]["mean"] == pytest.approx(np.mean(loss))  # the 99 of step 0 does not count


def test_c10_prefers_runs_of_the_figure() -> None:
    """Runs of another recipe without the norms of each step are no rival, even with more seeds."""
    others = [
        remembered(f"{arch}-{seed}-lr", arch=arch, seed=seed, layers=2, metrics={"nll": [9.0] * 500},
                   settings={"train": {"lr": 1e-2}})
        for arch in ("branchnorm", "deepnorm") for seed in range(3, 9)
    ]  # fmt: skip
    found = judge(CLAIMS["C10"], Runs([*others, *early(1, 1, 1, loss=(-0.1, -0.1, -0.1))]))
    assert (found.verdict, found.effects[0]["n"]) == ("reproduced", 3)


def make_one_step(folder: Path, unevenness: Callable[[str, int], float], labels: Sequence[str]) -> None:
    """By seed, one-step runs whose gradient in layer 1 is ``unevenness`` times that of layers 2 and 3; the top layer's
    is 7 times it, and does not count."""
    settings = {
        "branchnorm alpha=0": {"alpha": 0.0, "T": 4000},
        "branchnorm": {"T": 4000},
        "branchnorm T=1": {"T": 1},
        "branchnorm T=100": {"T": 100},
    }
    for name in labels:
        for seed in SEEDS:

            def value(step: int, row, first: float = unevenness(name, seed)) -> float:
                if row.stack == "encoder" or row.sublayer != "ffn":
                    return 1e9
                return {1: first, 4: 7.0}.get(row.layer, 1.0)

            table = Made(sublayer_rows(4), ("value",), value)
            make_run(folder, f"{name}-{seed}", seed=seed, layers=4, kind="onestep", settings={"model": settings[name]},
                     tables={"activation_grad_norm": table})  # fmt: skip


def one(folder: Path, id: str) -> Finding:
    return judge(CLAIMS[id], load(folder))


@pytest.mark.parametrize(
    ("first", "verdict"),
    [
        (lambda seed: 1.00001, "reproduced"),
        (lambda seed: 1.06, "contradicted"),
        (lambda seed: 1.01, "not reproduced"),
        (lambda seed: 1.2 if seed == 3 else 1.0, "inconclusive"),
    ],
)
def test_c07_identical_gradients(tmp_path: Path, first: Callable[[int], float], verdict: str) -> None:
    make_one_step(
        tmp_path, lambda name, seed: first(seed) if name == "branchnorm" else 1.0, ("branchnorm alpha=0", "branchnorm")
    )
    found = one(tmp_path, "C07")
    assert found.verdict == verdict
    larger, still, ramped = found.effects
    assert still["mean"] == 1.0
    assert larger["mean"] == ramped["mean"] == pytest.approx(np.exp(np.mean([np.log(first(seed)) for seed in SEEDS])))


def test_c07_is_about_the_first_step_of_a_long_ramp(tmp_path: Path) -> None:
    make_one_step(tmp_path, lambda name, seed: 1.0, ("branchnorm alpha=0", "branchnorm T=100"))
    found = one(tmp_path, "C07")
    assert found.verdict == "not testable"
    assert found.command == "stabilitylab claims --fast"


@pytest.mark.parametrize(
    ("first", "verdict"),
    [
        (lambda seed: 2.0 + seed / 10, "reproduced"),
        (lambda seed: 1.01 + seed / 1000, "contradicted"),
        (lambda seed: 1.3, "not reproduced"),
    ],
)
def test_c08_due_to_alpha(tmp_path: Path, first: Callable[[int], float], verdict: str) -> None:
    make_one_step(
        tmp_path, lambda name, seed: first(seed) if "T=1" in name else 1.0, ("branchnorm alpha=0", "branchnorm T=1")
    )
    found = one(tmp_path, "C08")
    assert found.verdict == verdict
    assert found.effects[0]["mean"] == pytest.approx(np.mean([first(seed) - 1 for seed in SEEDS]))


def test_c08_without_the_other_arm(tmp_path: Path) -> None:
    make_one_step(tmp_path, lambda name, seed: 1.0, ("branchnorm alpha=0",))
    assert one(tmp_path, "C08").verdict == "not testable"
