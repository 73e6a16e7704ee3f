"""A sink between a watcher and its run that shows each row to the alarm."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..schema import Cells, Table
from .alarm import Alarm, Alert

log = logging.getLogger("stabilitylab.alarm")

KEPT = 1000  # the most alerts of a run that run.json holds: the first ones


class AlarmSink:
    """Passes everything to ``sink``, then shows it to ``alarm``; each alert goes to run.json, and to ``tell``.

    If a row can be read when ``step`` returns (on a CPU), rules that need no number of the update speak then, before
    the optimizer's step. Other rules speak when the row is whole. An error of the alarm ends the alarm, never the
    training.
    """

    def __init__(
        self, sink: Any, alarm: Alarm, record: Callable[..., object], tell: Callable[[Alert], object] | None = None
    ) -> None:
        self.alarm = alarm
        self.incident = sink.incident
        self.path, self.run_id, self.record = sink.path, sink.run_id, record
        self._sink, self._tell = sink, tell
        self._told: list[dict[str, Any]] = []
        self._working = True

    def open(self, tables: Sequence[Table]) -> None:
        self._sink.open(tables)
        self._safely(lambda: self.alarm.open(tables))

    def begin(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None:
        self._sink.begin(step, metrics, tables)
        self._safely(lambda: self._hear(self.alarm.begin(step, metrics, tables)))

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None:
        self._sink.append(step, metrics, tables)
        self._safely(lambda: self._hear(self.alarm.observe(step, metrics, tables)))

    def ledger(self, facts: Sequence[Mapping[str, Any]]) -> None:
        self._sink.ledger(facts)
        self._safely(lambda: self.alarm.read_ledger(facts))

    def close(self) -> None:
        self._sink.close()

    def state_dict(self) -> dict[str, Any]:
        return {"alarm": self.alarm.state_dict(), "told": self._told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._told = list(state["told"])
        self.record(alarms=self._told)  # run.json may hold alerts about rows after the checkpoint
        self._safely(lambda: self.alarm.load_state_dict(state["alarm"]))

    def _hear(self, alerts: Sequence[Alert]) -> None:
        if alerts:
            self._told = [*self._told, *(alert.as_dict() for alert in alerts)][:KEPT]
            self.record(alarms=self._told)
            for alert in alerts:
                if self._tell is not None:
                    self._tell(alert)

    def _safely(self, action: Callable[[], object]) -> None:
        if self._working:
            try:
                action()
            except Exception:
                self._working = False
                log.exception("the alarm failed and says nothing more; training and the run directory go on.")
