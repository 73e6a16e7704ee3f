"""What a row of curvature costs: CPU time beside the update's, in pairs, with a control.

python benchmarks/curvature_cost.py [--depth 6] [--rounds 7]

Each round times, in CPU seconds of this process and in an order that turns, an update without a watcher, the same again
(control), and one at which each probe of curvature has a warm row; ratios are taken within a round, and printed as a
table with the median and the range of the middle half.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from timing import Nowhere

from stabilitylab.models import build_model
from stabilitylab.probes import Watcher

PROBES = ("critical_sharpness", "preconditioned_sharpness", "sharpness")
SENTENCES, LENGTH, VOCAB = 16, 14, 2000


def updates(probe: str, depth: int) -> Callable[[], None]:
    """A function that makes an update, at which ``probe`` has a row ("" for none)."""
    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_ffn": 128, "heads": 2, "encoder_layers": depth // 2, "decoder_layers": depth // 2}
    model = build_model(arch="preln", **sizes, source_vocab=VOCAB, target_vocab=VOCAB, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, VOCAB, (SENTENCES, LENGTH))
    mask = torch.ones(SENTENCES, LENGTH, dtype=torch.bool)

    def losses() -> torch.Tensor:
        logits = model(source=ids, target=ids.flip(1), source_mask=mask, target_mask=mask)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")

    options = {"curvature_every": 1, "curvature_loss": losses, "total_every_step": False}
    watcher = Watcher(model, Nowhere(), probes=probe, optimizer=optimizer, **options) if probe else None

    def update() -> None:
        losses().mean().backward()
        if watcher is not None:
            watcher.step()
        optimizer.step()
        optimizer.zero_grad()

    return update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = ("bare", "control", *PROBES)
    made = {name: updates("" if name in names[:2] else name, given.depth) for name in names}
    for update in made.values():  # the cold row
        update()
        update()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(given.rounds):
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            began = time.process_time()
            made[name]()
            seconds[name].append(time.process_time() - began)
    bare = np.array(seconds["bare"])
    print(f"{given.depth} layers, {given.rounds} rounds, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}; ")
    print(f"a bare update takes {1e3 * np.median(bare):.0f} ms of CPU time\n")
    print("| an update with | over bare [middle half] | its share at one row in 200 |\n|---|---|---|")
    for name in names[1:]:
        low, middle, high = np.quantile(np.array(seconds[name]) / bare, (0.25, 0.5, 0.75))
        share = "" if name == "control" else f"{100 * (middle - 1) / 200:.1f} %"
        print(f"| {name} | {middle:.2f} [{low:.2f}, {high:.2f}] | {share} |")


if __name__ == "__main__":
    main()
