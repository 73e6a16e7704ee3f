"""What ``diagnose`` says of a run of the corpus afterwards, and ``preflight`` of its model before the first update."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from families import UPDATES, Plan
from subjects import Student
from torch import nn

from stabilitylab import preflight
from stabilitylab.data import Batch, Dataset
from stabilitylab.diagnose import diagnose
from stabilitylab.schema import Cells, Sink, Table
from stabilitylab.store import Run, RunWriter

MOST_EVENTS = 40  # of a run that are kept


class Both:
    """A sink that hands everything to a run directory, which is read by ``diagnose`` at the end and thrown away, and
    then to another sink."""

    def __init__(self, second: Sink) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="faults-")
        self._run = RunWriter.create(Path(self._folder.name) / "run", {"kind": "watched", "config": {}})
        self._second = second
        self.incident, self.begin = self._run.incident, self._run.begin

    def open(self, tables: Sequence[Table]) -> None:
        self._run.open(tables)
        self._second.open(tables)

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None:
        self._run.append(step, metrics, tables)
        self._second.append(step, metrics, tables)

    def close(self) -> None:
        self._second.close()

    def judged(self, rows: int) -> dict[str, Any]:
        """What diagnose says: verdict, kinds that came first and the whole chain, the first place; of each event its
        kind, step, severity and how many times over its threshold it was. The run is gone."""
        try:
            self._run.set_status("finished", rows)
            self._run.close()
            found = diagnose(Run.open(self._run.path)).as_dict()
        finally:
            self._folder.cleanup()
        kept = {name: found[name] for name in ("verdict", "first", "chain", "undecided")}
        chosen = [event for event in found["events"] if event["kind"] in found["first"]]
        return kept | {
            "step": chosen[0]["step"] if chosen else None,
            "layer": chosen[0]["layer"] if chosen else None,
            "events": [
                [event["kind"], event["step"], event["severity"], float(f"{event['strength']:.4g}")]
                for event in found["events"][:MOST_EVENTS]
            ],
        }


def mask_of(batch: Batch) -> dict[str, torch.Tensor] | torch.Tensor:
    """By stack, or of the one stack, whose name in another library's model is its own."""
    return dict(batch.masks) if len(batch.masks) > 1 else next(iter(batch.masks.values()))


def foreseen(subject: Student, what: Plan, data: Dataset) -> dict[str, Any]:
    """What preflight says of the model, at the highest rate that the plan has, on the first batch: bounds that fail,
    and that warn, with the number that is beyond each, and the numbers of the whole model."""
    batch = data.micro_batch(0)
    real = batch.weight > 0
    rate = max(what.rate(row) for row in range(UPDATES))
    optimizer = torch.optim.AdamW(
        subject.model.parameters(), lr=rate, betas=what.betas, eps=what.eps, weight_decay=what.decay
    )

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(subject.logits(model, batch)[real], batch.labels[real])

    log = logging.getLogger("stabilitylab")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        found = preflight(subject.model, batch, loss, optimizer, mask=mask_of(batch))
    finally:
        log.setLevel(level)
    told: dict[str, Any] = {"fail": {}, "warn": {}, "numbers": found.numbers}
    for finding in found.findings:
        told[finding.severity].setdefault(finding.bound, finding.value)
    return told
