"""Run directories as training leaves them, and a launcher whose processes do what a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from made_verdict import made_verdict

from stabilitylab.config import Config, resolve
from stabilitylab.experiments import Experiment, Kind
from stabilitylab.labels import label
from stabilitylab.store import RunWriter
from stabilitylab.sweep import Job, plan

SMALL: dict[str, Any] = {"data": {"sentences": 4, "held_out": 6}, "probes": {"names": ("none",)}}


def config(arch: str = "deepnorm", steps: int = 4, seed: int = 3, **train: Any) -> Config:
    sections = {"model": {"arch": arch}, "train": {"steps": steps, "seed": seed, **train}}
    return resolve(SMALL, sections, depth=2)


def on(folder: Path, **settings: Any) -> Config:
    """A configuration on the files of the fixture ``texts``."""
    data = {"source": f"text:{folder}/a.de,{folder}/a.en", "valid": f"{folder}/v.de,{folder}/v.en"}
    return resolve({"data": data}, settings, depth=2)


def experiment(name: str, kind: Kind = "train", **settings: Any) -> Experiment:
    return Experiment(name, config(**settings), kind)


def leave(
    job: Job, state: str, step: int = 2, reason: str = "", checkpoint: int = 0, verdict: str = "", **judged: float
) -> RunWriter:
    """Write ``job``'s run directory up to ``step`` rows; the writer still holds it."""
    conf = job.experiment.config
    manifest = {"label": label(conf.model), "config": conf.model_dump(mode="json")}
    if job.experiment.kind != "train":
        manifest["kind"] = job.experiment.kind
    writer = RunWriter.create(job.path, manifest)
    writer.open([])
    for row in range(step):
        writer.append(row, {"loss": 1.0}, {})
    if checkpoint:
        (job.path / "checkpoints").mkdir()
        (job.path / "checkpoints" / f"step-{checkpoint:08d}.pt").write_bytes(b"")
    facts = {"verdict": {**made_verdict(verdict), **judged}} if verdict else {}
    writer.set_status(state, step, reason, **facts)  # type: ignore[arg-type]
    return writer


def left(job: Job, state: str, **how: Any) -> None:
    leave(job, state, **how).close()


Act = Callable[[Job], int]  # what a process does to the disk, and its exit code


def finishes(job: Job) -> int:
    if not job.path.exists():
        left(job, "finished", step=job.steps, verdict="trained")
    else:  # a resumed one; the store's own tests cover how
        with RunWriter.resume(job.path, part=2) as writer:
            writer.set_status("finished", job.steps, "", verdict=made_verdict("trained"))
    return 0


def says(text: str, code: int) -> Act:
    def act(job: Job) -> int:
        with job.log_path.open("a") as log:
            log.write(text + "\n")
        return code

    return act


class FakeProcess:
    def __init__(self, act: Callable[[], int], polls: int) -> None:
        self.act, self.polls, self.code = act, polls, None
        self.stops: list[int] = []

    def poll(self) -> int | None:
        if self.code is None:
            self.polls -= 1
            if self.polls < 0:
                self.code = self.act()
        return self.code

    def stop(self, asked: int) -> None:
        self.stops.append(asked)
        self.polls = 0


class FakeLauncher:
    """Processes that take ``polls`` looks; the n-th attempt at a run does the n-th thing of ``script[name]``."""

    def __init__(self, script: dict[str, Sequence[Act]] | None = None, workers: int = 1, polls: int = 0) -> None:
        self.script, self.workers, self.polls = script or {}, workers, polls
        self.started: list[Job] = []
        self.processes: list[FakeProcess] = []
        self.most = 0
        self.closed = False

    def running(self) -> int:
        return sum(process.code is None for process in self.processes)

    def free(self) -> bool:
        return self.running() < self.workers

    def start(self, job: Job) -> FakeProcess:
        number = sum(earlier.name == job.name for earlier in self.started)
        act = self.script.get(job.name, [finishes] * 9)[number]
        self.started.append(job)
        process = FakeProcess(lambda: act(job), self.polls)
        self.processes.append(process)
        self.most = max(self.most, self.running())
        return process

    def close(self) -> None:
        self.closed = True


class Heard:
    """An audience that keeps what it was told."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, str, bool]] = []
        self.starts: list[str] = []

    def planned(self, jobs: Sequence[Job]) -> None: ...

    def started(self, job: Job) -> None:
        self.starts.append(job.name)

    def ended(self, job: Job, seconds: float, again: bool) -> None:
        self.ends.append((job.name, job.state, again))

    def progress(self, running: Sequence[Job]) -> None: ...


def planned(out: Path, *names: str, **settings: Any) -> list[Job]:
    return plan([experiment(name, **settings) for name in names], out)
