"""Attention without a choice: made-up gradients, and a model whose tokens are made alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diagnose_cases import Copier, Made, falling, found, kinds, made, only, train

from stabilitylab.diagnose.detectors.rank import MAY_PASS, NOTHING_TO_CHOOSE
from stabilitylab.schema import Row

STEPS = [step * MAY_PASS // 20 for step in range(41)]  # the collapse at row 20 is as old as it must be
ROWS = [Row(f"{stack}.{n}.{part}", stack, n, part) for stack in ("encoder", "decoder") for n in (1, 2, 3)
        for part in ("attn", "ffn")]  # fmt: skip


LOSS = {"loss": falling(41)}


def gradients(share: Any) -> Made:
    """Of attention 1 to values and output and ``share(step)`` (places,) to queries and keys; of a feed-forward 1."""

    def values(step: int) -> np.ndarray:
        own = np.broadcast_to(share(step), (len(ROWS),))
        attention = np.array([row.sublayer == "attn" for row in ROWS])
        queries = np.where(attention, own, np.nan)
        return np.stack([np.hypot(1.0, np.nan_to_num(queries)), queries], axis=1)

    return Made(ROWS, ("value", "qk"), values, STEPS)


def diagnosed(folder: Path, share: Any) -> Any:
    return found(made(folder / "run", LOSS, {"grad_norm": gradients(share)}, STEPS))


@pytest.mark.parametrize(("factor", "seen"), [(0.9, True), (1.1, False)])
def test_below_the_threshold_to_the_end_is_a_warning(tmp_path: Path, factor: float, seen: bool) -> None:
    low = np.array([1.0, 1, factor * NOTHING_TO_CHOOSE, 1, factor * NOTHING_TO_CHOOSE, 1, 1, 1, 1, 1, 1, 1])
    diagnosis = diagnosed(tmp_path, lambda t: low if t >= MAY_PASS else np.ones(12))
    assert ("rank_collapse" in kinds(diagnosis)) == seen
    if seen:
        event = only(diagnosis, "rank_collapse")
        assert (event.step, event.after, event.until, event.severity) == (MAY_PASS, STEPS[19], None, "warning")
        assert event.place == ROWS[2]
        assert "layer 2 of encoder (attn)" in event.evidence
        assert event.evidence.endswith("at the end 2 of 3 layers are affected")


def test_what_may_still_pass_and_what_is_in_few_layers_is_a_note(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path / "a", lambda t: 1e-9 if t > MAY_PASS else 1.0)
    young = only(diagnosis, "rank_collapse")
    assert (young.severity, young.until) == ("note", None)
    assert young.evidence.endswith("at the end 3 of 3 layers are affected, and may recover")
    assert diagnosis.verdict == "open"  # it would be called healthy else, and may never be
    passes = "the rank collapse of the encoder may pass, and the rank collapse of the decoder may pass"
    assert f", but {passes}. Note: attention does not choose" in diagnosis.paragraph
    low = np.array([1.0, 1, 1e-9, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    one = diagnosed(tmp_path / "b", lambda t: low)
    assert (one.verdict, only(one, "rank_collapse").severity) == ("healthy", "note")


@pytest.mark.parametrize(
    ("worth", "says", "verdict"),
    [
        (
            0.001,
            "and may recover; the decoder ignores its input (a wrong source does not change the validation loss)",
            "open",
        ),
        (0.05, "and may recover", "open"),
        (0.4, "and may recover; the decoder still reads its source (a wrong one costs 0.4 nats a token)", "healthy"),
    ],
)
def test_what_the_source_is_worth_is_said_where_it_was_measured(
    tmp_path: Path, worth: float, says: str, verdict: str
) -> None:
    losses = {**LOSS, "source_worth": [None] * 40 + [worth]}
    collapsed = gradients(lambda t: 1e-9 if t > MAY_PASS else 1.0)
    diagnosis = found(made(tmp_path / "run", losses, {"grad_norm": collapsed}, STEPS))
    event = only(diagnosis, "rank_collapse")
    assert event.evidence.endswith(f"3 of 3 layers are affected, {says}")
    assert all(map(math.isfinite, event.numbers.values()))
    assert diagnosis.verdict == verdict


def test_without_a_measured_source_every_number_is_one(tmp_path: Path) -> None:
    """NaN is no JSON."""
    event = only(diagnosed(tmp_path, lambda t: 1e-9 if t > MAY_PASS else 1.0), "rank_collapse")
    assert all(map(math.isfinite, event.numbers.values()))


def test_what_passes_is_a_note(tmp_path: Path) -> None:
    event = only(diagnosed(tmp_path, lambda t: 1e-9 if STEPS[5] <= t < STEPS[35] else 1.0), "rank_collapse")
    assert (event.step, event.until, event.severity, event.places) == (STEPS[5], STEPS[35], "note", 3)
    assert "it recovered" in event.evidence
    assert event.open == ""


def test_two_rows_are_no_state(tmp_path: Path) -> None:
    assert "rank_collapse" not in kinds(diagnosed(tmp_path, lambda t: 1e-9 if STEPS[10] <= t < STEPS[12] else 1.0))


def test_attention_without_any_gradient_is_another_event(tmp_path: Path) -> None:
    def nothing(step: int) -> np.ndarray:
        return np.zeros((len(ROWS), 2))

    table = Made(ROWS, ("value", "qk"), nothing, STEPS)
    assert "rank_collapse" not in kinds(found(made(tmp_path / "run", LOSS, {"grad_norm": table}, STEPS)))


def test_a_branch_that_is_closed_at_the_start_says_nothing_there(tmp_path: Path) -> None:
    """Its norm alone has a gradient, as in ProRes at t = 0: no weight of it has one, whatever its keys are."""

    def opening(step: int) -> np.ndarray:
        attention = np.array([row.sublayer == "attn" for row in ROWS])
        queries = np.where(attention, 0.0 if step == 0 else NOTHING_TO_CHOOSE / 10, np.nan)
        rest = 0.0 if step == 0 else 1.0
        return np.stack([np.hypot(np.hypot(rest, 0.01), np.nan_to_num(queries)), queries, np.full(len(ROWS), 0.01)], 1)

    table = Made(ROWS, ("value", "qk", "ln"), opening, STEPS)
    event = only(found(made(tmp_path / "run", LOSS, {"grad_norm": table}, STEPS)), "rank_collapse")
    assert (event.step, event.after) == (STEPS[1], 0)


def test_it_is_not_checked_where_queries_and_keys_are_not_apart(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path, lambda t: np.nan)
    assert "rank_collapse" not in diagnosis.checked
    assert diagnosis.unchecked["rank_collapse"].startswith("not recorded: grad_norm.qk (probe grad_norm, where queries")


@pytest.mark.slow
def test_a_model_whose_tokens_are_alike(tmp_path: Path) -> None:
    """From step 20 on the third layer gets each sentence's mean in the place of its tokens."""

    def alike(step: int, model: Copier, optimizer: torch.optim.Optimizer) -> None:
        if step == 20:
            model.layers[2].register_forward_pre_hook(lambda _, x: (x[0].mean(1, keepdim=True).expand_as(x[0]),))

    diagnosis = found(train(tmp_path / "run", fault=alike))
    event = only(diagnosis, "rank_collapse")
    assert (event.step, event.severity) == (20, "note")  # one layer of four
    assert event.place is not None
    assert event.place.layer == 3
    assert "rank_collapse" not in kinds(found(train(tmp_path / "well")))


def test_the_softmax_is_told_from_the_tokens(tmp_path: Path) -> None:
    """By the probe of attention's entropy, where it is recorded."""
    for name, share, words in (("alike", 0.99, "attention is uniform"), ("sharp", 0.01, "attention is saturated")):
        rows = [row for row in ROWS if row.sublayer == "attn"]

        def entropies(step: int, share: float = share, count: int = len(rows)) -> np.ndarray:
            return np.tile([2.0 * share, 2.0], (count, 1))

        tables = {
            "grad_norm": gradients(lambda t: 1e-9 if t >= MAY_PASS else 1.0),
            "attention": Made(rows, ("entropy", "ceiling"), entropies, STEPS),
        }
        event = only(found(made(tmp_path / name, LOSS, tables, STEPS)), "rank_collapse")
        assert words in event.evidence
