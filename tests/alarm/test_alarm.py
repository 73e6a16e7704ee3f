"""The alarm: speaks once, says what, where and since when, keeps quiet and its state, and never ends anything."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace

import numpy as np
import pytest
from made import TABLES, cells, run
from rest_slow import rest_slow

from stabilitylab.alarm import Alarm, AlarmRule, Alert, ErrorRates, fitted, names
from stabilitylab.alarm.row_signals import Reading
from stabilitylab.alarm.rules import compressed
from stabilitylab.alarm.signal import signal_of
from stabilitylab.errors import UsageError
from stabilitylab.schema import Row

Z = AlarmRule("z", {"grad_norm.z": 1.0}, math.log1p(12.0), "a gradient jumps")
LATE = AlarmRule("late", {"update.z": 1.0, "grad_norm.z": 1.0}, math.log1p(12.0))


def heard(alarm: Alarm, rows: object) -> list[Alert]:
    alarm.open(TABLES)
    return [alert for row in rows for alert in alarm.observe(*row)]  # pyright: ignore[reportGeneralTypeIssues]


def test_a_jump_is_said_once_with_its_place() -> None:
    [alert] = heard(Alarm([Z]), run(80, jump=40))
    assert (alert.step, alert.rule, alert.signal) == (40, "z", "grad_norm.z")
    assert alert.place is not None
    assert alert.place.site == "two"
    assert alert.since == 40
    for word in ("step 40", "a gradient jumps", "two", "false alarms is not known", "To do:"):
        assert word in alert.sentence
    assert json.loads(json.dumps(alert.as_dict()))["place"]["layer"] == 2


@pytest.mark.parametrize("seed", rest_slow(range(5), [0, 1]))
def test_noise_is_nothing(seed: int) -> None:
    assert heard(Alarm([Z]), run(300, seed=seed)) == []


def test_it_is_quiet_for_a_while() -> None:
    def jumps() -> object:
        for step, metrics, tables in run(200, seed=3):
            if step in (60, 80, 115):
                tables = {**tables, "grad_norm": cells(tables["grad_norm"].values[:, 0] * [1, 1, 1e4])}
            yield step, metrics, tables

    assert [alert.step for alert in heard(Alarm([Z]), jumps())] == [60, 115]
    assert [alert.step for alert in heard(Alarm([Z], refractory=10), jumps())] == [60, 80, 115]


def test_since_is_where_the_score_passed_half_its_threshold() -> None:
    slow = AlarmRule("drift", {"grad_norm.drift": 1.0}, 1.0)

    def grows() -> object:
        for step, metrics, tables in run(80, seed=1):
            factor = 1.5 ** max(0, step - 50)
            yield step, metrics, {**tables, "grad_norm": cells(tables["grad_norm"].values[:, 0] * factor)}

    alarm = Alarm([slow])
    [alert, *_] = heard(alarm, grows())
    assert 50 < alert.since < alert.step
    assert f"since step {alert.since}" in alert.sentence


def test_muted_rules_say_nothing_and_others_do() -> None:
    assert [alert.rule for alert in heard(Alarm([Z, LATE], mute=["z"]), run(80, jump=40))] == ["late"]
    with pytest.raises(UsageError, match="no rule 'x' to mute; there are z, not finite"):
        Alarm([Z], mute=["x"])


def test_a_rule_of_no_signal_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no signal 'grad\.z'; there are loss\.z"):
        AlarmRule("x", {"grad.z": 1.0}, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_always_said(value: float) -> None:
    alarm = Alarm([])
    alarm.open(TABLES)
    [alert] = alarm.observe(7, {"loss": value}, {})
    assert alert.rule == "not finite"
    assert f"step 7: loss is {value}" in alert.sentence
    assert "stabilitylab diagnose" in alert.sentence


def test_the_part_before_the_update_speaks_first() -> None:
    """Of rules that need nothing of the update; the others when the row is whole, and no row counts twice."""
    early, whole = Alarm([Z, LATE]), Alarm([Z, LATE])
    early.open(TABLES)
    whole.open(TABLES)
    for step, metrics, tables in run(80, jump=40):
        begun = early.begin(step, metrics, {"grad_norm": tables["grad_norm"]})
        after = early.observe(step, metrics, tables)
        at_once = whole.observe(step, metrics, tables)
        assert {alert.rule for alert in (*begun, *after)} == {alert.rule for alert in at_once}
        if step == 40:
            assert [alert.rule for alert in begun] == ["z"]
            assert [alert.rule for alert in after] == ["late"]
    assert early.alerts == whole.alerts
    assert early.state_dict() == whole.state_dict()


def test_a_resumed_alarm_says_what_one_that_went_on_says() -> None:
    rows = list(run(120, seed=5, jump=70))
    whole = Alarm([Z, LATE])
    expected = heard(whole, rows)
    for cut in (10, 40, 69):
        first, second = Alarm([Z, LATE]), Alarm([Z, LATE])
        found = heard(first, rows[:cut])
        step, metrics, tables = rows[cut]
        found += first.begin(step, metrics, {"grad_norm": tables["grad_norm"]})  # saved in the middle of a row
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        found += heard(second, rows[cut:])
        assert found == expected
        assert second.state_dict() == whole.state_dict()


def test_what_on_alarm_raises_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(alert: Alert) -> None:
        raise RuntimeError("no network")

    with caplog.at_level(logging.WARNING, "stabilitylab"):
        assert len(heard(Alarm([Z], on_alarm=broken), run(80, jump=40))) == 1
    assert "alarm: step 40" in caplog.text
    assert "on_alarm failed at step 40; training goes on." in caplog.text


def test_scores_add_up_what_is_there() -> None:
    rule = AlarmRule("r", {"loss.z": 2.0, "rms_t.level": 1.0, "grad_norm.drift": -1.0, "headroom.level": 1.0}, 1.0)
    told = {"loss.z": Reading(math.e - 1), "rms_t.level": Reading(math.e), "headroom.level": Reading(math.exp(-2))}
    assert rule.score(told) == (pytest.approx(2.0 + 1.0 + 2.0), "loss.z")
    assert math.isnan(rule.score({})[0])
    centred = AlarmRule("c", {"loss.z": 2.0, "loss.drift": 1.0}, 1.0, centres={"loss.z": 0.25, "loss.drift": 5.0})
    assert centred.score(told) == (pytest.approx(2.0 * 0.75), "loss.z")
    held = AlarmRule("h", {"loss.drift": -3.0}, 1.0, lowest={"loss.drift": -0.2})
    falls = [held.score({"loss.drift": Reading(value)})[0] for value in (-0.9, -0.2, 0.1)]
    assert falls == pytest.approx([0.6, 0.6, -0.3])
    assert compressed("loss.z", -5.0) == 0.0
    assert compressed("loss.drift", 1e9) == 20.0
    assert compressed("loss.z", math.nan) == 0.0


def test_a_rule_is_written_and_read() -> None:
    measured = ErrorRates((0.04, 0.01, 0.09), 200, (0.7, 0.6, 0.8), 96, (20, 10, 30), "models")
    assert measured.sentence == (
        "the rule accused 8 of 200 healthy runs, and announced 60 to 80 % of 96 events (95 %; models)"
    )
    rule = AlarmRule("r", {"loss.z": 1.0}, 2.0, "t", {"loss.z": 0.5}, measured, {"loss.z": 0.1})
    for own in (rule, replace(rule, measured=replace(measured, lead=None)), replace(rule, measured=None)):
        assert AlarmRule.of(json.loads(json.dumps(own.as_dict(), allow_nan=False))) == own


def test_what_comes_with_the_package() -> None:
    """Error rates come with each rule, and the digest of what was frozen before they were measured."""
    known, loud = fitted(), fitted("loud")
    assert known.fitted == loud.fitted != ""
    assert (known.name, loud.name) == ("default", "loud")
    for rule in (*known.rules, *loud.rules):
        assert rule.measured is not None
        assert min(rule.measured.healthy, rule.measured.events) > 0
        assert not any(signal.endswith(".level") for signal in rule.weights), "a level has a scale of its own"
    for seed in range(3):
        assert heard(Alarm(known), run(300, seed=seed)) == []
    assert heard(Alarm(loud), run(80, jump=40, factor=1e6))


def test_every_signal_has_words() -> None:
    assert all(signal_of(name).title for name in names())
    assert np.unique(names()).size == len(names())


@pytest.mark.parametrize(
    ("place", "where"),
    [
        (Row("h.2.mlp", "h", 3, "ffn"), " at h.2.mlp (layer 3 of h, ffn) ("),
        (Row("ln_f"), " at ln_f ("),
        (Row("", "decoder"), " at decoder ("),
        (Row("", "decoder", 2), " at layer 2 of decoder ("),
        (None, "the training loss ("),
    ],
)
def test_an_alert_says_where(place: Row | None, where: str) -> None:
    alert = Alert(3, "z", "t", 1.0, 0.5, 3, "loss.z", 2.0, place, "look")
    assert where in alert.sentence
