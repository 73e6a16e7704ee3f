"""Small models and batches for the tests of the architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilitylab.models import Transformer, build_model

VOCAB = 37


@pytest.fixture
def small() -> Callable[..., Transformer]:
    """A model of width 16 with two layers a stack and a vocabulary of 37, unless told otherwise."""

    def make(arch: str = "postln", **settings: Any) -> Transformer:
        sizes: dict[str, Any] = {"d_model": 16, "d_ffn": 32, "heads": 2}
        if not {"depth", "encoder_layers", "decoder_layers"} & settings.keys():
            sizes["depth"] = 4 if settings.get("stack", "encoder-decoder") == "encoder-decoder" else 2
        model = build_model(arch=arch, source_vocab=VOCAB, target_vocab=VOCAB, **(sizes | settings))
        if model.calibrated is not None:
            model.calibrated.set(True)
        return model

    return make


@pytest.fixture
def pairs() -> dict[str, Tensor]:
    """Five sentences of 9 source and 7 target tokens, the last two and three of some of them padding."""
    generator = torch.Generator().manual_seed(11)
    lengths = torch.tensor([9, 7, 9, 8, 7]), torch.tensor([7, 7, 4, 5, 6])
    return {
        "source": torch.randint(0, VOCAB, (5, 9), generator=generator),
        "target": torch.randint(0, VOCAB, (5, 7), generator=generator),
        "source_mask": torch.arange(9) < lengths[0][:, None],
        "target_mask": torch.arange(7) < lengths[1][:, None],
    }


@pytest.fixture
def randomise() -> Callable[[Transformer], Transformer]:
    """Every parameter away from its initial value: biases off 0, gains off 1, omegas in [1, 3]."""

    def change(model: Transformer) -> Transformer:
        generator = torch.Generator().manual_seed(5)
        for name, parameter in model.named_parameters():
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
            with torch.no_grad():
                if name.endswith("omega"):
                    parameter.copy_(1 + 2 * noise)
                else:
                    parameter.add_(noise - 0.5, alpha=0.4)
        return model

    return change


@pytest.fixture
def loss_of() -> Callable[..., Tensor]:
    """Mean cross-entropy over the real target tokens, for labels that depend on nothing but the shape."""

    def loss(model: Transformer, inputs: dict[str, Tensor]) -> Tensor:
        logits = model(**inputs)
        mask = inputs.get("target_mask", inputs.get("mask"))
        assert mask is not None
        labels = torch.arange(mask.numel()).view(mask.shape) % VOCAB
        return torch.nn.functional.cross_entropy(logits[mask], labels[mask])

    return loss
