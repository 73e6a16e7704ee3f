"""Small models for set-ups of several processes: a GPT, convolutions, and blocks that are split by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, HEAD, LENGTH, ROWS = 24, 16, 4, 8, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.ffn, self.dropout = Attention(), FeedForward(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class Gpt(nn.Module):
    """Two layers; ``tied``: the head is the embedding; ``again``: layers are computed again in the backward pass."""

    def __init__(
        self, seed: int = 0, *, dropout: float = 0.0, tied: bool = False, again: bool = False, vocab: int = VOCAB
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.again = nn.Embedding(vocab, WIDTH), again
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
            nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return self.head(self.norm(x))


class Convolutions(nn.Module):
    """Three convolutions with a norm each, for a regression."""

    def __init__(self, norm: type[nn.BatchNorm1d] | type[nn.GroupNorm], seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(6, 6, 3, padding=1), nn.BatchNorm1d(6) if norm is nn.BatchNorm1d else nn.GroupNorm(2, 6)
            )
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x


class _Copied(torch.autograd.Function):
    """The same value on every rank; gradients add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Added(torch.autograd.Function):
    """The sum over ranks; every rank has its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def _tokens(x: Tensor, group: Any) -> Tensor:
    """This rank's tokens."""
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()


def _all_tokens(x: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


class _Gathered(torch.autograd.Function):
    """All tokens on every rank. ``apart``: what follows is split over ranks, so that gradients are parts of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, apart: bool) -> Tensor:
        ctx.group, ctx.apart = group, apart
        return _all_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].clone()
        if ctx.apart:
            dist.all_reduce(total, group=ctx.group)
        return _tokens(total, ctx.group), None, None


class _AddedInParts(torch.autograd.Function):
    """The sum over ranks, of which each keeps its own tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return _tokens(total, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _all_tokens(gradients[0], ctx.group), None


class SplitBlock(nn.Module):
    """A norm and a feed-forward block, of whose inner units this rank has its part, as Megatron splits them.
    ``sequence``: the norm sees this rank's tokens alone."""

    def __init__(self, group: Any, sequence: bool, dropout: float) -> None:
        super().__init__()
        inner = 4 * WIDTH // dist.get_world_size(group)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH, bias=False)
        self.group, self.sequence = group, sequence

    def forward(self, x: Tensor) -> Tensor:
        if self.sequence:
            entering = _Gathered.apply(self.norm(x), self.group, True)
            return x + self.dropout(_AddedInParts.apply(self.down(F.gelu(self.up(entering))), self.group))
        entering = _Copied.apply(self.norm(x), self.group)
        return x + self.dropout(_Added.apply(self.down(F.gelu(self.up(entering))), self.group))


class SplitNet(nn.Module):
    """Two such blocks, a last norm and a head that every rank has whole. ``alike``: the ranks draw the same numbers
    for their parts."""

    def __init__(
        self, group: Any, *, seed: int = 0, sequence: bool = False, dropout: float = 0.0, alike: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(SplitBlock(group, sequence, dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
        self.group, self.sequence = group, sequence
        if not alike:
            torch.manual_seed(1000 + seed + dist.get_rank(group))
            for name, parameter in self.named_parameters():
                if is_split(name):
                    nn.init.normal_(parameter, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = _tokens(x, self.group) if self.sequence else x
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(_Gathered.apply(x, self.group, False) if self.sequence else x)


def is_split(name: str) -> bool:
    """True for the parameters of which each rank has a part."""
    return ".up." in name or ".down." in name
