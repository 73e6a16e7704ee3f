"""Probes of the reference pass: the similarity of neighbouring layers, and the change of the output by updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import UsageError
from ..base import Numbers, Probe, probe, wide
from ..places.sites import Site, layers, outputs
from ..rules import Mean


@probe(
    "cosine_similarity",
    on="reference",
    at=layers,
    unit="cosine",
    total="mean",
    columns={"raw": Mean(), "centred": Mean()},
    default=True,
    log=False,
)
class CosineSimilarity(Probe):
    """The cosine between a layer's input and output over the width d, per token, then the mean over real tokens. Row l
    compares layers l-1 and l (row 1 compares with the embedding). ``raw``: the vectors as they are. ``centred``: after
    the mean token is subtracted. BranchNorm, Fig. 8. For maps of convolutions the cosine is over channels, per pixel. A
    layer that changes the shape has no number."""

    of_stream = True
    undefined = frozenset({"raw", "centred"})  # of a token that is all 0

    def measure(self, site: Site, x: torch.Tensor | None, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        if x is None or x.shape != y.shape:
            return None
        real, count = weight.unsqueeze(-1), weight.sum()
        tokens = tuple(range(weight.dim()))

        def centred(z: torch.Tensor) -> torch.Tensor:
            return z - z.sum(tokens) / count

        def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (a * b).sum(-1) / (torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1))

        x, y = (torch.where(real, z, 0).to(wide(z)) for z in (x, y))  # (B, T, D)
        return {"raw": cosine(x, y), "centred": cosine(centred(x), centred(y))}


@dataclass
class Output:
    """The output of one call of a stack in a reference pass."""

    row: int
    value: torch.Tensor  # (B, T, D)
    weight: torch.Tensor  # (B, T)


@probe(
    "model_update",
    on="reference",
    at=outputs,
    unit="L2 norm per token",
    columns={"cumulative": Mean(), "one_update": Mean(), "parameters": Mean(), "schedule": Mean()},
    default=True,
    log=False,
)
class ModelUpdate(Probe):
    """The distance that the model's output F has moved on a fixed batch x, in L2 norm per token, mean over real tokens.
    ``cumulative``: ||F(x; theta_t, alpha_t) - F(x; theta_0, alpha_0)||_2, since the start. ``one_update``: against the
    output at row t-1. ``parameters``: against F(x; theta_0, alpha_t), so by the parameters alone. ``schedule``: F(x;
    theta_0, alpha_t) against the start, so by a schedule of alpha alone. The columns do not add up. With a schedule, a
    copy of theta is kept for the run, and due rows take a second copy and one more forward. DeepNet, Fig. 4a."""

    of_stream = True

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        return y.detach().to(wide(y), copy=True)  # compared later: a stack may be reused or written to in place


def distances(some: Sequence[Output], others: Sequence[Output]) -> list[torch.Tensor]:
    """Return ||a - b||_2 of each token of each call, (B, T)."""
    if [(a.row, a.value.shape) for a in some] != [(b.row, b.value.shape) for b in others]:
        raise UsageError("reference= must run the model on the same fixed batch each time: its outputs changed shape.")
    pairs = zip(some, others, strict=True)
    return [torch.linalg.vector_norm(a.value - b.value, dim=-1, dtype=torch.float64) for a, b in pairs]
