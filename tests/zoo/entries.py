"""What an entry of the zoo is: a tiny model of one family or layout, its input, and, by hand, its places."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCAB, WIDTH, BATCH, TOKENS = 29, 16, 2, 6
EXPERT = 12  # the inner width of an expert, and of nothing else
TEXT = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
KV = {"num_key_value_heads": 1}


def ids() -> Tensor:
    return torch.randint(3, VOCAB, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


def text() -> dict[str, Any]:
    return {"input_ids": ids()}


def pairs() -> dict[str, Any]:
    return {"input_ids": ids(), "decoder_input_ids": ids().flip(1)}


def images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()}


@dataclass(frozen=True)
class Entry:
    """Places are full names, apart by blanks: ``*`` stands for the number of a layer (``depth`` of them), ``{0,2}`` for
    each of several; of activations with "<" in front the module's input counts, with "=" what is inside stacked
    experts. ``attentions=None``: they are not checked."""

    build: Callable[[], nn.Module]
    layers: str
    norms: str
    activations: str
    outputs: str
    attentions: str | None = ""
    feed: Callable[[], dict[str, Any]] = text
    depth: int = 2
    ends: str = ""  # what yields the output of each layer, where no layer is called itself
    shown: str = ""  # norms and activations that tap() shows, which are in the tables and not among the modules' places
    probes: str = "ln_input,activation_grad_norm,activation_sparsity,residual_norm"

    def names(self, patterns: str) -> list[str]:
        return [name for pattern in patterns.split() for name in self._each(pattern)]

    def _each(self, pattern: str) -> Iterator[str]:
        parts = re.split(r"(\*|\{[^}]*\})", pattern)
        among = [
            [str(n) for n in range(self.depth)]
            if part == "*"
            else part.strip("{}").split(",")
            if "{" in part
            else [part]
            for part in parts
        ]
        return map("".join, itertools.product(*among))

    def born(self) -> nn.Module:
        torch.manual_seed(7)
        return self.build().double().train()

    def loss(self, model: nn.Module) -> Tensor:
        torch.manual_seed(3)  # of dropout
        out = model(**self.feed())
        return floating(out).double().square().mean()


def floating(value: Any) -> Tensor:
    """The first floating tensor, depth first."""
    if isinstance(value, Tensor):
        return value
    items = value.values() if hasattr(value, "values") else value
    return next(item for item in items if isinstance(item, Tensor) and item.is_floating_point())
