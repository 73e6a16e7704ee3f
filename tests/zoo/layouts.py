"""Decoders that do the same in different layouts: how other people name and nest what they build, written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, INNER, VOCAB = 8, 12, 11


class CausalSelfAttention(nn.Module):
    """nanoGPT's: one fused projection."""

    def __init__(self, names: Sequence[str] = ("c_attn", "c_proj")) -> None:
        super().__init__()
        self.names = names
        self.add_module(names[0], nn.Linear(D, 3 * D))
        self.add_module(names[1], nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.get_submodule(self.names[0])(x).chunk(3, -1)
        return self.get_submodule(self.names[1])(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class FusedMixer(CausalSelfAttention):
    """The same under a name that does not say so."""


class TokenMixer(nn.Module):
    """Attention under a name that does not say so, its softmax written out."""

    def __init__(self, names: Sequence[str] = ("wq", "wk", "wv", "wo")) -> None:
        super().__init__()
        self.names = names
        for name in names:
            self.add_module(name, nn.Linear(D, D, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.get_submodule(name)(x) for name in self.names[:3])
        return self.get_submodule(self.names[3])((q @ k.mT / D**0.5).softmax(-1) @ v)


class Gelu(nn.Module):
    """A feed-forward block with a functional activation."""

    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.fc, self.proj = nn.Linear(D, inner), nn.Linear(inner, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x)))


class Block(nn.Module):
    def __init__(self, mixer: nn.Module, inner: int = INNER, name: str = "attn") -> None:
        super().__init__()
        self.name = name
        self.ln_1, self.ln_2, self.mlp = nn.LayerNorm(D), nn.LayerNorm(D), Gelu(inner)
        self.add_module(name, mixer)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.get_submodule(self.name)(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class StateSpaceBlock(Block):
    """A layer of another class; what it mixes is beside the point."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(D, D), name="ssm")


class Whole(nn.Module):
    """A block that holds its projections itself, with d_ff = d."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class NanoGPT(nn.Module):
    """Everything in a ModuleDict, which nobody calls; the head beside it."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleList(Block(CausalSelfAttention()) for _ in range(3))
        parts = {"wte": nn.Embedding(VOCAB, D), "drop": nn.Dropout(0.0), "h": blocks, "ln_f": nn.LayerNorm(D)}
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(D, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.transformer["drop"](self.transformer["wte"](ids))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


class Titan(nn.Module):
    """Layers in a ModuleDict by their number; of a stage of a pipeline the later ones."""

    def __init__(self, numbers: Sequence[int] = (0, 1, 2), mixer: Callable[[], nn.Module] = TokenMixer) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, D)
        self.layers = nn.ModuleDict({str(n): Block(mixer(), name="attention") for n in numbers})
        self.norm, self.output = nn.RMSNorm(D), nn.Linear(D, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


class Plain(nn.Module):
    """Blocks of any kind in a ModuleList, behind a bare nn.Module that serves as a namespace."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.backbone = nn.Module()
        self.backbone.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(D, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.backbone.blocks:
            x = block(x)
        return self.head(x)


class Residual(nn.Module):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return x + residual


class Lists(nn.Module):
    """Each layer a list of a list of norms, a block and a residual (x-transformers' layout)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        blocks = [TokenMixer(("to_q", "to_k", "to_v", "to_out")), Gelu(), TokenMixer(), Gelu()]
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.ModuleList([nn.LayerNorm(D)]), block, Residual()]) for block in blocks
        )
        self.final_norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for norms, block, residual in self.layers:  # type: ignore[misc]
            x = residual(block(norms[0](x)), x)
        return self.head(self.final_norm(x))


@dataclass(frozen=True)
class Layout:
    """A model and, by hand, its places: (name, number) of layers; activations with "<" where the input counts."""

    build: Callable[[], nn.Module]
    layers: tuple[tuple[str, int], ...]
    activations: tuple[str, ...]
    outputs: tuple[str, ...]
    attentions: tuple[str, ...]
    norms: int  # how many


def _numbered(home: str, numbers: Sequence[int]) -> tuple[tuple[str, int], ...]:
    return tuple((f"{home}.{n}", n + 1) for n in numbers)


def _each(pattern: str, numbers: Sequence[int]) -> tuple[str, ...]:
    return tuple(pattern.replace("*", str(n)) for n in numbers)


THREE = (0, 1, 2)
LAYOUTS: dict[str, Layout] = {
    "nanogpt": Layout(
        NanoGPT,
        _numbered("transformer.h", THREE),
        _each("<transformer.h.*.mlp.proj", THREE),
        ("transformer.ln_f",),
        _each("transformer.h.*.attn", THREE),
        7,
    ),
    "torchtitan": Layout(
        Titan,
        _numbered("layers", THREE),
        _each("<layers.*.mlp.proj", THREE),
        ("norm",),
        _each("layers.*.attention", THREE),
        7,
    ),
    "a stage of a pipeline": Layout(
        lambda: Titan((4, 5)),
        _numbered("layers", (4, 5)),
        _each("<layers.*.mlp.proj", (4, 5)),
        ("norm",),
        _each("layers.*.attention", (4, 5)),
        5,
    ),
    "a hybrid": Layout(
        lambda: Plain(StateSpaceBlock(), StateSpaceBlock(), Block(TokenMixer()), StateSpaceBlock()),
        _numbered("backbone.blocks", (0, 1, 2, 3)),
        _each("<backbone.blocks.*.mlp.proj", (0, 1, 2, 3)),
        ("backbone.blocks.3",),
        ("backbone.blocks.2.attn",),
        8,
    ),
    "attention as 'sa'": Layout(
        lambda: Plain(*(Block(TokenMixer(), name="sa") for _ in range(2))),
        _numbered("backbone.blocks", (0, 1)),
        _each("<backbone.blocks.*.mlp.proj", (0, 1)),
        ("backbone.blocks.1",),
        _each("backbone.blocks.*.sa", (0, 1)),
        4,
    ),
    "a fused mixer, d_ff = d": Layout(
        lambda: Plain(*(Block(FusedMixer(("in_proj", "out")), inner=D, name="mixer") for _ in range(2))),
        _numbered("backbone.blocks", (0, 1)),
        _each("<backbone.blocks.*.mlp.proj", (0, 1)),
        ("backbone.blocks.1",),
        _each("backbone.blocks.*.mixer", (0, 1)),
        4,
    ),
    "projections in the block": Layout(
        lambda: Plain(Whole(), Whole()),
        _numbered("backbone.blocks", (0, 1)),
        _each("<backbone.blocks.*.down", (0, 1)),
        ("backbone.blocks.1",),
        _each("backbone.blocks.*", (0, 1)),
        4,
    ),
    "lists of lists": Layout(
        Lists,
        _numbered("layers", (0, 1, 2, 3)),
        _each("<layers.*.1.proj", (1, 3)),
        ("final_norm",),
        _each("layers.*.1", (0, 2)),
        5,
    ),
}


def born(name: str) -> nn.Module:
    torch.manual_seed(5)
    return LAYOUTS[name].build().double().train()


def ids() -> Tensor:
    return torch.randint(0, VOCAB, (3, 5), generator=torch.Generator().manual_seed(2))
