"""States of made-up courses; what the rule is worth on real ones stands in results/states."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from stabilitylab.store.documents import plain
from stabilitylab.verdict import (
    LEAST,
    LEVEL_NATS,
    MATERIAL,
    READS_NATS,
    RULE,
    STATES,
    TRAINED_NATS,
    UNREAD,
    Baseline,
    Evaluation,
    Verdict,
    divergence,
    judge,
    judge_recorded,
    trend,
)

U, A = 5.0, 0.10
BASE = Baseline(U, A)


def evaluations(*nlls: float, accuracy: float = A, every: int = 10) -> list[Evaluation]:
    return [Evaluation(i * every, nll, accuracy) for i, nll in enumerate(nlls)]


def course(*, gap: float, fall: float = 0.0, noise: float = 0.0, count: int = 51) -> list[Evaluation]:
    """So many evaluations of a run of 100 updates that ends ``gap`` above the baseline and falls by ``fall`` nats per
    tenth of the run."""
    steps = np.linspace(0, 100, count).round()
    wobble = noise * np.where(np.arange(count) % 2, 1.0, -1.0)
    return [
        Evaluation(int(t), float(U + gap + fall * (100 - t) / 10 + w), A) for t, w in zip(steps, wobble, strict=True)
    ]


def state(series: list[Evaluation], **more: Any) -> Verdict:
    return judge(series, BASE, steps=series[-1].step, **more)


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        (course(gap=0.0), "stuck"),
        (course(gap=0.3), "stuck"),  # far above the baseline, and going nowhere
        (course(gap=3.0), "stuck"),
        (course(gap=0.1, fall=MATERIAL / 2), "stuck"),  # slower than matters
        (course(gap=0.1, fall=-0.1), "stuck"),  # it rises
        (course(gap=0.0, noise=0.005), "stuck"),
        (course(gap=0.3, fall=0.1), "descending"),
        (course(gap=0.0, fall=0.1), "descending"),
        (course(gap=-LEVEL_NATS + 1e-6, fall=MATERIAL), "descending"),
        (course(gap=0.1, fall=0.1, noise=0.01), "descending"),
        (course(gap=0.3, noise=0.2), "cannot tell"),  # the interval reaches from a fall to a rise
        (course(gap=0.1, fall=MATERIAL, noise=0.05), "cannot tell"),
        (course(gap=-LEVEL_NATS - 1e-6), "learning"),
        (course(gap=-TRAINED_NATS), "learning"),
        (course(gap=-TRAINED_NATS - 1e-6), "trained"),
        (course(gap=-1.0, noise=0.2), "trained"),
    ],
)
def test_the_sign_of_the_gap_and_the_fall_decide(series: list[Evaluation], expected: str) -> None:
    assert state(series).state == expected


def test_every_state_has_a_course() -> None:
    marks = test_the_sign_of_the_gap_and_the_fall_decide.pytestmark  # type: ignore[attr-defined]
    assert {case[1] for case in marks[0].args[1]} == {*STATES} - {"diverged", UNREAD}


@pytest.mark.parametrize("gap", [-0.06, -0.2, -2.0])
def test_a_loss_below_the_baseline_is_no_training_where_the_source_is_not_read(gap: float) -> None:
    series = course(gap=gap)
    unread = state(series, source_worth=0.004)
    assert unread.state == UNREAD
    assert "0.004 nats a token" in unread.reason
    assert unread.step == 0
    assert state(series, source_worth=READS_NATS - 1e-9).state == UNREAD
    assert state(series, source_worth=math.nan).state == UNREAD  # "trained" is never said of what cannot be shown
    assert state(series, source_worth=READS_NATS) == replace(state(series), source_worth=READS_NATS)


def test_a_model_at_the_baseline_or_diverged_keeps_its_state_whatever_its_source_is_worth() -> None:
    assert state(course(gap=0.0), source_worth=0.0).state == "stuck"
    assert state(course(gap=0.1, fall=0.1), source_worth=0.0).state == "descending"
    assert state(course(gap=-1.0), source_worth=0.0, non_finite=(3, "loss is nan at step 3")).state == "diverged"


def test_what_the_source_is_worth_is_read_from_the_last_row_of_a_run_that_has_ended() -> None:
    columns: dict[str, list[float | None]] = {
        "step": [*range(10)],
        "held_out_nll": [U - 1.0] * 10,
        "held_out_accuracy": [A] * 10,
        "source_worth": [0.0, None, *[0.5] * 6, 0.02, None],
    }
    manifest = {"unigram": {"cross_entropy": U, "accuracy": A}, "config": {"train": {"steps": 9}}}
    whole = judge_recorded(columns, manifest, whole=True)
    assert whole is not None
    assert (whole.state, whole.source_worth) == (UNREAD, 0.02)
    assert Verdict.of(json.loads(json.dumps(plain(whole.recorded())))) == whole
    older = judge_recorded({**columns, "source_worth": [None] * 10}, manifest, whole=True)
    assert older is not None
    assert (older.state, older.source_worth) == ("trained", None)


def test_a_smooth_fall_above_the_baseline_is_not_stuck() -> None:
    """A 12-layer DeepNorm's 60 updates: from 7.76 to 5.28 nats, above a baseline of 5.0."""
    falling = [Evaluation(t, 7.76 - (7.76 - 5.28) * (t / 60) ** 0.8) for t in range(61)]
    verdict = judge(falling, BASE, steps=60)
    assert (verdict.state, verdict.step) == ("descending", 0)
    assert "0.28 nats above the unigram baseline" in verdict.reason
    assert "too early to say" in verdict.reason


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        (0.55, "0.55 nats above the unigram baseline"),
        (0.04, "at the unigram baseline (+0.040 nats)"),
        (-0.04, "at the unigram baseline (-0.040 nats)"),
        (-0.12, "0.12 nats below the unigram baseline"),
        (-0.54, "0.54 nats below the unigram baseline"),
    ],
)
def test_the_words_go_by_the_sign_of_the_gap(gap: float, words: str) -> None:
    for fall in (0.1, 0.0):
        reason = state(course(gap=gap, fall=fall)).reason
        assert reason.startswith(words)
        assert ("falling by" in reason) == (fall > 0)
        assert ("no longer falling" in reason) == (fall == 0)
    assert "and hardly falling (0.010 [0.010, 0.010] nats" in state(course(gap=gap, fall=0.01)).reason
    assert "and hardly rising (0.010 [0.010, 0.010] nats" in state(course(gap=gap, fall=-0.01)).reason
    assert "and rising by 0.100 [0.100, 0.100] nats per tenth" in state(course(gap=gap, fall=-0.1)).reason


@pytest.mark.parametrize("count", [1, 2, LEAST - 1])
def test_few_evaluations_cannot_tell_unless_the_gap_does(count: int) -> None:
    few = state([Evaluation(100 * i + 100, U + 0.1, A) for i in range(count)])
    assert few.state == "cannot tell"
    assert f"{count} evaluation{'s' * (count > 1)} cannot show whether it falls: 8 are needed" in few.reason
    assert few.trend is None
    assert state([Evaluation(100 * i + 100, U - 1.0, A) for i in range(count)]).state == "trained"


def test_the_log_cadence_of_older_runs_leaves_a_line_through_eight() -> None:
    steps = [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 22, 27, 33, 40, 48, 58, 70, 84, 101, 122, 147, 160]
    found = trend([Evaluation(t, U + 0.1, A) for t in steps])
    assert found is not None
    assert found.evaluations == LEAST  # of which only two lie in the last fifth


def test_the_trend_is_the_t_interval_of_a_least_squares_slope() -> None:
    noise = np.random.default_rng(0).normal(size=51)
    series = [Evaluation(2 * i, U - 0.01 * i + 0.02 * float(noise[i]), A) for i in range(51)]
    found = trend(series)
    assert found is not None
    last = [e for e in series if e.step >= 80]
    assert found.evaluations == len(last) == 11
    x, y = np.array([e.step / 10 for e in last]), np.array([e.nll for e in last])
    line: Any = stats.linregress(x, y)
    rest = y - line.intercept - line.slope * x
    r = max(0.0, float(rest[1:] @ rest[:-1] / (rest @ rest)))
    half = stats.t.ppf(0.975, 9) * line.stderr * math.sqrt((1 + r) / (1 - r))
    expected = (-line.slope, -line.slope - half, -line.slope + half)
    assert (found.fall, found.low, found.high) == pytest.approx(expected, rel=1e-9)


def test_what_hangs_together_widens_the_interval() -> None:
    wave = [0.02 * math.cos(0.6 * (i - 45)) for i in range(51)]  # even about the middle of the window: no slope
    slow = trend([Evaluation(2 * i, U + w, A) for i, w in enumerate(wave)])
    order = [*range(40), 40, 45, 41, 46, 42, 50, 44, 49, 43, 48, 47]  # the same numbers in another order
    quick = trend([Evaluation(2 * i, U + wave[j], A) for i, j in enumerate(order)])
    assert slow is not None and quick is not None  # noqa: PT018
    assert slow.high - slow.low > 1.5 * (quick.high - quick.low)


def test_since_when() -> None:
    plateau = [7.0, 6.0, *[5.02] * 49]
    assert state(evaluations(*plateau, every=2)).step == 4
    below = [*[5.0] * 45, 4.9, 4.74, 4.7, 4.7, 4.7, 4.7]
    assert (state(evaluations(*below, every=2)).state, state(evaluations(*below, every=2)).step) == ("trained", 92)


def test_the_validation_set_has_the_last_word() -> None:
    series = course(gap=0.02)
    on_all = (Evaluation(100, 4.0, 0.3), Baseline(4.5, 0.2), 400)
    verdict = state(series, validation=on_all)
    assert (verdict.state, verdict.sentences) == ("trained", 400)
    assert (verdict.nll_gap, verdict.accuracy_gap) == pytest.approx((-0.5, 0.1))
    assert state(series).nll_gap == pytest.approx(0.02)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_held_out_loss_is_divergence(value: float) -> None:
    verdict = state(evaluations(7.0, 4.0, value, 4.0, 3.0))
    assert (verdict.state, verdict.step) == ("diverged", 20)


def test_a_rise_of_two_nats_must_last() -> None:
    assert divergence(evaluations(4.0, 6.1, 4.1, 4.0, every=1), steps=100, last_step=3) is None
    found = divergence(evaluations(4.0, 6.1, 6.2, 6.2, 6.2, 6.2, 6.2, every=1), steps=100, last_step=99)
    assert found is not None
    assert found[0] == 1
    assert found[1].endswith("nats over its minimum of 4.000 (step 0) at step 1 and was still there at step 6")
    # below 5 % of the steps, and the run still goes on
    assert divergence(evaluations(4.0, 6.1, 6.2, every=1), steps=100, last_step=99) is None
    # the last evaluation of the run: nothing is left to recover in
    last = divergence(evaluations(4.0, 6.1, every=1), steps=100, last_step=1)
    assert last is not None
    assert last[1].endswith("at step 1, the last evaluation")
    assert divergence(evaluations(4.0, 5.9, 5.9, 5.9, every=50), steps=100, last_step=150) is None


def test_a_non_finite_training_number_is_divergence() -> None:
    verdict = state(evaluations(7.0, 4.0, 3.0), non_finite=(13, "loss is nan at step 13"))
    assert (verdict.state, verdict.step, verdict.reason) == ("diverged", 13, "loss is nan at step 13")


def test_no_evaluation_no_state() -> None:
    with pytest.raises(ValueError, match="without an evaluation"):
        judge([], BASE, steps=10)


def test_a_verdict_survives_the_file() -> None:
    lost = state([*course(gap=0.1)[:-1], Evaluation(100, math.nan, math.nan)])
    for verdict in (state(course(gap=0.1)), state([Evaluation(5, U, A)]), lost):
        read = Verdict.of(json.loads(json.dumps(plain(verdict.recorded()), allow_nan=False)))
        assert (repr(read), read.rule) == (repr(verdict), RULE)  # nan is not equal to itself
        assert all(isinstance(gap, float) for gap in (read.nll_gap, read.accuracy_gap))


MANIFEST = {"unigram": {"cross_entropy": U, "accuracy": A}, "config": {"train": {"steps": 100}}}


def columns(series: list[Evaluation], **more: list[float | None]) -> dict[str, list[float | None]]:
    known: dict[str, list[float | None]] = {
        "step": [e.step for e in series],
        "held_out_nll": [e.nll for e in series],
        "held_out_accuracy": [e.accuracy for e in series],
    }
    return {**known, **more}


def test_a_recorded_run_is_judged_alike() -> None:
    series = course(gap=0.1)
    assert judge_recorded(columns(series), MANIFEST, whole=True) == state(series)
    assert judge_recorded(columns(series), {"config": {}}, whole=True) is None
    assert judge_recorded({"step": [0, 1]}, MANIFEST, whole=True) is None
    loss: list[float | None] = [None] * 51
    loss[7] = math.nan
    broken = judge_recorded(columns(series, loss=loss), MANIFEST, whole=True)
    assert broken is not None
    assert (broken.state, broken.step, broken.reason) == ("diverged", 14, "loss is nan at step 14")


def test_no_baseline_is_worse_than_a_uniform_guess() -> None:
    """A run of an older version, whose baseline was charged for labels that are not in the training text."""
    series = [Evaluation(step, math.log(100), A) for step in range(0, 101, 2)]
    charged = {"cross_entropy": math.log(100) + 5.2, "accuracy": A}
    manifest = {**MANIFEST, "unigram": charged, "validation_unigram": charged}
    recorded = columns(series, validation_nll=[math.log(100)] * 51, validation_accuracy=[A] * 51)
    unknown, known = (
        judge_recorded(recorded, {**manifest, "data": {"validation": 5, **vocab}}, whole=True)
        for vocab in ({}, {"target_vocab": 100})
    )
    assert unknown is not None and known is not None  # noqa: PT018
    assert (unknown.state, known.state) == ("trained", "stuck")
    assert known.nll_gap == 0
    assert Baseline.of(MANIFEST["unigram"], 10**6) == Baseline.of(MANIFEST["unigram"]) == BASE
    assert Baseline.of(None, 100) is None


def test_the_validation_set_counts_after_training_alone() -> None:
    series = course(gap=0.1)
    last: list[float | None] = [*[None] * 50, 4.0]
    manifest = {
        **MANIFEST,
        "validation_unigram": {"cross_entropy": 4.5, "accuracy": A},
        "data": {"validation": 728},
    }
    recorded = columns(series, validation_nll=last, validation_accuracy=last)
    done, open_ = (judge_recorded(recorded, manifest, whole=whole) for whole in (True, False))
    assert done is not None and open_ is not None  # noqa: PT018
    assert (done.state, done.sentences, done.nll_gap) == ("trained", 728, -0.5)
    assert (open_.state, open_.sentences) == ("stuck", 0)
