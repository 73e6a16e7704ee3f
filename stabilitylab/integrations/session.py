"""One training run under watch: the common part of the callbacks of all trainers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..alarm import Alert
from ..api import RunWatcher, watch
from ..errors import UsageError
from ..explain import Recorder
from ..probes import Mask, find_sites, split_sites
from ..probes.places.copied import Calling
from .masks import BatchMasks

Batch = Mapping[str, Any]
Masking = Literal["auto"] | Mask | Callable[[], Mask | None] | None
TOTAL = "grad_norm_total"  # the metric that progress bars show
OWN = ("optimizer", "scaler", "parallel", "resume")  # options that only the trainer knows


class Session:
    """A watcher from the first update to the last. It ends once, at the first of several calls that end it.

    ``mask="auto"``: from the batches (:class:`.BatchMasks`). ``reference``: as for :func:`stabilitylab.watch`, or a
    batch, on which ``model(**batch)`` is run. ``step``: the number of updates that ``model`` has had. A recorder gets
    the arguments of each training forward as its batch; with ``shows_batches``, it gets the argument of :meth:`batch`.

    An update has one row. If the optimizer's step computes the gradients itself, by a closure, the row is of the first
    evaluation, at theta_t; what the same step computes after that (as L-BFGS does) is left out.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        out: str | Path,
        mask: Masking = "auto",
        reference: Callable[[], Any] | Batch | None = None,
        step: int = 0,
        shows_batches: bool = False,
        resume: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.masks = None
        if isinstance(mask, str):
            if mask != "auto":
                raise UsageError(f"mask = {mask!r} is unknown: use 'auto', None, a tensor or a function.")
            sites = find_sites(model, options.get("output_site"), split_sites(options.get("sites"))[0])
            mask = self.masks = BatchMasks([stack.name for stack in sites.stacks])
        self._optimizer = optimizer
        self._loss: torch.Tensor | None = None
        self._row: Mapping[str, float | None] = {}  # the metrics of the last update, read when they are looked at
        self._unfollow = self.masks.follow(model) if self.masks else lambda: None
        self._steps = False  # True while the optimizer steps
        self._after_row = ExitStack()  # closed at the end of the optimizer's step in which the row was made
        self._left_out = False  # True from that row to the end of the step
        # before watch() puts its own hooks there: what those run is not left out
        self._on_step = (
            optimizer.register_step_pre_hook(self._step_begins),
            optimizer.register_step_post_hook(self._step_ended),
        )
        self._error = getattr(sys, "last_value", None)
        self._process = os.getpid()
        self.open = True
        try:
            self.watcher: RunWatcher = watch(
                model,
                out=out,
                optimizer=optimizer,
                mask=mask,
                reference=on_batch(model, reference) if isinstance(reference, Mapping) else reference,
                resume=resume,
                **options,
            )
        except BaseException:
            self._unhook()
            raise
        follows = isinstance(options.get("record"), Recorder) and not shows_batches
        self._unrecord = self._follow_batches(model) if follows else lambda: None
        if resume is None and step:
            self.watcher.begin_at(step)

    def batch(self, batch: Any) -> None:
        """Show the batch of the next micro-batch to the recorder."""
        self.watcher.batch(batch)

    def loss(self, loss: torch.Tensor) -> None:
        """Add the contribution of one micro-batch to the loss of the row."""
        if self._left_out:
            return
        loss = loss.detach()
        self._loss = loss if self._loss is None else self._loss + loss

    def drop(self) -> None:
        """Forget the loss of the micro-batches so far: their gradients were dropped without an update."""
        self._loss = None

    def _follow_batches(self, model: nn.Module) -> Callable[[], None]:
        """Give the recorder the arguments of each training forward as its batch, since the loop is the trainer's;
        return the function that ends this. Arguments without a name are the list ``args``."""

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module.training and torch.is_grad_enabled() and self.open and not self._left_out:
                self.watcher.batch({**kwargs, **({"args": list(args)} if args else {})})

        return model.register_forward_pre_hook(Calling(look), with_kwargs=True).remove

    def row(self) -> None:
        """End a row: gradients are those of the whole batch, unscaled and not clipped yet."""
        if self._left_out:
            return
        loss, self._loss = self._loss, None
        self._row = self.watcher.step(loss=loss, lr=self._optimizer.param_groups[0]["lr"])
        if self._steps:
            self._left_out = True
            self._after_row.enter_context(self.watcher.off())

    def _step_begins(self, *_: object) -> None:
        self._step_ended()  # one that an error ended
        self._steps = True

    def _step_ended(self, *_: object) -> None:
        self._steps = self._left_out = False
        self._after_row.close()

    def _unhook(self) -> None:
        self._step_ended()
        for handle in self._on_step:
            handle.remove()
        self._unfollow()

    def gradient_norm(self, wait: bool) -> float | None:
        """Return the norm of the whole gradient, before clipping, for a progress bar; None if the row has none.

        With ``wait``, the norm is that of the last update; call this between the optimizer's step and the next forward
        pass; it waits for the device. Without ``wait``, the norm is that of the update before, which the host knows
        already. Ranks never communicate here.
        """
        if not wait:
            return self.watcher.last[1].get(TOTAL) if self.watcher.last else None
        try:
            return self._row.get(TOTAL)
        except UsageError:  # the optimizer has not stepped, as under a scaler that skipped
            return None

    @property
    def alert(self) -> Alert | None:
        """The last alert of the alarm so far."""
        alarm = self.watcher.alarm
        return alarm.alerts[-1] if alarm is not None and alarm.alerts else None

    def finish(self) -> None:
        """End the run as finished."""
        self._end(None)

    def fail(self, error: BaseException) -> None:
        """End the run with ``error``: rows are kept, the status says why."""
        self._end(error)

    def abandon(self) -> None:
        """End the run as failed, if the trainer or the process ends without a call of :meth:`finish`."""
        if os.getpid() != self._process:
            return  # a fork that ends: the run is its parent's
        error = getattr(sys, "last_value", None)  # the error that ended the program, or a notebook's cell
        if error is None or error is self._error:
            error = RuntimeError("training ended without a word, by an error perhaps")
        self.fail(error)

    def _end(self, error: BaseException | None) -> None:
        if self.open:
            self.open = False
            try:
                self.watcher.__exit__(type(error) if error else None, error, None)
            finally:
                self._unrecord()
                self._unhook()  # only now: the last reference pass has a mask too


def refuse(options: Mapping[str, Any]) -> None:
    """Raise UsageError for options of :func:`stabilitylab.watch` that only the trainer can know."""
    if own := [name for name in OWN if name in options]:
        raise UsageError(f"{own[0]!r} is the trainer's to say here: leave it out.")


def on_batch(model: nn.Module, batch: Batch) -> Callable[[], Any]:
    """Return a reference pass: ``model(**batch)``, with the batch moved to the model's device."""

    def run() -> None:
        device = next(model.parameters()).device
        model(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()})

    return run
