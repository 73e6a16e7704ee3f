"""An alarm on the rows of a stored run that has ended or goes on, in their order."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..errors import UsageError
from ..schema import Cells, Table
from ..store import Run
from ..store.layout import METRICS
from ..store.reader import of_snapshots
from .alarm import Alarm, Alert
from .signal import tables_read

REST = 20  # the pause after a reading, in units of its duration

Stored = tuple[int, dict[str, float | None], dict[str, Cells]]


def rows(run: Run) -> Iterator[Stored]:
    """Yield step, metrics and tables of each recorded step, as its writer got them; only tables that the alarm
    reads."""
    yield from of_snapshots(lambda now: [*_rows(now)], run)


def _rows(run: Run, after: int = -1) -> Iterator[Stored]:
    metrics = run.arrow(METRICS)
    data = {name: metrics[name].to_pylist() for name in metrics.column_names}
    read = tables_read()
    tables = {name: by_step(run, name) for name in run.tables if name in read}
    for number, step in enumerate(data.pop("step")):
        if step > after:
            told = {name: own[number] for name, own in data.items()}
            yield step, told, {name: cells[step] for name, cells in tables.items() if step in cells}


def by_step(run: Run, name: str) -> dict[int, Cells]:
    """Return the cells of a table by step."""
    table = run.table(name)
    found = run.arrow(name)
    shape = (-1, len(table.rows))
    steps = found["step"].to_numpy().reshape(shape)[:, 0]
    values = np.stack([found[column].to_numpy().reshape(shape) for column in table.columns], axis=-1)
    absent = found["absent"].to_numpy().astype(bool).reshape(shape)
    return {int(step): Cells(values[at], absent[at]) for at, step in enumerate(steps)}


def listen(run: Run, alarm: Alarm, *, follow: bool = False, pause: float = 2.0) -> Iterator[Alert]:
    """Yield the alerts of ``alarm`` on the run's rows; with ``follow`` also on rows to come, until no process writes
    the run.

    The run is read every ``pause`` seconds. Each reading reads the whole run, and takes at most about a twentieth of a
    core. Raises UsageError for a calibrated alarm if the run is not like the calibrated runs; a run that goes on, from
    the first such row on.
    """
    of_snapshots(partial(refuse_unlike, alarm=alarm), run)
    seen = -1
    while True:
        begun = time.monotonic()
        going, tables, last = of_snapshots(partial(_look, after=seen), run)
        facts = _by_step(run.ledger)
        going = going and follow
        alarm.open(tables)
        for step, metrics, tables in last[: len(last) - 1 if going else None]:  # the last row of a live run may grow
            seen = step
            alarm.read_ledger(facts.get(step, ()))
            alerts = alarm.observe(step, metrics, tables)
            _refuse_outside(run, alarm, alarm.outside)
            yield from alerts
        if not going:
            return
        time.sleep(max(pause, REST * (time.monotonic() - begun)))


def _by_step(facts: Iterable[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    found: dict[int, list[Mapping[str, Any]]] = {}
    for fact in facts:
        found.setdefault(fact.get("step", -1), []).append(fact)
    return found


def refuse_unlike(run: Run, alarm: Alarm) -> None:
    """Raise UsageError if the run, as far as it is recorded, is not like the runs that calibrated the alarm."""
    if (known := alarm.calibration) is None:
        return
    _refuse_outside(run, alarm, known.unlike_tables([run.table(name) for name in run.tables]))
    steps = {name: {*run.steps(name).tolist()} for name in run.tables}
    going = run.status.state == "running"
    for number, step in enumerate(run.steps(METRICS).tolist()[: -1 if going else None], 1):  # the last row may grow
        held = [name for name, own in steps.items() if step in own]
        _refuse_outside(run, alarm, known.unlike_row(number, step, held))


def _refuse_outside(run: Run, alarm: Alarm, reason: str) -> None:
    if reason:
        raise UsageError(
            f"{alarm.name} was not calibrated for {run.name} ({reason}): calibrate with healthy runs like it, or take "
            "the rules that come with the package."
        )


def _look(run: Run, after: int) -> tuple[bool, list[Table], list[Stored]]:
    """Return True if the run goes on, its tables, and its rows beyond ``after``."""
    return run.status.state == "running", [run.table(name) for name in run.tables], [*_rows(run, after)]


def recorded(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the alarms in run.json, which were raised while the run was trained."""
    found = manifest.get("alarms")
    return [own for own in found if isinstance(own, dict)] if isinstance(found, list) else []
