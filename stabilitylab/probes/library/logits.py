"""The drift of the output logits, which shows in the loss only late."""

from __future__ import annotations

from typing import Any

import torch

from ..base import Numbers, Probe, probe, wide
from ..places.sites import Site, logits
from ..rules import Max, Mean, Quantile


@probe(
    "logits",
    on="reference",
    at=logits,
    unit="nats",
    columns={"log_z": Mean(), "abs_log_z_p99": Quantile("abs_log_z", 0.99), "mean_logit": Mean(), "max_abs": Max()},
    log=False,
)
class Logits(Probe):
    """The size of the output logits over the vocabulary (V entries). ``log_z``: log Z, the logsumexp of a token's
    logits, mean over real tokens. ``abs_log_z_p99``: the 99 % quantile of |log Z| over tokens. It comes from a
    histogram and is off by up to 2.2 %, so it can lie below the mean of tokens that are nearly equal. It is of the
    size, since a histogram on a log scale holds no signs. ``mean_logit``: the mean of the logits. ``max_abs``: the
    largest absolute logit. Chowdhery et al. 2022 (PaLM's z-loss, 1e-4 log^2 Z); Wortsman et al. 2023 (2309.14322,
    output logit divergence).

    Look for a log_z that moves further from 0 from row to row (it starts at about log V + var/2), or for a mean that
    drifts (to minus infinity, without z-loss or weight decay). The softmax does not change with such a drift, but bf16
    logits lose precision.

    The other numbers are exact and at full precision. All come from the reference pass and not from each training
    forward, since the logits are the largest tensor of the model.

    Cost: a logsumexp, a mean and a maximum over (tokens, V).
    """

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        y = y.to(wide(y))  # (B, T, V)
        log_z = y.logsumexp(-1)
        size = torch.linalg.vector_norm(y, float("inf"), dim=-1)
        return {"log_z": log_z, "abs_log_z": log_z.abs(), "mean_logit": y.mean(-1), "max_abs": size}
