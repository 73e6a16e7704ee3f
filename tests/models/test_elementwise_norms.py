"""DyT and Derf in the place of norms: vectors, places, and that each feature stands for itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from test_arch_formulas import Written, assert_equals_plain
from test_model_forward import Array

from stabilitylab.errors import UsageError
from stabilitylab.models import ARCHS, build_model
from stabilitylab.models.norms import DynamicErfNorm, DynamicTanhNorm, new_norm
from stabilitylab.probes import find_sites

SIZES: dict[str, Any] = {"d_model": 16, "d_ffn": 32, "heads": 2, "source_vocab": 37, "target_vocab": 37}
HOSTS = sorted(name for name, entry in ARCHS.items() if entry.is_sum)
OTHERS = sorted(name for name, entry in ARCHS.items() if entry.normalised and not entry.is_sum)
erf = np.vectorize(math.erf)


@pytest.mark.parametrize(
    ("kind", "values"),
    [("dyt", [-0.761594156, -0.244918662, 0, 0.244918662, 0.761594156]),
     ("derf", [-0.842700793, -0.276326390, 0, 0.276326390, 0.842700793])],
)  # fmt: skip
def test_values_of_the_reference(kind, values) -> None:
    x = torch.tensor([-2, -0.5, 0, 0.5, 2], dtype=torch.float64)
    found = new_norm(kind, 5).double()(x).detach().numpy()
    np.testing.assert_allclose(found, values, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["dyt", "derf"])
def test_each_feature_stands_for_itself(kind) -> None:
    norm = new_norm(kind, 6).double()
    x = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    jacobian = torch.autograd.functional.jacobian(norm, x)
    off = jacobian - torch.diag(jacobian.diagonal())
    assert not off.any()
    small = 1e-6 * x
    slope = {"dyt": 0.5, "derf": 2 * 0.5 / math.sqrt(math.pi)}[kind]
    torch.testing.assert_close(norm(small).detach(), slope * small, rtol=1e-9, atol=0)


class Elementwise(Written):
    def norm(self, role: str, x: Array) -> Array:
        alpha, gain = self.weights[f"{role}.alpha"], self.weights[f"{role}.weight"]
        inside = np.tanh(alpha * x) if self.config.norm == "dyt" else erf(alpha * x + self.weights[f"{role}.shift"])
        return gain * inside + self.weights[f"{role}.bias"]


@pytest.mark.parametrize("kind", ["dyt", "derf"])
@pytest.mark.parametrize("arch", [host for host in HOSTS if not host.startswith("dlcl")])
def test_forward_equals_the_formula_in_every_form_of_preln(arch, kind, small, randomise, pairs) -> None:
    model = randomise(small(arch, norm=kind).double())
    assert_equals_plain(model, pairs, Elementwise(model))


def test_alpha_starts_by_its_place() -> None:
    model = build_model(arch="preln", depth=4, norm="derf", norm_alpha=(0.8, 0.2, 0.1), **SIZES)
    for residual in model.residuals():
        assert float(residual.norm.alpha.detach()) == pytest.approx(0.2 if residual.place.sublayer == "ffn" else 0.8)
    assert float(model.decoder.norm.alpha.detach()) == pytest.approx(0.1)
    assert isinstance(model.decoder.norm, DynamicErfNorm)


def test_probes_take_them_for_norms() -> None:
    model = build_model(arch="preln", stack="decoder", depth=2, norm="dyt", bias=False, **SIZES)
    found = find_sites(model).norms
    assert len(found) == 5
    assert all(isinstance(site.module, DynamicTanhNorm) for site in found)
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]


@pytest.mark.parametrize("arch", OTHERS)
def test_a_stream_that_is_to_be_normalised_refuses(arch) -> None:
    with pytest.raises(UsageError, match="normalise nothing"):
        build_model(arch=arch, norm="dyt", depth=2, **SIZES)


def test_qk_norm_needs_a_norm() -> None:
    with pytest.raises(UsageError, match=r"model\.qk_norm needs a norm"):
        build_model(arch="preln", norm="dyt", qk_norm=True, depth=2, **SIZES)
