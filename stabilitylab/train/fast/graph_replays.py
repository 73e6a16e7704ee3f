"""Updates on the device: run directly, or recorded once per shape and replayed as CUDA graphs."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...config import Config
from ...data import Batch, Dataset
from ...errors import ResourceError, UsageError
from ...probes import CudaGraphs, DeviceRecorder, Template, Watcher, attempt
from ..ranks import Team

log = logging.getLogger(__name__)

Metrics = Mapping[str, float | None]
Work = Callable[[Sequence[Batch], Tensor], Metrics]
# The largest number of recorded updates: two for each combination of the shapes of micro-batches (:func:`kinds`). If
# halves of updates are recorded separately (:class:`~.micro_replays.ReplaysApart`): the largest number of shapes.
MOST = 16


class Directly:
    """An update that runs its code."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self._work, self._device = work, device

    def __call__(self, batches: Sequence[Batch], tokens: float) -> Metrics:
        # a tensor, as in a recorded update: a GPU divides by a tensor and by a number of the host differently
        return self._work(batches, torch.full((), tokens, device=self._device))


@dataclass
class Recorded:
    """A recorded update: its input batches, its number of tokens, its output and its replay."""

    batches: list[Batch]
    tokens: Tensor
    template: Template
    replay: Callable[[], None]

    @property
    def size(self) -> int:
        return size_of(self.batches)


class Update(Protocol):
    """The code to be recorded: a whole update (``work``), or its halves, the first for each micro-batch."""

    @property
    def model(self) -> torch.nn.Module: ...

    @property
    def compiled(self) -> bool: ...

    def work(self, batches: Sequence[Batch], tokens: Tensor) -> Metrics: ...

    def forward_backward(self, batches: Sequence[Batch], tokens: Tensor) -> tuple[Tensor, Tensor]: ...

    def micro_batch(self, batch: Batch, tokens: Tensor, last: bool) -> tuple[Tensor, Tensor]: ...

    def change(self, loss: Tensor, nll: Tensor) -> Metrics: ...

    def forget(self) -> None: ...


class Replays:
    """An update by a replay of the same code. Each combination of shapes is recorded once, for probed and plain rows
    separately.

    The first update and the first probed one run directly, which creates the optimizer's state and fills caches. Every
    other kind is recorded when it first comes. A direct run beside a recording would hold the working memory twice,
    since graphs do not share their memory. If a recording fails, the update runs directly once and is recorded the next
    time. If the second recording fails too, all updates run directly. From the 17th kind on, new kinds run directly. An
    update that is larger than all recorded ones drops their recordings and is recorded first: smaller updates fit into
    its working memory. Compiled layers are compiled in the first update of each shape. That update runs directly too,
    since a compiler cannot run within a recording.
    """

    def __init__(
        self, update: Update, device: torch.device, recorder: DeviceRecorder, watcher: Watcher, required: bool = False
    ) -> None:
        self._update, self._device, self._recorder, self._watcher = update, device, recorder.another(), watcher
        self._required = required
        self._directly = Directly(update.work, device)
        self._ran: set[bool] = set()  # True: a probed update ran directly; False: a plain one
        self._tried: set[object] = set()
        self._compiled: set[object] = set()  # shapes
        self.recorded: dict[object, Recorded] = {}
        self._failed = False

    def __call__(self, batches: Sequence[Batch], tokens: float) -> Metrics:
        probed = self._watcher.due(self._watcher.t)
        key = (probed, *(batch.shapes for batch in batches))
        if self._failed:
            return self._directly(batches, tokens)
        compiles = self._compiles(batches)
        # a probed update sets up everything that a plain one does
        if not self._ran or (probed and True not in self._ran):
            self._ran.add(probed)
            self._forget()  # recordings of a run resumed at a plain row: they are made anew in this one's memory
            return self._recorder.warm_up(lambda: self._directly(batches, tokens))
        if compiles or (key not in self.recorded and not self._record(key, batches)):
            return self._recorder.warm_up(lambda: self._directly(batches, tokens))
        chosen = self.recorded[key]
        for own, new in zip(chosen.batches, batches, strict=True):
            own.copy_(new)
        chosen.tokens.fill_(tokens)
        return self._watcher.replay(chosen.template, chosen.replay)

    def _compiles(self, batches: Sequence[Batch]) -> bool:
        """True if this update compiles layers, as the first update of a shape does."""
        shapes = {batch.shapes for batch in batches} if self._update.compiled else set()
        new = not shapes <= self._compiled
        self._compiled |= shapes
        return new

    def _record(self, key: object, batches: Sequence[Batch]) -> bool:
        if len(self.recorded) == MOST:
            return False
        if self.recorded and size_of(batches) > max(own.size for own in self.recorded.values()):
            self._forget()
        own, tokens = [batch.clone() for batch in batches], torch.ones((), device=self._device)

        def work(template: Template) -> None:
            self._update.work(own, tokens)
            template.pack()

        with self._watcher.recording() as template:
            found = attempt(self._recorder, lambda: work(template))
        if isinstance(found, str):
            self._missed(key, found)
            return False
        _, replay = found
        self.recorded[key] = Recorded(own, tokens, template, replay)
        return True

    def _missed(self, key: object, why: str) -> None:
        """Handle a recording that failed. The first time, this kind is recorded again when it comes next; the second
        time, all updates run directly, or ResourceError is raised if replays are required."""
        if key not in self._tried:  # the cause may be a set-up that only the first call does
            self._tried.add(key)
            return
        if self._required:
            raise ResourceError(
                f"this update cannot be recorded as a CUDA graph ({why}): leave --cuda-graphs at auto, or off."
            )
        log.warning("CUDA graphs are off: this update cannot be recorded (%s).", why)
        self._failed = True
        self._forget()  # updates will run in the memory of the recordings from now on

    def _forget(self) -> None:
        self.recorded.clear()
        self._recorder = self._recorder.another()
        gc.collect()
        torch.cuda.empty_cache()


def size_of(batches: Sequence[Batch]) -> int:
    """Return the number of tokens of both sides, padding included."""
    return sum(mask.numel() for batch in batches for mask in batch.masks.values())


def shapes_of(dataset: Dataset) -> int:
    """Return the number of shapes of micro-batches."""
    return len({(bucket.rows, *bucket.lengths) for bucket in dataset.buckets})


def kinds(shapes: int, accumulate: int) -> int:
    """Return the number of updates to record: 2 * shapes ** accumulate (probed and plain, each combination of
    shapes)."""
    return 2 * shapes**accumulate


def are_apart(dataset: Dataset, accumulate: int) -> bool:
    """True if micro-batches and the rest of an update are recorded separately, since there are too many whole
    updates."""
    return accumulate > 1 and kinds(shapes_of(dataset), accumulate) > MOST


def some_run_directly(dataset: Dataset, accumulate: int) -> bool:
    """True if there are more kinds of updates than are recorded."""
    shapes = shapes_of(dataset)
    return shapes > MOST if are_apart(dataset, accumulate) else kinds(shapes, accumulate) > MOST


def recorder_for(config: Config, device: torch.device, team: Team) -> DeviceRecorder | None:
    """Return the recorder of updates on this device; None if updates run directly.

    ``train.cuda_graphs``: "auto" records on a GPU if no setting excludes it; otherwise the reason is logged in one
    sentence. "on" raises ResourceError without a GPU, and UsageError if a setting excludes recording.
    """
    asked = config.train.cuda_graphs
    if asked == "off" or (device.type != "cuda" and asked == "auto"):
        return None
    if device.type != "cuda":
        raise ResourceError(f"--cuda-graphs on needs a CUDA device, and this run is on {device}: leave it at auto.")
    if not (obstacle := _obstacle(config, team)):
        return CudaGraphs(device)
    if asked == "on":
        raise UsageError(f"--cuda-graphs on: {obstacle}, which is not recorded: leave it at auto, or off.")
    log.warning("CUDA graphs are off: %s, which is not recorded.", obstacle)
    return None


def _obstacle(config: Config, team: Team) -> str:
    model = config.model
    if team.kind != "none":
        return f"--parallel {team.kind} exchanges gradients while it computes them"
    if config.probes.record:
        return "--record reads each update on the host"
    if config.train.activation_checkpointing and (model.dropout or model.attention_dropout or model.activation_dropout):
        return "--activation-checkpointing with dropout puts the random state back by the host"
    return ""
