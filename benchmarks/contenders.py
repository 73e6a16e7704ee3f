"""What watching every step costs, ours and others side by side: one model, alternating steps, CPU time, an A/A control.

    python benchmarks/contenders.py --rounds 20 --out benchmarks/contenders

Tiny post-LN encoder-decoder (64-128-2, ``--depth`` layers in all), 16 sentences, one thread, denormals flushed as in
``stabilitylab train``. Each contender has a model, an optimizer and a folder of its own; the steps of a round run one
after the other, each second round in reverse (ABBA); what takes over eight bare steps is left out after six rounds.
A contender over bare: the median over rounds of the ratio within a round, with a 95 % bootstrap interval; "control" is
a second bare model. CPU time is this process's, all threads: what a tool does in another process (wandb's service) is
not in it. Writes OUT.md and OUT.png. ``--parts``: what parts of ours cost.

The packages: ``pip install stabilitylab[benchmark]``; what is not installed is left out, and said so.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from stabilitylab.api import watch
from stabilitylab.config import parse_set, resolve
from stabilitylab.data import load_data
from stabilitylab.models import build_model
from stabilitylab.train.recipe import adamw, token_losses

SLOW, FEW = 8, 6  # what takes so many bare steps takes part in so few rounds

AfterBackward = Callable[[torch.Tensor], int]  # loss -> how many numbers were recorded
Masks = Mapping[str, torch.Tensor]
Attach = Callable[[nn.Module, Any, Path, Masks], AfterBackward]


class Contender:
    """One model that trains on one batch; ``attach`` makes what is called between backward and the optimizer."""

    def __init__(self, depth: int, folder: Path, attach: Attach) -> None:
        config = resolve(parse_set(["model.arch=postln"]), depth=depth)
        data = load_data(config.data, stack=config.model.stack)
        self.model = build_model(
            config.model, source_vocab=data.source_vocab, target_vocab=data.target_vocab, seed=config.train.seed
        ).train()
        self.batch = data.micro_batch(0)
        self.optimizer = adamw(config.train, self.model.parameters())
        self.numbers = 0
        self.after_backward = attach(self.model, self.optimizer, folder, self.batch.masks)

    def step(self) -> float:
        began = time.process_time()
        loss, _ = token_losses(self.model(**self.batch.inputs), self.batch.labels, self.batch.weight, 0.1)
        loss = loss / self.batch.tokens
        loss.backward()
        self.numbers = self.after_backward(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.process_time() - began


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


def measured(depth: int, rounds: int, names: list[str], folder: Path) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    subjects: dict[str, Contender] = {}
    slow: set[str] = set()
    base = 0.0
    for number, name in enumerate(names):
        attach, packages, _ = (CONTENDERS | PARTS)[name]
        try:
            subjects[name] = Contender(depth, folder / str(number), attach)
            last = [subjects[name].step() for _ in range(3)][-1]
            base = base or last
            slow |= {name} if last > SLOW * base else set()
        except ImportError as error:
            print(f"{name}: left out, {error}; pip install {packages}")
            subjects.pop(name, None)
    rows = []
    for turn in range(rounds):
        taking_part = [name for name in subjects if turn < FEW or name not in slow]
        order = taking_part if turn % 2 else taking_part[::-1]
        rows.append({name: subjects[name].step() for name in order})
    seconds = {name: np.array([row.get(name, np.nan) for row in rows]) for name in subjects}
    return seconds, {name: subject.numbers for name, subject in subjects.items()}


def ratios(seconds: dict[str, np.ndarray]) -> dict[str, tuple[float, float, float]]:
    """Median over rounds and its 95 % interval."""
    random, found = np.random.default_rng(0), {}
    for name, own in seconds.items():
        ratio = (own / seconds["bare"])[np.isfinite(own)]
        medians = np.median(random.choice(ratio, (4000, len(ratio))), axis=1)
        low, high = np.quantile(medians, [0.025, 0.975])
        found[name] = (float(np.median(ratio)), float(low), float(high))
    return found


def table(seconds: dict[str, np.ndarray], numbers: dict[str, int], arguments: argparse.Namespace) -> str:
    flag = " --parts" if arguments.parts else ""
    lines = [
        "# What parts of the standard set cost" if arguments.parts else "# What watching every step costs",
        "",
        f"`python benchmarks/contenders.py --depth {arguments.depth} --rounds {arguments.rounds}{flag}`, "
        f"{platform.machine()} with {os.cpu_count()} cores, one thread, torch {torch.__version__}, "
        f"Python {platform.python_version()}; load of the machine meanwhile {os.getloadavg()[1]:.1f}. "
        f"A bare step takes {1e3 * np.median(seconds['bare']):.0f} ms of CPU time.",
        "",
        "| contender | over bare [95 %] | numbers a step | µs a number | what it records |",
        "|---|---|---|---|---|",
    ]
    for name, (middle, low, high) in ratios(seconds).items():
        count = numbers[name]
        each = f"{1e6 * np.nanmedian(seconds[name] - seconds['bare']) / count:.1f}" if count else ""
        shown = f"{count:,}" if count else ""
        lines.append(
            f"| {name} | {middle:.3f} [{low:.3f}, {high:.3f}] | {shown} | {each} | {(CONTENDERS | PARTS)[name][2]} |"
        )
    return "\n".join(lines) + "\n"


def draw(seconds: dict[str, np.ndarray], path: Path) -> None:
    from matplotlib import pyplot as plt

    found = ratios(seconds)
    figure, axes = plt.subplots(figsize=(6.4, 0.35 * len(found) + 1), layout="constrained")
    for place, (middle, low, high) in enumerate(found.values()):
        axes.errorbar(middle, place, xerr=[[middle - low], [high - middle]], fmt="o", color="black", capsize=3)
    axes.set_yticks(range(len(found)), [*found])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1.03, color="grey", linestyle=":")
    axes.set_xlabel("CPU time of a step over bare (dotted: goal, 1.03)")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", action="append", default=[], choices=CONTENDERS, help="beside bare; may be repeated")
    parser.add_argument("--parts", action="store_true", help="what parts of the standard set cost, instead of others")
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.png")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    names = ["bare", "control", *arguments.only] if arguments.only else [*CONTENDERS]
    if arguments.parts:
        names = ["bare", "control", "stabilitylab, standard", *PARTS]
    with tempfile.TemporaryDirectory() as folder:
        seconds, numbers = measured(arguments.depth, arguments.rounds, names, Path(folder))
    print(text := table(seconds, numbers, arguments))
    if arguments.out:
        arguments.out.with_suffix(".md").write_text(text)
        if not arguments.parts:
            draw(seconds, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
