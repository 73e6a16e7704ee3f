"""Spikes, divergence and plateaus of made-up losses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from diagnose_cases import Made, falling, found, kinds, layer_rows, made, only
from edited_runs import edit
from rest_slow import rest_slow

from stabilitylab.diagnose.detectors.losses import SPIKE_SD, level, noise
from stabilitylab.diagnose.detectors.rise import RISE_SD


def test_the_noise_of_a_falling_loss_is_that_of_the_noise() -> None:
    """Against the known standard deviation: the trend must not count."""
    drawn = np.random.default_rng(0).standard_normal(4000) * 0.3
    assert noise(drawn - 0.01 * np.arange(4000)) == pytest.approx(0.3, rel=0.05)
    assert level(np.array([5.0, 1.0, 9.0, 2.0]), 3).tolist() == [5.0, 3.0, 5.0, 2.0]


def test_a_spike_is_found_with_its_end_and_height(tmp_path: Path) -> None:
    loss = falling(120)
    loss[60:63] = [3.0, 4.0, 2.5]
    event = only(found(made(tmp_path / "run", {"loss": loss})), "loss_spike")
    assert (event.step, event.until, event.after) == (60, 63, 59)
    assert event.numbers["peak"] == 4.0
    assert event.numbers["value"] > event.numbers["level"] + SPIKE_SD * event.numbers["sd"]


@pytest.mark.parametrize("seed", rest_slow(range(5), [0, 1]))
@pytest.mark.parametrize("noisy", [0.001, 0.05, 0.3])
def test_noise_is_no_spike(tmp_path: Path, seed: int, noisy: float) -> None:
    diagnosis = found(made(tmp_path / "run", {"loss": falling(400, noisy, seed)}))
    assert kinds(diagnosis) == set()


def test_a_memorised_loss_that_flickers_is_no_spike(tmp_path: Path) -> None:
    loss = [*np.linspace(3, 0.001, 100), *np.where(np.arange(100) % 17 == 0, 0.02, 0.001)]
    assert kinds(found(made(tmp_path / "run", {"loss": loss}))) == set()


def test_a_loss_that_ends_above_its_start_has_diverged_and_no_plateau(tmp_path: Path) -> None:
    loss = [*falling(60), *np.linspace(1.2, 9, 60)]
    diagnosis = found(made(tmp_path / "run", {"loss": loss}))
    event = only(diagnosis, "divergence")
    assert event.severity == "failure"
    assert 60 < event.step < 100
    assert "plateau" not in kinds(diagnosis)


def test_a_divergence_names_the_numbers_that_it_compares(tmp_path: Path) -> None:
    loss = [5.5, 29.1, 67.8, 90.0, 110.0, *[200.0] * 10, 167.0, 160.0, 180.0, 170.0, 143.9]
    event = only(found(made(tmp_path / "run", {"loss": loss})), "divergence")
    assert event.evidence == (
        "from step 1 on loss stays above its starting level of 5.5; at the end it is 167 (median of 5 rows)"
    )


def test_an_nll_diverges_two_nats_above_its_minimum(tmp_path: Path) -> None:
    rise = [*np.linspace(8, 4, 50), *np.linspace(4, 6.5, 50)]
    assert only(found(made(tmp_path / "up", {"nll": rise})), "divergence").step in range(89, 92)
    undone = [*np.linspace(8, 4, 50), 6.5, 6.5, *np.linspace(4, 3.9, 50)]
    assert "divergence" not in kinds(found(made(tmp_path / "back", {"nll": undone})))


def test_a_loss_that_never_falls_is_on_a_plateau_from_the_start(tmp_path: Path) -> None:
    flat = (3 + 0.02 * np.random.default_rng(0).standard_normal(100)).tolist()
    diagnosis = found(made(tmp_path / "run", {"loss": flat}))
    event = only(diagnosis, "plateau")
    assert (event.step, event.after, event.severity, diagnosis.verdict) == (0, None, "failure", "failure")


def test_a_relapse_is_a_plateau_since_it_began(tmp_path: Path) -> None:
    relapse = [*falling(60), *(2.6 + 0.02 * np.random.default_rng(1).standard_normal(60))]
    diagnosis = found(made(tmp_path / "run", {"loss": relapse}))
    assert only(diagnosis, "plateau").step in range(60, 67)
    assert [event.kind for event in diagnosis.cause.chain] == ["loss_spike", "plateau"]


def test_a_converged_loss_is_no_plateau(tmp_path: Path) -> None:
    loss = [*falling(100), *(1 + 0.02 * np.random.default_rng(2).standard_normal(300))]
    assert kinds(found(made(tmp_path / "run", {"loss": loss}))) == set()


@pytest.mark.parametrize(("nll", "stuck"), [(5.0, True), (4.5, False)])
def test_the_unigram_baseline_decides_where_it_is_known(tmp_path: Path, nll: float, stuck: bool) -> None:
    held_out = [*np.linspace(7, nll, 20), *[nll] * 40]
    metrics = {"loss": held_out, "held_out_nll": held_out, "held_out_accuracy": [0.1 if stuck else 0.3] * 60}
    path = made(tmp_path / "run", metrics, unigram={"cross_entropy": 5.0, "accuracy": 0.1})
    diagnosis = found(path)
    assert ("plateau" in kinds(diagnosis)) == stuck
    if stuck:
        event = only(diagnosis, "plateau")
        assert (event.step, event.after) == (19, 18)  # where it stopped to fall
        assert "stuck since step 19: at the unigram baseline" in event.evidence
        assert "it was never below it" in event.evidence


def test_a_run_that_still_falls_towards_the_baseline_is_not_stuck(tmp_path: Path) -> None:
    held_out = np.linspace(9, 5.8, 60).tolist()
    metrics = {"loss": held_out, "held_out_nll": held_out, "held_out_accuracy": [0.1] * 60}
    diagnosis = found(made(tmp_path / "run", metrics, unigram={"cross_entropy": 5.0, "accuracy": 0.1}))
    assert kinds(diagnosis) == set()
    assert diagnosis.verdict == "open"  # not healthy either
    assert (
        "it is not known whether the run trains: descending, 0.80 nats above the unigram baseline"
        in diagnosis.paragraph
    )


def test_a_run_too_short_for_a_plateau_that_is_stuck_is_not_healthy(tmp_path: Path) -> None:
    held_out = [7.5] * 12
    metrics = {"loss": held_out, "held_out_nll": held_out, "held_out_accuracy": [0.1] * 12}
    baseline = {"cross_entropy": 5.0, "accuracy": 0.1}
    diagnosis = found(made(tmp_path / "run", metrics, steps=range(0, 60, 5), unigram=baseline))
    assert "plateau" not in diagnosis.checked
    assert diagnosis.verdict == "open"
    assert "it is not known whether the run trains: stuck, 2.50 nats above the unigram baseline" in diagnosis.paragraph


def test_too_few_rows_are_said_not_judged(tmp_path: Path) -> None:
    diagnosis = found(made(tmp_path / "run", {"loss": [3.0] * 15}))
    assert diagnosis.unchecked["plateau"] == "15 rows are too few, it takes 20"
    assert "plateau" not in diagnosis.checked
    assert diagnosis.verdict == "open"
    assert "it is not known whether the run trains: its loss has 15 rows, and the checks need 20" in (
        diagnosis.paragraph
    )


@pytest.mark.parametrize(("rows", "verdict"), [(1, "open"), (19, "open"), (20, "healthy")])
def test_a_run_is_healthy_once_its_loss_was_judged(tmp_path: Path, rows: int, verdict: str) -> None:
    diagnosis = found(made(tmp_path / "run", {"loss": falling(rows)}))
    assert (diagnosis.verdict, diagnosis.events, "is healthy" in diagnosis.paragraph) == (
        verdict,
        (),
        verdict == "healthy",
    )
    assert diagnosis.as_dict()["open"] == diagnosis.untold
    assert bool(diagnosis.untold) == (verdict == "open")


def test_rows_without_a_loss_do_not_count(tmp_path: Path) -> None:
    """Of 40 rows three have a loss, or none; a held-out loss without a baseline judges nothing of the training."""
    norms = {"grad_norm_total": [1.0] * 40}
    none = found(made(tmp_path / "none", norms))
    assert none.verdict == "open"
    assert (
        "it is not known whether the run trains: no training loss was recorded (w.step(loss=loss))." in none.paragraph
    )
    few = found(made(tmp_path / "few", {**norms, "loss": [3.0, 2.0, 1.0, *[None] * 37]}))
    assert few.unchecked["plateau"] == "3 rows are too few, it takes 20"
    single = found(made(tmp_path / "single", {"loss": [2.0], "held_out_nll": [2.0]}))
    assert single.unchecked["plateau"] == "1 row is too few, it takes 20"
    assert "its loss has 3 rows, and the checks need 20" in few.paragraph
    held_out = found(made(tmp_path / "held", {**norms, "held_out_nll": falling(40)}))
    assert held_out.verdict == "open"


@pytest.mark.parametrize("state", ["failed", "diverged"])
def test_a_run_that_failed_is_never_healthy(tmp_path: Path, state: str) -> None:
    path = made(tmp_path / "run", {"loss": falling(60)})
    edit(path / "status.json", state=state, reason="RuntimeError: out of memory")
    diagnosis = found(path)
    assert diagnosis.verdict == "open"
    assert diagnosis.paragraph.startswith(
        f"{path} ({state} at step 59: RuntimeError: out of memory): none of {len(diagnosis.checked)} kinds of trouble "
        f"was found, but the numbers do not say why the run {state}."
    )


def risen(by: float, rows: int = 200, seed: int = 0, sd: float = 0.2) -> list[float]:
    """Falls to 3, and from row 120 on stands ``by`` above that, with normal noise."""
    t = np.arange(rows)
    clean = 3 + 3 * np.exp(-t / 15) + np.where(t >= 120, by * np.minimum((t - 120) / 40, 1.0), 0.0)
    return (clean + sd * np.random.default_rng(seed).standard_normal(rows)).tolist()


def test_a_loss_that_ends_above_its_lowest_level_has_risen(tmp_path: Path) -> None:
    diagnosis = found(made(tmp_path / "run", {"nll": risen(0.8)}))
    event = only(diagnosis, "loss_rise")
    assert diagnosis.verdict == "warning"
    assert 120 < event.step < 180
    assert event.numbers["last"] - event.numbers["lowest"] == pytest.approx(0.8, abs=0.25)
    values = np.array(risen(0.8))
    medians = np.array([np.median(values[at - 19 : at + 1]) for at in range(19, 200)])
    assert event.numbers["lowest"] == pytest.approx(medians.min())
    assert event.strength == pytest.approx((medians[-1] - medians.min()) / (RISE_SD * event.numbers["sd"]))


@pytest.mark.slow
def test_noise_alone_is_no_rise(tmp_path: Path) -> None:
    """A loss that stays where it is, or falls on: at most one of forty by chance."""
    for name, by in (("flat", 0.0), ("falls", -0.4)):
        runs = [made(tmp_path / f"{name}{seed}", {"nll": risen(by, seed=seed)}) for seed in range(40)]
        assert sum("loss_rise" in kinds(found(run)) for run in runs) <= 1


def test_a_rise_is_told_once(tmp_path: Path) -> None:
    """Not beside a divergence, a spike that was not undone, or a plateau; nor of a loss whose noise is tiny."""
    clean = np.array(risen(0.0, sd=0.0))
    jumped = clean + 0.01 * np.random.default_rng(0).standard_normal(200) + np.where(np.arange(200) >= 150, 0.9, 0.0)
    for name, losses in (("far", risen(2.5)), ("spike", jumped), ("tiny", risen(0.05, sd=1e-4))):
        assert "loss_rise" not in kinds(found(made(tmp_path / name, {"nll": list(losses)}))), name


@pytest.mark.parametrize(
    ("end", "still"),
    [(3.0, True), (2.4, False)],  # 40 and 52 % below 5, which is where the first ten rows' level lies
)
def test_without_a_baseline_a_loss_that_stands_still_early_leaves_it_open(
    tmp_path: Path, end: float, still: bool
) -> None:
    start = 5.0 if still else 5.2
    noise = 0.05 * np.random.default_rng(0).standard_normal(120)
    loss = end + (start + 0.3 - end) * np.exp(-np.arange(120) / 12) + noise
    diagnosis = found(made(tmp_path / "run", {"loss": loss.tolist()}))
    assert (diagnosis.verdict, kinds(diagnosis)) == (("open", {"plateau"}) if still else ("healthy", set()))
    if still:
        event = only(diagnosis, "plateau")
        assert event.severity == "note"
        assert 20 < event.step < 60
        assert "the model may be stuck on its plateau" in diagnosis.paragraph


def test_a_loss_that_falls_on_slowly_is_no_plateau(tmp_path: Path) -> None:
    noise = 0.05 * np.random.default_rng(0).standard_normal(120)
    assert kinds(found(made(tmp_path / "run", {"loss": (5 - 0.005 * np.arange(120) + noise).tolist()}))) == set()


def test_a_gradient_that_vanishes_under_a_loss_that_may_be_stuck_is_a_warning(tmp_path: Path) -> None:
    values = np.exp(0.7 * np.arange(20))[:, None]
    table = Made(layer_rows(20), ("value",), lambda t: values, tuple(range(60)))
    for name, end, severity in (("stuck", 4.0, "warning"), ("learns", 1.0, "note")):
        loss = (end + (5 - end) * np.exp(-np.arange(60) / 5)).tolist()
        noisy = [x + 0.05 * (-1) ** (t // 2) for t, x in enumerate(loss)]
        event = only(found(made(tmp_path / name, {"loss": noisy}, {"grad_norm": table})), "vanishing_gradient")
        assert event.severity == severity
