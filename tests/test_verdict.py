from __future__ import annotations

import math

import pytest

from stabilitylab.verdict import Evaluation, Verdict, divergence, judge

U, A = 5.0, 0.10


def evaluations(*nlls: float, accuracy: float = A, every: int = 10) -> list[Evaluation]:
    return [Evaluation(i * every, nll, accuracy) for i, nll in enumerate(nlls)]


def state(series: list[Evaluation], **more) -> Verdict:
    return judge(series, steps=series[-1].step, unigram_nll=U, unigram_accuracy=A, **more)


def test_a_plateau_at_the_unigram_loss_is_stuck_since_it_began() -> None:
    verdict = state(evaluations(7.0, 5.5, 5.1, 5.0, 4.99, 4.98, 4.97, 4.96, 4.96, 4.96, 4.96))
    assert (verdict.state, verdict.step) == ("stuck", 0)
    assert verdict.nll_gap == pytest.approx(-0.04)
    relapsed = state(evaluations(7.0, 4.5, 4.4, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0))
    assert (relapsed.state, relapsed.step) == ("stuck", 30)


def test_a_better_accuracy_alone_is_not_stuck() -> None:
    assert state(evaluations(*[4.97] * 11, accuracy=A + 0.021)).state == "learning"
    assert state(evaluations(*[4.97] * 11, accuracy=A + 0.019)).state == "stuck"


def test_learning_and_trained() -> None:
    learning = state(evaluations(7.0, *[5.0] * 7, 4.9, 4.85, 4.8))
    assert (learning.state, learning.step) == ("learning", 80)
    trained = state(evaluations(7.0, *[5.0] * 7, 4.9, 4.74, 4.7))
    assert (trained.state, trained.step) == ("trained", 90)
    assert state(evaluations(7.0, *[5.0] * 9, 4.751)).state == "learning"


def test_only_the_last_fifth_decides_stuck() -> None:
    assert state(evaluations(*[5.0] * 10, 4.9)).state == "learning"
    assert state(evaluations(*[4.0] * 8, *[5.0] * 3)).state == "stuck"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_held_out_loss_is_divergence(value: float) -> None:
    verdict = state(evaluations(7.0, 4.0, value, 4.0, 3.0))
    assert (verdict.state, verdict.step) == ("diverged", 20)


def test_a_rise_of_two_nats_must_last() -> None:
    assert divergence(evaluations(4.0, 6.1, 4.1, 4.0, every=1), steps=100, last_step=3) is None
    found = divergence(evaluations(4.0, 6.1, 6.2, 6.2, 6.2, 6.2, 6.2, every=1), steps=100, last_step=99)
    assert found is not None
    assert found[0] == 1
    # below 5 % of the steps, and the run still goes on
    assert divergence(evaluations(4.0, 6.1, 6.2, every=1), steps=100, last_step=99) is None
    # the last evaluation of the run: nothing is left to recover in
    assert divergence(evaluations(4.0, 6.1, every=1), steps=100, last_step=1) is not None
    assert divergence(evaluations(4.0, 5.9, 5.9, 5.9, every=50), steps=100, last_step=150) is None


def test_a_non_finite_training_number_is_divergence() -> None:
    verdict = state(evaluations(7.0, 4.0, 3.0), non_finite=(13, "loss is nan at step 13"))
    assert (verdict.state, verdict.step, verdict.reason) == ("diverged", 13, "loss is nan at step 13")


def test_no_evaluation_no_state() -> None:
    with pytest.raises(ValueError, match="without an evaluation"):
        judge([], steps=10, unigram_nll=U, unigram_accuracy=A)
