"""Several runs on one device at a time: updates a second of all together, against one run alone.

    python benchmarks/shared_gpu.py --device cuda --out benchmarks/shared_gpu
    python benchmarks/shared_gpu.py --device cpu --counts 1,2 --depth 4 --seconds 2    # a trial where there is no GPU

N processes, each with a model, a run directory and the default probes as under ``stabilitylab sweep --jobs N``,
make a few updates, wait for one another, and then all count the updates of the same seconds of wall time. Starting up
is not in it. The counts go up and down again in each round, so the first and the last measurement are one run alone
both times: their ratio is the control. A row is the median over all measurements of that count, their range beside it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

WARM = 5  # updates before the clock starts
RECORDED = 25  # and where they are replayed: by then each shape has come twice, probed and not, and is a graph
PATIENCE = 300  # seconds that the slowest process may take to get ready


class Count(NamedTuple):
    """What one process did: updates, seconds, and the bytes of the device that were in use by everybody."""

    updates: int
    seconds: float
    used: int


def work(device: str, depth: int, seconds: float, folder: str, number: int, barrier: Any, results: Any) -> None:
    """One process: a trainer that counts its updates."""
    import torch
    from subject import prepared, trainer

    def wait_for_device() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    try:
        plan = prepared(depth, f"train.device={device}", f"train.seed={number}")
        own = trainer(plan, Path(folder) / str(number))
        for _ in range(WARM if plan.recorder is None else RECORDED):
            own.update()
            own.row += 1
        wait_for_device()
        barrier.wait(PATIENCE)
        updates, began = 0, time.perf_counter()
        while time.perf_counter() < began + seconds:
            own.update()
            own.row += 1
            updates += 1
        wait_for_device()
        took = time.perf_counter() - began
        free, whole = torch.cuda.mem_get_info() if device.startswith("cuda") else (0, 0)
        barrier.wait(PATIENCE)  # so that nobody's memory is gone before everybody has looked
        own.watcher.close()
        results.put(Count(updates, took, whole - free))
    except BaseException as error:
        barrier.abort()
        results.put(f"{type(error).__name__}: {error}")


def together(count: int, device: str, depth: int, seconds: float) -> tuple[float, int]:
    """Updates a second of ``count`` processes in all, and bytes of the device in use."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(count), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        own = (device, depth, seconds, folder)
        crew = [context.Process(target=work, args=(*own, number, barrier, results)) for number in range(count)]
        for process in crew:
            process.start()
        found = [results.get(timeout=3 * PATIENCE) for _ in crew]
        for process in crew:
            process.join()
    if wrong := [each for each in found if isinstance(each, str)]:  # the others only say that the barrier broke
        raise SystemExit(f"{count} at a time: {max(wrong, key=lambda said: not said.startswith('BrokenBarrier'))}")
    return sum(each.updates / each.seconds for each in found), max(each.used for each in found)


def table(rates: dict[int, list[float]], used: dict[int, int], arguments: argparse.Namespace) -> str:
    import torch

    on_gpu = arguments.device.startswith("cuda")
    device = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, no GPU"
    one = statistics.median(rates[1])
    lines = [
        "# Several runs on one device",
        "",
        f"`python benchmarks/shared_gpu.py --device {arguments.device} --counts {arguments.counts} "
        f"--depth {arguments.depth} --seconds {arguments.seconds:g} --rounds {arguments.rounds}`",
        "",
        f"{device}, {os.cpu_count()} CPU cores, torch {torch.__version__}, Python {platform.python_version()}, load "
        f"{os.getloadavg()[1]:.1f}{', ' + mps() if on_gpu else ''}; 64-128-2, {arguments.depth} layers in all, default "
        f"probes. One run alone makes {one:.2f} updates a second; the first such count over the last, the control: "
        f"{rates[1][0] / rates[1][-1]:.3f}.",
        "",
        "| runs at a time | updates/s of all | over one run alone [range] | of each run | GPU memory in use |",
        "|---|---|---|---|---|",
    ]
    for count, own in rates.items():
        ratio = [rate / one for rate in own]
        middle = statistics.median(ratio)
        memory = f"{used[count] / 2**30:.1f} GiB" if on_gpu else "-"
        lines.append(
            f"| {count} | {statistics.median(own):.2f} | {middle:.2f} [{min(ratio):.2f}, {max(ratio):.2f}] | "
            f"{middle / count:.2f} | {memory} |"
        )
    return "\n".join(lines) + "\n"


def mps() -> str:
    """Whether CUDA's multi-process service is there, and serves."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        return "no MPS installed"
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return "MPS running" if (pipes / "control").exists() else "MPS installed, not running"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--counts", default="1,2,4,8", help="runs at a time; 1 is always among them")
    parser.add_argument("--depth", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write OUT.md")
    arguments = parser.parse_args()
    counts = sorted({1, *map(int, arguments.counts.split(","))})
    rates: dict[int, list[float]] = {count: [] for count in counts}
    used: dict[int, int] = {}
    for _ in range(arguments.rounds):
        for count in (*counts, *reversed(counts)):
            rate, used[count] = together(count, arguments.device, arguments.depth, arguments.seconds)
            rates[count].append(rate)
    print(text := table(rates, used, arguments))
    if arguments.out:
        arguments.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
