"""The spread of tokens over experts, and the certainty of their router."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..base import Numbers, Probe, probe, wide
from ..places.sites import Site, routers
from ..rules import Max, Mean


@probe(
    "router",
    on="forward",
    at=routers,
    unit={"entropy": "nats", "log_z": "nats", "load_max": "ratio", "load_min": "ratio", "max_logit": "logits"},
    columns={
        "entropy": Mean(),
        "log_z": Mean(),
        "load_max": Mean(),
        "load_min": Mean(),
        "max_logit": Max(),
    },
    log=False,
)
class Router(Probe):
    """The choices of a router among its E experts. ``entropy``: -sum_e p_e log p_e of a token's softmax over the
    experts, mean over real tokens (log E: undecided). ``log_z``: the logsumexp of a token's logits, mean over real
    tokens; the router z-loss is its square (Zoph et al. 2022, 2202.08906, Eq. 5). ``max_logit``: the largest absolute
    logit. ``load_max``, ``load_min``: the number of tokens whose first choice is the most chosen and the least chosen
    expert, as a ratio to an even share, taken for each micro-batch and rank, then averaged. Both are 1 if the load is
    balanced; they are E and 0 if all tokens go to one expert (f_i of Fedus et al. 2021, 2101.03961, Eq. 5).

    Look for a load_max that grows to E (collapse: the other experts get no gradient), and for a log_z that grows.

    The logits are x W^T + b for the input x of the router, in float32 or in a wider type of x. Noise, or a balancing
    bias that a model adds itself, is not included. A token that is dropped because its expert is full counts for the
    expert that it chose.
    """

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        router: Any = site.module
        dtype = wide(y)
        bias = getattr(router, "bias", None)
        bias = bias.to(dtype) if isinstance(bias, torch.Tensor) and bias.shape == router.weight.shape[:1] else None
        with torch.autocast(y.device.type, enabled=False):
            logits = F.linear(y.to(dtype), router.weight.to(dtype), bias)  # (*tokens, E)
        log_p = logits.log_softmax(-1)
        chosen = F.one_hot(logits.argmax(-1), logits.shape[-1]).double() * weight[..., None]
        load = chosen.flatten(0, -2).sum(0) * (logits.shape[-1] / weight.sum().clamp(min=1).double())
        return {
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "log_z": logits.logsumexp(-1),
            "load_max": load.amax(),
            "load_min": load.amin(),
            "max_logit": torch.linalg.vector_norm(logits, float("inf"), dim=-1),
        }
