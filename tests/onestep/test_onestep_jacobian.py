"""LN's Jacobian in closed form against automatic differentiation, and its table against tokens one by one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from onestep_cases import real_tokens, subject_of
from rest_slow import rest_slow
from torch import Tensor, nn
from torch.func import jacrev

from stabilitylab.onestep.initial_model import hooked
from stabilitylab.onestep.jacobian import Jacobians, jacobian_norms


@pytest.mark.parametrize("d", [2, 3, 8, 33])
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 30.0])  # with eps = 1e-5, a small token is hardly normalised
def test_norms_of_the_jacobian_that_autograd_finds(d: int, scale: float) -> None:
    x = scale * torch.randn(5, d, dtype=torch.float64, generator=torch.Generator().manual_seed(d)) + 0.3
    frobenius, spectral = jacobian_norms(x, 1e-5)
    for token, fro, two in zip(x, frobenius, spectral, strict=True):
        jacobian: Tensor = jacrev(lambda t: F.layer_norm(t, (d,), eps=1e-5))(token)  # type: ignore[assignment]
        assert fro.item() == pytest.approx(torch.linalg.matrix_norm(jacobian).item(), rel=1e-9)
        assert two.item() == pytest.approx(torch.linalg.matrix_norm(jacobian, 2).item(), rel=1e-9)


@pytest.mark.parametrize("d", [1, 2, 33])
@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_norms_of_rms_norms_jacobian(d: int, scale: float) -> None:
    x = scale * torch.randn(5, d, dtype=torch.float64, generator=torch.Generator().manual_seed(d))
    frobenius, spectral = jacobian_norms(x, 1e-5, centred=False)
    for token, fro, two in zip(x, frobenius, spectral, strict=True):
        jacobian: Tensor = jacrev(lambda t: F.rms_norm(t, (d,), eps=1e-5))(token)  # type: ignore[assignment]
        assert fro.item() == pytest.approx(torch.linalg.matrix_norm(jacobian).item(), rel=1e-9)
        assert two.item() == pytest.approx(torch.linalg.matrix_norm(jacobian, 2).item(), rel=1e-9)


@pytest.mark.parametrize(
    ("arch", "stack"),
    rest_slow([("deepnorm", "encoder-decoder"), ("preln", "encoder"), ("admin", "decoder")], [("preln", "encoder")]),
)
def test_one_row_a_norm_with_means_over_its_real_tokens(arch: str, stack: str) -> None:
    subject = subject_of(arch, stack)
    norms = {name: m for name, m in subject.model.named_modules() if isinstance(m, nn.LayerNorm)}
    entered: dict[str, Tensor] = {}
    for name, norm in norms.items():
        norm.register_forward_pre_hook(lambda _norm, args, name=name: entered.update({name: args[0]}))
    jacobians = Jacobians(subject)
    with hooked(jacobians.hooks()):
        subject.output()
    table, cells = jacobians.table()
    assert [row.site for row in table.rows] == list(norms)
    assert [row.layer for row in table.rows if row.sublayer == "norm"] == [0] * (arch == "preln")
    for row, values in zip(table.rows, cells.values.tolist(), strict=True):
        tokens = entered[row.site].detach()[real_tokens(subject, row.stack)]
        d = tokens.shape[1]
        full = torch.stack([jacrev(lambda t, d=d: F.layer_norm(t, (d,)))(token) for token in tokens])  # type: ignore
        expected = {
            "frobenius": full.square().sum((1, 2)).sqrt().mean().item(),
            "spectral": torch.linalg.matrix_norm(full, 2).mean().item(),
            "input": math.fsum(math.sqrt(float(t @ t)) for t in tokens) / len(tokens),
            "centred": (tokens - tokens.mean(1, keepdim=True)).square().sum(1).sqrt().mean().item(),
        }
        assert dict(zip(table.columns, values, strict=True)) == pytest.approx(expected, rel=1e-9)
