"""The drift of the output logits, which the loss does not feel until it is late."""

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
    """log_z: log Z = logsumexp of a token's logits over the vocabulary, mean over real tokens; abs_log_z_p99: 99 %
    quantile of |log Z| (its size, since a histogram on a log scale holds no signs; to within 2.2 %);
    mean_logit, max_abs: the logits' mean and largest size. Chowdhery et al. 2022 (PaLM's z-loss, 1e-4 log^2 Z);
    Wortsman et al. 2023 (2309.14322, output logit divergence).

    Look for log_z, about log V + var/2 at the start, that leaves 0 further behind from row to row, or for a mean that
    drifts (to minus infinity, without z-loss or weight decay): softmax does not feel it, bf16 logits do.

    Taken in the reference pass, exactly and at full precision, not in every training forward, whose logits are the
    model's largest tensor. Cost: a logsumexp, a mean and a maximum over (tokens, V).
    """

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        y = y.to(wide(y))  # (B, T, V)
        log_z = y.logsumexp(-1)
        size = torch.linalg.vector_norm(y, float("inf"), dim=-1)
        return {"log_z": log_z, "abs_log_z": log_z.abs(), "mean_logit": y.mean(-1), "max_abs": size}
