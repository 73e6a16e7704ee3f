"""The designs of published decoder-only models, as settings of the reference Transformer.

A design says what stands around the residual scheme: positions, activation, norm, biases, the factor on embeddings,
and the base of the initial weights. An architecture (``--arch``) keeps its own gains over that base.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DESIGNS: dict[str, dict[str, Any]] = {
    # Vaswani et al. 2017: the defaults of the settings.
    "transformer": {},
    # GPT-2, as karpathy/nanoGPT 3adf61e1 has it (model.py 18-170, 262-290): biases, GELU, f = 4d, learned positions, an
    # embedding without sqrt(d), tied output; N(0, .02^2), out and fc2 1/sqrt(2M) smaller.
    "gpt2": {
        "stack": "decoder",
        "positions": "learned",
        "activation": "gelu",
        "norm": "layernorm",
        "bias": True,
        "embedding_scale": 1,
        "tie": "output",
        "init": "arch-gpt2",
    },
    # LLaMA, as meta-llama/llama 689c7f2 has it (llama/model.py 34-100, 205-232, 307-348, 378-447): RMSNorm, RoPE, no
    # biases, SwiGLU of f = 8d/3 rounded up, untied output. That repository has no initial weights for training;
    # N(0, .02^2) is that of its descendants (Mix-LN, GPAS, ProRes).
    "llama": {
        "stack": "decoder",
        "positions": "rope",
        "activation": "swiglu",
        "norm": "rmsnorm",
        "bias": False,
        "embedding_scale": 1,
        "tie": "none",
        "init": "arch-normal",
    },
}
MULTIPLE = 8  # LLaMA rounds its 8d/3 up to a multiple of 256, which is 4d itself at width 64; ours is a multiple of 8


def is_design(name: Any) -> bool:
    """Return True for the name of a published model, such as ``gpt2``."""
    return isinstance(name, str) and name in DESIGNS and bool(DESIGNS[name])


def design_of(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the design that ``model.design`` names; none for an unknown name, which the configuration
    refuses."""
    name = model.get("design", "transformer")
    return DESIGNS.get(name, {}) if isinstance(name, str) else {}


def stack_of(model: Mapping[str, Any]) -> Any:
    """Return ``model.stack`` (or ``model.kind``, its other name) as given, else that of the design."""
    for key in ("stack", "kind"):
        if key in model:
            return model[key]
    return design_of(model).get("stack", "encoder-decoder")


def block_width(design: str, d_model: int) -> int | None:
    """Return the inner width of the feed-forward blocks of a design, for a model of width ``d_model``: 4d in GPT-2,
    8d/3 rounded up to a multiple of 8 in LLaMA; None where the preset decides."""
    if design == "gpt2":
        return 4 * d_model
    if design == "llama":
        return -(-8 * d_model // (3 * MULTIPLE)) * MULTIPLE
    return None
