"""The budget of one update of a deep, wide model: the least that it could take, what is reached, where the rest goes.

    python benchmarks/budget.py --device cuda --out DIR/budget               # 100L-100L 512-2048-8, bf16, 4k tokens
    python benchmarks/budget.py --depth 4 --rounds 3 --set model.d_model=64 --set model.d_ffn=128 --set data.sentences=8

One batch shape. Floor, line by line, of one unwatched update, at rates that this device reaches here:

  products    6 multiplications and additions for each weight of a matrix and token that passes it (2 forward, 4
              backward), padding included, over the rate of one large product in the run's type
  attention   12 for each pair of query and key and feature, 6 where the future is masked, over the same rate
  optimizer   28 bytes for each parameter (gradient, weight, two moments read; weight, moments written), and in bf16 6
              more for the short copy of each matrix that products read, over the bandwidth of a copy
  stream      6 values a token, sub-layer and feature, in the run's type: what a fused residual and norm must read and
              write, forward (two in, one out) and backward (likewise), over the same bandwidth

"reached": each way to run the update, one after the other, as two do not fit side by side on one card; the first comes
again at the end, as a control. The lines beside the floor are kernels' time by kind, of one update under a profiler
(on a CPU operators' wall time, which a busy machine makes long); idle is what they leave of an update.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from cuda_graphs import KINDS, bandwidth, spent
from subject import NEVER, UNWATCHED, prepared, trainer, update, warm
from timing import machine, middle, seconds

from stabilitylab.data import Batch
from stabilitylab.models import Transformer
from stabilitylab.models.sublayers import CrossAttention, FeedForward, SelfAttention
from stabilitylab.models.transformer import KINDS as MODELS

SETS = (
    *("model.arch=branchnorm", "model.d_model=512", "model.d_ffn=2048", "model.heads=8", "train.precision=bf16"),
    *("data.sentences=256", "data.shapes=1", "data.length_multiple=8", "train.warmup=0"),
)
EVERY_ROW = ("probes.every=1", f"probes.update_every={NEVER}")
DIRECT, GRAPHS = "train.cuda_graphs=off", "train.cuda_graphs=on"
SHORT, COMPILED = "train.working_weights=true", "train.compile=on"
# In the order of their worth: an occasion on a GPU may end before the last.
ON_GPU = {
    "direct": (DIRECT, *UNWATCHED),
    "graphs": (GRAPHS, *UNWATCHED),
    "graphs, working weights": (GRAPHS, SHORT, *UNWATCHED),
    "graphs, working weights, probes": (GRAPHS, SHORT, *EVERY_ROW),
    "graphs, one pass, probes": (GRAPHS, "train.one_pass=true", *EVERY_ROW),
    "graphs, compiled": (GRAPHS, COMPILED, *UNWATCHED),
    "graphs, compiled, probes": (GRAPHS, COMPILED, *EVERY_ROW),
}
ON_CPU = {"direct": (DIRECT, *UNWATCHED), "probes": (DIRECT, *EVERY_ROW)}
CONTROL = "direct, again"
LINES = {"products": "matrix products", "attention": "attention", "optimizer": "optimizer", "stream": "LayerNorm"}
GOAL = 1.03  # probes in every row, over the same without
SIDE = {"cpu": 1024, "cuda": 8192}  # of the large product


@dataclass(frozen=True)
class Work:
    """What one update must do: multiplications and additions of products and attention, bytes of the rest."""

    products: float
    attention: float
    optimizer: float
    stream: float

    def seconds(self, flops: float, bytes_: float) -> dict[str, float]:
        """At so many a second of each, by line; the lines do not overlap."""
        return {
            "products": self.products / flops,
            "attention": self.attention / flops,
            "optimizer": self.optimizer / bytes_,
            "stream": self.stream / bytes_,
        }


def work(model: Transformer, batch: Batch, width: int = 4) -> Work:
    """Of an update over ``batch``; ``width``: bytes of a value in the run's type."""
    tokens = {stack: mask.numel() for stack, mask in batch.masks.items()}
    places = {stack: mask.shape[1] for stack, mask in batch.masks.items()}
    products = attention = stream = 0.0
    for residual in model.residuals():
        stack, f, d = residual.place.stack, residual.f, residual.place.width
        own = tokens[stack]
        stream += 6 * own * d * width
        if isinstance(f, FeedForward):
            products += own * (f.fc1.weight.numel() + f.fc2.weight.numel())
        elif isinstance(f, SelfAttention):
            products += own * (f.qkv.weight.numel() + f.out.weight.numel())
            attention += (6 if f.causal else 12) * own * places[stack] * d
        elif isinstance(f, CrossAttention):
            products += own * (f.q.weight.numel() + f.out.weight.numel()) + tokens["encoder"] * f.kv.weight.numel()
            attention += 12 * own * places["encoder"] * d
    last = list(tokens.values())[-1]
    products += last * model.output.weight.numel()
    parameters = sum(p.numel() for p in model.parameters())
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    return Work(6 * products, attention, 28.0 * parameters + (6.0 * matrices if width == 2 else 0.0), stream)


def rate(device: torch.device, dtype: torch.dtype) -> float:
    """Multiplications and additions a second of one large product."""
    side = SIDE[device.type]
    one, two = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    taken = [seconds(lambda: one @ two, device) for _ in range(8)]
    return 2 * side**3 / float(np.median(taken[2:]))


@dataclass
class Reached:
    """One way to run updates: seconds of each, seconds of kernels by kind, bytes that were held, target tokens."""

    taken: np.ndarray
    kinds: Counter[str]
    memory: int
    tokens: int


def reached(name: str, sets: tuple[str, ...], arguments: argparse.Namespace, folder: Path) -> Reached:
    plan = prepared(arguments.depth, *SETS, f"train.device={arguments.device}", *sets, *arguments.set)
    on_gpu = plan.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    subject = trainer(plan, folder / name.replace(", ", "-"), bare="probes" not in name)
    for _ in range(warm(plan.device) // (5 if on_gpu else 1)):  # one shape: recorded by its third update
        update(subject)
    taken = np.array([update(subject) for _ in range(arguments.rounds)])
    tokens = subject.dataset.micro_batch(subject.row).tokens
    kinds = spent(subject)
    memory = torch.cuda.max_memory_reserved() if on_gpu else 0
    subject.watcher.close()
    del subject
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return Reached(taken, kinds, memory, tokens)


def table(floor: dict[str, float], found: dict[str, Reached]) -> str:
    """Milliseconds: the floor's lines beside the kernels of that kind, then the other kinds, what is idle, and all."""
    by_kind = {kind: line for line, kind in LINES.items()}
    lines = [f"| ms | floor | {' | '.join(found)} |", "|---|---|" + "---|" * len(found)]
    for kind in (*KINDS, "other"):
        least = f"{1e3 * floor[by_kind[kind]]:,.2f}" if kind in by_kind else ""
        cells = [f"{1e3 * each.kinds[kind]:,.2f}" for each in found.values()]
        lines.append(f"| {kind} | {least} | {' | '.join(cells)} |")
    least = sum(floor.values())
    busy = {name: sum(t for kind, t in each.kinds.items() if kind != "number") for name, each in found.items()}
    middles = {name: float(np.median(each.taken)) for name, each in found.items()}
    rows = {
        "idle |": [f"{1e3 * max(0.0, middles[name] - busy[name]):,.2f}" for name in found],
        f"an update | {1e3 * least:,.2f}": [f"{1e3 * each:,.2f}" for each in middles.values()],
        "over the floor | 1": [str(middle(each.taken / least)) for each in found.values()],
        "kernels |": [f"{int(each.kinds['number']):,}" for each in found.values()],
        "target tokens/s |": [f"{each.tokens / middles[name]:,.0f}" for name, each in found.items()],
    }
    if any(each.memory for each in found.values()):
        rows["GiB reserved |"] = [f"{each.memory / 2**30:.1f}" for each in found.values()]
    lines += [f"| {head} | {' | '.join(cells)} |" for head, cells in rows.items()]
    return "\n".join(lines)


def costs(found: dict[str, Reached]) -> list[str]:
    """What probes in every row cost, of the ways that were reached with and without."""
    said = []
    for name, each in found.items():
        bare = found.get(name.replace(", one pass", "").replace(", probes", "").replace("probes", "direct"))
        if "probes" in name and bare is not None:
            ratio = float(np.median(each.taken) / np.median(bare.taken))
            said.append(f"{name}: probes in every row cost {ratio:.3f} (goal {GOAL}).")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--depth", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10, help="updates that are timed, of each way")
    parser.add_argument("--minutes", type=float, default=10.0, help="no further way is begun after so many")
    parser.add_argument("--set", action="append", default=[], help="any setting of the runs")
    parser.add_argument("--out", type=Path, help="write OUT.md, anew after each way")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} sees no CUDA device.")
    began = time.monotonic()
    device = torch.device(arguments.device)
    plan = prepared(arguments.depth, *SETS, f"train.device={arguments.device}", *arguments.set)
    short = plan.config.train.precision == "bf16"
    batch = plan.dataset.micro_batch(0)
    flops, moved = rate(device, torch.bfloat16 if short else torch.float32), bandwidth(device)
    vocabularies = {"source_vocab": plan.dataset.source_vocab, "target_vocab": plan.dataset.target_vocab}
    with torch.device("meta"):
        model = MODELS[plan.config.model.stack](plan.config.model, **vocabularies)
    floor = work(model, batch, 2 if short else 4).seconds(flops, moved)
    config = plan.config.model
    size = f"{config.encoder_layers}L-{config.decoder_layers}L {config.d_model}-{config.d_ffn}-{config.heads}"
    shape = " + ".join(f"{tuple(mask.shape)}" for mask in batch.masks.values())
    ways = {**ON_GPU, CONTROL: ON_GPU["direct"]} if device.type == "cuda" else {**ON_CPU, CONTROL: ON_CPU["direct"]}
    found: dict[str, Reached] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, sets in ways.items():
            if found and time.monotonic() - began > 60 * arguments.minutes:
                break
            found[name] = reached(name, sets, arguments, Path(folder))
            left = [way for way in ways if way not in found]
            report = "\n\n".join(
                [
                    "# The budget of an update",
                    f"`python benchmarks/budget.py {' '.join(sys.argv[1:])}`, {machine(device)}.",
                    f"{size}, {plan.footprint.parameters:,} parameters, {plan.config.train.precision}; batches of "
                    f"{shape} tokens, {batch.tokens:,} of them real and predicted, {plan.dataset.padding():.0%} "
                    f"padding. A large product reaches {flops / 1e12:,.2f} TFLOP/s, a copy {moved / 1e9:,.0f} GB/s.",
                    table(floor, found),
                    *costs(found),
                    *([f"Not measured: {'; '.join(left)}."] if left else []),
                ]
            )
            if arguments.out:
                arguments.out.with_suffix(".md").write_text(report + "\n")
        print(report)


if __name__ == "__main__":
    main()
