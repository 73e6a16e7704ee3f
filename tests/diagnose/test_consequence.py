"""The rule of consequence: warnings that stay, become notes, or are too early to tell; on made-up series."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diagnose_cases import Made, falling, found, layer_rows, made, only

from stabilitylab.diagnose import Event
from stabilitylab.diagnose.consequence import weighed
from stabilitylab.diagnose.evidence import Evidence
from stabilitylab.diagnose.series import JUDGED_ROWS
from stabilitylab.schema import Row
from stabilitylab.store import Run
from stabilitylab.verdict import TOO_EARLY

AT = 100


def learns(rows: int = 200) -> list[float]:
    return falling(rows, noise=0.01)


def stuck_from(at: int, rows: int = 200) -> list[float]:
    """A loss that falls by .01 a row up to ``at``, and then stands .3 higher."""
    noise = 0.01 * np.random.default_rng(1).standard_normal(rows)
    return [5.0 - 0.01 * min(t, at) + 0.3 * (t > at) + noise[t] for t in range(rows)]


def judged(path: Path, losses: list[float] | None, *events: Event, is_learning: bool = False) -> list[Event]:
    metrics: dict[str, Any] = {"other": [1.0] * 200} if losses is None else {"loss": losses}
    return weighed(events, Evidence(Run.open(made(path, metrics))), is_learning)


def event(kind: str = "update_jump", step: int = AT, severity: Any = "warning", **given: Any) -> Event:
    return Event(kind, kind, step, "update", "it jumped", severity, **given)


@pytest.mark.parametrize(
    ("losses", "stands", "severity", "why"),
    [
        (learns(), False, "note", "the loss reached a new minimum after it"),
        (stuck_from(AT), False, "warning", "the loss reached no new minimum after it"),
        (learns(), True, "warning", "still so at the last row"),
        (stuck_from(AT), True, "warning", "still so at the last row"),
        (None, False, "warning", "no loss was recorded that could show its consequence"),
    ],
    ids=["healed", "harmed", "stands", "both", "no loss"],
)
def test_a_warning_stays_if_the_loss_was_harmed_or_its_condition_stands(
    losses: list[float] | None, stands: bool, severity: str, why: str, tmp_path: Path
) -> None:
    (one,) = judged(tmp_path / "run", losses, event(stands=stands))
    assert (one.severity, one.consequence) == (severity, why)


def test_notes_failures_and_outcomes_stay_as_they_are(tmp_path: Path) -> None:
    given = [
        event(severity="note"),
        event("divergence", severity="failure"),
        event("loss_rise"),
    ]
    assert judged(tmp_path / "run", learns(), *given) == given


@pytest.mark.parametrize(("after", "severity"), [(JUDGED_ROWS - 1, "note"), (JUDGED_ROWS, "warning")])
def test_an_event_at_the_end_of_a_run_is_too_early_to_tell(after: int, severity: str, tmp_path: Path) -> None:
    step = 199 - after
    (one,) = judged(tmp_path / "run", stuck_from(step), event(step=step))
    assert one.severity == severity
    if severity == "note":
        told = "too early to tell after 19 rows of the loss after it: its consequence is judged from 20 rows on"
        assert one.consequence == told
        assert one.open == f"it is too early to tell what the update_jump at step {step} did"
        (lasting,) = judged(tmp_path / "other", stuck_from(step), event(step=step, stands=True))
        assert lasting.severity == "warning", "a condition that stands needs no loss"


@pytest.mark.parametrize("rows", [TOO_EARLY - 1, TOO_EARLY])
def test_a_short_run_leaves_a_failure_open_that_is_judged_from_more_updates_on(rows: int, tmp_path: Path) -> None:
    short, other = judged(
        tmp_path / "run",
        [5.0] * rows,
        event("plateau", 0, "failure", judged_from=TOO_EARLY),
        event("divergence", 0, "failure"),
    )
    assert other.severity == "failure"
    assert short.severity == ("note" if rows < TOO_EARLY else "failure")
    assert bool(short.open) == (rows < TOO_EARLY)
    assert ("too early to tell after 49 updates" in short.evidence) == (rows < TOO_EARLY)


def test_mild_events_are_notes_in_a_run_that_learns_without_a_failure(tmp_path: Path) -> None:
    mild = event("vanishing_gradient", stands=True)
    assert judged(tmp_path / "a", learns(), mild, is_learning=True)[0].severity == "note"
    assert judged(tmp_path / "b", learns(), mild)[0].severity == "warning"
    broken = event("non_finite", severity="failure")
    assert judged(tmp_path / "c", learns(), mild, broken, is_learning=True)[0].severity == "warning"


def test_a_rate_beyond_the_edge_is_a_note_unless_the_loss_rose(tmp_path: Path) -> None:
    edge = event("beyond_the_edge", 0, stands=True)
    assert judged(tmp_path / "a", learns(), edge)[0].severity == "note"
    healed, spike = judged(tmp_path / "b", learns(), edge, event("loss_spike"))
    assert (healed.severity, spike.severity) == ("note", "note"), "a spike that healed is a note itself"
    rose = judged(tmp_path / "c", learns(), edge, event("loss_rise"))[0]
    assert (rose.severity, rose.consequence) == ("warning", "the loss rose")


def gradients(factor: float, rows: int, last: int) -> Made:
    """Gradients that are ``factor`` times larger from AT to ``last``."""
    noise = np.random.default_rng(2).uniform(0.8, 1.2, rows)

    def values(t: int) -> Any:
        return [[noise[t] * (factor if AT <= t < last else 1.0)], [noise[t]]]

    return Made(layer_rows(2), ("value",), values, tuple(range(rows)))


@pytest.mark.parametrize(("last", "severity"), [(200, "warning"), (103, "note")])
def test_gradients_30_fold_to_the_end_stay_a_warning_though_the_loss_falls(
    last: int, severity: str, tmp_path: Path
) -> None:
    run = made(tmp_path / "run", {"loss": learns()}, {"grad_norm": gradients(30.0, 200, last)})
    one = only(found(run), "exploding_gradient")
    assert (one.step, one.severity, one.stands) == (AT, severity, last == 200)


def test_a_spike_that_heals_is_a_note_and_one_that_stays_a_warning(tmp_path: Path) -> None:
    losses = [4.0 - 0.01 * t for t in range(200)]
    healed = [loss + 1.0 * (AT <= t < AT + 3) for t, loss in enumerate(losses)]
    stays = [loss + 1.0 * (t >= AT) for t, loss in enumerate(losses)]
    assert only(found(made(tmp_path / "a", {"loss": healed})), "loss_spike").severity == "note"
    spike = only(found(made(tmp_path / "b", {"loss": [*losses[:AT], *([stays[AT]] * 100)]})), "loss_spike")
    assert (spike.severity, spike.stands) == ("warning", True)


def test_the_reason_is_in_the_diagnosis_and_its_json(tmp_path: Path) -> None:
    losses = [4.0 - 0.01 * t + 1.0 * (AT <= t < AT + 3) for t in range(200)]
    diagnosis = found(made(tmp_path / "run", {"loss": losses}))
    assert diagnosis.verdict == "healthy"
    (told,) = [one for one in diagnosis.as_dict()["events"] if one["kind"] == "loss_spike"]
    assert (told["severity"], told["stands"]) == ("note", False)
    assert told["consequence"] == "the loss reached a new minimum after it"


@pytest.mark.parametrize(
    ("tensor", "severity"), [("layers.2.up", "warning"), ("layers.3.up", "note"), ("layers.2.up_proj", "note")]
)
def test_a_write_stays_a_warning_if_it_holds_the_number_that_broke(tensor: str, severity: str, tmp_path: Path) -> None:
    losses = [*learns(AT), *[math.nan] * 100]
    lost = Event(
        "non_finite", "", AT, "step", "it broke", "failure", place=Row("layers.2.up"), numbers={"kind": "parameter"}
    )
    write = Event("foreign_write", "", AT, "between", f"1 tensor changed: {tensor}", "warning")
    one, _ = judged(tmp_path / "run", losses, write, lost)
    assert one.severity == severity
    assert one.consequence == (
        "it holds the first number that is not finite"
        if severity == "warning"
        else "too early to tell after 0 rows of the loss after it: its consequence is judged from 20 rows on"
    )
