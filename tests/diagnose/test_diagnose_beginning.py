"""The first rows of a loss: explosions before there is a past, where a loss began, and runs too young to be judged."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diagnose_cases import VOCAB, Copier, falling, found, kinds, made, only, train

from stabilitylab.diagnose.detectors.beginning import EXPLODED_LOSS, FIRST_ROWS, explosion, start
from stabilitylab.store import Run
from stabilitylab.verdict import TOO_EARLY, Baseline, Evaluation, judge


def came_back(first: float, peak: float, end: float, rows: int = 60) -> list[float]:
    """The loss jumps from ``first`` to ``peak`` in row 1, and ends at ``end``: the shape of the runs in the tests."""
    noise = 0.01 * np.random.default_rng(0).standard_normal(rows - 1)
    return [first, *(end + (peak - end) * np.exp(-np.arange(rows - 1) / 6) + noise).tolist()]


def test_a_loss_that_explodes_at_once_and_stays_above_its_start_is_a_failure(tmp_path: Path) -> None:
    """4.78 -> 14.4 -> 5.2: the median of the first five rows, 12, would have said that it learned."""
    diagnosis = found(made(tmp_path / "run", {"loss": came_back(4.78, 14.4, 5.2)}))
    event = only(diagnosis, "early_explosion")
    assert (event.step, event.after, event.severity, diagnosis.verdict) == (1, 0, "failure", "failure")
    assert event.numbers["before"] == 4.78
    assert event.numbers["peak"] == pytest.approx(14.4, abs=0.05)
    assert "it does not come back" in event.evidence


@pytest.mark.parametrize(("end", "severity", "told"), [(3.91, "note", "a new"), (4.77, "warning", "no new")])
def test_a_loss_that_explodes_at_once_and_comes_back_is_judged_by_what_it_does_then(
    tmp_path: Path, end: float, severity: str, told: str
) -> None:
    """4.73 -> 6.91 -> 3.91, and back to where it began."""
    diagnosis = found(made(tmp_path / "run", {"loss": came_back(4.73, 6.91, end)}))
    event = only(diagnosis, "early_explosion")
    assert event.severity == severity
    assert event.until is not None or severity == "warning"
    assert f"it comes back to {end}" in event.evidence
    assert event.consequence == f"the loss reached {told} minimum after it"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noisy", [0.001, 0.05, 0.3])
def test_noise_at_the_start_is_no_explosion(tmp_path: Path, seed: int, noisy: float) -> None:
    assert "early_explosion" not in kinds(found(made(tmp_path / "run", {"loss": falling(200, noisy, seed)})))


def test_a_loss_that_jumps_up_and_down_as_a_matter_of_course_has_not_exploded() -> None:
    jumping = 1.0 + 0.9 * np.random.default_rng(3).random(200)
    assert explosion(jumping) is None
    assert explosion(np.array([1.0])) is None
    assert explosion(np.array([0.0, 5.0])) is None  # of nothing there is no share


def test_an_explosion_in_the_last_rows_is_bounded_by_the_first_loss_alone() -> None:
    """Fewer rows after it than a noise can be taken of."""
    seen = explosion(np.array([1.0, 1.0, 1.0, 1.9, 1.8]))
    assert seen is not None
    assert (seen.at, seen.peak, seen.bound) == (3, 3, EXPLODED_LOSS)


@pytest.mark.parametrize("at", [1, FIRST_ROWS, FIRST_ROWS + 1])
def test_only_the_first_rows_are_judged_here(at: int) -> None:
    values = np.linspace(5.0, 4.9, 80)
    values[at : at + 3] = 9.0
    seen = explosion(values)
    assert (seen is not None) == (at <= FIRST_ROWS)
    if seen is not None:
        assert (seen.at, seen.peak) == (at, at)
        assert seen.before == pytest.approx(float(np.median(values[:at])))


def test_where_a_loss_began() -> None:
    calm = np.array([5.0, 4.8, 4.9, 4.7, 4.6, 4.5, 4.4])
    assert start(calm) == 4.8
    assert start(np.array([5.0, 20.0, 18.0, 16.0, 14.0, 12.0, 10.0, 9.0])) == 5.0


def test_the_loss_of_a_uniform_guess_is_where_a_loss_began_if_the_classes_are_known(tmp_path: Path) -> None:
    """Watched from update 1000 on, at ln 200: without the number of classes it stands still at an unknown level."""
    flat = (math.log(200) + 0.01 * np.random.default_rng(0).standard_normal(80)).tolist()
    falls = [*np.linspace(7.0, math.log(200), 20).tolist(), *flat]
    event = only(found(made(tmp_path / "known", {"loss": falls}, data={"target_vocab": 200})), "plateau")
    assert event.severity == "failure"
    assert "the loss of a uniform guess over 200 classes is 5.3" in event.evidence
    unknown = [event.severity for event in found(made(tmp_path / "unknown", {"loss": falls})).events]
    assert "failure" not in unknown


def test_watch_records_how_many_classes_a_model_chooses_among(tmp_path: Path) -> None:
    assert Run.open(train(tmp_path / "run", steps=3)).manifest["classes"] == VOCAB


def test_a_run_of_30_updates_is_too_young_to_be_broken(tmp_path: Path) -> None:
    flat = (3 + 0.02 * np.random.default_rng(0).standard_normal(30)).tolist()
    diagnosis = found(made(tmp_path / "young", {"loss": flat}))
    event = only(diagnosis, "plateau")
    assert (event.severity, diagnosis.verdict) == ("note", "open")
    assert f"too early to tell after 30 updates: a plateau is judged from {TOO_EARLY} updates on" in event.evidence
    assert "the loss may still fall" in diagnosis.paragraph
    flat = (3 + 0.02 * np.random.default_rng(0).standard_normal(TOO_EARLY)).tolist()
    assert found(made(tmp_path / "old", {"loss": flat})).verdict == "failure"


def test_a_young_loss_a_little_above_its_start_has_not_diverged_yet(tmp_path: Path) -> None:
    rises = np.linspace(3.0, 3.5, 30).tolist()
    diagnosis = found(made(tmp_path / "young", {"loss": rises}))
    assert (only(diagnosis, "divergence").severity, diagnosis.verdict) == ("note", "open")
    assert found(made(tmp_path / "far", {"loss": np.linspace(3.0, 5.0, 30).tolist()})).verdict == "failure"
    slow = np.linspace(3.0, 3.5, 80).tolist()
    assert found(made(tmp_path / "old", {"loss": slow})).verdict == "failure"


@pytest.mark.parametrize(("updates", "state"), [(TOO_EARLY - 1, "cannot tell"), (TOO_EARLY, "stuck")])
def test_the_state_of_a_run_is_not_told_too_early(updates: int, state: str) -> None:
    rows = [Evaluation(step, 7.5, 0.1) for step in np.linspace(0, updates, 12).astype(int).tolist()]
    verdict = judge(rows, Baseline(5.0, 0.1), steps=updates)
    assert verdict.state == state
    assert ("too early to tell" in verdict.reason) == (state == "cannot tell")


@pytest.mark.slow
def test_an_explosion_of_real_training_is_found(tmp_path: Path) -> None:
    """A rate of 3 in the first update of a model of four layers, and the usual one afterwards."""
    healthy, exploded = (train(tmp_path / name, rate=rate) for name, rate in RATES.items())
    assert "early_explosion" not in kinds(found(healthy))
    event = only(found(exploded), "early_explosion")
    assert event.step <= 3
    model = Copier()
    tokens = torch.arange(12).view(2, 6) % VOCAB
    guess = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).item()
    assert event.numbers["peak"] > 1.25 * guess > event.numbers["before"]


RATES = {"healthy": lambda t: 1e-3, "exploded": lambda t: 3.0 if t == 0 else 1e-3}
