"""Small models for tests of ``lr_find``, of kinds that its validation does not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

CLASSES, INPUTS = 6, 8


class Quadratic(nn.Module):
    """E(x) = 1/2 sum_i h_i x_i^2 in float64, from x = 1; gradient descent is stable below a rate of 2 / max h."""

    def __init__(self, curvatures: tuple[float, ...] = (4.0, 1.0, 0.25)) -> None:
        super().__init__()
        self.register_buffer("h", torch.tensor(curvatures, dtype=torch.float64))
        self.x = nn.Parameter(torch.ones(len(curvatures), dtype=torch.float64))

    def forward(self, scale: Tensor) -> Tensor:
        return 0.5 * scale * (self.h * self.x**2).sum()


def quadratic_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def ones(count: int) -> list[Tensor]:
    return [torch.ones((), dtype=torch.float64)] * count


def clusters(count: int, rows: int = 16, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return batches of points around the means of classes."""
    g = torch.Generator().manual_seed(seed)
    means = torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(99))
    labels = [torch.randint(0, CLASSES, (rows,), generator=g) for _ in range(count)]
    return [(means[y] + torch.randn(rows, INPUTS, generator=g), y) for y in labels]


def perceptron(seed: int = 0, dropout: float = 0.1, width: int = 16) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(INPUTS, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, CLASSES)
    )


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def state_of(model: nn.Module) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}
