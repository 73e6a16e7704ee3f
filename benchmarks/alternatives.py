"""What contenders.py compares: hooks by hand, other people's tools, and parts of ours; how each attaches to a model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stabilitylab import watch

AfterBackward = Callable[[torch.Tensor], int]  # loss -> how many numbers were recorded
Masks = Mapping[str, torch.Tensor]
Attach = Callable[[nn.Module, Any, Path, Masks], AfterBackward]


def bare(model: nn.Module, optimizer: Any, folder: Path, masks: Masks) -> AfterBackward:
    return lambda loss: 0


def ours(probes: str) -> Attach:
    def attach(model: nn.Module, optimizer: Any, folder: Path, masks: Masks) -> AfterBackward:
        watcher = watch(model, out=folder, probes=probes, every=1, optimizer=optimizer, mask=masks)
        numbers = sum(len(table.rows) * len(table.columns) for table in watcher.tables.values())

        def after_backward(loss: torch.Tensor) -> int:
            watcher.step(loss=loss)
            return numbers

        return after_backward

    return attach


def places(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The norms, and the last of each layer: what the standard set looks at."""
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    layers = [module for name, module in model.named_modules() if name.split(".")[-2:-1] == ["layers"]]
    return norms, layers


def naive(model: nn.Module, optimizer: Any, folder: Path, masks: Masks) -> AfterBackward:
    """The standard set as one writes it in an afternoon: float32, padding counted, ``.item()`` on the spot."""
    seen: list[float] = []
    norms, layers = places(model)

    def norm_input(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        seen.append(args[0].norm(dim=-1).mean().item())

    def layer_output(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        seen.append(output.norm(dim=-1).mean().item())
        output.register_hook(lambda gradient: seen.append(gradient.norm().item()))

    for module in norms:
        module.register_forward_hook(norm_input)
    for module in layers:
        module.register_forward_hook(layer_output)

    def after_backward(loss: torch.Tensor) -> int:
        seen.extend(p.grad.norm().item() for p in model.parameters() if p.grad is not None)
        count = len(seen)
        seen.clear()
        return count

    return after_backward


def full_copy(model: nn.Module, optimizer: Any, folder: Path, masks: Masks) -> AfterBackward:
    """Copies of the same tensors, kept for the step and thrown away unread: the least that a full copy can cost."""
    seen: list[torch.Tensor] = []
    norms, layers = places(model)

    def keep(tensor: torch.Tensor) -> None:
        seen.append(tensor.detach().clone())

    def layer_output(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        keep(output)
        output.register_hook(keep)

    for module in norms:
        module.register_forward_hook(lambda module, args, output: keep(args[0]))
    for module in layers:
        module.register_forward_hook(layer_output)

    def after_backward(loss: torch.Tensor) -> int:
        for p in model.parameters():
            if p.grad is not None:
                keep(p.grad)
        count = len(seen)
        seen.clear()
        return count

    return after_backward


def floor(measures: bool) -> Attach:
    """The standard set's hooks on forward and backward that do nothing, or take one float32 norm and read none."""

    def attach(model: nn.Module, optimizer: Any, folder: Path, masks: Masks) -> AfterBackward:
        seen: list[torch.Tensor] = []
        norms, layers = places(model)

        def look(tensor: torch.Tensor) -> None:
            if measures:
                seen.append(torch.linalg.vector_norm(tensor.detach(), dim=-1))

        def layer_output(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            look(output)
            output.register_hook(look)

        for module in norms:
            module.register_forward_hook(lambda module, args, output: look(args[0]))
        for module in layers:
            module.register_forward_hook(layer_output)

        def after_backward(loss: torch.Tensor) -> int:
            seen.clear()
            return len(norms) + 2 * len(layers)

        return after_backward

    return attach


def wandb_watch(model: nn.Module, optimizer: Any, folder: Path, masks: Masks) -> AfterBackward:
    wandb = importlib.import_module("wandb")
    run = wandb.init(mode="offline", dir=str(folder.parent), settings=wandb.Settings(silent=True))
    run.watch(model, log="gradients", log_freq=1)
    count = sum(1 for p in model.parameters() if p.requires_grad)

    def after_backward(loss: torch.Tensor) -> int:
        run.log({"loss": loss.item()})
        return count

    return after_backward


def torchinstruments(model: nn.Module, optimizer: Any, folder: Path, masks: Masks) -> AfterBackward:
    inject = importlib.import_module("torchinstruments").inject_observer
    inject(model, interval=timedelta(microseconds=1), output_dir=folder)
    modules = len(list(model.modules()))
    return lambda loss: 2 * 9 * modules  # nine numbers of each output and of its gradient


def trainscope(model: nn.Module, optimizer: Any, folder: Path, masks: Masks) -> AfterBackward:
    module = importlib.import_module("trainscope")
    config = importlib.import_module("trainscope.core.config").TrainScopeConfig(run_dir=str(folder), run_name="run")
    scope = module.TrainScope(model, optimizer, config=config).attach()
    count = 9 * sum(1 for _ in model.parameters())  # its statistics of activations do not come at every step

    def after_backward(loss: torch.Tensor) -> int:
        scope.step(loss.item())
        return count

    return after_backward


def lightning(model: nn.Module, optimizer: Any, folder: Path, masks: Masks) -> AfterBackward:
    grad_norm = importlib.import_module("lightning.pytorch.utilities").grad_norm

    def after_backward(loss: torch.Tensor) -> int:
        return len([float(value) for value in grad_norm(model, 2).values()])  # as a logger reads them

    return after_backward


def debug_overflow(model: nn.Module, optimizer: Any, folder: Path, masks: Masks) -> AfterBackward:
    debug = importlib.import_module("transformers.debug_utils").DebugUnderflowOverflow(model)
    leaves = sum(len(list(m.named_parameters(recurse=False))) + 2 for m in model.modules())

    def after_backward(loss: torch.Tensor) -> int:
        assert debug is not None
        return 2 * leaves

    return after_backward


# name: (what makes it, the packages that it needs, what it records at each step)
CONTENDERS: dict[str, tuple[Attach, str, str]] = {
    "bare": (bare, "", "nothing"),
    "control": (bare, "", "nothing: bare again"),
    "stabilitylab, standard": (
        ours("standard"),
        "",
        "norm of each layer's output and of its gradient, of each norm's input, of each sub-layer's parameters' "
        "gradients (a norm of each parameter is taken, one number a sub-layer is kept); float64, padding left out",
    ),
    "stabilitylab, default": (
        ours("default"),
        "",
        "the default probes of the training pass: the same for sub-layers, by parameter group, taps, p99, update ratio",
    ),
    "naive hooks": (naive, "", "the standard set's places by hand: float32, padding counted, read by .item()"),
    "full copy": (full_copy, "", "copies of the same tensors, not stored (counted: tensors)"),
    "torchinstruments": (
        torchinstruments,
        "torchinstruments tensorboard",
        "nine statistics and a histogram of each module's output and its gradient; made for one sample a minute, "
        "asked for each step here",
    ),
    "trainscope": (
        trainscope,
        "trainscope",
        "four statistics of each parameter's gradient and five of its weights; at some steps more",
    ),
    "wandb.watch": (  # behind trainscope, which would write into its run as well
        wandb_watch,
        "wandb",
        "histogram of each parameter's gradient (counted: histograms); offline; its service's CPU time is not in this",
    ),
    "Lightning grad_norm": (lightning, "lightning", "norm of each parameter's gradient and of all, float32"),
    "DebugUnderflowOverflow": (
        debug_overflow,
        "transformers",
        "least and largest magnitude of each module's weights, input and output in the forward pass, for the last 21 "
        "modules; stores nothing unless one is NaN or inf",
    ),
}

# with --parts: where the standard set's time goes
PARTS: dict[str, tuple[Attach, str, str]] = {
    "empty hooks": (floor(measures=False), "", "nothing: the hooks of the standard set, each returns at once"),
    "norms alone": (
        floor(measures=True),
        "",
        "a float32 norm per token in each of these hooks, never read",
    ),
    "activations": (ours("standard,-grad_norm,-activation_grad_norm"), "", "of the standard set the forward pass"),
    "their gradients": (ours("standard,-grad_norm,-ln_input,-residual_norm"), "", "of it the backward pass"),
    "parameters": (ours("standard,-ln_input,-residual_norm,-activation_grad_norm"), "", "of it the parameters"),
    "no probe": (ours("none"), "", "loss and total gradient norm"),
}
