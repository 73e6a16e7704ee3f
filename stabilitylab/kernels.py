"""Kernels that are known to give wrong numbers, and a check for runs that may have used one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

SHORT = {"bf16", "bfloat16", "fp16", "float16"}
CUDNN = (
    "cuDNN's attention may have run, whose backward pass is known to give NaN in the gradient of the queries, with a "
    "mask and lengths of 64 mod 128 (pytorch#196678)"
)


def suspected(numerics: Mapping[str, Any] | None, types: Collection[str] | None, how: str) -> str:
    """Name another possible cause of a gradient that is not finite; "" for none.

    ``numerics``: the run's record (:func:`stabilitylab.probes.numerics.numerics`). ``types``: the types in which
    attention computed, None if unknown. ``how``: the step that rules the kernel out.
    """
    found = numerics if isinstance(numerics, Mapping) else {}
    allowed, capability = found.get("attention"), found.get("capability")
    if not isinstance(allowed, list) or "cudnn" not in allowed or not isinstance(capability, list) or not capability:
        return ""
    if capability[0] != 9 or (types is not None and not SHORT & {*types}):
        return ""
    when = "" if types is not None else "if attention computed in bfloat16 or float16, "
    return f"{when}{CUDNN}: {how} and see whether it goes away"
