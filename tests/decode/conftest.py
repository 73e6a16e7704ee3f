"""Small translation models away from their initialisation, and sentences of several lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilitylab.models import Transformer, build_model


@pytest.fixture
def translator() -> Callable[..., Transformer]:
    """A float64 encoder-decoder of width 16 whose distributions are far from uniform; Admin with random omegas."""

    def make(arch: str = "postln", *, vocab: int = 23, seed: int = 0, sharp: float = 2.0, **settings: Any):
        sizes = {"d_model": 16, "d_ffn": 32, "heads": 2, "encoder_layers": 2, "decoder_layers": 3}
        model = build_model(arch=arch, source_vocab=19, target_vocab=vocab, tie="none", **(sizes | settings)).double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                if name.endswith("omega"):
                    parameter.copy_(1 + 2 * noise)
                else:
                    parameter.add_(noise - 0.5, alpha=0.4)
            model.output.weight.mul_(sharp)
        if model.calibrated is not None:
            model.calibrated.set(True)
        model.set_row(10_000)
        return model.eval()

    return make


@pytest.fixture
def sources() -> tuple[Tensor, Tensor]:
    """Six sentences of 3 to 9 tokens, padded, and their mask."""
    lengths = torch.tensor([9, 3, 7, 5, 8, 4])
    mask = torch.arange(9) < lengths[:, None]
    tokens = torch.randint(5, 19, (6, 9), generator=torch.Generator().manual_seed(3))
    return torch.where(mask, tokens, 0), mask


@pytest.fixture
def shifted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Transformer, int, float], Transformer]:
    """The model with one id's logit moved by a constant."""

    def shift(model: Transformer, token: int, by: float) -> Transformer:
        logits = model.logits
        change = torch.zeros(model.output.out_features, dtype=torch.float64)
        change[token] = by
        monkeypatch.setattr(model, "logits", lambda hidden: logits(hidden) + change)
        return model

    return shift
