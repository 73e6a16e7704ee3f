"""The models that can be watched, and the parts of them: compiled code runs without Python hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from ...errors import UsageError
from ..parameters.layouts import ddp_wrappers
from ..places.naming import held_by_wrapper

SPLIT = (
    "DDP splits what is compiled at its buckets, in which the probes' operators are lost: set "
    "torch._dynamo.config.optimize_ddp = False before watch and the first compiled call; gradients are averaged as "
    "before"
)
RUNS = "a function that runs the model on a fixed batch, 'first batch' or None"
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def check_watchable(model: nn.Module) -> None:
    """Raise UsageError for a model in which hooks would be missed, whose parameters lie on several devices, or whose
    parameters have no values yet."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model = {model!r} must be a torch.nn.Module.")
    if isinstance(model, nn.DataParallel):
        raise UsageError("nn.DataParallel copies the model at each forward: use DistributedDataParallel or one device.")
    if scripted := [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]:
        found = f"{scripted[0]} is a ScriptModule, which" if scripted[0] else "a ScriptModule"
        raise UsageError(f"{found} runs without hooks: watch the model as it is before torch.jit.")
    if any(isinstance(parameter, torch.nn.parameter.UninitializedParameter) for parameter in model.parameters()):
        raise UsageError("a lazy module has no parameters yet: run one batch through the model, then watch it.")
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise UsageError(f"parameters lie on several devices ({', '.join(devices)}): move the model to one device.")
    if devices == ["meta"]:
        raise UsageError("parameters on the meta device have no values: create them (to_empty), then watch the model.")


def as_tuple(optimizer: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """Return one, several or no optimizer as a tuple."""
    if optimizer is None:
        return ()
    return tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)  # pyright: ignore


def check_arguments(optimizer: Any, scaler: Any, mask: Any, reference: Any) -> None:
    """Raise UsageError for an argument of a wrong kind, before anything is attached or written."""
    if optimizer is not None and not as_tuple(optimizer):
        raise UsageError(f"optimizer = {optimizer!r} is empty: give one, several, or leave it out.")
    kinds: list[tuple[str, Any, Any, str]] = [
        *(("optimizer", each, torch.optim.Optimizer, "a torch.optim.Optimizer") for each in as_tuple(optimizer)),
        ("scaler", scaler, torch.amp.GradScaler, "a torch.amp.GradScaler"),
        ("mask", mask, (torch.Tensor, Mapping, Callable), "a tensor, a dict of them by stack, or a function"),
        ("reference", None if reference == "first batch" else reference, Callable, RUNS),
    ]
    for name, value, kind, meant in kinds:
        inner = getattr(value, "optimizer", value) if name == "optimizer" else value  # Accelerate wraps it
        if value is not None and not isinstance(inner, kind):
            given = f"a {type(value).__name__}" if isinstance(value, nn.Module) else repr(value)[:60]
            raise UsageError(f"{name} = {given} must be {meant}.")


def check_current(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> None:
    """Raise UsageError for an optimizer that was made before parallelize_module replaced parameters."""
    own = set(model.parameters())
    for optimizer in optimizers:
        if any(parameter not in own for group in optimizer.param_groups for parameter in group["params"]):
            raise UsageError(
                "optimizer= holds parameters that the model no longer has: make it after "
                "parallelize_module, and the watch after it."
            )


def check_unscaled(scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if the gradients that are about to be recorded still carry the loss scale."""
    if scaler is None or not scaler.is_enabled():
        return
    wrapped = getattr(optimizer, "optimizer", optimizer)  # by Accelerate, which unscales the one inside
    states = [scaler._per_optimizer_states[id(each)] for each in (optimizer, wrapped)]
    if all(state["stage"] is torch.amp.grad_scaler.OptState.READY for state in states):
        raise UsageError("gradients are still scaled: call scaler.unscale_(optimizer) before watcher.step().")


def split_by_ddp(model: nn.Module) -> bool:
    """Return True if Dynamo cuts what it compiles of a DDP model at the buckets of its gradients.

    It does so by default with more than one bucket. Operators without a result, as the probes' are, do not survive that
    (torch 2.13).
    """
    wrappers = ddp_wrappers(model)
    config = sys.modules.get("torch._dynamo.config")
    if not wrappers or (config is not None and config.optimize_ddp not in (True, "ddp_optimizer")):
        return False
    trained = [parameter for parameter in wrappers[0].parameters() if parameter.requires_grad]
    return sum(p.numel() * p.element_size() for p in trained) > torch.distributed._DEFAULT_FIRST_BUCKET_BYTES  # pyright: ignore


def compiled_modules(model: nn.Module) -> set[nn.Module]:
    """Return all modules inside ``torch.compile(module)``, and modules whose ``.compile()`` was called, with all
    inside.

    Hooks there become part of the code if they are there before it is compiled; later hooks are skipped in silence.
    """
    return {inner for compiled in model.modules() for root in _compiled(compiled) for inner in root.modules()}


def _compiled(module: nn.Module) -> Iterator[nn.Module]:
    if module._compiled_call_impl is not None:
        yield module
    if held_by_wrapper(module) == "_orig_mod":  # what torch.compile(module) wraps
        yield cast(nn.Module, module._modules["_orig_mod"])


@contextmanager
def with_hooks() -> Iterator[None]:
    """Run inference module by module, so that hooks see it. Compiled code, inside a model or around it, runs as it was
    written. ``nn.Transformer`` runs without its fused path, which skips modules and may pack tokens into nested
    tensors."""
    fused = torch.backends.mha.get_fastpath_enabled()
    compiles = "torch._dynamo" in sys.modules
    stance = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with stance:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
