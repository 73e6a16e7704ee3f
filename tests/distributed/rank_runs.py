"""What two ranks do with the trainer: whole runs, an interruption that one rank alone hears of, and its resumption."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from stabilitylab.commands import _resuming as resuming
from stabilitylab.config import parse_set, resolve
from stabilitylab.errors import StabilityLabError
from stabilitylab.train import checkpoint, plan, resume, start
from stabilitylab.train import run as runs
from stabilitylab.train.loop import Report, Trainer
from stabilitylab.train.run import Plan

RUN_CASES: dict[str, Callable[[Path], Any]] = {}
SHARED = (
    "model.T=4 train.warmup=3 train.lr=1e-3 probes.every=2 probes.update_every=3 data.sentences=5 data.held_out=6 "
    "train.clip_norm=0.5 train.accumulate=2 train.steps=6"
)


def prepared(parallel: str, *settings: str, arch: str = "branchnorm") -> Plan:
    sets = [*SHARED.split(), f"model.arch={arch}", f"train.parallel={parallel}", *settings]
    return plan(resolve(parse_set(sets), depth=4))


class Silent:
    def opened(self, path: Path, manifest: object) -> None: ...

    def show(self, report: Report) -> None: ...


class Interrupted(Silent):
    """Rank 1 alone gets a SIGTERM after the third update."""

    def show(self, report: Report) -> None:
        if report.row == 2 and dist.get_rank() == 1:
            signal.raise_signal(signal.SIGTERM)


def equal_to_one_process(kind: str, arch: str) -> Callable[[Path], Any]:
    return lambda folder: start(prepared(kind, arch=arch), folder, f"{kind}-{arch}", Silent()).path


def resumed(kind: str) -> Callable[[Path], Any]:
    def run(folder: Path) -> Any:
        drop = "model.dropout=0.1"
        whole = start(prepared(kind, drop), folder, f"{kind}-whole", Silent())
        silent, runs.Nobody = runs.Nobody, Interrupted  # what the second rank shows its reports to
        broken = start(prepared(kind, drop), folder, f"{kind}-broken", Silent())
        runs.Nobody = silent
        dist.barrier()  # rank 0 writes the checkpoint; who is launched anew finds it whole
        done = resume(broken.path, None, Silent())
        dist.barrier()
        return {
            "broken": (broken.state, broken.row, broken.signal),
            "done": (done.state, done.row, done.verdict == whole.verdict),
            "paths": (str(whole.path), str(broken.path)),
        }

    return run


def checkpointed(kind: str) -> Callable[[Path], Any]:
    """The same run with the layers' insides kept, and computed again."""

    def run(folder: Path) -> Any:
        paths = []
        for again in ("false", "true"):
            settings = ("model.dropout=0.1", "train.steps=3", f"train.activation_checkpointing={again}")
            paths.append(start(prepared(kind, *settings), folder, f"{kind}-again-{again}", Silent()).path)
        return paths

    return run


def timed(kind: str) -> Callable[[Path], Any]:
    """Ranks whose clocks disagree: ten minutes pass on the first after every second update, on the other at once."""

    def run(folder: Path) -> Any:
        plain = start(prepared(kind, "train.checkpoint_minutes=0"), folder, f"{kind}-untimed", Silent())
        now, clock, save = [0.0], checkpoint.clock, Trainer.save
        rows: list[int] = []

        def passes() -> float:
            now[0] += 300.0 if dist.get_rank() == 0 else 1e6
            return now[0]

        def noted(trainer: Trainer) -> None:
            rows.append(trainer.row)
            save(trainer)

        checkpoint.clock, Trainer.save = passes, noted
        try:
            done = start(prepared(kind), folder, f"{kind}-timed", Silent())
        finally:
            checkpoint.clock, Trainer.save = clock, save
        return {"rows": rows, "paths": (str(plain.path), str(done.path))}

    return run


for kind in ("ddp", "fsdp"):
    RUN_CASES[f"{kind}_timed"] = timed(kind)
    RUN_CASES[f"{kind}_checkpointed"] = checkpointed(kind)
    for arch in ("branchnorm", "admin"):
        RUN_CASES[f"{kind}_{arch}"] = equal_to_one_process(kind, arch)
    RUN_CASES[f"{kind}_resumed"] = resumed(kind)


def found(folder: Path) -> Any:
    """How ``--resume auto`` finds runs of both ranks: before, after an interruption, under another configuration."""
    states = []
    config = prepared("ddp").config
    for row in range(3):
        job = resuming.found(config, folder, "ddp-auto")
        states.append((job.state, job.resumable))
        if row == 0:
            silent, runs.Nobody = runs.Nobody, Interrupted
            start(prepared("ddp"), folder, "ddp-auto", Silent())
            runs.Nobody = silent
        elif row == 1:
            resume(job.path, None, Silent())
        dist.barrier()
    try:
        resuming.found(prepared("ddp", "train.lr=1e-2").config, folder, "ddp-auto")
    except StabilityLabError as error:
        states.append(f"{type(error).__name__}: {error}")
    return states


RUN_CASES["found"] = found


def refused(folder: Path) -> Any:
    """A directory that exists; batches with fewer sentences than ranks."""
    said = []
    for name, settings in (("ddp-branchnorm", ()), ("small", ("data.sentences=1",))):
        try:
            start(prepared("ddp", *settings), folder, name, Silent())
        except StabilityLabError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


RUN_CASES["refused"] = refused
