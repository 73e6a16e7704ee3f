"""A jump of the learning rate: what an alert says of it, and what is no jump."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from looped import Loop, watched
from made import TABLES, Made, run

from stabilitylab.alarm import Alarm, AlarmRule, Alert
from stabilitylab.alarm.rates import JUMP, RateJump, Rates
from stabilitylab.alarm.reading import listen
from stabilitylab.diagnose.detectors.jumps import LR_JUMP
from stabilitylab.store import Run

RULE = AlarmRule("z", {"update.z": 1.0, "grad_norm.z": 1.0}, math.log1p(12.0), "a gradient jumps")


def jump_of(rates: Sequence[float | None], name: str = "lr") -> RateJump | None:
    known = Rates()
    for step, rate in enumerate(rates):
        known.read(step, {name: rate})
    return known.jump(len(rates) - 1)


def with_rates(rows: Iterator[Made], at: int, factor: float, name: str = "lr") -> Iterator[Made]:
    for step, metrics, tables in rows:
        yield step, {**metrics, name: 1e-3 * (factor if step >= at else 1.0)}, tables


def heard(alarm: Alarm, rows: Iterator[Made]) -> list[Alert]:
    alarm.open(TABLES)
    return [alert for row in rows for alert in alarm.observe(*row)]


@pytest.mark.parametrize("name", ["lr", "learning_rate"])
def test_an_alert_names_the_jump_and_its_step(name: str) -> None:
    [alert] = heard(Alarm([RULE]), with_rates(run(60, jump=41), 40, 100.0, name))
    assert alert.rate_jump == RateJump(40, 1e-3, 1e-3 * 100)
    assert (
        ". The learning rate rose 100-fold at step 40, from 0.001 to 0.1. Most of all the gradient norm of a sub-layer "
        in alert.sentence
    )
    advice = "check the schedule and what a resume restored, and go back to a checkpoint before step 40"
    assert f" To do: {advice}. How sure: " in alert.sentence


def test_without_a_jump_the_advice_is_that_of_the_signal() -> None:
    [alert] = heard(Alarm([RULE]), with_rates(run(60, jump=41), 40, 2.9))
    assert alert.rate_jump is None
    assert "rose" not in alert.sentence
    assert "learning rate" in alert.advice


def test_a_number_that_is_not_finite_names_it_too() -> None:
    alarm = Alarm([])
    alarm.open(TABLES)
    for step, metrics, tables in with_rates(run(30), 25, 3.5):
        alarm.observe(step, metrics, tables)
    [alert] = alarm.observe(30, {"loss": math.nan, "lr": 3.5e-3}, {})
    assert alert.sentence == (
        "step 30: loss is nan. The learning rate rose 3.5-fold at step 25, from 0.001 to 0.0035. Run stabilitylab "
        "diagnose, which says where the number came from, and go back to a checkpoint."
    )


def test_an_old_jump_is_not_named() -> None:
    flat = [1e-3] * 10
    assert jump_of([*flat, *[1e-2] * 51]) == RateJump(10, 1e-3, 1e-2)
    assert jump_of([*flat, *[1e-2] * 52]) is None


@pytest.mark.parametrize(
    "rates",
    [
        [1e-3] * 20,
        [1e-3 * step / 20 for step in range(40)],  # a warm-up from 0 on
        [1e-6 * 10.0**step for step in range(4)],  # nothing to compare with yet
        [*[1e-3] * 10, *[1e-4] * 10, *[1e-3] * 10],  # a restart comes back to its maximum
        [None] * 10,
        [*[1e-3] * 10, math.nan, math.inf, 0.0, *[1e-3] * 5],
    ],
)
def test_no_jump(rates: list[float | None]) -> None:
    assert jump_of(rates) is None


def test_the_ledger_names_a_jump_of_a_group() -> None:
    def fact(
        step: int, after: object, name: str = "optimizer 0 group 1 lr", kind: str = "setting"
    ) -> dict[str, object]:
        return {"step": step, "kind": kind, "name": name, "before": None, "after": after}

    known = Rates()
    known.read_ledger([fact(0, 1e-3), fact(0, 1.0, "optimizer 0 group 0 lr"), fact(7, 2.9e-3)])
    assert known.jump(7) is None
    known.read_ledger(
        [fact(8, "?"), fact(8, None), fact(8, 9.0, kind="state"), fact(8, 9.0, "optimizer 0 group 1 eps")]
    )
    assert known.jump(8) is None
    known.read_ledger([fact(9, 2.9e-1)])
    assert known.jump(9) == RateJump(9, 2.9e-3, 2.9e-1)
    early = Rates()
    early.read_ledger([fact(0, 1e-6), fact(1, 1e-3)])  # a warm-up that starts near 0
    assert early.jump(1) is None


def test_a_watched_run_reads_its_ledger(tmp_path: Path) -> None:
    """The loop gives no ``lr``; the stored run says the same."""
    rules = [AlarmRule("update", {"update.level": 1.0}, math.log(50.0))]
    options = {"record": "ledger", "reference": None, "probes": ["grad_norm", "update_ratio"]}
    [alert, *_] = watched(tmp_path / "a", Loop(fast=25), steps=26, alarm=Alarm(rules), **options)
    assert (alert.step, alert.rate_jump) == (25, RateJump(25, 1e-3, 1e5))
    assert "The learning rate rose 1e+08-fold at step 25, from 0.001 to 1e+05." in alert.sentence
    assert next(listen(Run.open(tmp_path / "a"), Alarm(rules))) == alert


def test_the_part_before_the_update_and_a_resume() -> None:
    rows = [*with_rates(run(60, jump=41), 40, 100.0)]
    whole = Alarm([RULE])
    expected = heard(whole, iter(rows))
    for cut in (3, 40, 41):
        first, second = Alarm([RULE]), Alarm([RULE])
        found = heard(first, iter(rows[:cut]))
        step, metrics, _ = rows[cut]
        found += first.begin(step, metrics, {})
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        found += heard(second, iter(rows[cut:]))
        assert found == expected
        assert second.state_dict() == whole.state_dict()
    old = {name: value for name, value in whole.state_dict().items() if name != "rates"}
    Alarm([RULE]).load_state_dict(old)


def test_a_jump_is_what_diagnose_calls_one() -> None:
    assert JUMP == LR_JUMP
