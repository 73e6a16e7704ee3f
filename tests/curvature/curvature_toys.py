"""A loop under watch, what it recorded, and a smooth decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from probe_toys import ListSink, Toy
from torch import Tensor, nn

from stabilitylab.probes import Watcher

NAMES = ("critical_sharpness", "preconditioned_sharpness", "sharpness")


def entries(model: Toy, fixed: dict[str, Tensor]) -> Callable[[], Tensor]:
    """The loss of each real token of a fixed batch."""
    real = fixed["target_mask"]
    return lambda: F.cross_entropy(model(**fixed)[real], fixed["target"][real], reduction="none")


def numbers(sink: ListSink, row: int, table: str) -> dict[str, float]:
    columns, cells = sink.tables[table].columns, sink.row(row)[1][table]
    return dict(zip(columns, cells.values[0].tolist(), strict=True))


def recorded(
    model: nn.Module,
    loss: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    fixed: Callable[[], Tensor] | None = None,
    steps: int = 3,
    probes: str = ",".join(NAMES),
    **options: Any,
) -> ListSink:
    """The rows of a loop that trains on ``loss``."""
    sink = ListSink()
    settings = {"curvature_every": 1, "curvature_loss": fixed or loss, "strict": True, **options}
    with Watcher(model, sink, probes=probes, optimizer=optimizer, **settings) as watcher:
        for _ in range(steps):
            value = loss()
            value.mean().backward()
            watcher.step(loss=value.detach().mean())
            optimizer.step()
            optimizer.zero_grad()
    return sink


class GPT(nn.Module):
    """A smooth decoder with fused attention, which has no second derivative; returns the loss of each token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(23, 16), nn.Linear(16, 23)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        logits = self.head(self.layers(self.embedding(ids), mask, is_causal=True))
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
