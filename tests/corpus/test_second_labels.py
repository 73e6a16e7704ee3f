"""The labels of the second corpus, on series made by hand: each label, and both sides of its bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

ROWS = 300
EVALUATIONS = range(0, ROWS, 10)
STATES = ("held_out", "source_worth", "attention_spent", "tokens_alike", "dead", "silent")


def falling(rows: int = ROWS) -> np.ndarray:
    """A loss without noise that falls from 6 to 4 in a hundred rows and stays."""
    return np.interp(np.arange(rows), [0, 100], [6.0, 4.0])


def run_of(loss: np.ndarray | None = None, **states: Any) -> dict[str, np.ndarray]:
    """Columns of a run; a state is a number, or a function of the row of an evaluation."""
    loss = falling() if loss is None else loss
    columns = {"nll": loss, "gradient": np.ones(len(loss)), **{name: np.full(len(loss), np.nan) for name in STATES}}
    usual = {"held_out": 4.0, "attention_spent": 0.0, "tokens_alike": 0.5, "dead": 0.0, "silent": 0.0}
    for name, value in {**usual, **states}.items():
        for row in EVALUATIONS:
            if row < len(loss):
                columns[name][row] = value(row) if callable(value) else value
    return columns


def from_row(row: int, value: float, before: float = 0.0, until: int = ROWS) -> Any:
    return lambda at: value if row <= at < until else before


@pytest.fixture
def labels(scripts: Any) -> Any:
    return scripts("second_labels").labels


def test_a_run_that_learns_has_no_label(labels: Any) -> None:
    assert labels(run_of(), run_of()).outcome == "healthy"
    assert labels(run_of(), None).outcome == "healthy"  # a twin


@pytest.mark.parametrize("name", ["nll", "gradient"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_an_event_in_its_row(labels: Any, name: str, value: float) -> None:
    run = run_of()
    run[name][120] = value
    found = labels(run, run_of())
    assert (found.event.kind, found.event.began, found.event.full) == ("not finite", 120, 120)
    assert (found.outcome, found.failed) == ("event", 120)


@pytest.mark.parametrize(("height", "rises"), [(0.49, False), (0.51, True)])
def test_a_rise_that_stays_is_more_than_half_a_nat(labels: Any, height: float, rises: bool) -> None:
    """Without noise the bound is .5 nats; the level, a median of ten rows, follows five rows later."""
    loss = falling()
    loss[150:] += height
    event = labels(run_of(loss), run_of()).event
    assert (event is not None) == rises
    if rises:
        assert (event.kind, event.began) == ("rise", 155)
        assert event.height == pytest.approx(height)
        assert event.length is None


@pytest.mark.parametrize(("sd", "rises"), [(0.1, True), (0.3, False)])
def test_noise_raises_the_bound_of_a_rise(labels: Any, sd: float, rises: bool) -> None:
    """.7 nats are seven of the small deviations, and less than three of the large ones."""
    loss = falling() + sd * np.tile([0.0, 1.2, -1.2, 0.7, -0.7], ROWS // 5)  # medians of ten rows have no noise
    loss[150:] += 0.7
    assert (labels(run_of(loss), run_of()).event is not None) == rises


@pytest.mark.parametrize(("back", "stays"), [(44, False), (60, True)])
def test_a_rise_that_comes_back_within_fifty_rows_is_kept_and_is_no_event(labels: Any, back: int, stays: bool) -> None:
    """The rise is below the bound of a spike. Its level comes back five rows after its loss."""
    loss = falling()
    loss[150 : 150 + back] += 0.8
    found = labels(run_of(loss), run_of())
    assert (found.event is not None) == stays
    assert found.passing == (() if stays else (155,))
    assert found.outcome == ("event" if stays else "healthy")


def test_the_end_of_a_run_leaves_a_rise_open_and_a_number_that_is_not_finite_decides_it(labels: Any) -> None:
    loss = falling()
    loss[ROWS - 30 :] += 0.8
    found = labels(run_of(loss), run_of())
    assert (found.outcome, found.undecided, found.failed) == ("open", ROWS - 25, None)
    loss[-1] = np.nan
    found = labels(run_of(loss), run_of())
    assert (found.outcome, found.event.kind, found.event.began) == ("event", "rise", ROWS - 25)
    whole = falling()
    whole[ROWS - 55 :] += 0.8  # its level has fifty rows left
    assert labels(run_of(whole), run_of()).outcome == "event"


@pytest.mark.parametrize(
    ("rows", "height", "kind"), [(2, 3.0, None), (3, 3.0, "spike"), (3, 0.99, None), (3, 1.01, "spike")]
)
def test_a_spike_has_three_rows_and_a_nat(labels: Any, rows: int, height: float, kind: str | None) -> None:
    loss = falling()
    loss[150 : 150 + rows] += height
    found = labels(run_of(loss), run_of())
    if kind is None:
        assert found.event is None
        assert found.passing == ((150,) if height > 1 else ())
    else:
        assert (found.event.kind, found.event.began, found.event.length) == (kind, 150, rows)
        assert found.event.height == pytest.approx(height)


def test_stretches_of_a_spike_with_two_lower_rows_between_them_are_one(labels: Any) -> None:
    for gap, length in ((2, 6), (3, None)):
        loss = falling()
        loss[[150, 151, 152 + gap, 153 + gap]] += 2.0
        found = labels(run_of(loss), run_of())
        assert (None if found.event is None else found.event.length) == length
        assert found.passing == (() if length else (150, 155))


def test_a_spike_that_goes_over_into_a_rise_is_one_event(labels: Any) -> None:
    loss = falling()
    loss[150:] += np.interp(np.arange(150), [0, 100], [1.2, 4.0])
    event = labels(run_of(loss), run_of()).event
    assert (event.kind, event.began) == ("rise", 150)


@pytest.mark.parametrize(("highest", "nats"), [(6.0, 1.0), (0.9, 0.45)])
def test_a_rise_is_full_blown_at_half_its_height_or_one_nat(labels: Any, highest: float, nats: float) -> None:
    """By .05 nats a row: its level begins above .5 nats, and a spike's rows above 1 nat are full-blown at once."""
    loss = falling()
    loss[150:] += np.minimum(0.05 * np.arange(1, 151), highest)
    event = labels(run_of(loss), run_of()).event
    over = loss - loss[:150].min()
    level = {row: float(np.median(over[row - 9 : row + 1])) for row in range(150, ROWS)}
    began = next(row for row in level if level[row] > 0.5)
    full = next(row for row in level if row >= began and (level[row] >= nats or over[row] > 1.0 + 1e-9))
    assert (event.kind, event.began, event.full) == ("rise", began, full)
    assert full > began or highest < 1


@pytest.mark.parametrize(
    ("name", "below", "above", "kind"),
    [
        ("tokens_alike", 0.98, 0.99, "rank"),
        ("dead", 0.24, 0.25, "dead"),
        ("silent", 0.24, 0.25, "dead"),
    ],
)
def test_collapses_and_their_bounds(labels: Any, name: str, below: float, above: float, kind: str) -> None:
    found = labels(run_of(**{name: from_row(140, above)}), run_of())
    assert (found.collapse, found.outcome, found.failed) == ((kind, 140), "collapse", 140)
    assert labels(run_of(**{name: from_row(140, below)}), run_of()).outcome == "healthy"
    assert labels(run_of(**{name: above}), run_of(**{name: above})).outcome == "healthy"  # as its twin
    assert labels(run_of(**{name: above}), None).outcome == "healthy"  # a twin has no twin
    assert labels(run_of(**{name: from_row(140, above, until=280)}), run_of()).outcome == "healthy"  # it passed
    for first, outcome in ((250, "collapse"), (260, "healthy")):  # five evaluations and four
        assert labels(run_of(**{name: from_row(first, above)}), run_of()).outcome == outcome


def test_a_collapse_of_attention_is_half_of_the_modules_and_costs_something(labels: Any) -> None:
    def found(spent: float, held_out: float) -> Any:
        return labels(run_of(attention_spent=from_row(140, spent), held_out=held_out), run_of())

    assert (found(0.5, 4.11).collapse, found(0.5, 4.11).outcome) == (("attention", 140), "collapse")
    assert found(0.49, 4.11).outcome == "healthy"
    assert found(1.0, 4.09).outcome == "healthy"


def test_a_run_ignores_its_source_where_its_twin_reads_it(labels: Any) -> None:
    reads, not_yet = run_of(source_worth=0.1), run_of(source_worth=0.09)
    found = labels(run_of(source_worth=from_row(120, 0.05, before=0.3)), reads)
    assert (found.collapse, found.outcome) == (("source", 120), "collapse")
    assert labels(run_of(source_worth=0.05), not_yet).outcome == "healthy"
    assert labels(run_of(source_worth=0.1), reads).outcome == "healthy"
    assert labels(run_of(), run_of()).outcome == "healthy"  # decoders have no number


def test_too_fast_to_learn_well_is_no_failure_and_never_mixed(labels: Any) -> None:
    twin = run_of()
    slow = labels(run_of(held_out=from_row(200, 4.25, before=4.0)), twin)
    assert (slow.outcome, slow.slow, slow.failed) == ("slow", 200, None)
    assert labels(run_of(held_out=4.24), twin).outcome == "healthy"
    assert labels(run_of(held_out=from_row(260, 5.0, before=4.0)), twin).outcome == "healthy"  # four evaluations
    both = labels(run_of(held_out=5.0, attention_spent=1.0), twin)
    assert (both.outcome, both.slow) == ("collapse", 0)
    loss = falling()
    loss[150:] += 3.0
    every = labels(run_of(loss, held_out=5.0, tokens_alike=from_row(120, 1.0)), twin)
    assert (every.outcome, every.failed) == ("both", 120)


def test_a_run_that_ended_early_is_judged_by_what_it_has(labels: Any) -> None:
    loss = falling(160)
    loss[-1] = np.inf
    found = labels(run_of(loss, dead=from_row(100, 1.0)), run_of())
    assert (found.outcome, found.collapse, found.event.full) == ("both", ("dead", 100), 159)
