"""Small candidates for the tests of forecasts, and models of one's own."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from stabilitylab.config import Config, merge, resolve
from stabilitylab.data import load_data
from stabilitylab.forecast import Candidate, reference
from stabilitylab.models import Transformer, build_model

SMALL: dict[str, Any] = {
    "model": {"d_model": 16, "d_ffn": 24, "heads": 2, "T": 10, "encoder_layers": 2, "decoder_layers": 3},
    "data": {"sentences": 4, "max_length": 9, "held_out": 4, "seed": 3, "vocab_size": 200},
    "train": {"seed": 3, "device": "cpu", "lr": 1e-3, "warmup": 40},
}
CPU = torch.device("cpu")


def config_of(arch: str, **sections: Any) -> Config:
    return resolve(merge(SMALL, {"model": {"arch": arch}}, sections))


@functools.cache
def dataset() -> Any:
    return load_data(config_of("postln").data, stack="encoder-decoder")


def candidate_of(arch: str, **sections: Any) -> Candidate:
    return reference(config_of(arch, **sections), dataset(), CPU)


def model_of(config: Config, dtype: torch.dtype = torch.float32) -> Transformer:
    """As row 0 of a run has it."""
    sizes = {"source_vocab": dataset().source_vocab, "target_vocab": dataset().target_vocab}
    model = build_model(config.model, **sizes, seed=config.train.seed).to(dtype)
    model.calibrate(**dataset().micro_batch(0).inputs)
    model.set_row(0)
    return model


class Own(nn.Module):
    """Three layers of PyTorch's, as a user writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True) for _ in range(3)])
        self.head = nn.Linear(16, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def counting(seed: int) -> dict[str, torch.Tensor]:
    """Sentences that count, from anywhere on."""
    ids = (torch.randint(12, (6, 1), generator=torch.Generator().manual_seed(seed)) + torch.arange(9)) % 12
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def own() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Own()
    optimizer = torch.optim.AdamW(
        [{"params": model.embed.parameters(), "lr": 1e-3}, {"params": model.layers.parameters(), "lr": 4e-3}],
        betas=(0.9, 0.95),
    )
    batches = [counting(seed) for seed in range(3)]
    return {
        **{"model": model, "batch": batches[0], "batches": batches, "held_out": counting(9)},
        **{"loss_fn": loss_fn, "optimizer": optimizer},
    }
