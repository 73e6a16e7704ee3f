#!/usr/bin/env python
"""What the flight recorder costs: time of an update by what the recorder does in it, and memory.

    OMP_NUM_THREADS=1 python benchmarks/recorder_cost.py

A decoder of GPT's kind at three sizes, AdamW. Models that differ in ``record=`` alone are trained side by side, an
update each in turn, in reverse in each second turn. Ratios are those of an update's CPU time to that of the model with
``record="off"`` in the same turn. Most updates of a recorder only keep the batch, each tenth has sketches, each
hundredth a snapshot; here both come more often and are told apart, so that any spacing can be computed from them.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from timing import machine, middle, seconds

import stabilitylab as sl

DEVICE = torch.device("cpu")
SIZES = ((2, 128, 4, 128), (6, 256, 4, 256), (8, 512, 2, 256))  # layers, width, rows, tokens
DIGESTS, SNAPSHOTS, TURNS = 4, 9, 38
WARM = 2  # turns
VOCABULARY = 512


class Decoder(torch.nn.Module):
    def __init__(self, layers: int, width: int, tokens: int) -> None:
        super().__init__()
        self.embed, self.place = torch.nn.Embedding(VOCABULARY, width), torch.nn.Embedding(tokens, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, torch.nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(batch.shape[1])
        x = self.embed(batch) + self.place.weight[: batch.shape[1]]
        return self.head(self.layers(x, mask=mask, is_causal=True))


def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def kind(mode: str, t: int) -> str:
    """What a recorder does in update t."""
    if mode != "recorder":
        return mode
    return "snapshot" if t % SNAPSHOTS == 0 else "sketches" if t % DIGESTS == 0 else "recorder"


def bytes_of(state: object) -> int:
    """The size of the tensors in a snapshot."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(bytes_of, parts))


def cost(layers: int, width: int, rows: int, tokens: int, folder: Path) -> dict[str, object]:
    works = {}
    recorder = sl.Recorder(loss_fn, every=SNAPSHOTS, digests=DIGESTS)
    modes = {"off": "off", "ledger": None, "digests": "ledger", "recorder": recorder}
    watchers = []
    for mode, record in modes.items():
        torch.manual_seed(0)
        model = Decoder(layers, width, tokens)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        out = folder / f"{layers}-{width}-{mode}"
        options = {"probes": "none", "reference": None}
        watcher = sl.watch(model, out=out, optimizer=optimizer, record=record, **options)
        watchers.append(watcher)

        def update(t: int, model=model, optimizer=optimizer, watcher=watcher) -> None:
            batch = torch.randint(VOCABULARY, (rows, tokens + 1), generator=torch.Generator().manual_seed(t))
            loss = loss_fn(model, watcher.batch(batch))
            loss.backward()
            watcher.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()

        works[mode] = update
    count = sum(parameter.numel() for parameter in Decoder(layers, width, tokens).parameters())
    times: dict[str, list[float]] = defaultdict(list)
    plain = []
    for t in range(TURNS):
        order = list(works) if t % 2 else list(works)[::-1]
        own = {mode: seconds(lambda mode=mode, t=t: works[mode](t), DEVICE) for mode in order}
        if t >= WARM:
            plain.append(own["off"])
            for mode, taken in own.items():
                times[kind(mode, t)].append(taken / own["off"])
    flight = recorder.flight
    assert flight is not None, "the recorder has recorded"
    snapshots = [bytes_of(state) for state in flight.snapshots.values()]
    for watcher in watchers:
        watcher.close()
    found = {name: middle(np.array(times[name])) for name in ("ledger", "digests", "recorder", "sketches", "snapshot")}
    amortised = 1 + (found["recorder"].value - 1) + (found["sketches"].value - found["recorder"].value) / 10
    amortised += (found["snapshot"].value - found["recorder"].value) / 100
    return {
        "layers x width, tokens": f"{layers} x {width}, {rows} x {tokens}",
        "parameters": f"{count / 1e6:.2f} M",
        "update, ms": f"{1e3 * float(np.median(plain)):.0f}",
        "ledger (`record=None`)": found["ledger"],
        'ledger with digests (`"ledger"`)': found["digests"],
        "recorder: batch kept": found["recorder"],
        "with sketches": found["sketches"],
        "with a snapshot": found["snapshot"],
        "each 10th and 100th": f"{amortised:.3f}",
        "bytes a parameter and snapshot": f"{max(snapshots) / count:.1f}",
        "snapshots held": len(snapshots),
    }  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = [cost(*size, Path(folder)) for size in SIZES]
    names = list(found[0])
    print(machine(DEVICE) + "\n")
    print("| | " + " | ".join(str(one[names[0]]) for one in found) + " |\n|---|" + "---|" * len(found))
    for name in names[1:]:
        print(f"| {name} | " + " | ".join(str(one[name]) for one in found) + " |")


if __name__ == "__main__":
    main()
