"""What compiling the layers of the reference Transformer brings: side by side, ABBA, with an A/A control.

    python benchmarks/compiled_layers.py --depth 12                          # 64-128-2, on a CPU
    python benchmarks/compiled_layers.py --depth 12 --set model.d_model=256 --set model.d_ffn=1024 --set model.heads=4
    python benchmarks/compiled_layers.py --depth 200 --device cuda --out DIR/compiled_layers

"eager", "control": unwatched updates. "compiled": the same with train.compile=on; "probed": compiled, with all default
probes of the training pass in every update, over "eager, probed". Each has a model of its own class, since models of
one class share compiled code. Intervals: 95 %, bootstrap over rounds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import torch
from subject import NEVER, UNWATCHED, prepared, trainer, update
from timing import machine, middle, rounds

from stabilitylab.models import transformer
from stabilitylab.train import Trainer

EVERY_ROW = ("probes.every=1", f"probes.update_every={NEVER}")
SUBJECTS = {
    "eager": ("train.compile=off", *UNWATCHED),
    "control": ("train.compile=off", *UNWATCHED),
    "compiled": ("train.compile=on", *UNWATCHED),
    "eager, probed": ("train.compile=off", *EVERY_ROW),
    "compiled, probed": ("train.compile=on", *EVERY_ROW),
}
PAIRS = (
    ("control", "eager"),
    ("compiled", "eager"),
    ("eager, probed", "eager"),
    ("compiled, probed", "compiled"),
    ("compiled, probed", "eager, probed"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--set", action="append", default=[], help="any setting of the runs")
    parser.add_argument("--out", type=Path, help="write OUT.md")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    device = torch.device(arguments.device)
    sets = (f"train.device={arguments.device}", "train.cuda_graphs=off", "data.shapes=1")
    with tempfile.TemporaryDirectory() as folder:
        subjects: dict[str, Trainer] = {}
        for name, own in SUBJECTS.items():
            with mock.patch.object(transformer, "Layer", type("Layer", (transformer.Layer,), {})):
                plan = prepared(arguments.depth, *sets, *own, *arguments.set)
                subjects[name] = trainer(plan, Path(folder) / name)
        for subject in subjects.values():  # each new watch has forgotten what was compiled before it
            for _ in range(3):
                update(subject)
        works = {name: (lambda subject=subject: update(subject)) for name, subject in subjects.items()}
        taken = rounds(works, arguments.rounds)
        for subject in subjects.values():
            subject.watcher.close()
    config = subjects["eager"].config.model
    size = f"{config.encoder_layers}L-{config.decoder_layers}L {config.d_model}-{config.d_ffn}-{config.heads}"
    lines = [
        "# Compiled layers",
        f"`python benchmarks/compiled_layers.py {' '.join(sys.argv[1:])}`, {machine(device)}.",
        f"{size}; an eager update: {1e3 * middle(taken['eager']).value:,.1f} ms.",
        "\n".join(
            ["| update | over | ratio [95 %] |", "|---|---|---|"]
            + [f"| {one} | {other} | {middle(taken[one] / taken[other])} |" for one, other in PAIRS]
        ),
    ]
    report = "\n\n".join(lines) + "\n"
    print(report)
    if arguments.out:
        arguments.out.with_suffix(".md").write_text(report)


if __name__ == "__main__":
    main()
