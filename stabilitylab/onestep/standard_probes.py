"""The ordinary probes at step 0, recorded by the watcher itself, and the gradients of that pass."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

from ..models.groups import groups_of
from ..probes import Watcher
from ..schema import Cells, Table
from ..train.recipe import adamw, param_groups
from .initial_model import Filled, Subject

PROBES = (
    *("grad_norm", "activation_grad_norm", "ln_input"),
    *("cosine_similarity", "activation_sparsity", "branch_variance"),
)


class Gathered:
    """A sink that keeps its one row."""

    def __init__(self) -> None:
        self.tables: Sequence[Table] = ()
        self.metrics: dict[str, float | None] = {}
        self.cells: Mapping[str, Cells] = {}

    def open(self, tables: Sequence[Table]) -> None:
        self.tables = tables

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None:
        self.metrics, self.cells = dict(metrics), tables

    def close(self) -> None:
        pass


def ordinary(subject: Subject) -> tuple[dict[str, float | None], list[Filled]]:
    """Return metrics and tables of row 0; the reference pass is over the same batch. Afterwards ``.grad`` holds
    dE/dtheta."""
    sink = _watched(subject)
    gc.collect()  # a watcher is part of cycles, and the model would stay in memory with it
    return sink.metrics, [(table, sink.cells[table.name]) for table in sink.tables]


def _watched(subject: Subject) -> Gathered:
    model, batch, train, sink = subject.model, subject.batch, subject.config.train, Gathered()
    watcher = Watcher(
        model,
        sink,
        probes=[name for name in PROBES if subject.sites.norms or name != "ln_input"],  # some archs have no norm
        every=1,
        update_every=1,
        optimizer=adamw(train, param_groups(train, groups_of(model))),  # it never steps; probes record its eps
        mask=batch.masks,
        reference=lambda: model(**batch.inputs),
    )
    try:
        loss, nll = subject.loss()
        loss.backward()
        watcher.step(loss=loss, nll=nll, alpha=None if model.schedule is None else model.schedule.least)
        watcher.flush()
    finally:
        watcher.close()
    return sink
