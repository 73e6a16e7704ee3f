"""Which event came first: decided by the rows, or said to be undecided; and no run that makes diagnose itself fail."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from diagnose_cases import Made, falling, found, layer_rows, made, only
from rest_slow import rest_slow

import stabilitylab as sl
from stabilitylab.diagnose import diagnose
from stabilitylab.diagnose.cause import certainly_before, explain, ordered, sentence, undecided
from stabilitylab.diagnose.diagnosis import UNSEEN
from stabilitylab.diagnose.events import DETECTORS, Event
from stabilitylab.diagnose.order import PHASES, comes_before, describe, gathered
from stabilitylab.explain.flight import LEAST
from stabilitylab.schema import Phase, Row
from stabilitylab.store import Run
from stabilitylab.store.layout import BLACK_BOX


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
        (event("x", 40, 39, "reference"), event("y", 40, 39), True),  # theta_t alone; and the batch too
        (event("x", 40, 39, "step"), event("y", 40, 39), True),
        (event("x", 40, 39, "reference"), event("y", 40, 39, "backward"), True),
        (event("x", 40, 39), event("y", 40, 39, "reference"), False),
        (event("x", 40, 39, "step"), event("y", 40, 39, "reference"), False),  # one point
        (event("x", 40, 39, "reference"), event("y", 40, 39, "step"), False),
        (event("x", 40, 39, "backward"), event("y", 40, 39, "update"), True),
        (event("lr_jump", 40, 39, "setting"), event("x", 40, 39), False),  # the rate acts in the update of its row
        (event("lr_jump", 40, 39, "setting"), event("update_jump", 40, 39, "update"), True),
        (event("lr_jump", 40, 39, "setting"), event("update_jump", 40, 39, "reference"), False),  # of the update before
        (event("lr_jump", 40, 39, "setting"), event("update_jump", 41, 40, "reference"), True),
        (event("lr_jump", 40, 39, "setting"), event("update_jump", 41, 37, "update"), True),  # by arithmetic
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
        event("update_jump", 40, 39, "update"),
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
    assert "ln growth began after step 40 and by step 44; record with every=1, on the command line --every 1" in text
    (text,) = undecided(explain([event("ln_growth", 42, 41), event("exploding", 42, 41)]))
    assert text.endswith("both are seen in numbers that depend on theta_t and the batch")


def test_of_two_findings_of_one_moment_the_one_with_a_place_comes_first() -> None:
    placed = event("exploding_gradient", 3, 2, "backward", place=Row("", "encoder", 2))
    assert ordered([event("exploding_gradient", 3, 2, "backward"), placed])[0] is placed


def test_every_phase_of_a_table_has_a_point_and_dependence_is_transitive() -> None:
    assert {*get_args(Phase)} < {*PHASES}
    for a, b, c in itertools.product(PHASES, repeat=3):
        if comes_before(a, b) and comes_before(b, c):
            assert comes_before(a, c)
        assert not (comes_before(a, b) and comes_before(b, a))
    row = ("between", "step", "forward", "loss", "backward", "update")
    assert all(comes_before(a, b) for a, b in itertools.combinations(row, 2))
    assert not comes_before("step", "reference")
    assert not comes_before("reference", "step")
    # a learning rate acts in the update of its row, on nothing before it
    assert [phase for phase in PHASES if comes_before("setting", phase)] == ["update"]
    assert not any(comes_before(phase, "setting") for phase in PHASES)


def test_a_whole_layer_is_named_once() -> None:
    rows = [Row(f"e.{n}.{part}", "encoder", n, part) for n in (1, 2) for part in ("attn", "ffn")]
    assert gathered(rows, [0, 2, 3]) == ["layer 1 of encoder (attn)", "layer 2 of encoder"]
    assert describe(Row("head", "", 0, "head")) == "head"


def test_every_detector_says_how_to_record_what_it_reads(tmp_path: Path) -> None:
    diagnosis = found(made(tmp_path / "run", {"throughput": [1.0] * 40}))
    assert diagnosis.unchecked.keys() == DETECTORS.keys()
    assert diagnosis.unchecked["ln_growth"] == "not recorded: ln_input (probe ln_input)"
    assert "nothing was recorded that can be checked" in diagnosis.paragraph


@pytest.mark.parametrize("seed", rest_slow(range(30), range(10)))
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


AT = 30
STEPS = range(40)


def from_then(before: float, after: float, columns: int = 1, layers: int = 3):
    return lambda t: np.full((layers, columns), after if t >= AT else before)


def test_notes_that_came_before_are_said_to_be_left_aside(tmp_path: Path) -> None:
    loss = [6.0 - 0.05 * t for t in range(30)] + [60.0] * 10
    diagnosis = found(made(tmp_path / "run", {"loss": loss}))
    assert diagnosis.paragraph.partition("First sign")[2].startswith(f": {diagnosis.events[0].title}. ")
    note = replace(diagnosis.events[0], step=diagnosis.events[0].step - 5, severity="note")
    aside = replace(diagnosis, events=(note, *diagnosis.events))
    assert aside.paragraph.partition("First sign")[2].startswith(f" (without notes): {diagnosis.events[0].title}. ")


def test_each_place_stands_with_its_event(tmp_path: Path) -> None:
    diagnosis = found(made(tmp_path / "run", {"loss": [6.0 - 0.05 * t for t in range(30)] + [60.0] * 10}))
    first = diagnosis.events[0]
    assert first.place is None
    assert "Where:" not in diagnosis.paragraph, "the whole model is no place"
    events = tuple(replace(first, title=f"trouble {n}", place=Row("", "encoder", n)) for n in range(1, 7))

    def where(count: int) -> str:
        told = replace(diagnosis, cause=replace(diagnosis.cause, chain=(first, *events[:count]))).paragraph
        return told.partition("Where: ")[2].partition(".")[0]

    assert where(2) == "trouble 1 in layer 1 of encoder; trouble 2 in layer 2 of encoder"
    assert where(6).endswith("; trouble 4 in layer 4 of encoder; and 2 more")


def test_what_was_warned_of_as_it_ran_is_no_health(tmp_path: Path) -> None:
    """step() behind the optimizer's: what it recorded is of the wrong row."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with sl.watch(model, out=tmp_path / "run", every=1, optimizer=optimizer) as w:
        for _ in range(5):
            loss = model(torch.ones(3, 4)).square().mean()
            loss.backward()
            optimizer.step()
            w.step(loss=loss)
            optimizer.zero_grad()
    diagnosis = diagnose(Run.open(tmp_path / "run"))
    assert diagnosis.verdict == "open"
    assert replace(diagnosis, open="").verdict == "open"  # of which five rows are not the only reason
    assert "and the recorded numbers may not be those of the updates." in diagnosis.paragraph
    assert "Warned as it ran: row 0: the optimizer's step came before this one" in diagnosis.paragraph
    assert len(diagnosis.as_dict()["doubts"]) == 1


def test_two_events_of_one_point_are_named_together(tmp_path: Path) -> None:
    """Attention that collapses in the reference pass of a row whose gains became infinite: both are theta_t's."""
    attention = Made(layer_rows(3), ("entropy", "ceiling"), lambda t: [[0.05 if t >= AT else 2.0, 3.0]] * 3, STEPS)
    gains = Made(layer_rows(3), ("rms",), from_then(1.0, np.inf), STEPS)
    diagnosis = found(made(tmp_path / "run", {"loss": falling(40)}, {"attention": attention, "ln_gain": gains}))
    assert [event.phase for event in diagnosis.cause.together] == ["reference", "step"]
    assert (
        "First signs, together at step 30: attention entropy collapse and non-finite numbers (both are seen in numbers "
        "that depend on theta_t alone). The attention entropy of layer 1 of encoder (ffn) is 0.017 of its largest "
        "possible value"
    ) in diagnosis.paragraph
    assert ". ln_gain.rms of layer 1 of encoder (ffn) is inf at step 30" in diagnosis.paragraph
    assert sentence(diagnosis.cause) == "attention entropy collapse and non-finite numbers at step 30"
    facts = diagnosis.as_dict()
    assert facts["first"] == ["attention_collapse", "non_finite"]
    (text,) = facts["undecided"]
    assert "does not decide between attention entropy collapse at step 30 and non-finite numbers at step 30" in text


def test_the_reference_pass_comes_before_the_training_pass_of_its_row(tmp_path: Path) -> None:
    """It depends on theta_t alone; the training pass on the batch too. The tables stand the other way round."""
    tables = {
        "ln_input": Made(layer_rows(3), ("value",), lambda t: [[50.0 if t >= 10 else 1.0]] * 3, STEPS),
        "attention": Made(
            layer_rows(3), ("entropy", "ceiling"), lambda t: [[0.05 if t >= 10 else 2.0, 3.0]] * 3, STEPS
        ),
    }
    diagnosis = found(made(tmp_path / "run", {"loss": falling(40)}, tables))
    assert [event.kind for event in diagnosis.cause.chain] == ["attention_collapse", "ln_growth"]
    assert diagnosis.cause.rivals == ()
    assert "First sign: attention entropy collapse. " in diagnosis.paragraph


@pytest.mark.parametrize("gradient", ["grad_norm", "activation_grad_norm"])
def test_what_the_forward_pass_shows_comes_before_the_gradient_and_that_before_the_update(
    tmp_path: Path, gradient: str
) -> None:
    lost = {
        "update_ratio": Made(layer_rows(3), ("value", "rms"), from_then(1.0, np.nan, 2), STEPS),
        gradient: Made(layer_rows(3), ("value",), from_then(1.0, np.nan), STEPS),
        "residual_norm": Made(layer_rows(3), ("value",), from_then(1.0, np.nan), STEPS),
        "logits": Made([Row("head")], ("log_z",), lambda t: [[np.nan if t >= AT else 1.0]], STEPS),
    }
    for name, phase in (("logits", "reference"), ("residual_norm", "forward"), (gradient, "backward")):
        event = only(found(made(tmp_path / name, {"loss": falling(40)}, lost)), "non_finite")
        assert (event.step, event.phase) == (AT, phase)
        assert event.probe.startswith(f"{name}.")
        del lost[name]
    event = only(found(made(tmp_path / "update", {"loss": falling(40)}, lost)), "non_finite")
    assert (event.phase, event.probe) == ("update", "update_ratio.rms")  # its value may divide by 0


def test_numbers_that_are_lost_at_one_point_are_all_named(tmp_path: Path) -> None:
    """Gains and two tables of the reference pass; the training pass of the row is said to come after them."""
    lost = from_then(1.0, np.nan)
    tables = {
        "ln_input": Made(layer_rows(3), ("value",), lost, STEPS),
        "output_norm": Made(layer_rows(3), ("value",), lost, STEPS),
        "ln_gain": Made(layer_rows(3), ("rms",), lost, STEPS),
    }
    event = only(found(made(tmp_path / "run", {"loss": falling(40)}, tables)), "non_finite")
    assert event.evidence.startswith("output_norm.value of layer 1 of encoder (ffn) is nan at step 30")
    assert "equally early, also from theta_t alone: ln_gain.rms of layer 1" in event.evidence
    assert "after it, in the training pass of that row: ln_input.value of layer 1" in event.evidence


def test_a_ratio_that_divides_by_0_is_no_number_that_broke(tmp_path: Path) -> None:
    """All columns of the table may: a NaN of it alone is no event, and one beside a broken number is not its cause."""
    ratio = Made(layer_rows(3), ("raw", "centred"), from_then(1.0, np.nan, 2), STEPS)
    alone = found(made(tmp_path / "alone", {"loss": falling(40)}, {"cosine_similarity": ratio}))
    assert "non_finite" not in {event.kind for event in alone.events}
    broken = Made(layer_rows(3), ("value",), from_then(1.0, np.nan), STEPS)
    both = {"cosine_similarity": ratio, "ln_input": broken}
    assert only(found(made(tmp_path / "both", {"loss": falling(40)}, both)), "non_finite").phase == "forward"


def test_a_rate_that_jumps_in_the_row_of_something_else_is_not_said_to_precede_it(tmp_path: Path) -> None:
    """The rate acts in the update of row 30, after that row's training pass: both are named, the update follows."""
    tables = {
        "ln_input": Made(layer_rows(3), ("value",), from_then(1.0, 50.0), STEPS),
        "update_ratio": Made(layer_rows(3), ("value", "rms"), from_then(1e-3, 1.0, 2), STEPS),
    }
    rates = [1e-4 if t < AT else 1e-2 for t in STEPS]
    diagnosis = found(made(tmp_path / "run", {"loss": falling(40), "lr": rates}, tables))
    assert "First signs, together at step 30: growth of norm inputs and learning-rate jump" in diagnosis.paragraph
    assert "(they are seen in numbers that do not depend on each other)" in diagnosis.paragraph
    assert sentence(diagnosis.cause) == (
        "growth of norm inputs and learning-rate jump at step 30 -> update jump at step 30"
    )
    later = {**tables, "ln_input": Made(layer_rows(3), ("value",), lambda t: [[50.0 if t > AT else 1.0]] * 3, STEPS)}
    diagnosis = found(made(tmp_path / "later", {"loss": falling(40), "lr": rates}, later))
    assert [event.kind for event in diagnosis.cause.chain] == ["lr_jump", "update_jump", "ln_growth"]
    assert len(diagnosis.cause.together) == 1


@pytest.mark.parametrize(
    ("step", "boxes", "replayable", "is_unseen"),
    [
        (1, [28], False, True),
        (1, [1, 28], True, False),  # a loss that is not finite
        (1, [2, 28], True, False),  # ... or a gradient in the row before
        (6, [8], False, True),
        (8, [9], True, False),
        (1, [], False, False),
    ],
)
def test_explain_is_not_advised_where_its_recorder_had_no_level(
    step: int, boxes: list[int], replayable: bool, is_unseen: bool, tmp_path: Path
) -> None:
    losses = [*[3.0] * step, *[9.0] * (40 - step)]
    facts = {"config": {"model": {}, "train": {}}, "unigram": {"cross_entropy": 4.0, "accuracy": 0.1}}
    run = made(tmp_path / "run", {"loss": losses, "held_out_nll": losses}, **facts)
    assert (judged := Run.open(run).verdict) is not None
    assert (judged.state, judged.step) == ("diverged", step)
    (run / BLACK_BOX).mkdir()
    for box in boxes:
        (run / BLACK_BOX / f"step-{box:08d}.pt").touch()
    diagnosis = found(run)
    assert (diagnosis.replayable, diagnosis.untested == UNSEEN) == (replayable, is_unseen)
    assert f"needs {LEAST} losses before a trouble" in UNSEEN, "the recorder's own number"


def test_a_finding_ends_with_what_to_do(tmp_path: Path) -> None:
    """The remedy of the first sign stands in the paragraph and in the JSON, also that of an outcome alone."""
    loss = [*falling(30), *np.linspace(2, 30, 10)]
    rate = [1e-3] * 29 + [0.1] * 11
    diagnosis = found(made(tmp_path / "jump", {"loss": loss, "lr": rate}))
    assert diagnosis.paragraph.startswith(f"{tmp_path / 'jump'} has ")
    assert "First sign: learning-rate jump. The learning rate rose to 0.1 at step 29, 100 times" in diagnosis.paragraph
    back = "Set `lr` back to 0.001, its largest value before step 29: check the schedule, and what a resume restored."
    assert diagnosis.remedies == [back]
    assert f"What to do: {back}" in diagnosis.paragraph
    told = diagnosis.as_dict()
    assert (told["remedies"], told["cause"]) == ([back], ["lr_jump"])
    assert all(event["remedy"] for event in told["events"])
    assert all(event["consequence"] for event in told["events"] if event["severity"] == "warning")
    (divergence,) = (event for event in diagnosis.events if event.kind == "divergence")
    alone = replace(diagnosis, events=(divergence,), cause=explain([divergence]))
    assert alone.remedies == [DETECTORS["divergence"].remedy]
    assert alone.as_dict()["cause"] == "unknown"
    assert "Cause unknown: `stabilitylab explain` can test it" in alone.paragraph
    probed = found(made(tmp_path / "probed", {"loss": loss}, config={"model": {}, "train": {}}))
    probed = replace(probed, events=(divergence,), cause=explain([divergence]))
    assert "can test it, if the run is made again with `probe --record`." in probed.paragraph
    assert "watch(" not in probed.paragraph
    recorded = replace(alone, replayable=True)
    assert f"Cause unknown: `stabilitylab explain {diagnosis.run}` can test it. What to do" in recorded.paragraph
    early = replace(divergence, step=0)
    assert "Cause unknown" not in replace(alone, events=(early,), cause=explain([early])).paragraph, (
        "no update was made"
    )
    assert "Cause unknown" not in diagnosis.paragraph, "a jump of the rate names the cause"


def test_a_healthy_run_has_no_unknown_cause(tmp_path: Path) -> None:
    diagnosis = found(made(tmp_path / "run", {"loss": falling(60)}))
    assert (diagnosis.unknown, diagnosis.as_dict()["cause"]) == ("", [])
    assert "Cause unknown" not in diagnosis.paragraph


def test_every_finding_of_a_run_has_a_remedy_that_names_a_knob_or_says_what_to_look_at() -> None:
    """In backquotes stands what one sets or calls; the others say which thing to look at."""
    without = {kind for kind, detector in DETECTORS.items() if "`" not in detector.remedy}
    assert without == {"alike_tokens", "module_setting", "optimizer_setting", "accumulation_change"}, (
        "these have their numbers in the advice of the event, or need nothing"
    )


def test_every_remedy_is_an_instruction() -> None:
    for kind, detector in DETECTORS.items():
        assert detector.remedy[:1].isupper(), f"{kind}: begin the remedy with a verb: {detector.remedy!r}"
        assert detector.remedy.endswith("."), f"{kind}: end the remedy with a full stop: {detector.remedy!r}"
