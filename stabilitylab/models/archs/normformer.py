"""NormFormer: Pre-LN with norms and head scales inside the branch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..base import Place, arch
from ..sublayers import FeedForward, SelfAttention, SubLayer
from .preln import PreLN


@arch(
    "normformer",
    title="NormFormer",
    colour="#6a51a3",
    marker="X",
    rank=140,
    gains="base",
    family="More norms",
    stream="sum",
)
class NormFormer(PreLN):
    r"""x + LN(W_o [g_h head_h(LN(x))]_h) and x + W_2 LN(relu(W_1 LN(x))), else Pre-LN.  NormFormer, Shleifer et al.
    2021 (2110.09456).

    g_h, one number per head, starts at 1. (fairseq's code applies g_h after W_o, where heads no longer exist; this is
    not followed.) The optional scale of the residual is left out. Inferred: encoder and decoder are treated alike, and
    cross-attention is as in Pre-LN.
    """

    learns = "g: H a self-attention; a norm (d) behind it and one (d_ffn) in each feed-forward block; the final norm"

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        if isinstance(f, SelfAttention):
            f.head_scale = nn.Parameter(torch.ones(f.heads))
            f.outer_norm = place.new_norm()
        elif isinstance(f, FeedForward):
            f.inner_norm = place.new_norm(f.inner_width)
