"""Small models, faults that are planted in copies of them, and the modules in which each fault is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilitylab import build_model

VOCAB, WIDTH, HEADS = 31, 32, 4
Edit = Callable[[nn.Module], None]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.shift = (WIDTH // HEADS) ** -0.5, 0

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        scores = self.scale * q @ k.transpose(-1, -2)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(self.shift)
        mixed = scores.masked_fill(~seen, -1e9).softmax(-1) @ v
        return self.c_proj(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A GPT-2 of its own: Pre-LN, learned positions, gelu."""

    def __init__(self, layers: int = 4, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(24, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        for parameter in self.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, float(parameter.mean() > 0.5), 0.1)  # as trained ones, not 0 and 1

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


def ids(seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (4, 12), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


def loss_in_bf16(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, batch)


def reference_model(layers: int = 2, arch: str = "preln", seed: int = 0) -> nn.Module:
    """The project's own encoder-decoder."""
    return build_model(
        source_vocab=VOCAB, target_vocab=VOCAB, seed=seed, arch=arch, depth=2 * layers, preset="tiny",
        d_model=WIDTH, heads=HEADS, d_ffn=2 * WIDTH, dropout=0.0,
    )  # fmt: skip


def reference_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(source=batch, target=batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def after(path: str, change: Callable[[Tensor], Tensor]) -> Edit:
    """Change what a module returns."""

    def edit(model: nn.Module) -> None:
        module = model.get_submodule(path)
        inner = module.forward
        module.forward = lambda *args, **kwargs: change(inner(*args, **kwargs))  # pyright: ignore

    return edit


def setting(path: str, name: str, value: Any) -> Edit:
    return lambda model: setattr(model.get_submodule(path), name, value)


def noisy(share: float) -> Callable[[Tensor], Tensor]:
    """A random error of this relative size."""

    def change(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(x)
        return x + share * noise * (x.detach().float().norm() / noise.float().norm()).to(x)

    return change


def _without_bias(model: nn.Module) -> None:
    module = model.get_submodule("h.1.mlp.c_fc")
    weight = module.weight
    module.forward = lambda x: F.linear(x, weight.to(x.dtype))  # pyright: ignore


FAULTS: dict[str, tuple[Edit, str]] = {
    "channels rolled": (after("h.2.attn.c_proj", lambda x: x.roll(1, -1)), "h.2.attn.c_proj"),
    "sign flipped": (after("h.1.mlp", lambda x: -x), "h.1.mlp"),
    "1 % error": (after("h.2.attn", noisy(0.01)), "h.2.attn"),
    "wrong scale": (setting("h.1.attn", "scale", WIDTH**-0.5), "h.1.attn"),
    "missing bias": (_without_bias, "h.1.mlp.c_fc"),
    "eps of a norm": (setting("h.2.ln_1", "eps", 1e-2), "h.2.ln_1"),
    "mask off by one": (setting("h.0.attn", "shift", 1), "h.0.attn"),
}


def faulty(model: nn.Module, name: str) -> nn.Module:
    """A copy with a fault."""
    made = copy.deepcopy(model)
    FAULTS[name][0](made)
    return made
