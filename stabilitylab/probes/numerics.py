"""The numeric settings of this process that can change the digits of results, and the kernels of attention."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._version import __version__

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
ENABLED = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}


def enabled() -> list[str]:
    """Return the kernels of ``F.scaled_dot_product_attention`` that torch may choose from now."""
    return [name for name, is_on in ENABLED.items() if is_on()]


def attention(kernels: Sequence[str] | None) -> AbstractContextManager[Any]:
    """Return a context for forward and backward passes in which attention takes only these kernels, in torch's order:
    flash, efficient, math. (Backward passes too, since they compute checkpointed layers anew.) None: torch's own
    choice."""
    return nullcontext() if kernels is None else sdpa_kernel([BACKENDS[name] for name in kernels])


def process_facts(device: torch.device, kernels: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the facts about this process that every run records: versions, arguments, numeric settings."""
    return {
        "stabilitylab": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "argv": sys.argv,
        "numerics": numerics(device, kernels),
        "flush_denormal": bool(torch.tensor(1e-39) * 1 == 0),  # then a recorded 0 reads "0, or below 1.2e-38"
    }


def numerics(device: torch.device, kernels: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the numeric settings that a run records. ``kernels``: the attention kernels that the run will use (None:
    all that are enabled)."""
    cuda = device.type == "cuda"
    return {
        "attention": enabled() if kernels is None else list(kernels),
        "capability": list(torch.cuda.get_device_capability(device)) if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "float32_matmul": torch.get_float32_matmul_precision(),  # "highest": no TF32
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
