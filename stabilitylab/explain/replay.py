"""A replay: recorded updates done again by declaration from a snapshot, as they were or with one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import InputError, StabilityLabError, UsageError
from ..probes.parameters.processes import ALONE, Processes
from ..probes.places.naming import named, parameters_of
from ..probes.state import StateSnapshot
from .batches import restored
from .flight import Flight, RecordedUpdate
from .recorder import Loss, OutputDigests, Recorder
from .replicas import averaging, mean, processes_of
from .sketches import Sketcher, Sketches
from .states import State, captured, restore, set_numbers, set_settings, set_torch_random, settings_of

Settings = list[list[State]]


@dataclass(frozen=True)
class DeclaredLoop:
    """The objects that do an update, and the declared parts of it (:class:`~.recorder.Recorder`)."""

    model: nn.Module
    loss_fn: Loss
    optimizers: tuple[torch.optim.Optimizer, ...]
    scaler: Any = None
    scheduler: Any = None
    clip: float | Callable[[Sequence[nn.Parameter]], Any] | None = None
    accumulate: int | Literal["batches"] = 1
    processes: Processes = ALONE

    @classmethod
    def of(
        cls,
        flight: Flight,
        model: nn.Module,
        optimizer: Any,
        loss_fn: Loss,
        given: Recorder | None = None,
        *,
        scaler: Any = None,
        scheduler: Any = None,
        clip: Any = None,
    ) -> DeclaredLoop:
        """Return the loop of a flight. What a file cannot hold (functions, a scaler, a scheduler) is given by name, or
        comes from ``given``, the recorder's settings. Raises UsageError if something that was declared is missing."""
        declared = flight.declared
        scaler = scaler or (given.scaler if given else None)
        scheduler = scheduler or (given.scheduler if given else None)
        clip = clip or (given.clip if given else None) or declared["clip"]
        missing = {
            "scaler": declared["scaler"] and scaler is None,
            "scheduler": declared["scheduler"] and scheduler is None,
            "clip": declared["clip_function"] and not callable(clip),
        }
        if lacking := [name for name, is_missing in missing.items() if is_missing]:
            raise UsageError(f"the loop was recorded with {lacking[0]}=: give it with the model, under that name.")
        optimizers = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
        processes = processes_of(flight, model)
        return cls(model, loss_fn, optimizers, scaler, scheduler, clip, declared["accumulate"], processes)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def replica(self) -> nn.Module:
        """The model on this process alone, for passes that exchange nothing: what a DistributedDataParallel holds."""
        wrapper = averaging(self.model)
        return self.model if wrapper is None else wrapper.module

    def mean(self, value: float) -> float:
        """Return the mean over processes."""
        return mean(value, self.processes, self.device)

    def on_any(self, told: bool) -> bool:
        """Return True if it is true on some process."""
        return self.processes.any(told, self.device)

    def captured(self) -> State:
        """Return a copy, on the host, of everything that the next update depends on."""
        return captured(self.model, self.optimizers, self.scaler, self.scheduler)

    def restore(self, state: State) -> None:
        """Put back what :meth:`captured` returned, or a snapshot of a flight."""
        restore(state, self.model, self.optimizers, self.scaler, self.scheduler)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put everything back afterwards: a replay leaves the objects that it was given as they were."""
        before, held = self.captured(), StateSnapshot(self.model, copied=())
        gradients = [parameter.grad for parameter in self.model.parameters()]
        groups = [[*one.param_groups] for one in self.optimizers]
        try:
            yield
        finally:
            for one, own in zip(self.optimizers, groups, strict=True):
                one.param_groups[:] = own
            held.compare()  # puts back what was bound anew, and the model's own generators; the bits follow
            self.restore(before)
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad = gradient


@dataclass
class ReplayChange:
    """One thing that a replay does otherwise; every part is optional.

    ``start(loop)``: after the snapshot is put back. ``facts``: False for a flag or an attribute whose changes are not
    made. ``settings(step, recorded)``: the settings of the optimizers' groups. ``batch(step, number, batch)``: a kept
    batch. ``gradients(step, loop)``: after declared clipping, before the optimizers.
    ``begin(step, loop)``: before the first forward. ``around()``: a context around forward and backward.
    """

    start: Callable[[DeclaredLoop], None] = lambda loop: None
    facts: Callable[[Mapping[str, Any]], bool] = lambda fact: True
    settings: Callable[[int, Settings], Settings] = lambda step, recorded: recorded
    batch: Callable[[int, int, dict[str, Any]], dict[str, Any]] = lambda step, number, batch: batch
    gradients: Callable[[int, DeclaredLoop], None] = lambda step, loop: None
    begin: Callable[[int, DeclaredLoop], None] = lambda step, loop: None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass
class Replayed:
    """One update as it was replayed. ``full``: what the recorder sketched, of the replay. ``declared_settings``: those
    that a declared scheduler made; None without one."""

    step: int
    loss: float
    full: dict[str, Any] = field(default_factory=dict)
    declared_settings: Settings | None = None


class UpdateReplay:
    """Replays the updates of ``flight`` with ``loop``, from one snapshot on."""

    def __init__(self, flight: Flight, loop: DeclaredLoop, change: ReplayChange | None = None) -> None:
        self.flight, self.loop, self.change = flight, loop, change or ReplayChange()
        self.updates = 0
        self._sketcher = Sketcher()

    def begin(self, start: int) -> None:
        """Put the snapshot before update ``start`` back."""
        self.loop.restore(self.flight.snapshots[start])
        self.change.start(self.loop)
        self._start = start

    def run(self, start: int, stop: int, look: bool = False) -> Iterator[Replayed]:
        """Begin at ``start`` and yield each update before ``stop``, as far as batches are known."""
        self.begin(start)
        for update in self.flight.replayable(start):
            if update.step >= stop:
                return
            yield self.update(update, look)

    def losses(self, start: int, stop: int) -> list[float]:
        """Return the loss of each replayed update."""
        return [one.loss for one in self.run(start, stop)]

    def update(self, update: RecordedUpdate, look: bool = False) -> Replayed:
        """Do one update. ``look``: sketch what the recorder sketched in it."""
        loop, step = self.loop, update.step
        tensors = list(parameters_of(loop.model).values())
        full = update.full if look else None
        if step > self._start:
            self._facts(step)
        self.change.begin(step, loop)
        outputs = OutputDigests(loop.model, self._sketcher) if full is not None and "outputs" in full else None
        try:
            total = self._forward_backward(update)
        finally:
            if outputs is not None:
                outputs.detach()
        found = Replayed(step, total)
        if outputs is not None:
            found.full["outputs"] = outputs.read()
        self.updates += 1
        if loop.scaler is not None:
            for optimizer in loop.optimizers:
                loop.scaler.unscale_(optimizer)
        if full is not None:
            found.full["gradient"] = self._sketch([one.grad for one in tensors])
        self._clip()
        self.change.gradients(step, loop)
        if full is not None:
            found.full["handed"] = self._sketch([one.grad for one in tensors])
            found.full["before"] = self._sketch([one.detach() for one in tensors])
        if update.stepped or loop.scaler is not None:
            self._step(update, found)
        elif loop.scheduler is not None:
            loop.scheduler.step()
        if full is not None:
            found.full["after"] = self._sketch([one.detach() for one in tensors])
        for optimizer in loop.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return found

    def _forward_backward(self, update: RecordedUpdate) -> float:
        loop, total = self.loop, 0.0
        divisor = len(update.batches) if loop.accumulate == "batches" else loop.accumulate
        for place, number in enumerate(update.batches):
            batch = self.change.batch(update.step, number, self.flight.batches[number])
            set_torch_random(update.random[place])
            with self.change.around(), self._averaged(update, place):
                loss = loss_of(loop, restored(batch, loop.device)) / divisor
                (loss if loop.scaler is None else loop.scaler.scale(loss)).backward()
            total += float(loss.detach())
        return loop.mean(total)

    def _averaged(self, update: RecordedUpdate, place: int) -> AbstractContextManager[Any]:
        """Return the context in which processes average the gradients of a micro-batch as they did, or not."""
        wrapper = None if self.loop.processes.alone else averaging(self.loop.model)
        if wrapper is None or place >= len(update.synced) or update.synced[place]:
            return nullcontext()
        return wrapper.no_sync()

    def _clip(self) -> None:
        clip = self.loop.clip
        if callable(clip):
            clip([*self.loop.model.parameters()])
        elif clip is not None:
            torch.nn.utils.clip_grad_norm_([*self.loop.model.parameters()], clip)

    def _step(self, update: RecordedUpdate, found: Replayed) -> None:
        """Step with the recorded settings; a declared scheduler goes on with its own."""
        loop = self.loop
        own = [[settings_of(group) for group in one.param_groups] for one in loop.optimizers]
        if loop.scheduler is not None:
            found.declared_settings = own
        recorded = self.change.settings(update.step, update.settings or own)
        for optimizer, groups in zip(loop.optimizers, recorded, strict=True):
            set_settings(optimizer, groups)
        for optimizer in loop.optimizers:
            if loop.scaler is None:
                optimizer.step()
            else:
                loop.scaler.step(optimizer)
        if loop.scaler is not None:
            loop.scaler.update()
        if loop.scheduler is not None:
            for optimizer, groups in zip(loop.optimizers, own, strict=True):
                set_settings(optimizer, groups)
            loop.scheduler.step()

    def _facts(self, step: int) -> None:
        """Set the flags and the attributes of modules that the ledger saw change at this update."""
        modules = {each.path or "the model": each.module for each in named(self.loop.model)}
        parameters = parameters_of(self.loop.model)
        for fact in self.flight.facts:
            if fact["step"] != step or not self.change.facts(fact):
                continue
            what, _, whose = fact["name"].partition(" of ")
            if fact["kind"] == "attribute" and isinstance(fact["after"], int | float):
                set_numbers(self.loop.model, {fact["name"]: fact["after"]})
            elif what == "training" and whose in modules:
                modules[whose].training = fact["after"]
            elif what == "requires_grad" and whose in parameters:
                parameters[whose].requires_grad_(fact["after"])

    def _sketch(self, tensors: Sequence[Tensor | None]) -> Sketches:
        return self._sketcher.of(tensors).read()


def loss_of(loop: DeclaredLoop, batch: Any, model: nn.Module | None = None) -> Tensor:
    """Return ``loss_fn(model, batch)``, one number; ``model``: that of the loop if left out. Raises InputError if the
    function fails, UsageError if it returns no number."""
    try:
        loss = loop.loss_fn(loop.model if model is None else model, batch)
    except StabilityLabError:
        raise
    except Exception as error:
        raise InputError(f"loss_fn(model, batch) failed in the replay: {type(error).__name__}: {error}") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(
            f"loss_fn(model, batch) returned {type(loss).__name__}: it must return one number as a tensor."
        )
    return loss.reshape(())
