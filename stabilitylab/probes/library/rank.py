"""Rank collapse: the tokens of a sentence become alike with depth."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..base import Numbers, Probe, probe
from ..places.sites import Site, layers
from ..rules import Mean


@probe(
    "rank",
    on="reference",
    at=layers,
    unit={
        "token_cosine": "cosine",
        "residual_rank_one": "ratio",
        "effective_rank": "directions",
        "stable_rank": "directions",
    },
    total="mean",
    columns={"token_cosine": Mean(), "residual_rank_one": Mean(), "effective_rank": Mean(), "stable_rank": Mean()},
    log=False,
)
class Rank(Probe):
    """The similarity of the tokens in each layer's output X, and the rank of X, for real tokens only. ``token_cosine``:
    the mean cosine of a token with the other n - 1 tokens of its sentence, (||sum_i u_i||^2 - n) / (n (n - 1)) with u_i
    = x_i / ||x_i||. ``residual_rank_one``: ||X - 1 m^T||_F / ||X||_F of a sentence, where m is its mean token. Both are
    means over tokens; a sentence of one token counts as 1 and 0. ``effective_rank``: exp of the entropy of sigma /
    sum(sigma). ``stable_rank``: ||X||_F^2 / ||X||_2^2. These two take all tokens of a batch as one matrix with singular
    values sigma, leave out values below about 1e-7 of the largest, and are means over batches. Dong et al. 2021
    (2103.03404, there in another norm); Roy & Vetterli 2007, Garrido et al. 2022 (2210.02885, RankMe).

    Look for a token_cosine that rises to 1 and a residual_rank_one that falls to 0 with depth: all tokens become the
    same, attention becomes uniform, and q and k get no gradient (Noci et al. 2022). effective_rank says how many
    directions are in use.

    The first dimension of a layer's output is taken as the samples, and the others as their tokens, except in layers
    with ``nn.MultiheadAttention`` that say ``batch_first=False``. For any other model that is sequence-first (tokens,
    samples, width) give ``watch`` ``batch_first=False``. Without it the first two columns are about other tokens, and
    nothing shows it.

    Cost: for each layer of the reference pass, in float64, a Gram matrix (d, d) or (tokens, tokens) and its
    eigenvalues. On a GPU the eigenvalue solver makes the host wait once a layer.
    """

    waits = True
    of_stream = True
    undefined = frozenset(("token_cosine", "residual_rank_one", "effective_rank", "stable_rank"))  # of tokens all 0

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        turned = self.is_sequence_first(site, weight)
        if self.batch_first is None:
            turned = weight.dim() == 2 and sequence_first(site.module)
        own = weight.transpose(0, 1) if turned else weight if weight.dim() > 1 else weight[None]
        real = own.flatten(1)  # (B, T)
        hidden = (y.transpose(0, 1) if turned else y).reshape(*real.shape, -1).double()  # (B, T, D)
        hidden = torch.where(real[..., None], hidden, 0)
        cosine, residual = likeness(hidden, real)
        squares = spectrum(hidden.flatten(0, 1))
        share = squares.sqrt() / squares.sqrt().sum()
        return {
            **{
                name: (number.reshape(own.shape).transpose(0, 1) if turned else number).reshape(weight.shape)
                for name, number in (("token_cosine", cosine), ("residual_rank_one", residual))
            },
            "effective_rank": torch.special.entr(share).sum().exp(),
            "stable_rank": squares.sum() / squares.amax(),
        }


def likeness(hidden: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean cosine of each token with the others of its sentence, and the distance of the sentence from rank
    one, both (B, T). ``hidden``: (B, T, D), zeros on padding."""
    count = real.sum(1)[:, None].double()  # (B, 1)
    norms = torch.linalg.vector_norm(hidden, dim=-1)
    units = torch.where(real[..., None], hidden / norms[..., None], 0)
    others = (units * units.sum(1, keepdim=True)).sum(-1) - 1
    cosine = torch.where(count > 1, others / (count - 1), 1)
    mean = hidden.sum(1, keepdim=True) / count[..., None]
    off = torch.where(real[..., None], hidden - mean, 0)
    residual = torch.linalg.vector_norm(off, dim=(1, 2)) / torch.linalg.vector_norm(hidden, dim=(1, 2))
    return cosine, residual[:, None].expand_as(cosine)


def spectrum(matrix: torch.Tensor) -> torch.Tensor:
    """Return the squares of the singular values, from the smaller Gram matrix; all NaN if an entry is not finite."""
    gram = matrix.T @ matrix if matrix.shape[0] >= matrix.shape[1] else matrix @ matrix.T
    finite = gram.isfinite().all()
    squares = torch.linalg.eigvalsh(torch.where(finite, gram, 0))  # which raises if it does not converge
    noise = max(matrix.shape) * torch.finfo(torch.float64).eps * squares.amax()
    return torch.where(finite, torch.where(squares > noise, squares, 0), torch.nan)


def sequence_first(layer: nn.Module) -> bool:
    """Return True if the layer takes (tokens, sentences, width), as ``nn.Transformer`` does by default."""
    return any(isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in layer.modules())
