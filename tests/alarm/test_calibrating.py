"""An alarm that healthy runs calibrate, from the runs to the alert; runs that may not calibrate; resume and length."""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from calibrated import made as calibrated
from looped import Loop, watched
from made import GRADIENTS, TABLES, cells
from made import run as made_rows

import stabilitylab as sl
from stabilitylab.alarm import Alarm, AlarmRule, Alert, Calibration, RuleSet, calibrate, fitted
from stabilitylab.alarm.calibrating import available
from stabilitylab.alarm.reading import listen, recorded
from stabilitylab.errors import UsageError
from stabilitylab.store import Run, RunWriter

K, STEPS = 4, 40
PROBES = ["grad_norm", "update_ratio", "ln_input"]
OPTIONS: dict[str, Any] = {"reference": None, "probes": PROBES}
PLAIN = RuleSet((AlarmRule("gradient", {"grad_norm.z": 1.0}, 2.0, "a gradient jumps"),))


def train(out: Path, seed: int, *, steps: int = STEPS, every: int = 1, **options: Any) -> Run:
    loop = Loop(seed=seed)
    told = {**OPTIONS, "config": {"seed": seed, "lr": 1e-3}, **options}
    with sl.watch(loop.model, out=out, every=every, optimizer=loop.optimizer, **told) as w:
        loop.run(w, 0, steps)
    return Run.open(out)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("healthy")
    return [train(folder / f"s{seed}", seed) for seed in range(K)]


@pytest.fixture(scope="module")
def mine(healthy: list[Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mine") / "mine.json"
    calibrate(healthy).save(path)
    return path


def paths(runs: Sequence[Run]) -> list[str]:
    return [str(run.path) for run in runs]


def largest(stored: Run, rule: AlarmRule) -> float:
    """The largest score that an alarm without a threshold reports."""
    heard = Alarm([AlarmRule(rule.name, rule.weights, -1e9, centres=rule.centres)], refractory=1)
    return max(alert.score for alert in listen(stored, heard))


def test_scores_are_those_that_an_alarm_sees(healthy: list[Run]) -> None:
    signals = {"loss": "loss.z", "gradients": "grad_norm.z", "updates": "update.z"}
    three = RuleSet(tuple(AlarmRule(name, {signal: 1.0}, 3.0) for name, signal in signals.items()))
    found = calibrate(healthy, three)
    assert (found.k, found.rows, found.steps) == (K, STEPS, ((0, STEPS - 1, 1),))
    assert [rule.name for rule in found.rules] == ["loss", "gradients", "updates"]
    for rule in found.rules:
        for one, run in zip(found.runs, healthy, strict=True):
            assert one.run_id == run.identity.run_id
            assert one.scores[rule.name] == largest(run, rule.rule)
    excess = max(run.scores[rule.name] - rule.own_threshold for rule in found.rules for run in found.runs)
    for rule in found.rules:
        assert rule.threshold == pytest.approx(rule.own_threshold + excess, abs=1e-12)


def test_no_run_that_calibrated_has_an_alarm_and_any_larger_score_is_one(healthy: list[Run]) -> None:
    found = calibrate(healthy, PLAIN)
    assert all([*listen(run, Alarm(found))] == [] for run in healthy)
    top = max(healthy, key=lambda run: largest(run, PLAIN.rules[0]))
    rest = calibrate([run for run in healthy if run is not top], PLAIN)
    first, *_ = listen(top, Alarm(rest))
    assert first.sure == "at most 1 in 4 healthy runs of this recipe has an alarm, calibrated with 3 of them"
    assert f" How sure: {first.sure}." in first.sentence
    assert first.bound == 0.25
    assert all([*listen(run, Alarm(rest))] == [] for run in healthy if run is not top)


def test_signals_that_the_runs_lack_are_left_out_and_named(healthy: list[Run]) -> None:
    found = calibrate(healthy)
    (rule,) = found.rules
    assert {"update.drift", "uniformity.drift", "loss.rise"} < {*rule.weights}
    assert {*rule.centres} == {*rule.weights}
    assert dict(rule.lowest) == dict(rule.rule.lowest) == dict(fitted("loud").rules[0].lowest) != {}
    assert found.left_out["heads.drift"] == "attention_heads"
    assert rule.own_threshold == fitted("loud").rules[0].threshold
    no_loss = AlarmRule("loss", {"loss.z": 1.0}, 1.0)
    used, left_out = available([no_loss, *PLAIN.rules], {"grad_norm"}, {"grad_norm_total"})
    assert used == PLAIN.rules
    assert left_out == {"loss.z": "loss", "loss": "loss"}
    with pytest.raises(UsageError, match="the rules 'none' hold none that could be calibrated: take --rules loud"):
        calibrate(healthy, RuleSet((), name="none"))
    with pytest.raises(UsageError, match=r"no number that these rules read \(attention_heads\)"):
        calibrate(healthy, RuleSet((AlarmRule("heads", {"heads.z": 1.0}, 1.0),)))


def test_a_watched_run_says_how_sure_an_alarm_is(mine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {**OPTIONS, "config": {"seed": 9, "lr": 1e-3}, "alarm": str(mine)}
    with caplog.at_level(logging.WARNING, "stabilitylab"):
        [alert] = watched(tmp_path / "a", Loop(bad=30, seed=9), steps=STEPS, **options)
    assert alert.step == 30
    assert alert.bound == 0.2
    assert "at most 1 in 5 healthy runs of this recipe has an alarm, calibrated with 4 of them" in alert.sentence
    assert [line for line in caplog.messages if "alarm" in line] == [f"alarm: {alert.sentence}"]
    [told] = recorded(Run.open(tmp_path / "a").manifest)
    assert (told["bound"], told["sure"]) == (0.2, alert.sure)
    assert [*listen(Run.open(tmp_path / "a"), Alarm(mine))] == [alert]


@pytest.mark.slow
def test_a_watched_run_that_calibrated_is_silent(mine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each number again, as it comes from a training and not from the disk; the part before the update too."""
    for seed in range(K):
        loop = Loop(seed=seed)
        options = {**OPTIONS, "config": {"seed": seed, "lr": 1e-3}, "alarm": mine}
        assert watched(tmp_path / str(seed), loop, steps=STEPS, **options) == []
    assert not caplog.messages


def test_other_settings_are_warned_of(mine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watched(tmp_path / "a", Loop(), steps=2, **OPTIONS, config={"seed": 7, "lr": 1.0}, alarm=mine)
    [line] = [line for line in caplog.messages if "recipe" in line]
    assert line.endswith(
        "alarm: lr differs: 0.001 in mine.json; 1.0 in this run. Healthy runs of another recipe calibrated it."
    )


@pytest.mark.slow
def test_a_longer_run_is_said_once_and_claims_no_bound(
    mine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, run: Any
) -> None:
    options = {**OPTIONS, "config": {"lr": 1e-3}, "alarm": str(mine)}
    alerts = watched(tmp_path / "long", Loop(bad=30, seed=5), steps=STEPS + 50, **options)
    last = alerts[-1]
    assert last.step > STEPS
    assert last.bound is None
    assert "no bound on false alarms: this run is longer than the 40 rows of the calibrated runs" in last.sentence
    assert caplog.text.count("alarm: this run is longer than the 40 rows of the calibrated runs. The alarm goes") == 1
    code, out, err = run("alarm", str(tmp_path / "long"), "--rules", str(mine))
    assert (code, out) == (2, "")
    assert "mine.json was not calibrated for long (this run is longer than the 40 rows" in err


def test_rows_of_other_steps_and_other_tables_claim_no_bound(
    mine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, run: Any
) -> None:
    loop = Loop()
    told = {"reference": None, "alarm": str(mine), "optimizer": loop.optimizer}
    with sl.watch(loop.model, out=tmp_path / "sparse", every=10, probes=PROBES, **told) as w:
        loop.run(w, 0, 20)
    assert "table grad_norm has no row at step 1, and one in the calibrated runs" in caplog.text
    loop = Loop()
    with sl.watch(loop.model, out=tmp_path / "few", every=1, probes=["ln_input"], **told) as w:
        loop.run(w, 0, 2)
    assert "this run does not record grad_norm, update_ratio, which the calibrated runs did" in caplog.text
    for name in ("sparse", "few"):
        assert run("alarm", str(tmp_path / name), "--rules", str(mine))[0] == 2
    small = Alarm(calibrated(places=7))
    small.open(TABLES)
    assert small.outside == "table grad_norm has 3 places, and 7 in the calibrated runs"


def test_a_run_that_goes_on_is_refused_from_the_first_row_on_that_is_too_many() -> None:
    ear = Alarm(calibrated(steps=((0, 30, 1),)))
    ear.open(TABLES)
    outside = [
        (step, bool(ear.outside)) for step, metrics, tables in made_rows(33) if ear.observe(step, metrics, tables) or 1
    ]
    assert outside == [(step, step > 30) for step in range(33)]


def test_following_ends_where_the_run_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on while its reader rests."""
    writer = RunWriter.create(tmp_path / "live", {"label": "Model", "config": {}})
    writer.open([*TABLES])
    rows = made_rows(8)
    for _ in range(3):
        writer.append(*next(rows))
    ear = Alarm(calibrated(steps=((0, 4, 1),)))

    def goes_on(seconds: float) -> None:
        for row in rows:
            writer.append(*row)

    monkeypatch.setattr("stabilitylab.alarm.reading.time", SimpleNamespace(monotonic=time.monotonic, sleep=goes_on))
    with pytest.raises(UsageError, match=r"was not calibrated for live \(this run is longer than the 5 rows"):
        [*listen(Run.open(tmp_path / "live"), ear, follow=True)]
    writer.close()
    assert ear.rows == 6


def test_a_calibrated_alarm_reads_whole_rows() -> None:
    """A part of a row beside older numbers has scores that no calibrated run had; what is not finite speaks at once."""
    ear = Alarm(calibrated())
    ear.open(TABLES)
    for step, metrics, tables in made_rows(50, jump=40):
        begun = ear.begin(step, metrics, {"grad_norm": tables["grad_norm"]})
        assert begun == []
        assert [alert.step for alert in ear.observe(step, metrics, tables)] == [40] * (step == 40)
    [alert] = ear.begin(50, {"loss": math.nan}, {})
    assert (alert.rule, alert.bound, alert.sure) == ("not finite", None, "")


@pytest.mark.slow
def test_a_resumed_run_says_what_one_that_went_on_says(mine: Path, tmp_path: Path) -> None:
    options = {**OPTIONS, "config": {"lr": 1e-3}}
    whole = watched(tmp_path / "whole", Loop(bad=25, seed=6), steps=STEPS, alarm=Alarm(mine, refractory=5), **options)
    assert len(whole) > 1
    assert all(alert.bound == 0.2 for alert in whole)
    loop = Loop(bad=25, seed=6)
    told = {"every": 1, "optimizer": loop.optimizer, **options}
    with sl.watch(loop.model, out=tmp_path / "cut", alarm=Alarm(mine, refractory=5), **told) as w:
        loop.run(w, 0, 28)
        state = w.checkpoint()
    with sl.watch(loop.model, out=tmp_path / "cut", resume=state, alarm=Alarm(mine, refractory=5), **told) as w:
        loop.run(w, 28, STEPS)
        assert w.alarm is not None
        assert w.alarm.outside == ""
    sentences = [alert["sentence"] for alert in recorded(Run.open(tmp_path / "cut").manifest)]
    assert sentences == [alert.sentence for alert in whole]


def test_an_alarm_that_did_not_see_the_beginning_claims_no_bound(mine: Path, tmp_path: Path) -> None:
    loop = Loop()
    told = {"every": 1, "optimizer": loop.optimizer, **OPTIONS, "config": {"lr": 1e-3}}
    with sl.watch(loop.model, out=tmp_path / "a", **told) as w:
        loop.run(w, 0, 5)
        state = w.checkpoint()
    with sl.watch(loop.model, out=tmp_path / "a", resume=state, alarm=mine, **told) as w:
        loop.run(w, 5, 6)
    assert w.alarm is not None
    assert w.alarm.outside == "row 1 of this run is step 5, and step 0 in the calibrated runs"


def test_runs_that_do_not_belong_together_are_refused_by_name(healthy: list[Run], tmp_path: Path) -> None:
    def refused(match: str, *more: Run) -> None:
        with pytest.raises(UsageError, match=match):
            calibrate([*healthy, *more])

    refused(
        r"different numbers of rows \(s0 has 40, s1 has 40, .*, long has 42\)", train(tmp_path / "long", 8, steps=42)
    )
    refused(
        r"table grad_norm has rows of different steps \(s0 at 0 to 39 by 1 and sparse at 0 to 38 by 2\)",
        train(tmp_path / "sparse", 8, every=2),
    )
    few = ["grad_norm", "update_ratio"]
    refused(r"s0 and few recorded different tables \(few has no .*ln_input", train(tmp_path / "few", 8, probes=few))
    more = train(tmp_path / "more", 8, probes=[*PROBES, "residual_norm"])
    refused(r"s0 and more recorded different tables \(s0 has no residual_norm\)", more)
    refused("is the same run as", healthy[0])
    refused("copy repeats s0 row by row: calibrate with runs of different seeds", train(tmp_path / "copy", 0))
    with pytest.raises(UsageError, match=r"at least one healthy run, .* 1 in k \+ 1 .* \(4 runs: 1 in 5"):
        calibrate([])
    short = [train(tmp_path / "short", 0, steps=10)]
    with pytest.raises(UsageError, match="short has no number that these rules read after its first 20 rows"):
        calibrate(short)


def test_a_model_of_another_size_is_refused(healthy: list[Run], tmp_path: Path) -> None:
    loop = Loop()
    loop.model = torch.nn.TransformerEncoder(loop.model.layers[0], 1)
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=1e-3)
    with sl.watch(loop.model, out=tmp_path / "one", every=1, optimizer=loop.optimizer, **OPTIONS) as w:
        loop.run(w, 0, STEPS)
    with pytest.raises(UsageError, match=r"table .* of one has other places or columns than in s0"):
        calibrate([*healthy, tmp_path / "one"])


def test_runs_that_were_not_healthy_are_refused(healthy: list[Run], tmp_path: Path) -> None:
    def fails(loop: Loop) -> None:
        with sl.watch(loop.model, out=tmp_path / "failed", every=1, optimizer=loop.optimizer, **OPTIONS) as w:
            loop.run(w, 0, 3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails(Loop())
    with pytest.raises(
        UsageError, match=r"failed failed at step 3 \(ZeroDivisionError.*\): calibrate with healthy runs"
    ):
        calibrate([*healthy, tmp_path / "failed"])
    loop = Loop()
    with sl.watch(loop.model, out=tmp_path / "on", every=1, optimizer=loop.optimizer, **OPTIONS) as w:
        loop.run(w, 0, 3)
        with pytest.raises(UsageError, match="on still goes on"):
            calibrate([*healthy, tmp_path / "on"])
    broken = train_broken(tmp_path / "broken")
    with pytest.raises(UsageError, match=r"broken met a number that is not finite .*: calibrate with healthy runs"):
        calibrate([broken])


def train_broken(out: Path) -> Run:
    """A loss that is not finite in one row, as a run has it that no watcher saw."""
    writer = RunWriter.create(out, {"label": "Model", "config": {}})
    writer.open([GRADIENTS])
    for step in range(30):
        loss = math.nan if step == 25 else 1.0
        writer.append(step, {"loss": loss}, {"grad_norm": cells(np.ones(3))})
    writer.set_status("finished", 30)
    writer.close()
    return Run.open(out)


def test_a_verdict_that_is_no_health_is_refused(
    healthy: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck:
        state, reason = "stuck", "the loss stands still"

    monkeypatch.setattr(Run, "verdict", property(lambda self: Stuck() if self.name == "s1" else None))
    with pytest.raises(UsageError, match=r"s1 is no healthy run \(verdict: stuck, the loss stands still\)"):
        calibrate(healthy)


@pytest.mark.slow
def test_recipes_that_differ_are_told(healthy: list[Run], tmp_path: Path) -> None:
    other = train(tmp_path / "other", 8, config={"seed": 8, "lr": 2e-3})
    found = calibrate([*healthy, other])
    assert found.differing == {"lr": "0.001 in s0, s1, s2 and 1 more; 0.002 in other"}
    assert "lr" not in found.recipe
    assert calibrate(healthy).differing == {}
    assert found.other_settings({**other.manifest, "config": {"lr": 7}}) == []


@pytest.mark.slow
def test_rules_that_no_file_can_hold_are_refused(healthy: list[Run]) -> None:
    for rules, why in (
        ((AlarmRule("a\nb", {"grad_norm.z": 1.0}, 1.0),), "cannot be printed on one line"),
        ((AlarmRule("a", {"grad_norm.z": 1.0}, math.inf),), "finite number"),
        ((AlarmRule("a", {"grad_norm.z": 1.0}, 1.0), AlarmRule("a", {"update.z": 1.0}, 1.0)), "have one name"),
    ):
        with pytest.raises(UsageError, match=rf"these rules cannot be calibrated \(.*{why}"):
            calibrate(healthy, RuleSet(rules))


def test_settings_and_folders_of_any_name(tmp_path: Path) -> None:
    train(tmp_path / "a\nb", 1, config={"": 1, "x\ny": 2, "deep": {"": 3}})
    found = calibrate([tmp_path / "a\nb"], PLAIN)
    assert found.runs[0].name == "'a\\nb'"
    assert {"''", "'x\\ny'", "deep."} <= {*found.recipe}
    found.save(tmp_path / "mine.json")
    assert Calibration.read(tmp_path / "mine.json").recipe == found.recipe


@pytest.mark.slow
def test_names_that_repeat_are_paths(healthy: list[Run], tmp_path: Path) -> None:
    train(tmp_path / "s0", 11)
    found = calibrate([*healthy, tmp_path / "s0"])
    assert [one.name for one in found.runs] == [str(healthy[0].path), "s1", "s2", "s3", str(tmp_path / "s0")]


def test_the_command(healthy: list[Run], tmp_path: Path, run: Any) -> None:
    out = tmp_path / "mine.json"
    code, told, _ = run("alarm", "--calibrate", *paths(healthy), "--out", str(out))
    assert code == 0
    assert told.startswith("4 healthy runs of 40 rows: at most 1 in 5 new healthy runs of this recipe and length has")
    assert "heads.drift (attention_heads)" in told.partition("Left out, since the runs do not record it: ")[2]
    assert "Warning" not in told
    found = Calibration.read(out)
    assert f"combination: threshold {found.rules[0].threshold:.3g}\n" in told
    code, told, err = run("alarm", *paths(healthy[:1]), "--rules", str(out))
    assert (code, told) == (0, "")
    assert "s0: no alarm by the mine.json rules in 40 rows" in err
    assert err.rstrip().endswith("mine.json limits false alarms, and may miss a failure.")
    code, told, _ = run(
        "alarm", "--calibrate", *paths(healthy), "--out", str(tmp_path / "j.json"), "--json", "--rules", "loud"
    )
    assert code == 0
    assert json.loads(told)["rule_set"] == "loud"
    assert json.loads(told)["k"] == 4
    other = train(tmp_path / "other", 8, config={"seed": 8, "lr": 2e-3})
    _, told, _ = run("alarm", "--calibrate", *paths([*healthy, other]), "--out", str(tmp_path / "o.json"))
    assert "Warning: lr differs: 0.001 in s0, s1, s2 and 1 more; 0.002 in other." in told
    _, _, err = run("alarm", str(other.path), "--rules", str(out))
    assert "warning: lr differs: 0.001 in mine.json; 0.002 in this run." in err


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["--calibrate", "--out", "a.json"], 2, "give at least one healthy run"),
        (["--calibrate", "RUN"], 2, "needs --out FILE"),
        (["--calibrate", "RUN", "--out", "a"], 2, "must end in .json"),
        (["--calibrate", "RUN", "--out", "a.json", "--follow"], 2, "--follow is for reading a run"),
        (["--calibrate", "RUN", "--out", "a.json", "--refractory", "3"], 2, "--refractory is for reading a run"),
        (["--calibrate", "RUN", "--out", "a.json", "--rules", "all"], 2, "no rules 'all'"),
        (["--calibrate", "RUN", "absent", "--out", "a.json"], 4, "no run at absent"),
        (["RUN", "--out", "a.json"], 2, "add --calibrate"),
        (["RUN", "RUN"], 2, "give one run, not 2"),
        ([], 2, "give one run, not 0"),
        (["RUN", "--rules", "absent.json"], 4, "cannot read absent.json"),
    ],
)
def test_wrong_arguments(
    healthy: list[Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Any,
    arguments: list[str],
    code: int,
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    found, _, err = run("alarm", *(str(healthy[0].path) if word == "RUN" else word for word in arguments))
    assert found == code
    assert why in " ".join(err.split())
    assert not [*tmp_path.iterdir()]


def test_a_run_that_failed_by_its_diagnosis_is_refused(tmp_path: Path, run: Any) -> None:
    """A loss that explodes and stays finite; without a held-out loss there is no verdict."""
    writer = RunWriter.create(tmp_path / "ill", {"label": "Model", "config": {}})
    writer.open([GRADIENTS])
    random = np.random.default_rng(0)
    for step in range(80):
        loss = 5.0 + 0.01 * random.standard_normal() + (1e4 if step > 50 else 0.0)
        writer.append(step, {"loss": loss, "grad_norm_total": 1.0}, {"grad_norm": cells(1 + 0.1 * random.random(3))})
    writer.set_status("finished", 80)
    writer.close()
    code, _, err = run("alarm", "--calibrate", str(tmp_path / "ill"), "--out", str(tmp_path / "a.json"))
    assert code == 2
    assert "ill failed (" in err
    assert "calibrate with healthy runs" in err
    assert not (tmp_path / "a.json").exists()


def test_a_file_that_is_gone_leaves_no_run(tmp_path: Path) -> None:
    with pytest.raises(sl.errors.InputError, match=r"cannot read .*mine\.json"):
        sl.watch(Loop().model, out=tmp_path / "a", alarm=tmp_path / "mine.json")
    assert not (tmp_path / "a").exists()
    shutil.rmtree(tmp_path)


def test_alerts_are_json(mine: Path) -> None:
    alert = Alert(3, "z", "t", 1.0, 0.5, 3, "loss.z", 2.0, None, "look", sure="s", bound=0.2)
    assert json.loads(json.dumps(alert.as_dict()))["bound"] == 0.2
    assert Alarm(mine).name == "mine.json"
