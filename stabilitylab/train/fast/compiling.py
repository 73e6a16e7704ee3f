"""Compiled layers: one compilation for all layers of a kind and each shape of a batch, the probes inside."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from ...config import Config
from ...errors import ResourceError, UsageError, bounded
from ...models.transformer import Layer, Transformer
from ..ranks import Team

log = logging.getLogger(__name__)

BACKEND = "inductor"
# The largest number of kinds of layers in one model: encoder and decoder, in some architectures their first layers too.
KINDS = 8
# True if "auto" compiles on a GPU; no GPU has run compiled layers yet. On a CPU they do not pay (docs/speed.md).
COMPILED_BY_DEFAULT = False


def is_compiled(config: Config, device: torch.device, team: Team) -> bool:
    """True if the layers of this run are compiled: ``train.compile`` is "on", or "auto" on a GPU with
    :data:`COMPILED_BY_DEFAULT`.

    With "on", a setting that excludes compilation raises UsageError, and a missing compiler raises ResourceError. With
    "auto", layers then stay uncompiled.
    """
    asked = config.train.compile
    if asked == "off" or (asked == "auto" and not (COMPILED_BY_DEFAULT and device.type == "cuda")):
        return False
    if team.kind != "none":
        if asked == "on":
            raise UsageError(
                f"--compile on: --parallel {team.kind} spreads layers that are not compiled: leave --compile at auto, "
                "or off."
            )
        return False
    if missing := _missing(device):
        if asked == "on":
            raise ResourceError(f"--compile on needs {missing}: install it, or leave --compile at auto, or off.")
        log.warning("layers are not compiled: that needs %s.", missing)
        return False
    return True


def _missing(device: torch.device) -> str:
    """Return the name of the compiler that this machine lacks; "" if it lacks none."""
    if BACKEND != "inductor":
        return ""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "Triton"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler"
    return ""


def compile_layers(model: Transformer, shapes: int) -> None:
    """Have each layer compiled at its first call in each of ``shapes`` shapes of a batch. Names, parameters and
    checkpoints do not change.

    Layers of one kind share the compiled code. Only tensors differ between them: parameters, alpha and the keys of the
    probes' hooks.
    """
    from torch._dynamo import config

    limit = KINDS * shapes
    config.recompile_limit = max(config.recompile_limit, limit)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, limit)
    for module in model.modules():
        if isinstance(module, Layer):
            module.compile(backend=BACKEND, fullgraph=True, dynamic=False)


@contextmanager
def explained() -> Iterator[None]:
    """Turn the error of an architecture whose layers cannot be compiled into one sentence (UsageError)."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        why = bounded(str(error).strip().partition("\n")[0].rstrip("."), 300)
        raise UsageError(f"--compile on: these layers cannot be compiled ({why}): use --compile off.") from error


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Run compiled layers as uncompiled code within this context, for passes whose batches come in many shapes."""
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield
