"""Our trainer as the benchmarks time it: one update at a time, in a scratch run."""

from __future__ import annotations

from pathlib import Path

import torch
from timing import seconds

from stabilitylab.config import parse_set, resolve
from stabilitylab.store import RunWriter
from stabilitylab.train import Plan, Trainer, plan

NEVER = 10**9
UNWATCHED = ("probes.names=['none']", "probes.every=1", f"probes.update_every={NEVER}")


def warm(device: torch.device) -> int:
    """Updates before the clock starts: on a GPU until each kind of update and held-out pass has come twice, when it is
    recorded and from then on replayed."""
    return 25 if device.type == "cuda" else 3


def prepared(depth: int | None, *sets: str) -> Plan:
    """A plan without the evaluations of a run's verdict, which no update that is compared should pay for."""
    return plan(resolve(parse_set(("train.evaluations=0", *sets)), depth=depth))


def trainer(plan: Plan, folder: Path, *, bare: bool = False) -> Trainer:
    """``bare``: not even the total gradient norm, which every update of ours records, is taken."""
    run = RunWriter.create(folder, {"config": {}})
    own = {"recorder": plan.recorder, "compiled": plan.compiled}
    made = Trainer(plan.config, plan.dataset, run, plan.device, **own)
    made.watcher.total_every_step = not bare
    return made


def update(trainer: Trainer) -> float:
    """Seconds of the next one."""

    def work() -> None:
        trainer.update()
        trainer.row += 1

    return seconds(work, trainer.device)
