"""Which event came first: decided by the rows, or said to be undecided; and no run that makes diagnose itself fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from diagnose_cases import Made, falling, found, layer_rows, made

from stabilitylab.diagnose.cause import certainly_before, explain, ordered, sentence, undecided
from stabilitylab.diagnose.events import DETECTORS, Event
from stabilitylab.diagnose.order import PHASES, describe, gathered
from stabilitylab.schema import Row


def event(kind: str, step: int, after: int | None, phase: str = "forward", **more) -> Event:
    return Event(kind, kind.replace("_", " "), step, phase, "evidence", after=after, **more)


@pytest.mark.parametrize(
    ("a", "b", "before"),
    [
        (event("x", 40, 36), event("y", 41, 40), True),  # y was not there yet in row 40
        (event("x", 40, 36), event("y", 42, 38), False),  # both within (38, 40]?
        (event("x", 44, 40), event("y", 42, 41, "loss"), False),  # rows 40 and 44 probed, spike at 42
        (event("y", 42, 41, "loss"), event("x", 44, 40), False),
        (event("x", 40, 39), event("y", 40, 39, "loss"), True),  # one step, in order of execution
        (event("x", 40, 39), event("y", 40, 39), False),  # one pass
        (event("x", 40, 36), event("y", 40, 36, "loss"), False),  # one row, several steps
        (event("x", 0, None), event("y", 0, None, "loss"), True),
        (event("lr_jump", 40, 39, "setting"), event("update_jump", 41, 37, "optimizer"), True),  # by arithmetic
        (event("lr_jump", 40, 39, "setting"), event("ln_growth", 41, 37), False),
    ],
)
def test_what_is_certain(a: Event, b: Event, before: bool) -> None:
    assert certainly_before(a, b) is before


def test_the_chain_holds_the_first_of_each_kind_and_outcomes_from_the_start_come_last() -> None:
    plateau = event("plateau", 0, None, "reference", severity="failure")
    events = [
        plateau,
        event("loss_spike", 41, 40, "loss"),
        event("loss_spike", 60, 59, "loss"),
        event("lr_jump", 40, 39, "setting"),
        event("update_jump", 40, 39, "optimizer"),
        event("dead_layer", 0, None, severity="note"),
    ]
    cause = explain(events)
    assert (
        sentence(cause)
        == "lr jump at step 40 -> update jump at step 40 -> loss spike at step 41 -> plateau from the start"
    )
    assert undecided(cause) == []
    assert explain([plateau]).first is plateau
    assert explain([]).first is None


def test_what_the_cadence_leaves_open_is_said() -> None:
    cause = explain([event("ln_growth", 44, 40), event("loss_spike", 42, 41, "loss")])
    (text,) = undecided(cause)
    assert text.startswith("the evidence does not decide between loss spike at step 42 and ln growth at step 44")
    assert "ln growth began after step 40 and by step 44; record every step (every=1)" in text
    (text,) = undecided(explain([event("ln_growth", 42, 41), event("attention_collapse", 42, 41)]))
    assert text.endswith("both are first seen in the forward pass of that step")


def test_of_two_findings_of_one_moment_the_one_with_a_place_comes_first() -> None:
    placed = event("exploding_gradient", 3, 2, "backward", place=Row("", "encoder", 2))
    assert ordered([event("exploding_gradient", 3, 2, "backward"), placed])[0] is placed


def test_the_phases_are_those_of_an_update() -> None:
    assert PHASES == ("between", "setting", "forward", "loss", "backward", "reference", "optimizer")


def test_a_whole_layer_is_named_once() -> None:
    rows = [Row(f"e.{n}.{part}", "encoder", n, part) for n in (1, 2) for part in ("attn", "ffn")]
    assert gathered(rows, [0, 2, 3]) == ["layer 1 of encoder (attn)", "layer 2 of encoder"]
    assert describe(Row("head", "", 0, "head")) == "head"


def test_every_detector_says_how_to_record_what_it_reads(tmp_path: Path) -> None:
    diagnosis = found(made(tmp_path / "run", {"throughput": [1.0] * 40}))
    assert diagnosis.unchecked.keys() == DETECTORS.keys()
    assert diagnosis.unchecked["ln_growth"] == "not recorded: ln_input (probe ln_input)"
    assert "nothing was recorded that could be checked" in diagnosis.paragraph


@pytest.mark.parametrize("seed", range(30))
def test_nothing_that_a_run_may_hold_makes_diagnose_fail(tmp_path: Path, seed: int) -> None:
    """NaN, inf, zeros, denormals, absent rows and missing cells, sparse steps: warnings are errors here."""
    draw = np.random.default_rng(seed)
    odd = np.array([np.nan, np.inf, 0.0, 1e-310, 1e300, 1.0, 1.0, 1.0, 1.0])

    def table(*columns: str, total: str = "") -> Made:
        steps = sorted(draw.choice(40, draw.integers(1, 30), replace=False).tolist())
        gone = draw.random(6) < 0.2
        return Made(
            layer_rows(6),
            columns,
            lambda t: draw.choice(odd, (6, len(columns))) * draw.random((6, len(columns))),
            steps,
            total,
            lambda t, row: bool(gone[row.layer - 1]),
        )

    tables = {
        "grad_norm": table("value", total="norm"),
        "activation_grad_norm": table("value"),
        "ln_input": table("value", "branch"),
        "update_ratio": table("value", "rms"),
        "model_update": table("cumulative", "one_update"),
        "attention": table("entropy", "ceiling", "max_logit"),
        "mine": table("value"),
    }
    loss = np.where(draw.random(40) < 0.1, draw.choice(odd, 40), falling(40, 0.3, seed)).tolist()
    given = [None if draw.random() < 0.2 else value for value in loss]
    metrics = {
        "loss": given,
        "grad_norm_total": loss,
        "lr": [abs(v) for v in draw.choice(odd, 40)],
        "held_out_nll": given,
    }
    diagnosis = found(made(tmp_path / "run", metrics, tables))
    assert diagnosis.paragraph
    assert diagnosis.as_dict()["events"]


def test_a_table_without_a_single_number_checks_nothing(tmp_path: Path) -> None:
    """As where step() came after zero_grad, so that no gradient was there in any row."""
    numbers = [[np.nan]] * 3
    for name, absent in (("none", True), ("some", False)):
        values = numbers if absent else [[1.0]] * 3
        table = Made(layer_rows(3), ("value",), lambda t, v=values: v, range(40), absent=lambda t, row, a=absent: a)
        diagnosis = found(made(tmp_path / name, {"loss": falling(40)}, {"grad_norm": table}))
        assert ("exploding_gradient" in diagnosis.unchecked) == absent
