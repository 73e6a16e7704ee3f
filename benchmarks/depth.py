"""Step time and memory against depth: does a layer cost the same at 1000 layers as at 12?

    python benchmarks/depth.py --out benchmarks/depth
    python benchmarks/depth.py --device cuda --steps 50 --out DIR/depth            # eager, and with CUDA graphs
    python benchmarks/depth.py --depths 1000 --steps 10 --add --out benchmarks/depth

Each depth and mode is a process of its own, so that its peak memory is its own. Those of one depth take turns, one
update each, in reverse in every second round (ABBA), so that what disturbs the machine disturbs all of them. Modes:
"bare" (forward, backward, optimizer, the loss recorded) and "control", the same again; "probes", all default probes at
every update and the reference pass (||dF|| and others) by cadence 10; "checkpointing" and both. A bare model of
``--anchor`` layers takes part at every depth: times of several depths are compared over its time in the same rounds.

Time of an update: CPU time of the process, or on a GPU wall time from idle to idle; medians over rounds, those with a
reference pass apart and weighted by their share. Memory: peak resident memory, or the peak of CUDA's allocator, less
what was in use before the model was built, when a model of two layers had come and gone. The marginal cost of a layer,
between neighbouring depths, is held against that of the first pair: "constant" if each 95 % bootstrap interval lies
within 10 %, "not constant" if one lies outside.
Writes OUT.csv (every update), OUT.md, OUT.png; ``--add`` keeps other depths and devices that OUT.csv holds (with
``--depths ''``: draws it again).
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import depth_report
import pandas as pd
import psutil
import torch
from timing import machine, rounds

CADENCE = 10
PROBES = ("probes.every=1", f"probes.update_every={CADENCE}")
MODES = ("bare", "control", "probes", "checkpointing", "checkpointing, probes")
GRAPHS = {"CPU": None, "GPU eager": "off", "GPU graphs": "on"}


def settings(series: str, mode: str, arguments: argparse.Namespace) -> list[str]:
    from subject import UNWATCHED

    sets = [f"model.arch={arguments.arch}", f"train.device={'cpu' if series == 'CPU' else 'cuda'}", *arguments.set]
    sets += PROBES if "probes" in mode else UNWATCHED
    sets += ["train.activation_checkpointing=true"] if "checkpointing" in mode else []
    return sets + ([f"train.cuda_graphs={GRAPHS[series]}"] if has_graphs() and series != "CPU" else [])


def has_graphs() -> bool:
    from stabilitylab.config import TrainConfig

    return "cuda_graphs" in TrainConfig.model_fields


def child(depth: int, bare: bool, sets: list[str]) -> None:
    """Answers each line on stdin with one update, and the end of stdin with what it all took."""
    from subject import prepared, trainer, update, warm

    with tempfile.TemporaryDirectory() as folder:
        small = trainer(prepared(2, *sets), Path(folder) / "small", bare=bare)  # loads what loads at first use
        update(small)
        small.watcher.close()
        del small
        plan = prepared(depth, *sets)
        gc.collect()
        before = in_use(plan.device)
        subject = trainer(plan, Path(folder) / "run", bare=bare)
        for _ in range(warm(subject.device)):
            update(subject)
        print(json.dumps({"row": subject.row, "machine": machine(subject.device)}), flush=True)
        for _ in sys.stdin:
            print(json.dumps(update(subject)), flush=True)
        subject.watcher.close()
        print(json.dumps(peak(subject.device) - before), flush=True)


def in_use(device: torch.device) -> int:
    """Bytes of the allocator, whose peak begins anew, or of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Process:
    """A child: one depth in one mode."""

    def __init__(self, depth: int, mode: str, sets: list[str]) -> None:
        command = [sys.executable, __file__, "--child", json.dumps([depth, "probes" not in mode, sets])]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self) -> Any:
        assert self.popen.stdout is not None
        if not (line := self.popen.stdout.readline()):
            raise EOFError(f"a process ended with exit code {self.popen.wait()}")
        return json.loads(line)

    def update(self) -> float:
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()
        return self.answer()

    def peak(self) -> int:
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        return self.answer()

    def kill(self) -> None:
        self.popen.kill()
        with self.popen:  # waits, and closes the pipes
            pass


def measured(series: str, depth: int, arguments: argparse.Namespace) -> pd.DataFrame:
    """Every update of every mode at one depth."""
    with ExitStack() as scope:
        processes = {}
        for mode in [*arguments.modes.split(";"), depth_report.ANCHOR]:
            layers = arguments.anchor if mode == depth_report.ANCHOR else depth
            processes[mode] = Process(layers, mode, settings(series, mode, arguments))
            scope.callback(processes[mode].kill)
        ready = [process.answer() for process in processes.values()]
        taken = rounds({mode: process.update for mode, process in processes.items()}, arguments.steps)
        peaks = {mode: process.peak() for mode, process in processes.items()}
    frames = [
        pd.DataFrame(
            {
                "series": series,
                "depth": depth,
                "mode": mode,
                "row": range(ready[0]["row"], ready[0]["row"] + arguments.steps),
                "seconds": taken[mode],
                "peak_bytes": peaks[mode],
                "made": f"`{shown(series, arguments)}`, {ready[0]['machine'].partition(';')[0]}",
            }
        )
        for mode in processes
    ]
    return pd.concat(frames, ignore_index=True)


def shown(series: str, arguments: argparse.Namespace) -> str:
    sets = "".join(f" --set {each}" for each in arguments.set)
    modes = "" if arguments.modes == ";".join(MODES) else f" --modes '{arguments.modes}'"
    return (
        f"python benchmarks/depth.py --device {'cpu' if series == 'CPU' else 'cuda'} --arch {arguments.arch} "
        f"--steps {arguments.steps}{modes}{sets}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="12,48,200,500,1000")
    parser.add_argument("--steps", type=int, default=2 * CADENCE, help=f"updates each, at least {CADENCE}")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "both"])
    parser.add_argument("--modes", default=";".join(MODES), help="some of the default, with ; between them")
    parser.add_argument("--anchor", type=int, default=48, help="layers of the model that takes part at every depth")
    parser.add_argument("--arch", default="branchnorm")
    parser.add_argument("--set", action="append", default=[], help="any setting of the run, such as model.d_model=512")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no depth later than that")
    parser.add_argument("--out", type=Path, help="write OUT.csv, OUT.md and OUT.png")
    parser.add_argument("--add", action="store_true", help="keep what OUT.csv has of other depths and devices")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*json.loads(arguments.child))
        return
    if arguments.steps < CADENCE:
        parser.error(f"--steps {arguments.steps} may miss the reference pass: give at least {CADENCE}.")
    if not {"bare"} <= set(arguments.modes.split(";")) <= set(MODES):
        parser.error(f"--modes {arguments.modes!r}: give bare, and any others of {';'.join(MODES)}.")
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch {torch.__version__} sees no CUDA device.")
    gpus = ["GPU eager", *(["GPU graphs"] if has_graphs() else [])]
    series = {"cpu": ["CPU"], "cuda": gpus, "both": ["CPU", *gpus]}[arguments.device]
    began, frames = time.monotonic(), []
    if arguments.add:
        with suppress(FileNotFoundError):
            frames.append(pd.read_csv(arguments.out.with_suffix(".csv")))
    for depth in (int(text) for text in arguments.depths.split(",") if text):
        for name in series:
            if time.monotonic() - began > 60 * arguments.minutes:
                print(f"depth {depth}, {name}: left out, --minutes {arguments.minutes} are over", file=sys.stderr)
                continue
            try:
                new = measured(name, depth, arguments)
            except EOFError as error:
                print(f"depth {depth}, {name}: left out, {error}", file=sys.stderr)
                continue
            frames = [old[(old["depth"] != depth) | (old["series"] != name)] for old in frames] + [new]
            if arguments.out:  # after each depth: what there is when time is up counts
                depth_report.write(pd.concat(frames, ignore_index=True), arguments.out, CADENCE)
    if not frames:
        sys.exit("nothing was measured")
    frame = pd.concat(frames, ignore_index=True)
    print(depth_report.text(frame, CADENCE))
    if arguments.out:
        depth_report.write(frame, arguments.out, CADENCE)


if __name__ == "__main__":
    main()
