"""The training step before and after: updates of several checkouts and ingredients side by side, in CPU time.

    python benchmarks/step.py --before e4ed72f --write            # all sizes, some minutes; writes benchmarks/step.md
    python benchmarks/step.py --size tiny:12 --rounds 40
    python benchmarks/step.py --size tiny:200 --parts             # where the time of one update goes

Every contender is a process of its own with one thread, and they take turns, in an order that is reversed every other
round. "after": this checkout; "control": it again; "before": the commit that --before names, in a temporary git
worktree; "without ...": this checkout with one ingredient as it was. Nothing is watched but the total gradient norm.
Ratios are medians over rounds with 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import os
import platform
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

SIZES = {"tiny:12": 24, "tiny:48": 16, "tiny:200": 12, "small:12": 8}  # preset:depth -> rounds
INGREDIENTS = {
    "without the lean AdamW": "optimizer",
    "without the loss's written gradient": "loss",
    "without kept memory": "memory",
}
NEVER = 10**9


def trainer(size: str, without: str, folder: Path) -> Any:
    """A trainer of the checkout that is on the path; ``without`` takes an ingredient out of it."""
    from stabilitylab.config import parse_set, resolve
    from stabilitylab.store import RunWriter
    from stabilitylab.train import environment, loop, plan, recipe

    if without == "optimizer":
        loop.adamw = lambda *given: recipe.adamw(*given, lean=False)
    if without == "loss":
        loop.token_losses = plain_losses
    if without == "memory":
        environment.keep_freed_memory = lambda: False
    preset, _, depth = size.partition(":")
    sets = ["probes.names=['none']", f"probes.every={NEVER}", f"probes.update_every={NEVER}"]
    prepared = plan(resolve({"preset": preset}, parse_set(sets), depth=int(depth)))
    run = RunWriter.create(folder / "run", {"config": {}})
    return loop.Trainer(prepared.config, prepared.dataset, run, prepared.device)


def plain_losses(logits: Any, labels: Any, weight: Any, smoothing: float) -> Any:
    """The same numbers, the gradient left to autograd."""
    import torch

    log_p = torch.log_softmax(logits.float(), dim=-1)
    nll = -(log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1) * weight).sum()
    return (1 - smoothing) * nll + smoothing * -(log_p.mean(dim=-1) * weight).sum(), nll


def child(size: str, without: str) -> None:
    """One update for each line that comes in; answers with its CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        subject = trainer(size, without, Path(folder))
        for _ in sys.stdin:
            began = time.process_time()
            subject.update()
            subject.row += 1
            print(time.process_time() - began, flush=True)
        subject.watcher.close()


@contextmanager
def contender(root: Path, size: str, without: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "ignore", __file__, "--child", size, "--without", without]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        assert process.stdin
        process.stdin.close()


def update(process: subprocess.Popen[str]) -> float:
    assert process.stdin
    assert process.stdout
    print(file=process.stdin, flush=True)
    return float(process.stdout.readline())


def compare(size: str, rounds: int, before: Path | None) -> dict[str, np.ndarray]:
    here = Path(__file__).resolve().parents[1]
    asked = {"after": (here, ""), "control": (here, "")}
    asked |= {name: (here, without) for name, without in INGREDIENTS.items()}
    if before:
        asked = {"before": (before, "")} | asked
    with ExitStack() as stack:
        running = {name: stack.enter_context(contender(root, size, out)) for name, (root, out) in asked.items()}
        for process in running.values():
            for _ in range(3):
                update(process)
        turns = []
        for turn in range(rounds):
            order = list(running) if turn % 2 else list(reversed(running))
            turns.append({name: update(running[name]) for name in order})
    return {name: np.array([turn[name] for turn in turns]) for name in asked}


def table(size: str, seconds: dict[str, np.ndarray]) -> str:
    random = np.random.default_rng(0)
    lines = [f"| {size}, {len(seconds['after'])} rounds | CPU ms | over after [95 %] |", "|---|---|---|"]
    for name, values in seconds.items():
        ratios = values / seconds["after"]
        medians = np.median(random.choice(ratios, (4000, len(ratios))), axis=1)
        low, high = np.quantile(medians, [0.025, 0.975])
        ratio = f"{np.median(ratios):.3f} [{low:.3f}, {high:.3f}]"
        lines.append(f"| {name} | {1e3 * np.median(values):.1f} | {ratio} |")
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
        subject = trainer(size, "", Path(folder))
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


def machine() -> str:
    import torch

    load = os.getloadavg()[0]
    return (
        f"{platform.machine()} with {os.cpu_count()} cores, one thread, torch {torch.__version__}, "
        f"Python {platform.python_version()}; load of the machine meanwhile {load:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", default=[], help="preset:depth; may be repeated")
    parser.add_argument("--rounds", type=int, help="default: fewer for larger models")
    parser.add_argument("--before", help="commit to compare with")
    parser.add_argument("--parts", action="store_true", help="where the time of one update goes")
    parser.add_argument("--write", action="store_true", help="put the tables into step.md's place for them")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--without", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.child, asked.without)
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
            tables.append(parts(size) if asked.parts else table(size, compare(size, rounds, before)))
            print(tables[-1], end="\n\n", flush=True)
    if asked.write:
        words = [word for word in sys.argv[1:] if word != "--write"]
        title = "Where the time goes" if asked.parts else "Before and after"
        text = f"## {title}\n\n`python benchmarks/step.py {' '.join(words)}`, {machine()}.\n\n" + "\n\n".join(tables)
        place = Path(__file__).with_suffix(".md")
        sections = place.read_text(encoding="utf-8").split("\n## ") if place.exists() else ["# The step on a CPU\n"]
        kept = [section for section in sections if not section.startswith(title)]
        place.write_text("\n## ".join([*kept, text.removeprefix("## ") + "\n"]), encoding="utf-8")


if __name__ == "__main__":
    main()
