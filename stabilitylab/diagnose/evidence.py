"""The contents of a run directory as arrays: metrics and tables, each as steps times places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
import pyarrow.compute as pc

from ..changes import LoopChange, changes_of
from ..decisive import decisive
from ..errors import DamagedError, listed
from ..schema import Row
from ..store import Run
from ..store.arrays import steps_in
from ..store.inventory import read as read_inventory
from ..store.layout import METRICS
from ..verdict import Verdict, judge_recorded
from .order import phase_of_metric

LOSSES = ("nll", "loss")  # the detector of spikes reads the first that was recorded


class FirstSeen(TypedDict):
    """Arguments of an :class:`~.events.Event`: where it was first seen."""

    step: int
    phase: str
    after: int | None
    probe: str


@dataclass(frozen=True)
class Grid:
    """One column: ``values`` and ``absent`` (steps, places), its places, and its phase (what its numbers depend on)."""

    table: str
    column: str
    phase: str
    steps: np.ndarray
    rows: tuple[Row, ...]
    values: np.ndarray
    absent: np.ndarray

    def select(self, chosen: np.ndarray) -> Grid:
        """Return only the places where ``chosen`` is True."""
        rows = tuple(row for row, keep in zip(self.rows, chosen, strict=True) if keep)
        return replace(self, rows=rows, values=self.values[:, chosen], absent=self.absent[:, chosen])

    def stacks(self) -> list[Grid]:
        """Return the rows inside layers, one grid a stack."""
        names = dict.fromkeys(row.stack for row in self.rows if row.layer > 0)
        return [self.select(np.array([row.stack == name and row.layer > 0 for row in self.rows])) for name in names]

    def at(self, chosen: np.ndarray) -> Grid:
        """Return only the steps where ``chosen`` is True."""
        return replace(self, steps=self.steps[chosen], values=self.values[chosen], absent=self.absent[chosen])

    @property
    def measured(self) -> np.ndarray:
        """The values, NaN where there is none."""
        return np.where(self.absent, np.nan, self.values)

    def first_seen(self, position: int) -> FirstSeen:
        """Return step, phase, step before and probe of an event that is first seen in the row at ``position``."""
        step, after = int(self.steps[position]), self.before(position)
        return FirstSeen(step=step, phase=self.phase, after=after, probe=self.name)

    def before(self, position: int) -> int | None:
        """Return the step recorded before the step at ``position``; None for the first."""
        return int(self.steps[position - 1]) if position else None

    def last_before(self, step: int) -> int | None:
        """Return the last recorded step before ``step``; None if there is none."""
        earlier = self.steps[self.steps < step]
        return int(earlier[-1]) if len(earlier) else None

    @property
    def is_metric(self) -> bool:
        return self.table == METRICS

    @property
    def name(self) -> str:
        return self.column if self.is_metric else f"{self.table}.{self.column}"


class Evidence:
    """A run as it stands now, read once per table and column; what is not recorded is None."""

    def __init__(self, run: Run) -> None:
        self.run = run = run.snapshot()
        self._read: dict[tuple[Any, ...], Grid | None] = {}  # no functools.cache: it would keep the run in memory
        self.metrics = run.arrow(METRICS)
        self.status = run.status
        self.incident = run.incident
        if not self.metrics.num_rows and (parts := read_inventory(run.path, run.identity)) and parts.of(METRICS):
            raise DamagedError(
                f"the metrics of {run.path} are missing: restore {run.path / METRICS} from a copy "
                "(stabilitylab verify lists all that is missing).",
                run.path,
            )

    @property
    def steps(self) -> np.ndarray:
        return self.metrics["step"].to_numpy()

    @cached_property
    def facts(self) -> list[dict[str, Any]]:
        """The facts of the ledger of updates up to the last row; [] for a run without them."""
        last = int(self.steps.max(initial=0))
        return [fact for fact in self.run.ledger if isinstance(fact.get("step"), int) and fact["step"] <= last]

    @cached_property
    def changes(self) -> list[LoopChange]:
        """The changes of the loop that the ledger's facts show."""
        audit = self.run.manifest.get("audit")
        count = audit.get("parameters") if isinstance(audit, Mapping) else None
        return changes_of(self.facts, count if isinstance(count, int) else 0)

    @property
    def without_steps(self) -> str:
        """The steps at which a given optimizer did not step while its parameters moved, in words; "" if there are none.
        The ledger knows neither the settings nor the state of an optimizer that stepped instead."""
        found = [change for change in self.changes if change.kind == "optimizer"]
        spans = ["from step {} on" if one.until is None else "at steps {} to {}" for one in found]
        return listed([
            f"{span.format(one.step, (one.until or 0) - 1)} ({one.place} did not step, while its parameters moved)"
            for one, span in zip(found, spans, strict=True)
        ])  # fmt: skip

    @property
    def unigram(self) -> Mapping[str, Any] | None:
        """The ``cross_entropy`` and ``accuracy`` of the unigram baseline; None if the baseline is not known."""
        return self.run.manifest.get("unigram") or None

    @property
    def classes(self) -> int | None:
        """The number of classes among which the model chooses, such as its vocabulary; None where run.json has none."""
        data = self.run.manifest.get("data")
        recorded = data.get("target_vocab") if isinstance(data, Mapping) else self.run.manifest.get("classes")
        return recorded if type(recorded) is int and recorded > 1 else None

    @cached_property
    def verdict(self) -> Verdict | None:
        """The state of the run, ended or not, by the rule that every page and table uses; None without a baseline."""
        ended = self.status.state in ("finished", "diverged")
        return judge_recorded(self.metrics.to_pydict(), self.run.manifest, whole=ended)

    @property
    def flushed(self) -> bool:
        """True if numbers below 1.2e-38 were flushed to 0 while the run was trained."""
        return bool(self.run.manifest.get("flush_denormal", False))

    def decisive(self, table: str, column: str = "") -> Grid | None:
        """Return a column of a table without the steps that decide nothing (:mod:`stabilitylab.decisive`): eigenvalues
        that have not converged, and critical rates of which only one side was seen."""
        grid = self.grid(table, column)
        if grid is None:
            return None

        def read(name: str) -> np.ndarray | None:
            other = self.grid(table, name)
            return None if other is None else other.values[:, 0]

        chosen = decisive(table, grid.column, read)
        return grid if chosen is None else grid.at(chosen)

    def loss(self) -> Grid | None:
        return next((grid for name in LOSSES if (grid := self.metric(name)) is not None), None)

    def metric(self, *names: str) -> Grid | None:
        """Return the first of ``names`` that was recorded, at the steps at which it was given. A NaN was measured."""
        if names not in self._read:
            self._read[names] = self._metric(*names)
        return self._read[names]

    def grid(self, table: str, column: str = "", by_layer: bool = False) -> Grid | None:
        """Return a column of a table (its main column if unnamed); ``by_layer`` combines rows if the table allows
        it."""
        key = table, column, by_layer
        if key not in self._read:
            self._read[key] = self._grid(*key)
        return self._read[key]

    def read_whole(self, table: str) -> None:
        """Read all columns of a table at once, for one who looks at each of many."""
        frame, definition = self.run.frame(table), self.run.table(table)
        for column in definition.columns if len(frame) else ():
            steps = steps_in(frame["step"].to_numpy())
            values, absent = (frame[key].to_numpy().reshape(len(steps), -1) for key in (column, "absent"))
            grid = Grid(table, column, definition.phase, steps, definition.rows, values, absent.astype(bool))
            self._read[table, column, False] = grid

    def _metric(self, *names: str) -> Grid | None:
        for name in names:
            if name not in self.metrics.column_names:
                continue
            data = self.metrics.select(["step", name])
            data = data.filter(pc.is_valid(data[name]))  # pyright: ignore[reportAttributeAccessIssue]
            if data.num_rows:
                values = data[name].to_numpy().astype(float)[:, None]
                steps, phase = data["step"].to_numpy(), phase_of_metric(name)
                return Grid(METRICS, name, phase, steps, (Row(""),), values, np.zeros(values.shape, bool))
        return None

    def _grid(self, table: str, column: str, by_layer: bool) -> Grid | None:
        if table not in self.run.tables:
            return None
        definition = self.run.table(table)
        column = column or definition.main
        if column not in definition.columns:
            return None
        combined = by_layer and bool(definition.total) and any(row.layer > 0 for row in definition.rows)
        cells = self.run.cells(table, column, by="layer" if combined else None)
        if not len(cells.steps):
            return None
        rows = tuple(Row("", row.stack, row.layer) for row in cells.rows) if combined else definition.rows
        return Grid(table, column, definition.phase, cells.steps, rows, cells.values, cells.absent)
