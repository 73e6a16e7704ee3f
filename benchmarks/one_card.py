"""Does a 1000-layer model of width 512 train within one 80 GB card, with all default probes at every update?

    python benchmarks/one_card.py --device cuda --out DIR/one_card
    python benchmarks/one_card.py --depth 4 --sentences 8            # on a CPU: the estimate alone

500L-500L 512-2048-8, bf16, activation checkpointing, batches of at least 4,096 real target tokens; DeepNorm and
BranchNorm; what probes keep of the parameters lies where there is room. Twelve updates, of which one holds ||dF||.
Allocated and reserved are peaks of CUDA's allocator: what tensors took, and what it held, CUDA graphs' own memory
included, which decides whether it fits.
The limit is 80e9 bytes less 1 GiB for CUDA's context.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from pathlib import Path

import torch
from subject import prepared, trainer, update
from timing import machine

LIMIT = int(80e9) - 2**30
UPDATES = 12
GIB = 2**30


def settings(arch: str, arguments: argparse.Namespace) -> list[str]:
    return [
        f"model.arch={arch}",
        "model.d_model=512",
        "model.d_ffn=2048",
        "model.heads=8",
        "train.precision=bf16",
        "train.activation_checkpointing=true",
        f"train.device={arguments.device}",
        f"data.sentences={arguments.sentences}",
        "probes.every=1",
        "probes.update_every=10",
    ]


def row(arch: str, arguments: argparse.Namespace, folder: Path) -> str:
    """A line of the table: what was estimated and, on a GPU, what was used."""
    plan = prepared(arguments.depth, *settings(arch, arguments))
    tokens = min(plan.dataset.micro_batch(step).tokens for step in range(8))
    cells = [arch, f"{plan.footprint.parameters:,}", f"{tokens:,}", f"{plan.footprint.total / GIB:.1f}"]
    if plan.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        subject = trainer(plan, folder / arch)
        seconds = [update(subject) for _ in range(UPDATES)]
        subject.watcher.close()
        peak = torch.cuda.max_memory_reserved()
        cells += [
            f"{torch.cuda.max_memory_allocated() / GIB:.1f}",
            f"{peak / GIB:.1f}",
            "fits" if peak <= LIMIT else "does not fit",
            f"{sorted(seconds)[UPDATES // 2]:.2f}",
        ]
        del subject
        gc.collect()
        torch.cuda.empty_cache()
    else:
        cells += ["", "", "", ""]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--depth", type=int, default=1000)
    parser.add_argument("--sentences", type=int, default=270)
    parser.add_argument("--arch", action="append", help="default: deepnorm, branchnorm")
    parser.add_argument("--out", type=Path, help="write OUT.md")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} sees no CUDA device.")
    with tempfile.TemporaryDirectory() as folder:
        lines = [row(arch, arguments, Path(folder)) for arch in arguments.arch or ("deepnorm", "branchnorm")]
    head = (
        "| arch | parameters | target tokens, at least | estimated, GiB | allocated, GiB | reserved, GiB | 80 GB "
        "| s an update |\n|---|---|---|---|---|---|---|---|"
    )
    where = f"`python benchmarks/one_card.py {' '.join(sys.argv[1:])}`, {machine(torch.device(arguments.device))}."
    report = "\n\n".join(["# A very deep model on one card", where, "\n".join([head, *lines])]) + "\n"
    print(report)
    if arguments.out:
        arguments.out.with_suffix(".md").write_text(report)


if __name__ == "__main__":
    main()
