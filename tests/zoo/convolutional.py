"""Networks of convolutions: one of blocks, and a U-net, whose middle stands in no list."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from entries import BATCH, Entry
from torch import Tensor, nn


def maps() -> dict[str, Any]:
    return {"x": torch.randn(BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.bn, self.relu = nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.relu(self.bn(self.conv1(x))))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 4, 3, padding=1), nn.Sequential(Residual(), Residual(), Residual())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.stem(x))


class UNet(nn.Module):
    """Down, a middle that stands in no list, and up, with skips between."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.down, self.up = nn.ModuleList([Residual(), Residual()]), nn.ModuleList([Residual(), Residual()])
        self.middle = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        skips = [x := self.stem(x)]
        for block in self.down:
            x = F.avg_pool2d(block(x), 2)
            skips.append(x)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(block(x + skips.pop()), scale_factor=2.0)
        return x


FLOW = "activation_grad_norm,activation_sparsity,residual_norm"
CONVOLUTIONAL: dict[str, Entry] = {
    "convolutions with batch norms": Entry(
        ConvNet, "blocks.*", "", "blocks.*.relu", "blocks.2", "", maps, depth=3, probes=FLOW
    ),
    "u-net": Entry(UNet, "{down,up}.*", "", "{down,up}.*.relu", "down.1 up.1", "", maps, probes=FLOW),
}
