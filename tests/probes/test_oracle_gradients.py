"""Parameter gradients, activation gradients and updates against ``torch.autograd.grad`` in float64, piece by piece."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from oracles import (
    ADAM_EPS,
    RUNS,
    UPDATES,
    WIDTH,
    Batch,
    Column,
    Place,
    Run,
    agree,
    listen,
    loss_tokens,
    run_of,
    sublayers,
    watched_run,
)
from rest_slow import rest_slow
from torch import Tensor

from stabilitylab.models import Transformer

GROUPS = ("vo_ffn", "qk", "bias", "ln")
ROWS = {  # matrix -> group -> its rows
    "qkv": {"qk": slice(0, 2 * WIDTH), "vo_ffn": slice(2 * WIDTH, 3 * WIDTH)},
    "q": {"qk": slice(0, WIDTH)},
    "kv": {"qk": slice(0, WIDTH), "vo_ffn": slice(WIDTH, 2 * WIDTH)},
    **{matrix: {"vo_ffn": slice(None)} for matrix in ("out", "fc1", "fc2")},
}
MATRICES = {"self_attn": ("qkv", "out"), "cross_attn": ("q", "kv", "out"), "ffn": ("fc1", "fc2")}


class Piece(NamedTuple):
    place: Place
    group: str  # one of GROUPS, or "" for what is in none of them
    in_branch: bool  # a parameter of F: alpha multiplies its gradient
    name: str
    parameter: Tensor
    rows: slice = slice(None)


def pieces(model: Transformer) -> Iterator[Piece]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}

    def piece(place: Place, group: str, parameter: Tensor, rows: slice = slice(None), in_branch: bool = False) -> Piece:
        return Piece(place, group, in_branch, names[parameter], parameter, rows)

    for place, residual in sublayers(model):
        for matrix in MATRICES[place[2]]:
            linear = residual.f.get_submodule(matrix)
            for group, rows in ROWS[matrix].items():
                yield piece(place, group, linear.get_parameter("weight"), rows, in_branch=True)
            yield piece(place, "bias", linear.get_parameter("bias"), in_branch=True)
        for parameter in residual.norm.parameters():
            yield piece(place, "ln", parameter)
        if hasattr(residual, "omega"):
            yield piece(place, "", residual.get_parameter("omega"))
    for stack_name, stack in model.stacks.items():
        for parameter in stack.norm.parameters() if stack.norm is not None else ():
            yield piece((stack_name, 0, "norm"), "ln", parameter)
    embeddings = {stack.embedding.weight: name for name, stack in model.stacks.items()}  # a shared one: the last's
    for weight, stack_name in embeddings.items():
        yield piece((stack_name, 0, "embedding"), "", weight)
    if model.output.weight not in embeddings:
        yield piece(("", 0, "output"), "", model.output.weight)


def length(tensors: Sequence[Tensor]) -> float:
    """L2 norm of all entries together; NaN of none."""
    return math.sqrt(math.fsum(x.double().square().sum().item() for x in tensors)) if tensors else math.nan


class Gradients(NamedTuple):
    parameters: dict[str, Tensor]
    streams: Column  # ||dE/dx|| of what enters a stack and of what leaves each sub-layer


def gradients(model: Transformer, batches: Sequence[Batch], random: Tensor) -> Gradients:
    """E is the loss per token over all micro-batches; its gradient in the concatenation of their activations."""
    torch.set_rng_state(random)
    passes = [listen(model.train(), batch) for batch in batches]
    loss = torch.stack([seen.result for seen in passes]).sum() / loss_tokens(batches)
    streams: dict[Place, list[Tensor]] = {}
    for seen in passes:
        entering = {(name, 0, "input"): seen.x[name, 1, "self_attn"] for name in model.stacks}
        for place, x in (entering | seen.out).items():
            streams.setdefault(place, []).append(x)
    parameters = dict(model.named_parameters())
    flat = [x for parts in streams.values() for x in parts]
    found = torch.autograd.grad(loss, [*parameters.values(), *flat])
    rest = iter(found[len(parameters) :])
    norms = {place: length([next(rest) for _ in parts]) for place, parts in streams.items()}
    return Gradients(dict(zip(parameters, found, strict=False)), norms)


@functools.cache
def expected(case: str, dtype: torch.dtype) -> list[Gradients]:
    run = run_of(case, dtype)
    return [gradients(run.twins[t], run.batches[t], run.random[t]) for t in range(UPDATES)]


def norm(model: Transformer, found: Gradients, keep: Callable[[Piece], bool]) -> float:
    return length([found.parameters[piece.name][piece.rows] for piece in pieces(model) if keep(piece)])


def places(model: Transformer) -> list[Place]:
    return list(dict.fromkeys(piece.place for piece in pieces(model)))


def test_the_pieces_are_all_of_the_model_once() -> None:
    run = run_of("admin", torch.float64)
    model = run.twins[0]
    assert sum(p.parameter[p.rows].numel() for p in pieces(model)) == sum(p.numel() for p in model.parameters())


@RUNS
def test_grad_norm_of_every_place_and_group(case: str, dtype: torch.dtype) -> None:
    run = run_of(case, dtype)
    assert set(run.tables["grad_norm"].columns) == {"value", *GROUPS}
    for t, found in enumerate(expected(case, dtype)):
        model = run.twins[t]
        value = {place: norm(model, found, lambda p, at=place: p.place == at) for place in places(model)}
        agree(run.column(t, "grad_norm", "value"), value, dtype)
        for group in GROUPS:
            part = {at: norm(model, found, lambda p, at=at, g=group: (p.place, p.group) == (at, g)) for at in value}
            agree(run.column(t, "grad_norm", group), part, dtype, scale=max(value.values()))


def test_alpha_0_gives_every_branch_and_the_whole_encoder_a_gradient_of_exactly_0() -> None:
    run = run_of("alpha-from-0", torch.float32)
    for group in ("vo_ffn", "qk", "bias"):
        assert {v for v in run.column(0, "grad_norm", group).values() if not math.isnan(v)} == {0.0}
    for table in ("grad_norm", "activation_grad_norm"):
        for place, value in run.column(0, table, "value").items():
            assert (value == 0.0) == (place[0] == "encoder")
    assert run.rows[0][0]["grad_norm_branch_decoder"] == run.rows[0][0]["grad_norm_branch_encoder"] == 0.0
    assert min(run.column(1, "grad_norm", "value").values()) > 0


@pytest.mark.parametrize("scale", rest_slow([1e-28, 1e28], [1e28]))
def test_float32_gradients_whose_squares_leave_the_range_of_float32(scale: float) -> None:
    run, plain = (watched_run("postln", torch.float32, loss_scale=loss_scale) for loss_scale in (scale, 1.0))
    for table, column in [("grad_norm", name) for name in ("value", *GROUPS)] + [("activation_grad_norm", "value")]:
        scaled = {place: scale * norm for place, norm in plain.column(0, table, column).items()}
        agree(run.column(0, table, column), scaled, torch.float32)
    assert run.rows[0][0]["grad_norm_total"] == pytest.approx(scale * (plain.rows[0][0]["grad_norm_total"] or 0), 1e-5)


@RUNS
def test_gradient_norms_of_the_whole_model(case: str, dtype: torch.dtype) -> None:
    run = run_of(case, dtype)
    for t, found in enumerate(expected(case, dtype)):
        model = run.twins[t]
        total = {
            "grad_norm_total": norm(model, found, lambda p: True),
            "grad_norm_nonbranch": norm(model, found, lambda p: not p.in_branch),
        }
        for stack in model.stacks:
            branch = norm(model, found, lambda p, at=stack: p.in_branch and p.place[0] == at)
            total[f"grad_norm_branch_{stack}"] = branch
        recorded = {name: value for name, value in run.rows[t][0].items() if name.startswith("grad_norm_")}
        assert recorded == pytest.approx(total, rel=1e-9 if dtype == torch.float64 else 2e-5)


@RUNS
def test_share_of_gradient_entries_under_adams_eps(case: str, dtype: torch.dtype) -> None:
    run = run_of(case, dtype)
    for t, found in enumerate(expected(case, dtype)):
        entries = torch.cat([gradient.flatten() for gradient in found.parameters.values()]).abs()
        share = (entries < ADAM_EPS).double().mean().item()
        assert 0 < share < 1
        unsure = 0 if dtype == torch.float64 else ((entries / ADAM_EPS - 1).abs() < 1e-3).double().mean().item()
        assert run.rows[t][0]["grad_under_eps"] == pytest.approx(share, abs=unsure + 1e-12)


@RUNS
def test_activation_grad_norm_of_every_place(case: str, dtype: torch.dtype) -> None:
    run = run_of(case, dtype)
    for t, found in enumerate(expected(case, dtype)):
        agree(run.column(t, "activation_grad_norm", "value"), found.streams, dtype)


def moved(run: Run, t: int) -> tuple[dict[Place, list[Tensor]], dict[Place, list[Tensor]]]:
    """theta_{t+1} - theta_t and theta_t by place."""
    steps: dict[Place, list[Tensor]] = {}
    weights: dict[Place, list[Tensor]] = {}
    after = dict(run.twins[t + 1].named_parameters())
    for piece in pieces(run.twins[t]):
        before = piece.parameter[piece.rows].detach()
        weights.setdefault(piece.place, []).append(before)
        steps.setdefault(piece.place, []).append(after[piece.name][piece.rows].detach() - before)
    return steps, weights


@RUNS
def test_update_ratio_of_every_place(case: str, dtype: torch.dtype) -> None:
    run = run_of(case, dtype)
    assert set(run.tables["update_ratio"].columns) == {"value", "rms"}
    for t in range(UPDATES):
        steps, weights = moved(run, t)
        ratio = {place: length(steps[place]) / length(weights[place]) for place in steps}
        entries = {place: sum(x.numel() for x in parts) for place, parts in steps.items()}
        rms = {place: length(steps[place]) / math.sqrt(entries[place]) for place in steps}
        assert min(ratio.values()) > 0
        agree(run.column(t, "update_ratio", "value"), ratio, dtype)
        agree(run.column(t, "update_ratio", "rms"), rms, dtype)
    assert "update_ratio" not in run.rows[UPDATES][1]
