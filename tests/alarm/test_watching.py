"""The alarm in a loop of somebody's own, and on the run that it wrote."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from looped import Loop, watched

import stabilitylab as sl
from stabilitylab.alarm import Alarm, AlarmRule, Alert, RuleSet
from stabilitylab.alarm.reading import listen, recorded, rows
from stabilitylab.diagnose import diagnose
from stabilitylab.errors import UsageError
from stabilitylab.store import Run

RULES = (
    AlarmRule("gradient", {"grad_norm.z": 1.0}, math.log1p(15.0), "a gradient jumps"),
    AlarmRule("update", {"update.level": 1.0}, math.log(50.0), "an update is fifty times its weights"),
)


def test_an_alarm_goes_to_the_log_the_run_and_the_caller(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Alert] = []
    with caplog.at_level(logging.WARNING, "stabilitylab"):
        alerts = watched(tmp_path / "a", Loop(bad=24), steps=26, alarm=Alarm(RULES, on_alarm=heard.append))
    assert [(alert.step, alert.rule) for alert in alerts] == [(24, "gradient")]
    assert heard == alerts
    assert "alarm: step 24: a gradient jumps" in caplog.text
    told = recorded(Run.open(tmp_path / "a").manifest)
    assert [alert["sentence"] for alert in told] == [alert.sentence for alert in alerts]


def test_a_stored_run_says_the_same(tmp_path: Path) -> None:
    alerts = watched(tmp_path / "a", Loop(bad=22, fast=25), steps=26, alarm=Alarm(RULES))
    assert [(alert.step, alert.rule) for alert in alerts] == [(22, "gradient"), (25, "update")]
    again = Alarm(RULES)
    assert list(listen(Run.open(tmp_path / "a"), again)) == alerts


def test_rows_are_what_the_writer_got(tmp_path: Path) -> None:
    seen = {}

    class Keeps(Alarm):
        def observe(self, step: int, metrics: Any, tables: Any) -> list[Alert]:
            seen[step] = dict(metrics), {name: cells.values.copy() for name, cells in tables.items()}
            return []

    watched(tmp_path / "a", Loop(), steps=5, alarm=Keeps(RULES))
    for step, metrics, tables in rows(Run.open(tmp_path / "a")):
        assert {name: value for name, value in metrics.items() if value is not None} == pytest.approx(seen[step][0])
        for name, cells in tables.items():
            torch.testing.assert_close(cells.values, seen[step][1][name], rtol=0, atol=0, equal_nan=True)


def test_it_speaks_before_the_optimizer_steps(tmp_path: Path) -> None:
    loop, seen = Loop(bad=22), {}
    steps: list[int] = []
    loop.optimizer.register_step_post_hook(lambda *_: steps.append(len(steps)))
    alarm = Alarm(RULES[:1], on_alarm=lambda alert: seen.update({alert.step: len(steps)}))
    watched(tmp_path / "a", loop, steps=24, alarm=alarm)
    assert seen == {22: 22}  # 22 updates were made, that of row 22 was not


def test_training_is_bit_for_bit_that_without_it(tmp_path: Path) -> None:
    plain, with_alarm = Loop(bad=20), Loop(bad=20)
    with sl.watch(plain.model, out=tmp_path / "a", every=1, optimizer=plain.optimizer) as w:
        plain.run(w, 0, 30)
    watched(tmp_path / "b", with_alarm, steps=30, alarm=True)
    for one, other in zip(plain.model.parameters(), with_alarm.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_past(tmp_path: Path) -> None:
    whole = watched(tmp_path / "whole", Loop(bad=40, fast=50), alarm=Alarm(RULES))
    loop = Loop(bad=40, fast=50)
    with sl.watch(loop.model, out=tmp_path / "cut", every=1, optimizer=loop.optimizer, alarm=Alarm(RULES)) as w:
        loop.run(w, 0, 45)
        state = w.checkpoint()
    options = {"resume": state, "alarm": Alarm(RULES)}
    with sl.watch(loop.model, out=tmp_path / "cut", every=1, optimizer=loop.optimizer, **options) as w:
        loop.run(w, 45, 60)
    told = recorded(Run.open(tmp_path / "cut").manifest)
    assert [alert["sentence"] for alert in told] == [alert.sentence for alert in whole]


def test_an_alarm_of_rows_after_the_checkpoint_is_not_the_resumed_runs(tmp_path: Path) -> None:
    loop = Loop(bad=24)
    with sl.watch(loop.model, out=tmp_path / "a", every=1, optimizer=loop.optimizer, alarm=Alarm(RULES)) as w:
        loop.run(w, 0, 22)
        state = w.checkpoint()
        loop.run(w, 22, 26)
    assert [alert["step"] for alert in recorded(Run.open(tmp_path / "a").manifest)] == [24]
    healed = Loop()
    options = {"resume": state, "alarm": Alarm(RULES)}
    with sl.watch(healed.model, out=tmp_path / "a", every=1, optimizer=healed.optimizer, **options) as w:
        healed.run(w, 22, 26)
    assert w.alarm.alerts == []
    assert recorded(Run.open(tmp_path / "a").manifest) == []


def test_an_alarm_that_breaks_ends_itself_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Alarm):
        def observe(self, step: int, metrics: Any, tables: Any) -> list[Alert]:
            raise ZeroDivisionError

    with caplog.at_level(logging.ERROR, "stabilitylab"):
        watched(tmp_path / "a", Loop(), steps=5, alarm=Broken(RULES))
    assert caplog.text.count("the alarm failed and says nothing more") == 1
    assert len(Run.open(tmp_path / "a").metrics) == 6


def test_the_command(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stabilitylab.alarm.alarm.fitted", lambda name: RuleSet(RULES, name="own"))
    loop = Loop(bad=40)
    with sl.watch(loop.model, out=tmp_path / "bad", every=1, optimizer=loop.optimizer) as w:
        loop.run(w, 0, 60)
    path = str(tmp_path / "bad")
    code, out, _ = run("alarm", path)
    assert code == 0
    assert out.startswith("step 40: a gradient jumps")
    code, out, _ = run("alarm", path, "--fail", "--json", "--follow")
    assert code == 1
    assert json.loads(out)["rule"] == "gradient"
    code, out, err = run("alarm", path, "--fail", "--mute", "gradient")
    assert (code, out) == (0, "")
    told = "bad: no alarm by the own rules in 61 rows; the first 20 rows have too little past to judge. No alarm is"
    assert told in err
    assert run("alarm", path, "--mute", "nothing")[0] == 2
    assert run("alarm", str(tmp_path / "absent"))[0] == 4


def test_silence_says_what_was_not_heard_and_damage_is_told(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lacks = (*RULES, AlarmRule("heads", {"heads.level": 1.0}, 1.0, "a head"))
    monkeypatch.setattr("stabilitylab.alarm.alarm.fitted", lambda name: RuleSet(lacks, name="others"))
    loop = Loop()
    with sl.watch(loop.model, out=tmp_path / "a", every=1, optimizer=loop.optimizer) as w:
        loop.run(w, 0, 30)
    code, _, err = run("alarm", str(tmp_path / "a"))
    assert code == 0
    assert "no alarm by the others rules in 31 rows" in err
    assert "tables that this run did not record: attention_heads. No alarm is no sign of health" in err
    assert "did not record" not in run("alarm", str(tmp_path / "a"), "--mute", "heads")[2]
    shutil.rmtree(tmp_path / "a" / "probes" / "grad_norm")
    caplog.clear()
    assert run("alarm", str(tmp_path / "a"))[0] == 0
    assert "is missing" in caplog.text


@pytest.mark.slow
def test_diagnose_has_alarms_on_its_time_line(tmp_path: Path) -> None:
    """As notes: an alarm makes no run ill."""
    watched(tmp_path / "a", Loop(bad=40), alarm=Alarm(RULES))
    [event] = [event for event in diagnose(Run.open(tmp_path / "a")).events if event.kind == "alarm"]
    assert (event.step, event.severity) == (40, "note")
    assert event.title == "alarm: a gradient jumps"
    assert event.evidence.startswith("step 40: a gradient jumps")
    assert event.place is not None
    assert event.place.stack == "layers"


def test_diagnose_has_the_advice_of_an_alarm(tmp_path: Path) -> None:
    loop = Loop()
    told = Alert(2, "mine", "weights jump", 3.0, 1.0, 2, "update.z", 9.0, None, "lower the learning rate")
    with sl.watch(loop.model, out=tmp_path / "a", every=1, optimizer=loop.optimizer) as w:
        loop.run(w, 0, 3)
        w.run.record(alarms=[told.as_dict()])
    [event] = [event for event in diagnose(Run.open(tmp_path / "a")).events if event.kind == "alarm"]
    assert event.remedy == event.as_dict()["remedy"] == "Lower the learning rate."


def test_alarms_that_are_damaged_end_no_diagnosis(tmp_path: Path) -> None:
    loop = Loop()
    with sl.watch(loop.model, out=tmp_path / "a", every=1, optimizer=loop.optimizer) as w:
        loop.run(w, 0, 3)
        w.run.record(alarms=[1, {"step": "x"}, {"step": 2, "place": [1]}])
    events = [event for event in diagnose(Run.open(tmp_path / "a")).events if event.kind == "alarm"]
    assert [event.step for event in events] == [2]


def test_rules_go_by_their_name(tmp_path: Path, run: Any) -> None:
    """An alarm says what its rules were measured with and this run has not."""
    told = watched(tmp_path / "a", Loop(fast=30), alarm="loud")
    named = [alert for alert in told if alert.rule == "combination"]
    assert named
    for alert in named:
        assert alert.lacking == ("adam", "attention_heads", "logits", "outliers", "residual_norm")
        assert "together. The learning rate rose" in alert.sentence
        assert alert.sentence.endswith("outliers, residual_norm too, which this run did not record.")
    _, out, _ = run("alarm", str(tmp_path / "a"), "--rules", "loud")
    assert out.splitlines() == [alert.sentence for alert in told]
    code, _, err = run("alarm", str(tmp_path / "a"), "--rules", "all")
    assert code == 2
    assert "there are default and loud" in err


def test_what_is_no_alarm_is_refused(tmp_path: Path) -> None:
    """Rules without an Alarm around them would be taken for True, and never speak."""
    model = Loop().model
    with pytest.raises(UsageError, match=r"alarm= takes True, .* not tuple: .* write alarm=Alarm\(rules\)"):
        sl.watch(model, out=tmp_path / "a", alarm=RULES)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="on_alarm belongs to the Alarm"):
        sl.watch(model, out=tmp_path / "a", alarm=Alarm(RULES), on_alarm=print)
    with pytest.raises(UsageError, match="no rules 'all'; there are default and loud"):
        sl.watch(model, out=tmp_path / "a", alarm="all")
    assert not (tmp_path / "a").exists()
