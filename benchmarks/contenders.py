"""What watching every step costs, ours and others side by side: one model, alternating steps, an A/A control.

    python benchmarks/contenders.py --rounds 20 --out benchmarks/contenders
    python benchmarks/contenders.py --device cuda --rounds 50 --out DIR/contenders

Tiny post-LN encoder-decoder (64-128-2, ``--depth`` layers in all), 16 sentences, one thread, denormals flushed as in
``stabilitylab train``. Each contender has a model, an optimizer and a folder of its own; the steps of a round run one
after the other, each second round in reverse (ABBA); what takes over eight bare steps is left out after six rounds.
A contender over bare: the median over rounds of the ratio within a round, with a 95 % bootstrap interval; "control" is
a second bare model. Time is CPU time of this process, all threads: what a tool does in another process (wandb's
service) is not in it; on a GPU it is wall time from idle to idle. Writes OUT.md and OUT.png. ``--parts``: what parts of
ours cost.

The packages: ``pip install stabilitylab[benchmark]``; what is not installed is left out, and said so.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from alternatives import CONTENDERS, PARTS, Attach
from timing import Middle, machine, middle, rounds, seconds

from stabilitylab.config import parse_set, resolve
from stabilitylab.data import load_data
from stabilitylab.models import build_model
from stabilitylab.train.recipe import adamw, token_losses

SLOW, FEW, WARM = 8, 6, 3  # what takes so many bare steps takes part in so few rounds


class Contender:
    """One model that trains on one batch; ``attach`` makes what is called between backward and the optimizer."""

    def __init__(self, depth: int, device: torch.device, folder: Path, attach: Attach) -> None:
        config = resolve(parse_set(["model.arch=postln"]), depth=depth)
        data = load_data(config.data, stack=config.model.stack)
        self.model = build_model(
            config.model, source_vocab=data.source_vocab, target_vocab=data.target_vocab, seed=config.train.seed
        )
        self.model.to(device).train()
        self.device, self.batch = device, data.micro_batch(0).to(device)
        self.optimizer = adamw(config.train, self.model.parameters())
        self.numbers = 0
        self.after_backward = attach(self.model, self.optimizer, folder, self.batch.masks)

    def step(self) -> float:
        return seconds(self.update, self.device)

    def update(self) -> None:
        loss, _ = token_losses(self.model(**self.batch.inputs), self.batch.labels, self.batch.weight, 0.1)
        loss = loss / self.batch.tokens
        loss.backward()
        self.numbers = self.after_backward(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def measured(
    names: list[str], arguments: argparse.Namespace, folder: Path
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Seconds of every step of each contender, and how many numbers it records at one."""
    subjects: dict[str, Contender] = {}
    warm: dict[str, float] = {}
    for number, name in enumerate(names):
        attach, packages, _ = (CONTENDERS | PARTS)[name]
        try:
            subjects[name] = Contender(arguments.depth, torch.device(arguments.device), folder / str(number), attach)
            warm[name] = [subjects[name].step() for _ in range(WARM)][-1]
        except ImportError as error:
            print(f"{name}: left out, {error}; pip install {packages}")
            subjects.pop(name, None)
    slow = {name for name, taken in warm.items() if taken > SLOW * warm["bare"]}
    taken = rounds({name: subject.step for name, subject in subjects.items()}, arguments.rounds, slow, FEW)
    return taken, {name: subject.numbers for name, subject in subjects.items()}


def ratios(taken: dict[str, np.ndarray]) -> dict[str, Middle]:
    return {name: middle(own / taken["bare"]) for name, own in taken.items()}


def table(taken: dict[str, np.ndarray], numbers: dict[str, int], arguments: argparse.Namespace) -> str:
    device = torch.device(arguments.device)
    flags = (" --device cuda" if device.type == "cuda" else "") + (" --parts" if arguments.parts else "")
    lines = [
        "# What parts of the standard set cost" if arguments.parts else "# What watching every step costs",
        "",
        f"`python benchmarks/contenders.py --depth {arguments.depth} --rounds {arguments.rounds}{flags}`, "
        f"{machine(device)}. A bare step takes {1e3 * np.median(taken['bare']):.0f} ms"
        f"{'.' if device.type == 'cuda' else ' of CPU time.'}",
        "",
        "| contender | over bare [95 %] | numbers a step | µs a number | what it records |",
        "|---|---|---|---|---|",
    ]
    for name, over in ratios(taken).items():
        count = numbers[name]
        each = f"{1e6 * np.nanmedian(taken[name] - taken['bare']) / count:.1f}" if count else ""
        shown = f"{count:,}" if count else ""
        lines.append(f"| {name} | {over} | {shown} | {each} | {(CONTENDERS | PARTS)[name][2]} |")
    return "\n".join(lines) + "\n"


def draw(taken: dict[str, np.ndarray], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = ratios(taken)
    figure, axes = plt.subplots(figsize=(6.4, 0.35 * len(found) + 1), layout="constrained")
    for place, (value, low, high) in enumerate(found.values()):
        axes.errorbar(value, place, xerr=[[value - low], [high - value]], fmt="o", color="black", capsize=3)
    axes.set_yticks(range(len(found)), [*found])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1.03, color="grey", linestyle=":")
    axes.set_xlabel("time of a step over bare (dotted: goal, 1.03)")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--only", action="append", default=[], choices=CONTENDERS, help="beside bare; may be repeated")
    parser.add_argument("--parts", action="store_true", help="what parts of the standard set cost, instead of others")
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.png")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch {torch.__version__} sees no CUDA device.")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    names = ["bare", "control", *arguments.only] if arguments.only else [*CONTENDERS]
    if arguments.parts:
        names = ["bare", "control", "stabilitylab, standard", *PARTS]
    with tempfile.TemporaryDirectory() as folder:
        taken, numbers = measured(names, arguments, Path(folder))
    print(text := table(taken, numbers, arguments))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.with_suffix(".md").write_text(text)
        if not arguments.parts:
            draw(taken, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
