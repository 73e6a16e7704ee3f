"""Small models for the questions about a whole model: a decoder, and one fault at a time put into it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH = 41, 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_causal = True

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attention, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Decoder(nn.Module):
    """Two blocks; every matrix at a standard deviation of .02, as GPT-2 draws them."""

    def __init__(self, seed: int = 0, std: float = 0.02) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=std)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedded(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def embedded(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) + self.places(torch.arange(ids.shape[1]))


def text(length: int = 13, samples: int = 5) -> Tensor:
    return torch.randint(VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(1))


def next_tokens() -> tuple[Tensor, Tensor]:
    ids = text()
    return ids[:, :-1], ids[:, 1:]


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


def adamw(model: nn.Module, rate: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate)
