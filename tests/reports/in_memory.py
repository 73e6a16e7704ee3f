"""Records of runs that never touch the disk: for claims that need a hundred runs and of each only a few numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
from making import by_protocol

from stabilitylab.labels import label
from stabilitylab.reports.collection import Record
from stabilitylab.store.reader import Status
from stabilitylab.verdict import Verdict

UNIGRAM = 6.0  # cross-entropy of the unigram baseline


def remembered(
    name: str,
    *,
    arch: str = "branchnorm",
    seed: int = 3,
    layers: int = 6,
    nll: float = 5.0,
    verdict: str = "trained",
    gap: float = -1.0,
    falls: float | None = None,
    settings: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Sequence[float]] | None = None,
) -> Record:
    """An ended training run with the held-out loss ``nll``, or with ``metrics`` of one number a step; ``falls``: by so
    much over the last fifth of the updates."""
    base = {"model": {"arch": arch, "encoder_layers": layers, "decoder_layers": layers}, "train": {"seed": seed}}
    config = by_protocol(base, settings or {})
    steps = config.train.steps
    known: dict[str, Any] = {"step": [0, steps], "held_out_nll": [8.0, nll], "held_out_accuracy": [0.1, 0.3]}
    if falls is not None:
        known = {"step": [0, int(0.8 * steps), steps], "held_out_nll": [8.0, nll + falls, nll],
                 "held_out_accuracy": [0.1, 0.3, 0.3]}  # fmt: skip
    if metrics is not None:
        known = {"step": [*range(len(next(iter(metrics.values()))))], **metrics}
    state = "diverged" if verdict == "diverged" else "finished"
    run = SimpleNamespace(
        path=Path("nowhere") / name,
        name=name,
        kind="train",
        config=config.model_dump(mode="json"),
        manifest={"label": label(config.model), "unigram": {"cross_entropy": UNIGRAM, "accuracy": 0.05}},
        tables=(),
        status=Status(state, steps, "made up", "", {}),
        verdict=Verdict(verdict, 0, "made up", gap, 0.1) if verdict else None,  # type: ignore[arg-type]
        metrics=pd.DataFrame(known),
    )
    return Record(run, name)  # type: ignore[arg-type]


def rejudge(record: Record, state: str, source_worth: float | None = None) -> None:
    """The record as if it had ended in this state."""
    record.judged = Verdict(state, 0, "made up", -1.0, 0.1, source_worth=source_worth)  # type: ignore[arg-type]
