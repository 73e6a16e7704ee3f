"""Places at which probes tap any ``nn.Module``: the kinds that a probe names with ``at=``."""

from .sites import (
    Site,
    Sites,
    activations,
    attentions,
    branches,
    hidden_state,
    layers,
    logits,
    norms,
    outputs,
    routers,
    stream,
    tensor_of,
)

__all__ = [
    "Site",
    "Sites",
    "activations",
    "attentions",
    "branches",
    "hidden_state",
    "layers",
    "logits",
    "norms",
    "outputs",
    "routers",
    "stream",
    "tensor_of",
]
