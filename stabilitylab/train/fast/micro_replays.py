# pyright: reportPrivateImportUsage=false
"""Updates of several micro-batches, whose halves are recorded separately. The number of recordings grows with the
shapes, not with their combinations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...data import Batch
from ...probes import DeviceRecorder, Template, Watcher, attempt
from .graph_replays import MOST, Metrics, Replays, Update, size_of

Key = tuple[bool, object, bool]  # probed, shapes, whether it is the last of its update


@dataclass
class RecordedBatch:
    """The recorded forward and backward pass of one micro-batch, and the batch that it reads."""

    batch: Batch
    replay: Callable[[], None]
    size: int


@dataclass
class Change:
    """The recorded rest of an update: its row, clipping, the optimizer's step."""

    template: Template
    replay: Callable[[], None]


class ReplaysApart(Replays):
    """An update by replays of its halves, which share the memory of one recorder (:class:`~.graph_replays.Replays`).

    Gradients and sums of losses pass from one recording to the next, so they have memory of their own and are zeroed at
    the start of an update. A parameter without a gradient in the first update never has one. From the 17th shape on
    updates run directly.
    """

    def __init__(
        self, update: Update, device: torch.device, recorder: DeviceRecorder, watcher: Watcher, required: bool = False
    ) -> None:
        super().__init__(update, device, recorder, watcher, required)
        self.pieces: dict[Key, RecordedBatch] = {}
        self.changes: dict[bool, Change] = {}
        self._owners: list[Tensor] = []  # parameters that have a gradient
        self._gradients: list[Tensor] = []
        self._tokens, self._loss, self._nll = (torch.ones((), device=device) for _ in range(3))

    def __call__(self, batches: Sequence[Batch], tokens: float) -> Metrics:
        probed = self._watcher.due(self._watcher.t)
        keys: list[Key] = [(probed, batch.shapes, number == len(batches)) for number, batch in enumerate(batches, 1)]
        if self._failed:
            return self._directly(batches, tokens)
        compiles = self._compiles(batches)
        if not self._ran or (probed and True not in self._ran):
            self._ran.add(probed)
            self._forget()
            return self._recorder.warm_up(lambda: self._first(batches, tokens))
        if compiles or not self._prepare(probed, dict(zip(keys, batches, strict=True))):
            return self._recorder.warm_up(lambda: self._directly(batches, tokens))

        def run() -> None:
            torch._foreach_zero_(self._gradients)
            self._loss.zero_()
            self._nll.zero_()
            self._tokens.fill_(tokens)
            for key, batch in zip(keys, batches, strict=True):
                self.pieces[key].batch.copy_(batch)
                self.pieces[key].replay()
            self.changes[probed].replay()

        return self._watcher.replay(self.changes[probed].template, run)

    def _first(self, batches: Sequence[Batch], tokens: float) -> Metrics:
        """Run an update directly, and list the parameters that have gradients."""
        try:
            sums = self._update.forward_backward(batches, torch.full((), tokens, device=self._device))
            self._owners = self._owners or [p for p in self._update.model.parameters() if p.grad is not None]
            return self._update.change(*sums)
        finally:
            self._update.forget()

    def _prepare(self, probed: bool, wanted: dict[Key, Batch]) -> bool:
        """Record the missing halves: micro-batches by size, largest first, then the rest of the update, which reads
        their sums. False if the update must run directly."""
        missing = {key: batch for key, batch in wanted.items() if key not in self.pieces}
        if not missing:
            return True
        shapes = {key[1] for key in (*self.pieces, *missing)}
        if len(shapes) > MOST:
            return False
        largest = max(size_of([batch]) for batch in missing.values())
        if self.pieces and largest > max(piece.size for piece in self.pieces.values()):
            self._forget()
            missing = wanted
        if not self._gradients:
            self._gradients = [torch.zeros_like(p) for p in self._owners]
        with self._watcher.recording() as template:
            try:
                for owner, gradient in zip(self._owners, self._gradients, strict=True):
                    owner.grad = gradient
                for key, batch in sorted(missing.items(), key=lambda item: -size_of([item[1]])):
                    if isinstance(why := self._record_piece(key, batch), str):
                        break
                else:
                    why = None if probed in self.changes else self._record_change(probed, template)
            finally:
                self._update.forget()
        if why is not None:
            self._forget()
            self._missed(frozenset(missing), why)
        return why is None

    def _record_piece(self, key: Key, batch: Batch) -> str | None:
        own, last = batch.clone(), key[2]

        def work() -> None:
            loss, nll = self._update.micro_batch(own, self._tokens, last)
            self._loss += loss
            self._nll += nll
            self._watcher.end_pass(more=not last)
            if any(p.grad is not None for p in self._update.model.parameters() if id(p) not in owners):
                raise RuntimeError("a parameter has a gradient that had none in the first update")

        owners = set(map(id, self._owners))
        found = attempt(self._recorder, work)
        if isinstance(found, str):
            return found
        self.pieces[key] = RecordedBatch(own, found[1], size_of([batch]))
        return None

    def _record_change(self, probed: bool, template: Template) -> str | None:
        def work() -> None:
            self._update.change(self._loss / self._tokens, self._nll / self._tokens)
            template.pack()

        found = attempt(self._recorder, work)
        if isinstance(found, str):
            return found
        self.changes[probed] = Change(template, found[1])
        return None

    def _forget(self) -> None:
        self.pieces.clear()
        self.changes.clear()
        super()._forget()
