"""Dashboards: each row's aggregates to TensorBoard, W&B, MLflow, ..., through ``accelerate.tracking``.

>>> with sl.watch(model, out="runs/mine", tracker="tensorboard") as w:  # doctest: +SKIP
...     ...  # then: tensorboard --logdir runs/mine/trackers
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..alarm import Alert
from ..errors import ResourceError, UsageError
from ..schema import Cells, Table
from .layer_map import PICTURED, LayerMap

try:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
    from accelerate.utils import LoggerType
except ImportError as error:
    raise ResourceError("trackers need Accelerate: pip install 'stabilitylab[trackers]'.") from error

log = logging.getLogger(__name__)


def aggregates(
    metrics: Mapping[str, float | None], tables: Mapping[str, Cells], definitions: Mapping[str, Table]
) -> dict[str, float]:
    """Return the numbers of one row for a tracker. They are few for a model of any depth, since no layer has its own.

    A metric is ``metrics/<name>``, as recorded. The main column of each table gives ``<table>.<column>/<stack>/min``,
    ``median`` and ``max`` over the places of the stack whose number is finite. If there are places with NaN or inf,
    ``not_finite`` is their number. The tags are those of ``stabilitylab export --to tensorboard``.
    """
    values = {f"metrics/{name}": float(value) for name, value in metrics.items() if value is not None}
    for name, cells in tables.items():
        table = definitions[name]
        stacks = np.array([row.stack for row in table.rows])
        place = table.columns.index(table.main)
        for stack in dict.fromkeys(stacks.tolist()):
            missing = False if cells.missing is None else cells.missing[:, place]
            measured = cells.values[(stacks == stack) & ~cells.absent & ~np.asarray(missing), place]
            usual = measured[np.isfinite(measured)]
            head = f"{name}.{table.main}" + (f"/{stack}" if stack else "")
            if usual.size < measured.size:
                values[f"{head}/not_finite"] = float(measured.size - usual.size)
            if usual.size:
                values[f"{head}/min"] = float(usual.min())
                values[f"{head}/median"] = float(np.median(usual))
                values[f"{head}/max"] = float(usual.max())
    return values


class TrackerSink:
    """A sink that sends aggregates to a tracker of Accelerate. It starts the tracker, if it is not started yet, and
    finishes it.

    After an error of the tracker nothing more is sent to it. One warning is logged, and training and the run directory
    go on.
    """

    def __init__(self, tracker: GeneralTracker, config: Mapping[str, Any] | None = None) -> None:
        self.tracker = tracker
        self._config = dict(config or {})
        self._definitions: dict[str, Table] = {}
        self._working = True
        self._map = LayerMap()

    @classmethod
    def of(cls, tracker: str | GeneralTracker, out: Path, config: Mapping[str, Any]) -> TrackerSink:
        """Return the sink for a tracker, given by name or as an object.

        By name: a tracker that writes to a folder writes to ``out/trackers``. Other trackers get the name of ``out``
        (W&B: as the name of the run, in the project "stabilitylab"). A tracker object is used unchanged. Raises
        UsageError for an unknown name, ResourceError if the tracker's package is missing.
        """
        if not isinstance(tracker, str):
            return cls(tracker, config)
        if tracker not in LOGGER_TYPE_TO_CLASS:
            raise UsageError(f"unknown tracker {tracker!r}; choose one of {', '.join(LOGGER_TYPE_TO_CLASS)}.")
        if LoggerType(tracker) not in get_available_trackers():
            raise ResourceError(f"the tracker {tracker!r} is not installed: pip install {tracker.replace('_', '-')}.")
        maker: Any = LOGGER_TYPE_TO_CLASS[tracker]
        if maker.requires_logging_directory:
            return cls(maker(tracker, logging_dir=str(out / "trackers")), config)
        if tracker == "wandb":
            return cls(maker("stabilitylab", name=out.name), config)
        return cls(maker(out.name), config)

    def open(self, tables: Sequence[Table]) -> None:
        started, self._definitions = bool(self._definitions), {table.name: table for table in tables}
        if not started:  # tables may be declared anew before the first row
            self._safely("starting", self._start)

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None:
        if self._working:
            values = aggregates(metrics, tables, self._definitions)
            self._safely(f"step {step}", lambda: self.tracker.log(values, step=step))
            draw: Any = getattr(self.tracker, "log_images", None)  # not every tracker takes images
            if draw is not None and self._map.take(tables, self._definitions) and self._map.has_layers:
                image, how = self._image()
                images = {f"{PICTURED}/layers": image}
                self._safely(f"the image of step {step}", lambda: draw(images, step=step, **how))

    def alert(self, alert: Alert) -> None:
        """Send an alarm: as an alert if the tracker has alerts (W&B), as a text if it takes texts (TensorBoard), else
        as the number 1 of ``alarm/<rule>``."""
        self._safely(f"the alarm of step {alert.step}", lambda: self._send(alert))

    def _send(self, alert: Alert) -> None:
        own: Any = getattr(self.tracker, "tracker", None)
        if hasattr(own, "alert"):
            own.alert(title=f"{alert.title} (step {alert.step})", text=alert.sentence)
        elif hasattr(own, "add_text"):
            own.add_text(f"alarm/{alert.rule}", alert.sentence, alert.step)
        else:
            self.tracker.log({f"alarm/{alert.rule}": 1.0}, step=alert.step)

    def close(self) -> None:
        warn, self._working = self._working, False
        try:
            self.tracker.finish()  # a tracker that failed may have something to close, too
        except Exception as error:
            if warn:
                self._warn("finishing", error)

    def _image(self) -> tuple[Any, dict[str, str]]:
        """Return the image in the tracker's form: TensorBoard takes one array (n, height, width, 3), the others a list
        of images."""
        image = self._map.image()
        if getattr(self.tracker, "name", "") == "tensorboard":
            return image, {"dataformats": "NHWC"}
        return list(image), {}

    def _start(self) -> None:
        if not hasattr(self.tracker, "tracker"):  # trackers of Accelerate start late, those of old versions at once
            self.tracker.start()
        if self._config:
            simple = (bool, int, float, str)
            self.tracker.store_init_configuration(
                {key: value if isinstance(value, simple) else str(value) for key, value in self._config.items()}
            )

    def _safely(self, when: str, action: Callable[[], object]) -> None:
        if self._working:
            try:
                action()
            except Exception as error:
                self._working = False
                self._warn(when, error)

    def _warn(self, when: str, error: Exception) -> None:
        name = getattr(self.tracker, "name", type(self.tracker).__name__)
        log.warning(
            "the tracker %s failed (%s: %s: %s) and gets nothing more; training and the run directory go on",
            name,
            when,
            type(error).__name__,
            error,
        )


class Tee:
    """A sink that passes tables and rows to a run and then to a second sink. Incidents, the ledger, facts for run.json,
    and the early part of a row go to the run alone; alerts go to the second sink alone."""

    def __init__(self, run: Any, second: TrackerSink) -> None:
        self._both = (run, second)
        self.incident, self.ledger, self.begin = run.incident, run.ledger, run.begin
        self.path, self.run_id, self.record = run.path, run.run_id, run.record
        self.alert = second.alert

    def open(self, tables: Sequence[Table]) -> None:
        for sink in self._both:
            sink.open(tables)

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None:
        for sink in self._both:
            sink.append(step, metrics, tables)

    def close(self) -> None:
        for sink in reversed(self._both):
            sink.close()
