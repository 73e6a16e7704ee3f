"""``ln_input`` against each architecture's formula, written out over sub-layer inputs and branches in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import pytest
import torch
from oracles import RUNS, UPDATES, Column, Pass, Place, Run, agree, listen, run_of, sublayers, watched_run
from torch import Tensor

from stabilitylab.models import Residual, Transformer

COLUMNS = ("value", "branch", "scaled_branch", "shortcut", "p99")


def arch_of(model: Transformer, stack: str) -> str:
    return (stack == "decoder" and model.config.decoder_arch) or model.config.arch


def shortcut_scale(model: Transformer, stack: str, residual: Residual) -> Tensor | float:
    n, m = model.config.encoder_layers, model.config.decoder_layers
    match arch_of(model, stack):
        case "admin":
            return residual.get_parameter("omega")
        case "deepnorm" if n and m:
            return 0.81 * (n**4 * m) ** (1 / 16) if stack == "encoder" else (3 * m) ** 0.25
        case "deepnorm":
            return (2 * (n + m)) ** 0.25
    return 1.0


@functools.cache
def expected(run: Run, t: int) -> dict[str, Column]:
    model, batches = run.twins[t].train(), run.batches[t]
    torch.set_rng_state(run.random[t])
    with torch.no_grad():
        passes = [listen(model, batch) for batch in batches]

        def real(stack: str, x: Sequence[Tensor]) -> Tensor:
            """L2 norms of the real tokens of all micro-batches."""
            tokens = [part[batch.masks[stack]] for part, batch in zip(x, batches, strict=True)]
            return torch.cat(tokens).square().sum(dim=1).sqrt()

        columns: dict[str, Column] = {name: {} for name in (*COLUMNS, "largest")}
        for place, residual in sublayers(model):
            numbers = at_sublayer(model, place, residual, passes)
            for name, x in numbers.items():
                columns[name][place] = real(place[0], x).mean().item()
            columns["p99"][place] = percentile(real(place[0], numbers["value"]))
            columns["largest"][place] = real(place[0], numbers["value"]).max().item()
        for name, stack in model.stacks.items():
            if stack.norm is not None:
                norms = real(name, [seen.out[name, len(stack.layers), "ffn"] for seen in passes])
                final = {"value": norms.mean().item(), "p99": percentile(norms)}
                for column in COLUMNS:
                    columns[column][name, 0, "norm"] = final.get(column, math.nan)
    return columns


def at_sublayer(
    model: Transformer, place: Place, residual: Residual, passes: Sequence[Pass]
) -> dict[str, list[Tensor]]:
    """What the norm gets, F, alpha F as it is added (alpha = 1 where there is none) and s x, of each micro-batch."""
    arch, scale = arch_of(model, place[0]), shortcut_scale(model, place[0], residual)
    x, branch = [seen.x[place] for seen in passes], [seen.branch[place] for seen in passes]
    shortcut = [scale * part for part in x]
    alpha = 1.0
    if arch == "branchnorm":
        assert model.schedule is not None
        alpha = model.schedule.get()
        assert 0 <= alpha < 1
    added = [alpha * f for f in branch]
    value = x if arch == "preln" else [s + f for s, f in zip(shortcut, added, strict=True)]
    return {"value": value, "branch": branch, "scaled_branch": added, "shortcut": shortcut}


def percentile(norms: Tensor) -> float:
    """The smallest norm that 99 % of the tokens stay at or below."""
    return min(v for v in norms.tolist() if (norms <= v).double().mean().item() >= 0.99)


@RUNS
def test_means_over_the_real_tokens_of_all_micro_batches(case: str, dtype: torch.dtype) -> None:
    run = run_of(case, dtype)
    assert set(run.tables["ln_input"].columns) == set(COLUMNS)
    for t in range(UPDATES):
        for name in COLUMNS[:-1]:
            agree(run.column(t, "ln_input", name), expected(run, t)[name], dtype)


def test_alpha_changes_from_row_to_row_and_the_branch_is_not_the_scaled_branch() -> None:
    run = run_of("branchnorm", torch.float64)
    alphas = [twin.schedule.get() for twin in run.twins if twin.schedule is not None]
    assert alphas == pytest.approx([1 / 7, 2 / 7, 3 / 7, 4 / 7])
    for t in range(UPDATES):
        branch, scaled = (run.column(t, "ln_input", name) for name in ("branch", "scaled_branch"))
        agree({place: alphas[t] * norm for place, norm in branch.items()}, scaled, torch.float64)


@RUNS
def test_p99_to_its_stated_2_2_percent(case: str, dtype: torch.dtype) -> None:
    run = run_of(case, dtype)
    for t in range(UPDATES):
        agree(run.column(t, "ln_input", "p99"), expected(run, t)["p99"], dtype, within=0.022)


def test_p99_is_not_just_the_largest() -> None:
    run = run_of("postln", torch.float64)
    columns = expected(run, 0)
    assert any(columns["largest"][place] > 1.05 * p99 for place, p99 in columns["p99"].items())


def test_without_a_mask_every_token_counts() -> None:
    run, masked = watched_run("deepnorm", torch.float64, masked=False), run_of("deepnorm", torch.float64)
    for name in COLUMNS[:-1]:
        agree(run.column(0, "ln_input", name), expected(run, 0)[name], torch.float64)
        assert run.column(0, "ln_input", name) != pytest.approx(masked.column(0, "ln_input", name), rel=1e-3)
