"""CUDA graphs and the probes inside them: how much faster, what watching every update costs, and where time goes.

    python benchmarks/cuda_graphs.py --device cuda --out DIR/cuda_graphs      # both models, on a GPU
    python benchmarks/cuda_graphs.py --model tiny --rounds 6                  # on a CPU: no graphs, but the counts

Models: "tiny", 100L-100L 64-128-2, which is bound by launches, and "wide", 6L-6L 512-2048-8 in bf16 with at least 4,096
tokens a batch, which is bound by arithmetic and memory. "probes": all default probes, those of the training pass at
every update, the held-out pass (||dF||, similarity, sparsity) by cadence 10. Rounds of ten updates in alternating order
(ABBA), "control" an A/A control; wall time from idle to idle on a GPU, else CPU time. Goals, set beforehand: probes
under graphs at most 1.05 (tiny) and 1.03 (wide), graphs at least 4 times faster than eager (tiny).

Floor: the bytes that the training pass's probes must read at least once - each watched value, its gradient, all
gradients of parameters, theta before and after - over the bandwidth that copying 256 MiB reaches. Operators: calls
below autograd that compute something, of one update that is run, not replayed.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from subject import UNWATCHED, prepared, trainer
from timing import machine, middle, rounds, seconds
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from stabilitylab.probes._engine.passes import Pass
from stabilitylab.probes.parameters import squares as norms
from stabilitylab.train import Plan, Trainer
from stabilitylab.train.fast import Replays

UPDATES = 10
PROBES = ("probes.every=1", f"probes.update_every={UPDATES}")
MODELS = {
    "tiny": (200, ()),
    "wide": (
        12,
        ("model.d_model=512", "model.d_ffn=2048", "model.heads=8", "data.sentences=256", "train.precision=bf16"),
    ),
}
GOALS = {"tiny": 1.05, "wide": 1.03}
FASTER = 4.0
KINDS = {  # of kernels and operators, by what their names hold; the first that fits
    "matrix products": r"gemm|cutlass|xmma|\bmm\b|addmm|bmm|nvjet",
    "attention": r"fmha|flash|attention|softmax",
    "optimizer": r"adam",
    "LayerNorm": r"layer_?norm|LayerNorm|GammaBeta",
    "norms and sums": r"norm|reduce|sum",
    "copies": r"copy|memcpy|memset|cat|stack|fill",
    "elementwise": r"elementwise|add|mul|div|relu|threshold|where|index",
}


class Operators(TorchDispatchMode):
    """Counts operators that compute: not views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += all(r.alias_info is None or r.alias_info.is_write for r in func._schema.returns)
        return func(*args, **(kwargs or {}))


class Counting:
    """A recorder that records nothing: updates run, arranged as for a recording, and their operators are counted."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def warm_up(self, work: Callable[[], Any]) -> Any:
        with Operators() as counted:
            result = work()
        self.counts.append(counted.count)
        return result

    def record(self, work: Callable[[], Any]) -> Any:
        raise RuntimeError("this one does not")

    def another(self) -> Counting:
        return self


def arranged(plan: Plan, folder: Path) -> int:
    """Operators of a probed update as a graph holds them, with norms as a GPU takes them: not a CPU's cache full at a
    time. A list of tensors is one operator, of which a GPU makes a few launches."""
    counting = Counting()
    with (
        mock.patch.dict(norms.CHUNK, cpu=norms.CHUNK["cuda"]),
        mock.patch.object(norms, "widens", return_value=False),
    ):
        subject = trainer(replace(plan, recorder=counting), folder)
        replays = subject.apply
        assert isinstance(replays, Replays)
        for _ in range(3):  # the first fills caches
            replays._ran.clear()
            advance(subject, 1)
        subject.watcher.close()
    return counting.counts[-1]


def advance(subject: Trainer, updates: int = UPDATES) -> None:
    for _ in range(updates):
        subject.update()
        subject.row += 1


def bytes_read(subject: Trainer) -> int:
    """What the probes of one update's training pass read at least once."""
    values: dict[tuple[Any, ...], int] = {}
    keep = Pass.keep

    def counted(self: Pass, wanted: Any, x: Any, y: torch.Tensor, weight: Any, compiled: bool = False) -> None:
        board, row, fed = wanted
        if board.probe.on in ("forward", "backward"):
            values[board.table.name, row, fed] = y.numel() * y.element_size()
        keep(self, wanted, x, y, weight, compiled)

    Pass.keep = counted  # type: ignore[method-assign]
    try:
        advance(subject, 1)
    finally:
        Pass.keep = keep  # type: ignore[method-assign]
    weights = sum(p.numel() * p.element_size() for p in subject.model.parameters())
    return sum(values.values()) + 3 * weights  # gradients, theta before, theta after


def bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of copying 256 MiB."""
    source = torch.ones(1 << 26, device=device)
    target = torch.empty_like(source)
    taken = [seconds(lambda: target.copy_(source), device) for _ in range(12)]
    return 2 * source.numel() * source.element_size() / float(np.median(taken[2:]))


def spent(subject: Trainer) -> Counter[str]:
    """Seconds of one update by kind of kernel, or on a CPU of operator, and their number. The update is probed, and has
    no held-out pass, as rows that are a multiple of UPDATES do."""
    on_gpu = subject.device.type == "cuda"
    if subject.row % UPDATES == 0:
        advance(subject, 1)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        advance(subject, 1)
        if on_gpu:
            torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for event in profiled.key_averages():
        if on_gpu and event.device_type != DeviceType.CUDA:  # a launch, which is on the host
            continue
        time = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kind = next((kind for kind, names in KINDS.items() if re.search(names, event.key)), "other")
        found[kind] += time / 1e6
        found["number"] += event.count
    return found


def measured(model: str, arguments: argparse.Namespace, folder: Path) -> list[str]:
    """The report's paragraphs about one model."""
    depth, sets = MODELS[model]
    sets = (*sets, f"train.device={arguments.device}", *arguments.set)
    graphs = arguments.device == "cuda"
    subjects: dict[str, Trainer] = {}
    for kind in ("off", "on") if graphs else ("off",):
        for mode in ("bare", "control", "probes"):
            chosen = PROBES if mode == "probes" else UNWATCHED
            name = f"{'graphs' if kind == 'on' else 'eager'}, {mode}"
            plan = prepared(arguments.depth or depth, *sets, *chosen, f"train.cuda_graphs={kind}")
            subjects[name] = trainer(plan, folder / f"{model} {name}", bare=mode != "probes")
    probed, bare = subjects["eager, probes"], subjects["eager, bare"]
    read = bytes_read(probed)
    operators = {}
    for name in ("eager, bare", "eager, probes"):
        advance(subjects[name], 3)
        with Operators() as counted:
            advance(subjects[name], 1)
        operators[name] = counted.count
    arrangement = arranged(plan, folder / f"{model} arranged")
    for subject in subjects.values():
        advance(subject, -subject.row % UPDATES + 2 * UPDATES)  # by then each shape has come twice, and is recorded
    device = bare.device
    works: dict[str, Callable[[], float]] = {
        name: (lambda subject=subject: seconds(lambda: advance(subject), device)) for name, subject in subjects.items()
    }
    taken = rounds(works, arguments.rounds)
    where = {name: spent(subject) for name, subject in subjects.items() if "control" not in name}
    for subject in subjects.values():
        subject.watcher.close()

    batch = probed.dataset.micro_batch(0)
    shape = " + ".join(f"{tuple(mask.shape)}" for mask in batch.masks.values())
    rate = bandwidth(device)
    bare_seconds = np.median(taken["eager, bare"]) / UPDATES
    config = bare.config.model
    text = [
        f"## {model}: {config.encoder_layers}L-{config.decoder_layers}L {config.d_model}-{config.d_ffn}-{config.heads}",
        f"Batches such as {shape} tokens, {batch.tokens} of them real and predicted.",
        *times(taken, operators, model),
        f"Arranged as a graph holds it, a probed update is {arrangement:,} operators, "
        f"{arrangement / operators['eager, bare']:.3f} of a bare one.",
        f"The probes must read {read / 1e6:,.1f} MB an update: {1e6 * read / rate:,.0f} us at the {rate / 1e9:,.0f} "
        f"GB/s that a copy reaches, {read / rate / bare_seconds:.2%} of a bare eager update.",
        *shares(where),
    ]
    if graphs:
        faster = middle(taken["eager, bare"] / taken["graphs, bare"])
        ratio = middle(taken["graphs, probes"] / taken["graphs, bare"])
        text.append(f"Graphs are {faster} times as fast as eager" + f" (goal: {FASTER:g})." * (model == "tiny"))
        verdict = "reached" if ratio.high <= GOALS[model] else "missed" if ratio.low > GOALS[model] else "inconclusive"
        text.append(f"Probes under graphs cost {ratio}; the goal of {GOALS[model]} is {verdict}.")
    return text


def times(taken: dict[str, np.ndarray], operators: dict[str, int], model: str) -> list[str]:
    lines = ["| update | ms | over bare [95 %] | operators |", "|---|---|---|---|"]
    for name, values in taken.items():
        base = taken[f"{name.partition(',')[0]}, bare"]
        count = f"{operators[name]:,}" if name in operators else ""
        lines.append(f"| {name} | {1e3 * np.median(values) / UPDATES:,.2f} | {middle(values / base)} | {count} |")
    return ["\n".join(lines)]


def shares(where: dict[str, Counter[str]]) -> list[str]:
    """A column of percent for each mode, and the number of kernels."""
    lines = [f"| where time goes | {' | '.join(where)} |", "|---|" + "---|" * len(where)]
    total = {name: sum(v for kind, v in found.items() if kind != "number") for name, found in where.items()}
    rows: defaultdict[str, list[str]] = defaultdict(list)
    for kind in (*KINDS, "other"):
        for name, found in where.items():
            rows[kind].append(f"{found[kind] / max(total[name], 1e-12):.1%}")
    for name, found in where.items():
        rows["calls"].append(f"{int(found['number']):,}")
        rows["busy, ms"].append(f"{1e3 * total[name]:,.2f}")
    return ["\n".join([*lines, *(f"| {kind} | {' | '.join(cells)} |" for kind, cells in rows.items())])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", action="append", choices=[*MODELS], help="default: both")
    parser.add_argument("--depth", type=int, help="instead of the model's own, for a quick look")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--set", action="append", default=[], help="any setting of the runs")
    parser.add_argument("--out", type=Path, help="write OUT.md")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} sees no CUDA device.")
    device = torch.device(arguments.device)
    text = [
        "# CUDA graphs, and the probes inside them" if device.type == "cuda" else "# What the probes add to an update"
    ]
    with tempfile.TemporaryDirectory() as folder:
        parts = [part for model in arguments.model or MODELS for part in measured(model, arguments, Path(folder))]
    text += [f"`python benchmarks/cuda_graphs.py {' '.join(sys.argv[1:])}`, {machine(device)}.", *parts]
    report = "\n\n".join(text) + "\n"
    print(report)
    if arguments.out:
        arguments.out.with_suffix(".md").write_text(report)


if __name__ == "__main__":
    main()
