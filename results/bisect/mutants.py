"""The 40 mutants: a name, the models in which each has a place, the module in which the fault is, and the edit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALL, GPT, LLAMA, DECODERS, TRANSLATOR = (
    ("gpt", "llama", "translator"), ("gpt",), ("llama",), ("gpt", "llama"), ("translator",)
)  # fmt: skip
BIASED = ("gpt", "translator")


@dataclass(frozen=True)
class Mutant:
    """``where``: the module that ``bisect`` must name. ``phase``: the pass in which the fault shows first."""

    name: str
    models: tuple[str, ...]
    where: str
    edit: Callable[[nn.Module], None]
    phase: str = "forward"


def _set(path: str, **values: Any) -> Callable[[nn.Module], None]:
    def edit(model: nn.Module) -> None:
        module = model.get_submodule(path)
        for name, value in values.items():
            setattr(module, name, value(module) if callable(value) and name != "act" else value)

    return edit


def _returns(path: str, change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    def edit(model: nn.Module) -> None:
        module: Any = model.get_submodule(path)
        inner = module.forward
        module.forward = lambda *args: change(inner(*args))

    return edit


def _without_bias(path: str) -> Callable[[nn.Module], None]:
    def edit(model: nn.Module) -> None:
        module: Any = model.get_submodule(path)
        module.forward = lambda x: F.linear(x, module.weight)

    return edit


def _transposed(path: str) -> Callable[[nn.Module], None]:
    def edit(model: nn.Module) -> None:
        module: Any = model.get_submodule(path)
        module.forward = lambda x: F.linear(x, module.weight.T, module.bias)

    return edit


def _noisy(share: float) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        return x + (share * noise * x.detach().double().norm() / noise.norm()).to(x.dtype)

    return change


def _wrong_weight(path: str) -> Callable[[nn.Module], None]:
    def edit(model: nn.Module) -> None:
        weight = model.get_parameter(path)
        with torch.no_grad():
            weight.copy_(weight.flip(0).clone())

    return edit


def _takes(path: str, change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    def edit(model: nn.Module) -> None:
        module: Any = model.get_submodule(path)
        inner = module.forward
        module.forward = lambda x, *rest: inner(change(x), *rest)

    return edit


A, N, M = "layers.1.attn", "layers.1", "layers.2.ffn"
MUTANTS = (
    Mutant("scale: not by the root", ALL, A, _set(A, scale=lambda m: m.scale**2)),
    Mutant("scale: none", ALL, A, _set(A, scale=1.0)),
    Mutant("scale: of the width, not of a head", ALL, A, _set(A, scale=48**-0.5)),
    Mutant("mask: sees the next token", ALL, A, _set(A, shift=1)),
    Mutant("mask: does not see itself", ALL, A, _set(A, shift=-1)),
    Mutant("mask: none", ALL, A, _set(A, causal=False)),
    Mutant("mask: a window of 8", ALL, A, _set(A, window=8)),
    Mutant("scores are capped at 1", ALL, A, _set(A, cap=1.0)),
    Mutant("heads of keys in the wrong order", ALL, A, _set(A, swap=True)),
    Mutant("heads and features exchanged", ALL, A, _set(A, heads_last=True)),
    Mutant("key heads repeated as tiles", LLAMA, A, _set(A, tiled=True)),
    Mutant("RoPE: base of 500,000", LLAMA, A, _set(A, rope=500_000.0)),
    Mutant("RoPE: neighbours instead of halves", LLAMA, A, _set(A, interleaved=True)),
    Mutant("RoPE: keys are not turned", LLAMA, A, _set(A, turns=("q",))),
    Mutant("RoPE: queries are not turned", LLAMA, A, _set(A, turns=("k",))),
    Mutant("RoPE: left out", LLAMA, A, _set(A, rope=0.0)),
    Mutant("cross-attention is causal", TRANSLATOR, "layers.1.cross", _set("layers.1.cross", causal=True)),
    Mutant("encoder is causal", TRANSLATOR, "encoder.1.attn", _set("encoder.1.attn", causal=True)),
    Mutant("transposed output projection", ALL, f"{A}.out", _transposed(f"{A}.out")),
    Mutant("transposed queries", ALL, f"{A}.q", _transposed(f"{A}.q")),
    Mutant("missing bias of the first linear", BIASED, f"{M}.fc1", _without_bias(f"{M}.fc1")),
    Mutant("missing bias of the values", BIASED, f"{A}.v", _without_bias(f"{A}.v")),
    Mutant("channels rolled", ALL, f"{A}.out", _returns(f"{A}.out", lambda x: x.roll(1, -1))),
    Mutant("tokens rolled", ALL, f"{M}.fc2", _returns(f"{M}.fc2", lambda x: x.roll(1, 1))),
    Mutant("sign flipped", ALL, f"{M}.fc2", _returns(f"{M}.fc2", lambda x: -x)),
    Mutant("1 % error", ALL, f"{M}.fc2", _returns(f"{M}.fc2", _noisy(0.01))),
    Mutant("10 % error", ALL, f"{A}.out", _returns(f"{A}.out", _noisy(0.1))),
    Mutant("dropout left on", ALL, f"{M}.fc2", _returns(f"{M}.fc2", lambda x: F.dropout(x, 0.1, True))),
    Mutant("eps of a norm: 1e-3", ALL, "layers.1.norm1", _set("layers.1.norm1", eps=1e-3)),
    Mutant("eps of a norm: 1e-1", ALL, "layers.1.norm2", _set("layers.1.norm2", eps=1e-1)),
    Mutant("RMSNorm takes the mean off", LLAMA, "layers.1.norm1", _set("layers.1.norm1", mean=True)),
    Mutant("gelu by tanh", GPT, M, _set(M, act=lambda x: F.gelu(x, approximate="tanh"))),
    Mutant("relu instead of the activation", DECODERS, M, _set(M, act=F.relu)),
    Mutant("gate and value exchanged", LLAMA, M, _set(M, swapped=True)),
    Mutant("residual after the norm", DECODERS, N, _set(N, skip="normed")),
    Mutant("residual left out", DECODERS, N, _set(N, skip="none")),
    Mutant("branch scaled by 0.9", ALL, N, _set(N, gain=0.9)),
    Mutant("positions off by one", BIASED, "embedding", _set("embedding", offset=1)),
    Mutant("wrong weight: rows reversed", ALL, f"{A}.v", _wrong_weight(f"{A}.v.weight"), "weights"),
    Mutant("gradient scaled by 2", ALL, M, _takes(M, lambda x: 2 * x - x.detach()), "backward"),
)
assert len(MUTANTS) == 40
