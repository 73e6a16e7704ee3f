"""Hyper-Connections: several streams, with trained mixtures of them around each sub-layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from ...config import ModelConfig
from ..base import ArchOptions, Factors, Place, Residual, Trunk, arch, without_own_gains
from ..sublayers import SubLayer

Streams = tuple[Tensor, ...]
Connections = tuple[Tensor, Tensor, Tensor]


class Copies(Trunk):
    """A stream of n copies of the embedding. The stack ends in the mean of the copies. Probes read the mean."""

    def __init__(self, place: Place, streams: int) -> None:
        super().__init__(place)
        self.streams = streams

    def enter(self, x: Tensor) -> Streams:
        return (x,) * self.streams

    def leave(self, stream: Streams) -> Tensor:
        return torch.stack(stream).mean(0)

    def shown(self, stream: Streams) -> Streams:
        return stream


class Connected(Residual):
    """A sub-layer with streams x (n, D) around it: x <- C x + s F(g x). g (n) gathers the input of F, C (n, n) carries
    the streams past F, and s (n) spreads the output of F over them. The tap ``mixing`` carries C, as (B, T, n n), for
    probes alone."""

    final_norm = True
    trunk = Copies

    class Options(ArchOptions):
        n: int = Field(default=4, ge=1, le=64)

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        self.scaled_branch = nn.Identity()
        self.mixing = nn.Identity()

    @classmethod
    def new_trunk(cls, place: Place, options: Any) -> Trunk:
        return Copies(place, options.n)

    def connections(self, stream: Streams, states: Tensor) -> Connections:  # states (B, T, n, D)
        """Return g (..., n), C (..., n, n) and s (..., n), of all tokens or of each."""
        raise NotImplementedError

    def forward(self, x: Any, *context: Tensor | None) -> Any:
        states = torch.stack(x, 2)  # (B, T, n, D)
        with torch.autocast(states.device.type, enabled=False):  # the streams keep their type
            gather, carry, spread = self.connections(x, states)
            mixed = torch.cat((gather.unsqueeze(-2), carry), -2) @ states  # (B, T, 1 + n, D)
        shape = (*states.shape[:2], *carry.shape[-2:])
        self.mixing(carry.detach().expand(shape).flatten(2))
        entering, *carried = mixed.unbind(2)
        branch = self.branch(self.f(self.norm(entering), *context))
        kept = self.shortcut(tuple(carried))
        added = self.scaled_branch((spread.unsqueeze(-1) * branch.unsqueeze(2)).unbind(2))
        return tuple(own + new for own, new in zip(kept, added, strict=True))


@arch(
    "hyper-connections-static",
    title="HC (static)",
    colour="#56B4E9",
    marker="s",
    rank=260,
    gains="base",
    family="More streams, since 2024",
    stream="mixed",
)
class StaticHyperConnections(Connected):
    r"""x <- A_r^T x + B F(LN(A_m^T x)), n streams x; B = 1, A_m = e_{s mod n}, A_r = 1 at the start.  HC, Zhu et al.
    2024 (2409.19606), Eqs. 1-2, 14.

    s is the sub-layer's number in its stack, from 0. At the start each stream is that of Pre-LN. A and B have no weight
    decay, as in the paper. The stack ends in the mean of the streams and a final norm. The paper has the sum, which the
    norm makes equal to the mean. ``arch.root_n = true`` multiplies the standard deviation of out and fc2 by sqrt(n), as
    the paper says. It is off by default (ours), since it does not balance a sum of equal streams and ends the equality
    with Pre-LN. Inferred: each stack of an encoder-decoder has its own streams, and cross-attention has its own
    connection.
    """

    learns = "A_m, B: n, A_r: n^2 numbers a sub-layer; the final norm of each stack"
    undecayed = ("gather", "carry", "spread")

    class Options(Connected.Options):
        root_n: bool = False

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        n = self.options.n
        self.gather = nn.Parameter(torch.eye(n)[place.index % n].clone())
        self.carry = nn.Parameter(torch.eye(n))
        self.spread = nn.Parameter(torch.ones(n))

    def connections(self, stream: Streams, states: Tensor) -> Connections:
        return self.gather, self.carry.mT, self.spread

    @classmethod
    def idle(cls, config: ModelConfig) -> Mapping[str, str]:
        if not config.options.get("root_n"):
            return {}
        why = "arch.n = 1, whose root is 1" if config.options.get("n") == 1 else without_own_gains(config)
        return {"arch.root_n": why} if why else {}

    def gain(self, matrix: str) -> float:
        larger = self.options.root_n and matrix in ("out", "fc2")
        return super().gain(matrix) * (math.sqrt(self.options.n) if larger else 1.0)

    def factors(self, role: str) -> Factors:
        return Factors(decay=0.0 if role.rpartition(".")[2] in self.undecayed else 1.0)


@arch(
    "hyper-connections",
    title="Hyper-Connections",
    colour="#0072B2",
    marker="o",
    rank=270,
    gains="base",
    family="More streams, since 2024",
    stream="mixed",
)
class HyperConnections(StaticHyperConnections):
    r"""Static ones plus s tanh(LN(x) W) for B, A_m and A_r, W = 0 at the start, s = .01.  Hyper-Connections, Zhu et al.
    2024 (2409.19606), Eqs. 10-13.

    The paper's n is 4. LN is a norm of each stream; each connection has its own. The start of s is that of the listing
    in the paper's appendix, of which only notes were read. At the start the model equals the static one, bit for bit. W
    has weight decay.
    """

    learns = "beside the static ones W_b, W_m: d, W_r: d n, 2 scales and a norm a sub-layer"

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        n, width = self.options.n, place.width
        self.stream_norm = place.new_norm()
        self.gather_from = nn.Parameter(torch.zeros(width, 1))
        self.carry_from = nn.Parameter(torch.zeros(width, n))
        self.spread_from = nn.Parameter(torch.zeros(width, 1))
        self.mixture_scale = nn.Parameter(torch.full((1,), 0.01))  # of A_m and A_r
        self.spread_scale = nn.Parameter(torch.full((1,), 0.01))

    def connections(self, stream: Streams, states: Tensor) -> Connections:
        normed = torch.stack([self.stream_norm(x) for x in stream], 2)  # (B, T, n, D)
        weights = torch.cat((self.gather_from, self.carry_from, self.spread_from), 1)
        gather, *carry, spread = torch.tanh(normed @ weights).unbind(-1)  # (B, T, n) each
        dynamic = self.carry + self.mixture_scale * torch.stack(carry, -1)  # (B, T, n, n)
        return self.gather + self.mixture_scale * gather, dynamic.mT, self.spread + self.spread_scale * spread
