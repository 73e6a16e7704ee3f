"""Hits, leads, false alarms and their rates: alarms with known answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import corpus_run, spikes

ROOT = Path(__file__).resolve().parents[2]


def test_alarms_keep_quiet(scripts: Any) -> None:
    alarms = scripts("events").alarms
    assert alarms(np.ones(160), 1.0) == [0, 50, 100, 150]
    assert alarms(spikes(200, 10, 30, 61, 111), 0.5) == [10, 61, 111]
    assert alarms(spikes(200, 10), 1.5) == []


def test_hits_leads_and_what_comes_before(scripts: Any) -> None:
    outcome = scripts("events").outcome
    run = corpus_run(scripts, failed=300)
    assert outcome(run, spikes(400, 290), 1.0).lead == 10
    assert outcome(run, spikes(400, 305), 1.0).lead == -5
    assert outcome(run, spikes(400, 306), 1.0).lead is None
    found = outcome(run, spikes(400, 50, 100, 280), 1.0)
    assert (found.lead, found.before, found.false) == (200, 1, 0)


def test_healthy_rows_and_false_alarms(scripts: Any) -> None:
    events = scripts("events")
    healthy = corpus_run(scripts, family="twin", kind="healthy", benign=(200,))
    assert healthy.healthy.sum() == 400 - 20 - 50
    found = events.outcome(healthy, spikes(400, 5, 100, 210, 300), 1.0)
    assert (found.false, found.benign) == (2, 1)
    struck = corpus_run(scripts, kind="exogenous", fault=250)
    assert struck.healthy.sum() == 230
    found = events.outcome(struck, spikes(400, 100, 260), 1.0)
    assert (found.false, found.delay) == (1, 10)
    assert events.value(events.false_rate([found])) == pytest.approx(1000 / 230)
    assert events.outcome(struck, spikes(400, 300), 1.0).delay is None


def test_outcomes_follow_from_what_happened(scripts: Any) -> None:
    kinds = {
        "failure": {"failed": 51},
        "early": {"failed": 50},
        "healthy": {"family": "rate"},
        "open": {"open": True},
        "fault": {"fault": 200, "failed": 210, "kind": "exogenous"},
    }
    for name, facts in kinds.items():
        assert corpus_run(scripts, **facts).outcome == name
    assert corpus_run(scripts, fault=200, failed=100).outcome == "early"  # it failed before it was struck
    assert corpus_run(scripts, family="fast", kind="healthy", failed=90).outcome == "failure"


def test_a_threshold_has_the_rate_that_was_asked_for(scripts: Any) -> None:
    events = scripts("events")
    random = np.random.default_rng(0)
    runs = [corpus_run(scripts, name=f"r{n}", family="twin", kind="healthy") for n in range(50)]
    scores = [random.standard_normal(400) for _ in runs]
    for rate in (0.5, 1.0, 5.0):
        threshold = events.threshold_at(runs, scores, rate)
        assert events.value(events.false_rate(events.outcomes(runs, scores, threshold))) <= rate
        lower = max(s for score in scores for s in score[20:] if s < threshold)
        assert events.value(events.false_rate(events.outcomes(runs, scores, lower))) > rate


def test_recall_and_leads(scripts: Any) -> None:
    events = scripts("events")
    runs = [corpus_run(scripts, name=str(n), seed=n, failed=300) for n in range(4)]
    found = events.outcomes(runs, [spikes(400, at) for at in (200, 285, 302, 350)], 1.0)
    assert events.value(events.recall(found)) == 0.75
    assert events.value(events.recall(found, 5)) == 0.5
    assert events.value(events.recall(found, 20)) == 0.25
    assert events.value(events.median_lead(found)) == 15
    value, low, high = events.interval(found, events.recall(found))
    assert low <= value <= high


def test_nothing_counted_is_not_certainty(scripts: Any) -> None:
    events = scripts("events")
    runs = [corpus_run(scripts, name=str(n), seed=n, failed=300) for n in range(4)]
    runs += [corpus_run(scripts, name=f"h{n}", seed=n, family="twin", kind="healthy") for n in range(4)]
    none = events.outcomes(runs, [np.zeros(400)] * 8, 1.0)
    assert events.interval(none, events.recall(none)) == (0, 0, pytest.approx(1 - 0.025**0.25))
    assert events.interval(none, events.false_rate(none)) == (0, 0, pytest.approx(1000 * 3.689 / 1520, rel=1e-3))
    every = events.outcomes(runs, [spikes(400, 290)] * 8, 1.0)
    assert events.interval(every, events.recall(every)) == (1, pytest.approx(0.025**0.25), 1)


def test_clusters_are_drawn_whole(scripts: Any) -> None:
    """Runs that share a twin say the same thing once: ten of one cluster are no more sure than one."""
    events = scripts("events")
    few = [corpus_run(scripts, name=str(n), seed=n, failed=300) for n in range(8)]
    many = [corpus_run(scripts, name=f"{n}-{k}", seed=n, failed=300) for n in range(8) for k in range(10)]
    widths = []
    for runs in (few, many):
        scores = [spikes(400, 250) if run.seed % 2 else np.zeros(400) for run in runs]
        found = events.outcomes(runs, scores, 1.0)
        _, low, high = events.interval(found, events.recall(found))
        widths.append(high - low)
    assert widths[1] == pytest.approx(widths[0], abs=0.06)


def test_auc_compares_runs_at_one_row(scripts: Any) -> None:
    auc = scripts("score").auc
    runs = [corpus_run(scripts, name="f", failed=200), corpus_run(scripts, name="h", family="twin", kind="healthy")]
    clock = [np.arange(400.0), np.arange(400.0)]  # time itself says nothing
    assert auc(runs, clock, 100) == 0.5
    assert auc(runs, [np.ones(400), np.zeros(400)], 100) == 1.0
    near = [np.where(np.arange(400) >= 150, 1.0, 0.0), np.full(400, 0.5)]
    assert auc(runs, near, 50) == 1.0
    assert auc(runs, near, 100) == pytest.approx(0.5, abs=0.1)


def test_precision_at_a_base_rate(scripts: Any) -> None:
    events, score = scripts("events"), scripts("score")
    runs = [corpus_run(scripts, name=str(n), failed=300) for n in range(2)]
    runs += [corpus_run(scripts, name=f"h{n}", family="twin", kind="healthy") for n in range(4)]
    scores = [spikes(400, 290), np.zeros(400), spikes(400, 100), *[np.zeros(400)] * 3]
    found = events.outcomes(runs, scores, 1.0)
    assert score.precision(found, 0.1) == pytest.approx(0.05 / (0.05 + 0.9 * 0.25))


def test_medians_and_ratios_of_draws_are_those_of_the_runs_drawn(scripts: Any) -> None:
    events, random = scripts("events"), np.random.default_rng(0)
    values = np.where(random.random(30) < 0.3, np.nan, random.integers(-5, 200, 30).astype(float))
    of, over = random.random(30), random.integers(0, 3, 30)
    counts = random.multinomial(30, np.full(30, 1 / 30), size=50)
    counts[0] = 0
    ratios, medians = events.Ratio(of, over).drawn(counts), events.Median(values).drawn(counts)
    assert np.isnan([ratios[0], medians[0]]).all()
    for times, ratio, median in zip(counts[1:], ratios[1:], medians[1:], strict=True):
        drawn = np.repeat(np.arange(30), times)
        assert ratio == pytest.approx(of[drawn].sum() / over[drawn].sum())
        assert median == np.nanmedian(values[drawn])
    assert np.isnan(events.value(events.Median(np.full(3, np.nan))))
