"""The training step before and after: updates of several checkouts and ingredients side by side, in CPU time.

    python benchmarks/step.py --before e4ed72f --write            # all sizes, some minutes; writes benchmarks/step.md
    python benchmarks/step.py --size tiny:12 --rounds 40
    python benchmarks/step.py --size tiny:200 --parts             # where the time of one update goes

"after": this checkout; "control": it again; "without ...": it with one ingredient as it was, all in turn in the same
process. "before": the commit that --before names, in a temporary git worktree; it and this checkout run in COPIES
processes each, whose means are compared, since two processes that do the same differ by a percent or two. One thread;
the order is reversed every other round; nothing is watched but the total gradient norm.
Ratios are medians over rounds with 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import machine, middle

SIZES = {"tiny:12": 60, "tiny:48": 24, "tiny:200": 10, "small:12": 8}  # preset:depth -> rounds
COPIES = 3
INGREDIENTS = ("after", "control", "without the lean AdamW", "without the loss's own gradient", "without both")
NEVER = 10**9


def trainer(size: str, folder: Path) -> Any:
    """A trainer of the checkout that is on the path."""
    from stabilitylab.config import parse_set, resolve
    from stabilitylab.store import RunWriter
    from stabilitylab.train import plan
    from stabilitylab.train.loop import Trainer

    preset, _, depth = size.partition(":")
    sets = ["probes.names=['none']", f"probes.every={NEVER}", f"probes.update_every={NEVER}"]
    prepared = plan(resolve({"preset": preset}, parse_set(sets), depth=int(depth)))
    return Trainer(prepared.config, prepared.dataset, RunWriter.create(folder / "run", {"config": {}}), prepared.device)


def plain_losses(logits: Any, labels: Any, weight: Any, smoothing: float) -> Any:
    """The same numbers, the gradient left to autograd."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    nll = -(log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1) * weight).sum()
    return (1 - smoothing) * nll + smoothing * -(log_p.mean(dim=-1) * weight).sum(), nll


def timed(subject: Any) -> float:
    began = time.process_time()
    subject.update()
    subject.row += 1
    return time.process_time() - began


def child(size: str) -> None:
    """One update for each line that comes in; answers with its CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        subject = trainer(size, Path(folder))
        for _ in sys.stdin:
            print(timed(subject), flush=True)
        subject.watcher.close()


@contextmanager
def checkout(root: Path, size: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "ignore", __file__, "--child", size]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        assert process.stdin
        process.stdin.close()


def answered(process: subprocess.Popen[str]) -> float:
    assert process.stdin
    assert process.stdout
    print(file=process.stdin, flush=True)
    return float(process.stdout.readline())


def checkouts(size: str, rounds: int, before: Path) -> dict[str, np.ndarray]:
    roots = {"after": Path(__file__).resolve().parents[1], "before": before}
    with ExitStack() as stack:
        running = {(n, i): stack.enter_context(checkout(roots[n], size)) for i in range(COPIES) for n in roots}
        turns = []
        for turn in range(rounds + 3):
            order = list(running) if turn % 2 else list(reversed(running))
            turns.append({key: answered(running[key]) for key in order})
    return {n: np.array([np.mean([turn[n, i] for i in range(COPIES)]) for turn in turns[3:]]) for n in roots}


def ingredients(size: str, rounds: int) -> dict[str, np.ndarray]:
    from stabilitylab.train import loop, recipe

    with tempfile.TemporaryDirectory() as folder:
        subject = trainer(size, Path(folder))
        losses, lean = loop.token_losses, subject.optimizer
        fused = recipe.adamw(subject.config.train, subject.model.parameters(), lean=False)
        ways = [(losses, lean), (losses, lean), (losses, fused), (plain_losses, lean), (plain_losses, fused)]
        asked = dict(zip(INGREDIENTS, ways, strict=True))
        turns: list[dict[str, float]] = []
        for turn in range(rounds + 3):
            turns.append({})
            for name in INGREDIENTS if turn % 2 else reversed(INGREDIENTS):
                loop.token_losses, subject.optimizer = asked[name]  # each optimizer has moments of its own
                turns[-1][name] = timed(subject)
        loop.token_losses = losses
        subject.watcher.close()
    return {name: np.array([turn[name] for turn in turns[3:]]) for name in INGREDIENTS}


def table(size: str, seconds: dict[str, np.ndarray]) -> str:
    lines = [f"| {size}, {len(seconds['after'])} rounds | CPU ms | over after [95 %] |", "|---|---|---|"]
    for name, values in seconds.items():
        lines.append(f"| {name} | {1e3 * np.median(values):.1f} | {middle(values / seconds['after'])} |")
    return "\n".join(lines)


def parts(size: str, rounds: int = 16) -> str:
    """CPU milliseconds of the parts of an update, medians; last, in the same rounds, what two of them replaced."""
    from stabilitylab.train import loop, recipe

    spent: dict[str, list[float]] = {}

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        spent.setdefault(name, []).append(1e3 * (time.process_time() - began))

    with tempfile.TemporaryDirectory() as folder:
        subject = trainer(size, Path(folder))
        model, train = subject.model, subject.config.train
        optimizers = {"": subject.optimizer, ", PyTorch's": recipe.adamw(train, model.parameters(), lean=False)}
        losses = {"": loop.token_losses, ", by autograd": plain_losses}
        for turn in range(rounds + 3):
            with noted("batch"):
                model.set_row(subject.row)
                batch = subject._micro_batch(subject.row, 0)
            with noted("forward"):
                logits = subject.spread(**batch.inputs)
            leaf = logits.detach().requires_grad_()
            for name in sorted(losses, reverse=bool(turn % 2)):
                leaf.grad = None
                with noted(f"loss and its gradient{name}"):
                    loss, nll = losses[name](leaf, batch.labels, batch.weight, train.label_smoothing)
                    (loss / batch.tokens).backward()
            with noted("backward of the model"):
                logits.backward(leaf.grad)
            with noted("total gradient norm, row"):
                tokens = batch.tokens
                subject.watcher.step(loss=loss.detach(), nll=nll.detach(), lr=0.0, alpha=None, tokens=tokens)
            for name in sorted(optimizers, reverse=bool(turn % 2)):  # each moves the weights, with moments of its own
                with noted(f"optimizer{name}"):
                    optimizers[name].step()
            with noted("zero_grad"):
                optimizers[""].zero_grad(set_to_none=True)
            subject.row += 1
        subject.watcher.close()
    medians = {name: statistics.median(values[3:]) for name, values in spent.items()}
    replaced = [name for name in medians if "," in name and not name.endswith("row")]
    whole = sum(ms for name, ms in medians.items() if name not in replaced)
    order = [*(name for name in medians if name not in replaced), *replaced]
    rows = [f"| {name} | {medians[name]:.2f} | {100 * medians[name] / whole:.1f} |" for name in order]
    return "\n".join([f"| {size}: part | CPU ms | % |", "|---|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", default=[], help="preset:depth; may be repeated")
    parser.add_argument("--rounds", type=int, help="default: fewer for larger models")
    parser.add_argument("--before", help="commit to compare with")
    parser.add_argument("--parts", action="store_true", help="where the time of one update goes")
    parser.add_argument("--write", action="store_true", help="put the tables into step.md's place for them")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.child)
        return
    sizes = asked.size or list(SIZES)
    root = Path(__file__).resolve().parents[1]
    with ExitStack() as stack:
        before = None
        if asked.before and not asked.parts:
            before = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "before"
            subprocess.run(["git", "-C", root, "worktree", "add", "--detach", before, asked.before], check=True)
            remove = ["git", "-C", str(root), "worktree", "remove", "--force", str(before)]
            stack.callback(subprocess.run, remove, check=True)
        tables = []
        for size in sizes:
            rounds = asked.rounds or SIZES.get(size, 12)
            if before:
                tables.append(table(f"{size}, checkouts", checkouts(size, rounds, before)))
            tables.append(parts(size) if asked.parts else table(f"{size}, ingredients", ingredients(size, rounds)))
            print(*tables[-2 if before else -1 :], sep="\n\n", end="\n\n", flush=True)
    if asked.write:
        words = [word for word in sys.argv[1:] if word != "--write"]
        title = "Where the time goes" if asked.parts else "Before and after"
        text = (
            f"## {title}\n\n`python benchmarks/step.py {' '.join(words)}`, {machine(torch.device('cpu'))}.\n\n"
            + "\n\n".join(tables)
        )
        place = Path(__file__).with_suffix(".md")
        sections = place.read_text(encoding="utf-8").split("\n## ") if place.exists() else ["# The step on a CPU\n"]
        kept = [section for section in sections if not section.startswith(title)]
        place.write_text("\n## ".join([*kept, text.removeprefix("## ") + "\n"]), encoding="utf-8")


if __name__ == "__main__":
    main()
