"""mHC: Hyper-Connections whose mixture of streams is doubly stochastic."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Place, arch
from ..norms import EPS
from ..sublayers import SubLayer
from .hyper_connections import Connected, Connections, Streams

ROUNDS = 20  # of Sinkhorn's algorithm
APART = -8.0  # b_res off the diagonal


def doubly_stochastic(logits: Tensor, rounds: int = ROUNDS) -> Tensor:
    """Return exp(logits), (..., n, n), after ``rounds`` divisions by its column sums, then by its row sums.  Sinkhorn
    and Knopp 1967; mHC, Eq. 9.

    The first round is computed from logarithms, so that a row far below another one does not underflow to 0. After it,
    each sum of n entries lies between 1 / n^2 and n, so that plain divisions are safe. They take a tenth of the time.
    """
    mixture = logits.log_softmax(-2).softmax(-1)
    for _ in range(rounds - 1):
        mixture = mixture / mixture.sum(-2, keepdim=True)
        mixture = mixture / mixture.sum(-1, keepdim=True)
    return mixture


@arch(
    "mhc",
    title="mHC",
    colour="#D55E00",
    marker="P",
    rank=280,
    gains="base",
    family="More streams, since 2024",
    stream="mixed",
)
class MHC(Connected):
    r"""x <- H_res x + H_post^T F(LN(H_pre x)), n streams x, H_res doubly stochastic.  mHC, Xie et al. 2025
    (2512.24880), Eqs. 6-9.

    H_pre = sigmoid(h), H_post = 2 sigmoid(h), H_res = 20 rounds of Sinkhorn's algorithm on exp(h). Each has its own h =
    a RMSNorm(vec x) phi + b, with a = .01 and n = 4. RMSNorm is over all n D features, without a gain; its eps is that
    of all architectures here instead of 1e-20. The stack ends in the mean of the streams, as Hyper-Connections do here;
    the released kernels have a head of trained weights. The start of b and phi was not found in the sources that were
    read, so it is ours: phi = 0, and b_res is 0 on the diagonal and -8 off it. ``arch.start = staggered``: b_pre =
    b_post = -1, but 1 at stream s mod n, as in FFTYYY/mhc-lite ea19775. ``preln``: H_pre = 1/n and H_post = 1, so that
    every stream is that of Pre-LN; streams that start equal then stay equal for good. With n = 1 every stream is only
    nearly that of Pre-LN: H_pre = sigmoid(8), 3e-4 below 1. Inferred: an encoder-decoder is treated as in
    Hyper-Connections.
    """

    learns = "phi: n D (n^2 + 2n), b: n^2 + 2n, a: 3 numbers a sub-layer; the final norm of each stack"

    class Options(Connected.Options):
        start: Literal["staggered", "preln"] = "staggered"

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        n = self.options.n
        self.phi = nn.Parameter(torch.zeros(n * place.width, n * n + 2 * n))
        self.scales = nn.Parameter(torch.full((3,), 0.01))  # of H_pre, H_post and H_res
        if self.options.start == "staggered":
            gather = torch.full((n,), -1.0)
            gather[place.index % n] = 1.0
            spread = gather.clone()
        else:
            gather = torch.full((n,), -math.log(n - 1) if n > 1 else -APART)
            spread = torch.zeros(n)
        self.gather_bias, self.spread_bias = nn.Parameter(gather), nn.Parameter(spread)
        self.carry_bias = nn.Parameter(APART * (1 - torch.eye(n)))

    def connections(self, stream: Streams, states: Tensor) -> Connections:
        n = len(stream)
        whole = states.flatten(2)  # (B, T, n D)
        found = F.rms_norm(whole, whole.shape[-1:], eps=EPS) @ self.phi
        gather, spread, carry = found.split((n, n, n * n), -1)
        scales = self.scales.unbind()
        mixture = doubly_stochastic(scales[2] * carry.unflatten(-1, (n, n)) + self.carry_bias)
        return (
            torch.sigmoid(scales[0] * gather + self.gather_bias),
            mixture,
            2 * torch.sigmoid(scales[1] * spread + self.spread_bias),
        )
