"""The course of a watcher: which row is next, when hooks are there, what it cost; updates that are replayed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...errors import UsageError
from .._engine.row import Metrics, RowMetrics, Template
from .._engine.watched import Watched
from ..instruments.curvature_rows import CurvatureRows
from ..instruments.instrument import Instruments
from ..instruments.reference_rows import ReferenceRows
from ..instruments.training_pass import TrainingRows
from .delivery import Delivery


@dataclass
class Cost:
    """Wall seconds that watching took so far: in hooks, in ``step``, and apart in reference passes and at curvature."""

    hooks: float = 0.0
    step: float = 0.0
    reference: float = 0.0
    curvature: float = 0.0


class Course:
    """What a watcher has besides its arguments and its rows' content: their count, its hooks' presence, its cost."""

    _watched: Watched
    _instruments: Instruments
    _training: TrainingRows
    _reference: ReferenceRows | None
    _curvature: CurvatureRows
    _delivery: Delivery

    def __init__(self) -> None:
        self.t = 0
        self._template: Template | None = None  # while an update is recorded for replays
        self._step_seconds = 0.0
        self._state = "open"
        self._process = os.getpid()

    def _is_fork(self) -> bool:
        """Return True in a forked child of the process that watches: the record is the parent's to end."""
        return os.getpid() != self._process

    def due(self, row: int) -> bool:
        """Whether the training pass of this row is probed, by what is recorded in it."""
        return self._watched.due(row)

    def due_reference(self, row: int) -> bool:
        """Whether the reference pass is recorded at this row."""
        return self._reference is not None and self._reference.due(row)

    @property
    def cost(self) -> Cost:
        apart = (self._reference.seconds if self._reference else 0.0, self._curvature.seconds)
        return Cost(self._training.passes.seconds, self._step_seconds, *apart)

    @contextmanager
    def recording(self) -> Iterator[Template]:
        """Around the device work of an update - forward, backward, ``step``, optimizer, :meth:`Template.pack` - while
        it is recorded instead of done: ``step`` computes a row like the coming one and neither sends nor ends any."""
        self._check_open()
        try:
            with self._delivery.set_aside():
                self._template = template = Template(self.t, self._watched.parameters.device)
                self._arm()
                yield template
        finally:
            self._template = None
            self._arm()

    def end_pass(self, more: bool) -> None:
        """Adds up what a micro-batch has left, where it is recorded apart from the next ones (``more``) and from
        ``step``, which otherwise do."""
        self._training.end_pass(more)

    def replay(self, template: Template, run: Callable[[], None]) -> Metrics:
        """Row t by ``run``, which replays what was recorded with ``template``, in place of ``step`` and all around it.

        The reference pass comes first, since the optimizer's step is in the replay; the row before is read last, while
        the device is busy with this one. Metrics that the host knows are added by :meth:`note`.
        """
        self._check_open()
        with self._timed():
            row = self._delivery.replay(self.t, template, run)
            self.t += 1
            self._arm()
        return RowMetrics(row)

    def _arm(self) -> None:
        """Prepares the coming row."""
        self._instruments.call("before_forward", self.t)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began, apart = time.perf_counter(), self.cost.reference + self.cost.curvature
        yield
        self._step_seconds += time.perf_counter() - began - (self.cost.reference + self.cost.curvature - apart)

    def _check_open(self) -> None:
        if self._state != "open":
            raise UsageError(f"this watcher is {self._state}: make a new one to record more.")
