"""A source that is not read: made-up courses, and a model whose encoder is made constant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from diagnose_cases import falling, found, kinds, made, only

from stabilitylab.diagnose import Diagnosis
from stabilitylab.diagnose.detectors.rank import MAY_PASS
from stabilitylab.diagnose.detectors.source import ALIKE_OUTPUTS
from stabilitylab.verdict import READS_NATS

ROWS = 41
STEPS = [row * MAY_PASS // 20 for row in range(ROWS)]  # what begins at row 20 is as old as it must be
UNIGRAM = {"cross_entropy": 5.0, "accuracy": 0.1}


def diagnosed(
    folder: Path, *, worth: float, between: float, within: float, loss: float = 3.0, steps: Sequence[int] = STEPS
) -> Diagnosis:
    """Distances of .5 that become ``between`` and ``within`` at row 20; a held-out loss that falls to ``loss``."""
    held_out = [6.0 - (6.0 - loss) * row / (ROWS - 1) for row in range(ROWS)]
    metrics: dict[str, list[Any]] = {
        "loss": falling(ROWS),
        "held_out_nll": held_out,
        "held_out_accuracy": [0.2] * ROWS,
        "source_worth": [0.0] * 20 + [worth] * 21,
        "encoder_distance_between": [0.5] * 20 + [between] * 21,
        "encoder_distance_within": [0.5] * 20 + [within] * 21,
    }
    return found(made(folder / "run", metrics, {}, steps, unigram=UNIGRAM))


@pytest.mark.parametrize(("factor", "seen"), [(0.99, True), (1.01, False)])
def test_an_encoder_that_is_the_same_everywhere_is_constant(tmp_path: Path, factor: float, seen: bool) -> None:
    diagnosis = diagnosed(tmp_path, worth=0.0, between=factor * ALIKE_OUTPUTS, within=1e-9)
    assert ("constant_encoder" in kinds(diagnosis)) == seen
    assert ("ignored_source" in kinds(diagnosis)) != seen
    if seen:
        event = only(diagnosis, "constant_encoder")
        assert (event.step, event.after, event.until, event.severity) == (STEPS[20], STEPS[19], None, "warning")
        assert event.numbers["within"] == 1e-9
        assert diagnosis.verdict == "warning"


def test_a_stack_alone_has_no_source_that_was_not_recorded(run, tmp_path: Path) -> None:
    config = {"model": {"stack": "decoder"}, "train": {}}
    diagnosis = found(made(tmp_path / "one", {"loss": falling(ROWS)}, config=config))
    three = ("constant_encoder", "ignored_source", "alike_tokens")
    assert {diagnosis.unchecked[kind] for kind in three} == {"a decoder alone has no source"}
    out = run("diagnose", "one")[1]
    assert "not checked: constant encoder, ignored source, alike tokens; a decoder alone has no source" in out
    both = found(made(tmp_path / "both", {"loss": falling(ROWS)}, config={"model": {}, "train": {}}))
    assert both.unchecked["ignored_source"].startswith("not recorded: source_worth")


def test_tokens_that_are_alike_and_read_are_a_note(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path, worth=0.44, between=0.2, within=1e-10)
    event = only(diagnosis, "alike_tokens")
    assert (event.step, event.severity) == (STEPS[20], "note")
    assert "costs 0.44 nats a token" in event.evidence
    assert not {"constant_encoder", "ignored_source"} & {*kinds(diagnosis)}


@pytest.mark.parametrize(("worth", "seen"), [(READS_NATS - 0.01, True), (READS_NATS, False)])
def test_a_decoder_that_ignores_an_encoder_that_works(tmp_path: Path, worth: float, seen: bool) -> None:
    diagnosis = diagnosed(tmp_path, worth=worth, between=0.2, within=0.1)
    assert ("ignored_source" in kinds(diagnosis)) == seen
    assert not {"constant_encoder", "alike_tokens"} & {*kinds(diagnosis)}


def test_what_may_still_pass_leaves_the_run_open(tmp_path: Path) -> None:
    """The same with a quarter of the updates: 18-layer models began to read within 500."""
    young: dict[str, Any] = {"steps": [step // 4 for step in STEPS]}
    constant = diagnosed(tmp_path / "a", worth=0.0, between=1e-6, within=1e-9, **young)
    unread = diagnosed(tmp_path / "b", worth=0.0, between=0.2, within=0.1, **young)
    assert only(constant, "constant_encoder").severity == only(unread, "ignored_source").severity == "note"
    assert constant.verdict == unread.verdict == "open"


def test_a_dip_at_the_baseline_may_pass(tmp_path: Path) -> None:
    """Every trajectory dips towards a constant while the loss is that of the unigram distribution."""
    diagnosis = diagnosed(tmp_path, worth=0.0, between=1e-6, within=1e-6, loss=5.0)
    event = only(diagnosis, "constant_encoder")
    assert event.severity == "note"
    assert event.open == "the encoder may recover from a constant function"
    assert "ignored_source" not in kinds(diagnosis)
