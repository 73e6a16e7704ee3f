"""What the reference pass records, against float64 models of each row run on the held-out batch in eval mode."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import pytest
import torch
from oracles import RUNS, UPDATES, Column, Pass, Place, Run, agree, listen, loss_tokens, run_of, watched_run
from torch import Tensor

from stabilitylab.models import Transformer

ALL_ROWS = range(UPDATES + 1)  # the last one is "after training"


def reference(run: Run, t: int, alpha_of: int | None = None) -> list[Pass]:
    """The held-out batches under theta_t and alpha_t, or the alpha of another row."""
    model, other = run.twins[t].eval(), run.twins[t if alpha_of is None else alpha_of]
    if model.schedule is None or other.schedule is None:
        return held_out_passes(run, model)
    own = model.schedule.get()
    model.schedule.set(other.schedule.get())
    try:
        return held_out_passes(run, model)
    finally:
        model.schedule.set(own)


def held_out_passes(run: Run, model: Transformer) -> list[Pass]:
    with torch.no_grad():
        return [listen(model, batch) for batch in run.held_out]


def mean(numbers: Iterable[float]) -> float:
    numbers = list(numbers)
    return math.fsum(numbers) / len(numbers)


def cosines(a: Tensor, b: Tensor) -> list[float]:
    """Of two (tokens, width) tensors, token by token."""
    return [float(x @ y) / math.sqrt(float(x @ x) * float(y @ y)) for x, y in zip(a, b, strict=True)]


def distance(run: Run, a: Sequence[Pass], b: Sequence[Pass]) -> Column:
    """Mean over real tokens of ||F_a - F_b||_2 for the output of each stack, its final norm included."""
    result: Column = {}
    for stack in run.twins[0].stacks:
        parts = [p.stack[stack] - q.stack[stack] for p, q in zip(a, b, strict=True)]
        real = torch.cat([part[batch.masks[stack]] for part, batch in zip(parts, run.held_out, strict=True)])
        result[stack, 0, "output"] = mean(math.sqrt(float(d @ d)) for d in real)
    return result


def similarity(run: Run, t: int) -> tuple[Column, Column]:
    """Raw, and without the mean token, of each layer's input and output; the token means are those of one batch."""
    raw: dict[Place, list[float]] = {}
    centred: dict[Place, list[float]] = {}
    for seen, batch in zip(reference(run, t), run.held_out, strict=True):
        for stack, number, sublayer in seen.out:
            if sublayer == "ffn":
                real, place = batch.masks[stack], (stack, number, "")
                below, above = seen.x[stack, number, "self_attn"][real], seen.out[stack, number, "ffn"][real]
                raw.setdefault(place, []).extend(cosines(below, above))
                centred.setdefault(place, []).extend(cosines(below - below.mean(dim=0), above - above.mean(dim=0)))
    return {at: mean(x) for at, x in raw.items()}, {at: mean(x) for at, x in centred.items()}


def nonzero(run: Run, t: int, doubt: float = 0.0) -> Column:
    """Share of what fc1 yields at real tokens that is above 0, or nearer to 0 than ``doubt``."""
    above: dict[Place, list[Tensor]] = {}
    for seen, batch in zip(reference(run, t), run.held_out, strict=True):
        for place, before_relu in seen.fc1.items():
            entries = before_relu[batch.masks[place[0]]].flatten()
            above.setdefault(place, []).append(entries.abs() < doubt if doubt else entries > 0)
    return {place: torch.cat(parts).double().mean().item() for place, parts in above.items()}


@RUNS
def test_cosine_similarity_of_each_layer_with_the_one_below(case: str, dtype: torch.dtype) -> None:
    run = run_of(case, dtype)
    assert set(run.tables["cosine_similarity"].columns) == {"raw", "centred"}
    for t in ALL_ROWS:
        raw, centred = similarity(run, t)
        agree(run.column(t, "cosine_similarity", "raw"), raw, dtype)
        agree(run.column(t, "cosine_similarity", "centred"), centred, dtype)


@RUNS
def test_share_of_activations_above_zero(case: str, dtype: torch.dtype) -> None:
    run = run_of(case, dtype)
    assert run.tables["activation_sparsity"].columns == ("nonzero_fraction", "active_fraction")
    for t in ALL_ROWS:
        doubt = 0.0 if dtype == torch.float64 else max(nonzero(run, t, doubt=1e-5).values())
        recorded = run.column(t, "activation_sparsity", "nonzero_fraction")
        assert recorded == pytest.approx(nonzero(run, t), rel=1e-12, abs=doubt)


@RUNS
def test_model_update_from_the_start_and_from_the_row_before(case: str, dtype: torch.dtype) -> None:
    run = run_of(case, dtype)
    outputs = [reference(run, t) for t in ALL_ROWS]
    for t in ALL_ROWS:
        cumulative = distance(run, outputs[t], outputs[0])
        agree(run.column(t, "model_update", "cumulative"), cumulative, dtype, scale=1.0)
        if t == 0:
            assert all(math.isnan(x) for x in run.column(0, "model_update", "one_update").values())
        else:
            agree(run.column(t, "model_update", "one_update"), distance(run, outputs[t], outputs[t - 1]), dtype)


@RUNS
def test_model_update_apart_for_parameters_and_schedule(case: str, dtype: torch.dtype) -> None:
    run = run_of(case, dtype)
    start = reference(run, 0)
    for t in ALL_ROWS:
        now, start_at_alpha = reference(run, t), reference(run, 0, alpha_of=t)
        parameters, schedule = distance(run, now, start_at_alpha), distance(run, start_at_alpha, start)
        if t > 0 and run.twins[0].schedule is not None:
            assert schedule[next(reversed(schedule))] > 1e-3  # alpha alone moves the last stack's output
        agree(run.column(t, "model_update", "parameters"), parameters, dtype, scale=1.0)
        agree(run.column(t, "model_update", "schedule"), schedule, dtype, scale=1.0)


def test_one_update_is_against_the_row_before_even_where_that_row_is_not_due() -> None:
    run = watched_run("branchnorm", torch.float64, update_every=3)
    outputs = [reference(run, t) for t in ALL_ROWS]
    assert [t for t in ALL_ROWS if "model_update" in run.rows[t][1]] == [0, 3]
    agree(run.column(3, "model_update", "one_update"), distance(run, outputs[3], outputs[2]), torch.float64)
    agree(run.column(3, "model_update", "cumulative"), distance(run, outputs[3], outputs[0]), torch.float64)


@pytest.mark.parametrize(("masked", "held_out"), [(False, 1), (True, 2)], ids=["without a mask", "two batches"])
def test_all_tokens_that_count_are_pooled(masked: bool, held_out: int) -> None:
    run, plain = watched_run("branchnorm", torch.float64, masked=masked, held_out=held_out), "branchnorm"
    outputs = [reference(run, t) for t in ALL_ROWS]
    numbers = {
        ("cosine_similarity", "raw"): similarity(run, 1)[0],
        ("cosine_similarity", "centred"): similarity(run, 1)[1],
        ("activation_sparsity", "nonzero_fraction"): nonzero(run, 1),
        ("model_update", "cumulative"): distance(run, outputs[1], outputs[0]),
        ("model_update", "parameters"): distance(run, outputs[1], reference(run, 0, alpha_of=1)),
    }
    for (table, column), expected in numbers.items():
        agree(run.column(1, table, column), expected, torch.float64)
        assert expected != pytest.approx(run_of(plain, torch.float64).column(1, table, column), rel=1e-5)


@RUNS
def test_what_the_reference_returns_becomes_a_metric_of_its_row(case: str, dtype: torch.dtype) -> None:
    run = run_of(case, dtype)
    for t in ALL_ROWS:
        nll = sum(float(seen.result) for seen in reference(run, t)) / loss_tokens(run.held_out)
        assert run.rows[t][0]["held_out_nll"] == pytest.approx(nll, rel=1e-9 if dtype == torch.float64 else 2e-5)
