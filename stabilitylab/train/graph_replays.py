"""Updates on the device: done directly, or recorded once per shape and replayed as CUDA graphs."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..config import Config
from ..data import Batch, Dataset
from ..errors import ResourceError, UsageError
from ..probes import CudaGraphs, Recorder, Template, Watcher, attempt
from .ranks import Team

log = logging.getLogger(__name__)

Metrics = Mapping[str, float | None]
Work = Callable[[Sequence[Batch], Tensor], Metrics]
# Recorded updates: two (:func:`kinds`) for each combination of shapes that micro-batches come in; or shapes, where
# halves of updates are recorded apart (:class:`~.micro_replays.ReplaysApart`).
MOST = 16


class Directly:
    """An update by running its code."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self._work, self._device = work, device

    def __call__(self, batches: Sequence[Batch], tokens: float) -> Metrics:
        # a tensor here too: a GPU divides by one otherwise than by a number of the host
        return self._work(batches, torch.full((), tokens, device=self._device))


@dataclass
class Recorded:
    """An update that is replayed: where its batches and its number of tokens lie, what it yields, and how it runs."""

    batches: list[Batch]
    tokens: Tensor
    template: Template
    replay: Callable[[], None]

    @property
    def size(self) -> int:
        return size_of(self.batches)


class Update(Protocol):
    """What is recorded: a whole update (``work``), or its halves, the first for each micro-batch."""

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
    """An update by a replay of the same code, recorded once for each combination of shapes, probed and plain apart.

    The first update, and the first probed one, run as they are, which makes the optimizer's state and fills caches.
    Every other kind is recorded when it first comes: what an update works in would be held twice if it also ran beside
    what is recorded, as memory of graphs is theirs alone. Where that fails it runs as it is once, and is recorded the
    next time; where that fails too, or from the 17th combination on, updates run directly. The largest is recorded
    first, and others anew after it, since they find room in what it works in, and it does not in theirs. Layers that
    are compiled are so in the first update of each shape, which runs directly too: no recording can hold a compiler.
    """

    def __init__(
        self, update: Update, device: torch.device, recorder: Recorder, watcher: Watcher, required: bool = False
    ) -> None:
        self._update, self._device, self._recorder, self._watcher = update, device, recorder.another(), watcher
        self._required = required
        self._directly = Directly(update.work, device)
        self._ran: set[bool] = set()  # probed, plain: what ran directly before anything else
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
        # a plain update sets nothing up that a probed one does not
        if not self._ran or (probed and True not in self._ran):
            self._ran.add(probed)
            self._forget()  # of a run that was resumed at a plain row: recorded anew, they share this one's memory
            return self._recorder.warm_up(lambda: self._directly(batches, tokens))
        if compiles or (key not in self.recorded and not self._record(key, batches)):
            return self._recorder.warm_up(lambda: self._directly(batches, tokens))
        chosen = self.recorded[key]
        for own, new in zip(chosen.batches, batches, strict=True):
            own.copy_(new)
        chosen.tokens.fill_(tokens)
        return self._watcher.replay(chosen.template, chosen.replay)

    def _compiles(self, batches: Sequence[Batch]) -> bool:
        """Whether an update compiles layers, as the first one of a shape does."""
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
        """After a recording that failed: it is tried once more, the next time that this kind comes."""
        if key not in self._tried:  # what its first call sets up may be what cannot be recorded
            self._tried.add(key)
            return
        if self._required:
            raise ResourceError(
                f"this update cannot be recorded as a CUDA graph ({why}): leave --cuda-graphs at auto, or off."
            )
        log.warning("CUDA graphs are off: this update cannot be recorded (%s).", why)
        self._failed = True
        self._forget()  # their memory is what updates will run in from now on

    def _forget(self) -> None:
        self.recorded.clear()
        self._recorder = self._recorder.another()
        gc.collect()
        torch.cuda.empty_cache()


def size_of(batches: Sequence[Batch]) -> int:
    """Tokens of both sides, padding included."""
    return sum(mask.numel() for batch in batches for mask in batch.masks.values())


def shapes_of(dataset: Dataset) -> int:
    """In how many shapes micro-batches come."""
    return len({(bucket.rows, *bucket.lengths) for bucket in dataset.buckets})


def kinds(shapes: int, accumulate: int) -> int:
    """How many updates there are to be recorded, of micro-batches that come in so many shapes."""
    return 2 * shapes**accumulate


def are_apart(dataset: Dataset, accumulate: int) -> bool:
    """Whether micro-batches and what follows them are recorded apart: there would be too many whole updates."""
    return accumulate > 1 and kinds(shapes_of(dataset), accumulate) > MOST


def some_run_directly(dataset: Dataset, accumulate: int) -> bool:
    """Whether there are more kinds than are recorded."""
    shapes = shapes_of(dataset)
    return shapes > MOST if are_apart(dataset, accumulate) else kinds(shapes, accumulate) > MOST


# What "auto" does on a GPU: False until one has run the recorder, whose capture of whole updates was tried with a
# stand-in on a CPU alone, and where it went wrong it would do so in everybody's default run. True once
# results/h200/ has the comparison of a recorded run with a direct one.
RECORDED_BY_DEFAULT = False


def recorder_for(config: Config, device: torch.device, team: Team) -> Recorder | None:
    """What records updates on this device; None where they run directly.

    ``train.cuda_graphs``: "auto" records on a GPU once one has run this (:data:`RECORDED_BY_DEFAULT`) and where it can,
    and says in one sentence why it does not; "on" raises ResourceError without a GPU and UsageError where a setting is
    in the way.
    """
    asked = config.train.cuda_graphs
    if asked == "off" or (device.type != "cuda" and asked == "auto"):
        return None
    if device.type != "cuda":
        raise ResourceError(f"--cuda-graphs on needs a CUDA device, and this run is on {device}: leave it at auto.")
    if asked == "auto" and not RECORDED_BY_DEFAULT:
        log.warning("CUDA graphs are off: no GPU has run them yet; --cuda-graphs on records updates and replays them.")
        return None
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
    if config.train.activation_checkpointing and (model.dropout or model.attention_dropout or model.activation_dropout):
        return "--activation-checkpointing with dropout puts the random state back by the host"
    return ""
