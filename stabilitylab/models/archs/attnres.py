"""AttnRes: the input of each sub-layer is an attention over the outputs of all sub-layers below, not their sum."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ..base import ArchOptions, Place, Residual, Trunk, arch
from ..norms import EPS
from ..sublayers import SubLayer

Sources = tuple[Tensor, ...]  # what the next sub-layer reads, then all that it attends over


class Growing(Trunk):
    """The stream (h, v_0, v_1, ...): h is the input of the next sub-layer, v_0 the embedding. Probes read h."""

    def enter(self, x: Tensor) -> Sources:
        return x, x

    def leave(self, stream: Sources) -> Tensor:
        return stream[0]


class Attending(Residual):
    """A sub-layer, followed by the attention over depth that makes the input of the next sub-layer or the stack's
    output. Inferred: w and the gain of the keys have weight decay, as all parameters."""

    final_norm = True
    trunk = Growing
    learns = "w and the gain of its keys: 2 D a sub-layer; the final norm of each stack"

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        self.depth_query = nn.Parameter(torch.zeros(place.width))
        self.depth_gain = nn.Parameter(torch.ones(place.width))
        self.scaled_branch = nn.Identity()
        self.opens = place.index % self.size(place) == 0  # the first of its block

    def size(self, place: Place) -> int:
        """Return the number of sub-layers whose outputs make one source."""
        return 1

    def shares(self, sources: Tensor) -> Tensor:  # (n, B, T, D) -> (n, B, T, 1)
        """Return the attention over ``sources``: softmax of w . RMSNorm(v), which has no scale."""
        keys = F.rms_norm(sources, sources.shape[-1:], self.depth_gain, EPS)
        return (keys * self.depth_query).sum(-1, keepdim=True).softmax(0)

    def forward(self, x: Any, *context: Tensor | None) -> Any:
        entering, *sources = x
        branch = self.branch(self.f(self.norm(entering), *context)).to(entering.dtype)
        begun = [] if self.opens else [sources.pop()]  # the sum of this block so far
        last = begun[0] + branch if begun else branch
        shares = self.shares(torch.stack((*sources, last)))
        kept = (shares * torch.stack((*sources, *(begun or [torch.zeros_like(branch)])))).sum(0)
        return (self.shortcut(kept) + self.scaled_branch(shares[-1] * branch), *sources, last)


@arch(
    "attnres",
    title="AttnRes",
    colour="#009E73",
    marker="^",
    rank=310,
    gains="base",
    family="More streams, since 2024",
    stream="mixed",
)
class OverOutputs(Attending):  # no "attention" in its name, by which probes know modules that attend
    r"""F_l reads LN(h_l), h_l = sum_{i<l} a_i v_i, v_i the output of F_i; a = softmax_i(w_l . RMSNorm(v_i)).  AttnRes,
    Kimi Team 2026 (2603.15031), Eqs. 1-4.

    v_0 is the embedding. w = 0 at the start, so that h is an average. Branches are not added to a sum. One more such
    attention ends the stack, followed by a norm. w_l and the gain of its RMSNorm are stored in the sub-layer below,
    whose output is the last that they read. The first sub-layer reads the embedding alone, so its w and gain would
    change nothing and are left out. Work and memory grow with the square of the depth. Inferred: each stack of an
    encoder-decoder has its own sources, and cross-attention is a sub-layer like the others.
    """


@arch(
    "attnres-block",
    title="AttnRes (blocks)",
    colour="#CC79A7",
    marker="X",
    rank=300,
    gains="base",
    family="More streams, since 2024",
    stream="mixed",
)
class OverBlocks(Attending):
    r"""AttnRes over N sources v_i, each the sum of L / N neighbouring outputs of its L sub-layers; N = 8.  AttnRes,
    Kimi Team 2026 (2603.15031), Eqs. 5-6.

    Inside a block, the sum of the block so far is one more source. With N >= L this is AttnRes over single outputs. If
    N does not divide L, blocks have L / N sub-layers rounded up (ours): the last block is shorter, or there are fewer
    than N.
    """

    class Options(ArchOptions):
        blocks: int = Field(default=8, ge=1)

    def size(self, place: Place) -> int:
        return -(-place.stack_sublayers // self.options.blocks)

    @classmethod
    def equal(cls, place: Place, options: Options) -> str:
        return "attnres" if place.stack_sublayers <= options.blocks else ""

    @staticmethod
    def constants(place: Place) -> dict[str, float]:
        return {"sub-layers a block": float(-(-place.stack_sublayers // 8))}
