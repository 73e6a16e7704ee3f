"""The course of a watcher: which row is next, when hooks are there, what it cost; updates that are replayed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...errors import UsageError
from .._engine.row import Metrics, RowMetrics, Template
from .assembly import Assembly
from .contents import Contents
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

    _parts: Assembly
    _contents: Contents
    _delivery: Delivery

    def __init__(self) -> None:
        self.t = 0
        self._template: Template | None = None  # while an update is recorded for replays
        self._step_seconds = 0.0
        self._state = "open"

    def due(self, row: int) -> bool:
        """Whether the training pass of this row is probed, by what is recorded in it."""
        return self._contents.due(row)

    def due_reference(self, row: int) -> bool:
        """Whether the reference pass is recorded at this row."""
        return self._parts.reference is not None and self._parts.reference.due(row)

    @property
    def cost(self) -> Cost:
        parts, reference = self._parts, self._parts.reference
        apart = (reference.seconds if reference else 0.0, parts.curvature.seconds)
        return Cost(parts.training.seconds, self._step_seconds, *apart)

    @contextmanager
    def recording(self) -> Iterator[Template]:
        """Around the device work of an update - forward, backward, ``step``, optimizer, :meth:`Template.pack` - while
        it is recorded instead of done: ``step`` computes a row like the coming one and neither sends nor ends any."""
        self._check_open()
        try:
            with self._delivery.set_aside():
                self._template = template = Template(self._parts.parameters.device)
                self._arm()
                yield template
        finally:
            self._template = None
            self._arm()

    def end_pass(self, more: bool) -> None:
        """Adds up what a micro-batch has left, where it is recorded apart from the next ones (``more``) and from
        ``step``, which otherwise do."""
        if self._parts.training.attached:
            self._parts.training.end(more)

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
        """Hooks for the coming row: there while it is probed, gone (and free of cost) while it is not."""
        training = self._parts.training
        training.start_row()
        if self.due(self.t):
            training.attach()
        else:
            training.detach()
        self._parts.curvature.arm(self.t)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began, apart = time.perf_counter(), self.cost.reference + self.cost.curvature
        yield
        self._step_seconds += time.perf_counter() - began - (self.cost.reference + self.cost.curvature - apart)

    def _check_open(self) -> None:
        if self._state != "open":
            raise UsageError(f"this watcher is {self._state}: make a new one to record more.")
