"""Against curvlinops, an implementation that shares no line with ours, on five models of different kinds."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from curvature_toys import numbers, recorded
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

curvlinops = pytest.importorskip(
    "curvlinops", reason="pip install curvlinops-for-pytorch: not in [dev], as it chooses a torch through torchvision"
)
Made = tuple[nn.Module, nn.Module, Tensor, Tensor]  # model, loss, input, labels


def perceptron() -> Made:
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    return model, nn.MSELoss(), torch.randn(10, 6), torch.randn(10, 3)


def convolution() -> Made:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(64, 3))
    return model, nn.CrossEntropyLoss(), torch.randn(9, 1, 6, 6), torch.arange(9) % 3


def normed() -> Made:
    model = nn.Sequential(nn.Embedding(7, 8), nn.LayerNorm(8), nn.Flatten(), nn.Linear(32, 4))
    return model, nn.CrossEntropyLoss(), torch.randint(0, 7, (8, 4)), torch.arange(8) % 4


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 6)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state)


def recurrent() -> Made:
    return Recurrent(), nn.CrossEntropyLoss(), torch.randn(8, 5, 4), torch.arange(8) % 3


def transformer() -> Made:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(40, 3))
    return model, nn.CrossEntropyLoss(), torch.randn(6, 5, 8), torch.arange(6) % 3


@pytest.mark.parametrize("make", [perceptron, convolution, normed, recurrent, transformer])
def test_sharpness_is_within_two_percent_of_curvlinops(make: Callable[[], Made]) -> None:
    """With Adam's preconditioner and without, in float64."""
    torch.manual_seed(1)
    model, criterion, x, labels = make()
    model = model.double().eval()
    x, labels = (t.double() if t.is_floating_point() else t for t in (x, labels))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-3)
    probes = "sharpness,preconditioned_sharpness"
    sink = recorded(model, lambda: criterion(model(x), labels), optimizer, steps=1, probes=probes)
    for p, old in zip(model.parameters(), before, strict=True):
        p.data.copy_(old)
    gradient = torch.autograd.grad(criterion(model(x), labels), list(model.parameters()))
    g = np.concatenate([part.flatten().numpy() for part in gradient])
    with warnings.catch_warnings(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        warnings.simplefilter("ignore")
        hessian = curvlinops.HessianLinearOperator(
            model, criterion, list(model.parameters()), [(x, labels)], check_deterministic=False
        ).to_scipy(dtype=np.float64)
        P = 0.1 * (np.abs(g) + 1e-3)  # of the first update
        for table, D in (("sharpness", np.ones_like(g)), ("preconditioned_sharpness", P**-0.5)):
            operator = LinearOperator(
                hessian.shape, matvec=lambda v, D=D: D * (hessian @ (D * v.ravel())), dtype=g.dtype
            )
            largest = float(eigsh(operator, k=1, which="LA", return_eigenvectors=False, tol=1e-6)[0])
            own, along = numbers(sink, 0, table), D * g
            assert own["value"] == pytest.approx(largest, rel=0.02)
            assert own["along_gradient"] == pytest.approx(along @ (operator @ along) / (along @ along), rel=0.02)
