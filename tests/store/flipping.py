"""A sound run of every kind of file, and all that can be read of it: what the tests of flipped bits compare."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from store_cases import contents, new_run, put

from stabilitylab.errors import StabilityLabError
from stabilitylab.store import Run, damage
from stabilitylab.store.evaluation import write_evaluation
from stabilitylab.store.verify import verify
from stabilitylab.train import checkpoint

CPU = torch.device("cpu")
KINDS = {
    "run.json": "run.json",
    "status.json": "status.json",
    "incident.json": "incident.json",
    "evaluation.json": "evaluation.json",
    "rows of the incident": "incident/metrics.parquet",
    "inventory": "inventory.jsonl",
    "journal": "journal-000003.records",
    "metrics part": "metrics/part-000001.parquet",
    "table part": "probes/grad_norm/part-000002.parquet",
    "checkpoint": "checkpoints/step-00000005.pt",
}


def sound_run(path: Path) -> Path:
    """Two parts, a journal that a dead process left, a checkpoint, an incident, an evaluation, numbers as settings."""
    writer = new_run(path, 0, 1)
    writer.record(settings={"beta1": 0.9, "beta2": 0.98, "lr": 0.0005, "names": ["a", "b"]})
    writer.seal()
    put(writer, 2, 3, 4)
    writer.seal()
    put(writer, 5, 6, 7)
    writer.incident({"step": 3, "paragraph": "Step 3: the loss is NaN."}, [(3, {"loss": 1.0}, contents(3))])
    writer.set_status("diverged", 7, "the loss is nan", note=1.5)
    weights = {"row": 5, "model": {"weight": torch.arange(64.0), "bias": torch.ones(8)}, "part": 3}
    checkpoint.save(path / "checkpoints", 5, weights, writer.run_id)
    writer._lock.release()
    write_evaluation(path, {"bleu": 12.5, "chrf": 30.25, "row": 5, "signature": "tok:13a"})
    return path


class Read(NamedTuple):
    """``content``: what was read. ``said``: what was refused or told on the way, "" for nothing."""

    content: Any
    said: str


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())


def read(path: Path) -> Read:
    """Read all of a run that can be read, by whoever reads it: the API, and a resume that loads the checkpoint."""
    heard, log = _Heard(), logging.getLogger("stabilitylab")
    damage._told.clear()
    log.addHandler(heard)
    try:
        run = Run.open(path)
        tables = {name: run.arrow(name).to_pydict() for name in ("metrics", *run.tables)}
        document = {key: value for key, value in run.manifest.items() if key != "run_id"}
        definitions = {name: run.table(name) for name in run.tables}
        state = checkpoint.load(path / "checkpoints", CPU, run.identity)
        weights = {name: value.tolist() for name, value in state["model"].items()}
        content = (document, definitions, run.status, run.incident, run.evaluation, tables, weights, state["row"])
    except StabilityLabError as error:
        return Read(None, str(error))
    finally:
        log.removeHandler(heard)
    return Read(content, "; ".join(heard.words))


class Count(NamedTuple):
    """Flips of one bit: how many were refused, told by readers, found by ``verify`` alone, changed nothing, and went
    through in silence with something else read."""

    refused: int = 0
    told: int = 0
    verified: int = 0
    harmless: int = 0
    silent: int = 0


def flips(file: Path, count: int, seed: int) -> Iterator[None]:
    """Flip ``count`` bits of a file, one at a time, at random from ``seed``; then put back what stood there."""
    data, chance = file.read_bytes(), random.Random(f"{seed} {file.name} {file.parent.name}")
    try:
        for _ in range(count):
            damaged = bytearray(data)
            damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            file.write_bytes(damaged)
            yield
    finally:
        file.write_bytes(data)


def flips_that_pandas_reads(file: Path, count: int, seed: int = 0) -> int:
    """Count the flips of one bit of a part after which ``pd.read_parquet`` returns other numbers without a word."""
    before, wrong = pd.read_parquet(file), 0
    for _ in flips(file, count, seed):
        with contextlib.suppress(Exception):  # refused
            wrong += not pd.read_parquet(file).equals(before)
    return wrong


def flip(path: Path, name: str, count: int, seed: int = 0) -> Count:
    """Count what becomes of ``count`` flips of one bit of one file of the run."""
    before = read(path)
    assert before.said == "", before.said
    found = Count()
    for _ in flips(path / name, count, seed):
        after = read(path)
        if after.content is None:
            kind = "refused"
        elif after.said:
            kind = "told"
        elif after.content != before.content:
            kind = "silent"
        else:
            kind = "verified" if verify(path).findings else "harmless"
        found = found._replace(**{kind: getattr(found, kind) + 1})
    assert read(path) == before
    return found
