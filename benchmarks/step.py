"""What the update itself costs on a CPU, and what flat buffers take off it: both side by side, in CPU time.

    python benchmarks/step.py --out benchmarks/step
    python benchmarks/step.py --depths 200 --rounds 20

"before" keeps each parameter and its moments in tensors of their own, as torch.optim.AdamW(fused=True) does; "now" is
the trainer's (stabilitylab/train/flat.py); "control" is "before" again. Nothing is probed. Rounds of one update each in
alternating order (ABBA); medians of ratios within a round, with 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from subject import UNWATCHED, prepared, trainer, update
from timing import machine, middle, rounds

from stabilitylab.train import loop
from stabilitylab.train.loop import Trainer
from stabilitylab.train.recipe import adamw

SMALL = ("preset=small", "model.d_model=256", "model.d_ffn=1024", "model.heads=4", "model.dropout=0.1")
PARTS = ("forward", "backward", "optimizer", "rest")


def made(depth: int, sets: tuple[str, ...], folder: Path, flat: bool) -> Trainer:
    def chosen(*arguments: object, flat: bool, choice: bool = flat, **options: object) -> torch.optim.Optimizer:
        return adamw(*arguments, flat=choice, **options)  # type: ignore[arg-type]

    with mock.patch.object(loop, "optimizer_of", chosen):
        return trainer(prepared(depth, *UNWATCHED, *sets), folder, bare=True)


def compared(depth: int, sets: tuple[str, ...], count: int, folder: Path) -> str:
    """A row of the table."""
    kinds = {"before": False, "control": False, "now": True}
    subjects = {kind: made(depth, sets, folder / f"{depth}-{len(sets)}-{kind}", flat) for kind, flat in kinds.items()}
    for subject in subjects.values():
        for _ in range(3):
            update(subject)
    taken = rounds({kind: partial(update, subject) for kind, subject in subjects.items()}, count)
    for subject in subjects.values():
        subject.watcher.close()
    config = subjects["now"].config.model
    cells = [
        f"{config.encoder_layers}L-{config.decoder_layers}L {config.d_model}-{config.d_ffn}-{config.heads}",
        *(f"{1e3 * np.median(taken[kind]):,.1f}" for kind in ("before", "now")),
        str(middle(taken["control"] / taken["before"])),
        str(middle(taken["now"] / taken["before"])),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="12,48,200", help="of the tiny model; 'small' 6L-6L comes last")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--out", type=Path, help="write OUT.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        lines = [compared(int(d), (), arguments.rounds, Path(text)) for d in arguments.depths.split(",")]
        lines.append(compared(12, SMALL[1:], arguments.rounds, Path(text)))
    head = "| model | before, ms | now, ms | control / before [95 %] | now / before [95 %] |\n|---|---|---|---|---|"
    where = f"`python benchmarks/step.py {' '.join(sys.argv[1:])}`, {machine(torch.device('cpu'))}."
    report = "\n\n".join(["# An update on a CPU, before and now", where, "\n".join([head, *lines])]) + "\n"
    print(report)
    if arguments.out:
        arguments.out.with_suffix(".md").write_text(report)


if __name__ == "__main__":
    main()
