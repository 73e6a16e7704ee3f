"""The flight recorder: it keeps snapshots, batches and sketches of the last updates while a loop runs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import StabilityLabError, UsageError
from ..probes.instruments.instrument import Instrument
from ..probes.instruments.ledger import LedgerFact, UpdateLedger
from ..probes.instruments.stepping import before_step
from ..probes.numerics import process_facts
from ..probes.places.copied import Calling
from ..probes.places.naming import ParameterPlaces, named
from ..probes.state.snapshot import free_memory
from . import black_box
from .batches import kept
from .flight import HELD_LOSSES, Flight, Level, RecordedUpdate
from .replicas import averaging, why_not
from .sketches import Sketcher, Sketches
from .states import captured, settings_of, torch_random

log = logging.getLogger("stabilitylab")

EVENTS = 10  # an event has no snapshot of its own within a tenth of the usual distance from another
Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(eq=False)
class Recorder:
    """The settings of a flight recorder, for ``record=`` of :func:`stabilitylab.watch`. They also declare everything
    that the loop does between backward and the optimizer's step. Anything that is not declared is reported as
    undeclared, not accused.

    The loop's update:

    - ``loss_fn(model, batch)``: returns the loss on which the loop calls backward.
    - ``clip``: the largest norm of ``clip_grad_norm_``, or a function of the parameters.
    - ``scaler``: a GradScaler.
    - ``scheduler``: any object with ``step()``, ``state_dict()`` and ``load_state_dict()`` that steps once per update,
      after the optimizers.
    - ``accumulate``: the number by which the loop divides the loss of each micro-batch (1 if ``loss_fn`` divides), or
      "batches": the number of the update's micro-batches.

    The recording:

    - ``labels``, ``masks``: the names of these tensors in a batch (``"labels"``, or ``"1"`` in a tuple), for the
      questions about the data.
    - ``every``: the number of updates between snapshots.
    - ``keep``: limits of age, in units of ``every``. One snapshot is kept up to the first limit, and one between each
      two neighbouring limits.
    - ``digests``: the number of updates between sketches of gradients, parameters and outputs of modules; 1: at each
      update.
    - ``after``: the number of updates that are recorded after trouble.
    - ``cap``: the most bytes of batches that are held.
    - ``flight``: the recording so far; None before the loop has begun.

    With Adam, a snapshot takes 12 bytes per parameter in the memory of the host. A replay takes 8 more, for gradients.
    """

    loss_fn: Loss
    every: int = 100
    keep: tuple[int, ...] = (1, 2, 4, 8)
    digests: int = 10
    clip: float | Callable[[Sequence[nn.Parameter]], Any] | None = None
    scaler: torch.amp.GradScaler | None = None
    scheduler: Any = None
    accumulate: int | Literal["batches"] = 1
    labels: str | Sequence[str] = ()
    masks: str | Sequence[str] = ()
    after: int = 32
    cap: int = 2**30
    flight: Flight | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise UsageError("Recorder(loss_fn): loss_fn must be a function of (model, batch) that returns the loss.")
        for name in ("every", "digests", "accumulate", "after", "cap"):
            value = getattr(self, name)
            if name == "accumulate" and value == "batches":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"Recorder({name}={value!r}): give a whole number from 1 on.")
        keep = tuple(self.keep)
        if not keep or any(b <= a for a, b in zip((0, *keep), keep, strict=False)):
            raise UsageError(f"Recorder(keep={self.keep!r}): give ages that grow, such as (1, 2, 4, 8).")
        if self.clip is not None and not callable(self.clip) and not float(self.clip) > 0:
            raise UsageError(f"Recorder(clip={self.clip!r}): give the largest norm, a number above 0, or a function.")
        for name in ("scaler", "scheduler"):
            one = getattr(self, name)
            if one is not None and not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise UsageError(f"Recorder({name}={one!r}): give an object with state_dict() and load_state_dict().")

    def instruments(self) -> list[Instrument]:
        """Return new instruments: the ledger, and the recorder, which gets the ledger's facts."""
        ledger = UpdateLedger(self.digests)
        return [ledger, UpdateRecorder(self, ledger)]

    def described(self) -> dict[str, Any]:
        """Return the declarations, in types that a file can hold."""
        return {
            "clip": None if self.clip is None or callable(self.clip) else float(self.clip),
            "clip_function": callable(self.clip),
            "scaler": self.scaler is not None,
            "scheduler": None if self.scheduler is None else type(self.scheduler).__name__,
            "accumulate": self.accumulate,
            "labels": [self.labels] if isinstance(self.labels, str) else list(self.labels),
            "masks": [self.masks] if isinstance(self.masks, str) else list(self.masks),
            "every": self.every,
            "digests": self.digests,
        }


class OutputDigests:
    """Digests of what modules return, in the order of their calls, while it is attached. A hook that returns nothing
    changes no bit."""

    def __init__(self, model: nn.Module, sketcher: Sketcher) -> None:
        self.names: list[str] = []
        self._found: list[Tensor] = []
        self._digester = sketcher.digester
        self._handles = [
            each.module.register_forward_hook(Calling(self._hook(each.path or "the model"))) for each in named(model)
        ]

    def _hook(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, given: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple | list) and output else output
            first = next(iter(first.values()), None) if isinstance(first, dict) else first
            if isinstance(first, Tensor) and first.numel():
                with torch.no_grad():
                    self._found.append(self._digester.of(first.detach()))
                self.names.append(name)

        return look

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def read(self) -> dict[str, Any]:
        """Return names and digests; the call waits for the device."""
        found = [one.to(self._found[0].device) for one in self._found]
        digests = torch.stack(found).cpu() if found else torch.zeros(0, dtype=torch.int64)
        return {"names": list(self.names), "digests": digests}


class UpdateRecorder(Instrument):
    """A recorder that keeps a :class:`~.flight.Flight` of the last updates, and writes it below the run if there is
    trouble.

    ``watcher.batch(batch)`` gives it each batch before its forward pass. Snapshots are taken at the first batch of an
    update, when all optimizers, schedulers and loaders have finished the previous update. The next update also gets a
    snapshot of its own after a fact of the ledger (except a setting, which schedules change), an alert of the alarm, or
    trouble.

    Trouble is a loss that is not finite or that leaves its level (:class:`~.flight.Level`). The black box is then
    written at once, and again ``after`` updates later. An alert writes it too, and so does the end of a run without
    trouble.

    The recorder writes nothing to model, optimizers or random states. If a loop cannot be replayed, one sentence says
    so once, and the ledger is kept. Each process of a DistributedDataParallel has its own flight and its own black box.
    """

    def __init__(self, settings: Recorder, ledger: UpdateLedger) -> None:
        self._given, self._ledger = settings, ledger
        self._sketcher = Sketcher()
        self._outputs: OutputDigests | None = None
        self._numbers: list[int] = []  # of the batches of the coming update
        self._random: list[list[Any]] = []
        self._synced: list[bool] = []  # if their gradients are averaged over processes
        self._left: Sketches | None = None  # gradients that were there before the first forward
        self._count = 0
        self._present: RecordedUpdate | None = None
        self._pending: dict[str, Any] = {}
        self._waiting: list[RecordedUpdate] = []
        self._until: int | None = None  # the row at which the black box is complete
        self._had_trouble = False
        self._place: Path | None = None
        self._run_id = ""
        self._why_not = self._gap = ""
        self._happened = False  # an event, after which a snapshot is due
        self._alerts = 0  # of the alarm, so far
        self._handles: list[Any] = []

    def open(self, watched: Any) -> None:
        self._watched = watched
        model = watched.model
        self._parameters = ParameterPlaces(model)
        parameters = self._parameters()
        self._names = list(parameters)
        self._flight = Flight(self._names, self._given.described())
        self._flight.start = {
            "optimizers": [type(one).__name__ for one in watched.optimizers],
            "device": str(watched.parameters.device),
            "numerics": _words(process_facts(watched.parameters.device)["numerics"]),
            "torch": str(torch.__version__),
            "ranks": watched.ranks.size,
        }
        self._given.flight = self._flight
        self._compiled = any("OptimizedModule" in type(module).__name__ for module in model.modules())
        self._place, self._run_id = watched.ranks.gathered(_whereabouts(watched.sink))[0]
        self._averaging = None if watched.ranks.alone else averaging(model)
        if why := why_not(model, watched.ranks):
            self._cannot(why)
        if any(isinstance(one, torch.optim.LBFGS) for one in watched.optimizers):
            self._cannot("L-BFGS calls the model several times in a step")
        self._ledger.heard.append(self._heard)
        self._handles = [before_step(watched.optimizers[0], self._stepping)]
        if self._averaging is not None:
            self._handles.append(self._averaging.register_forward_pre_hook(Calling(self._forward)))
        self._announce(parameters)

    def batch(self, t: int, batch: Any) -> None:
        """Take the batch of the coming forward; before the first one of an update, take a snapshot if one is due."""
        if self._why_not:
            return
        flight = self._flight
        if not self._numbers:
            self._begin(t)
        try:
            flight.add(self._count, kept(batch))
        except UsageError as error:
            if not flight.batches:
                raise
            self._cannot(str(error).rstrip("."))
            return
        self._numbers.append(self._count)
        self._random.append(torch_random())
        self._synced.append(True)
        self._count += 1

    def after_backward(self, row: Any) -> None:
        if self._why_not:
            return
        if not self._numbers:
            if self._flight.updates:
                told = f"updates came without w.batch(), update {row.step} first: a replay ends before it"
                self._gap = self._gap or told
                self._note(self._gap)
            else:
                self._cannot("no batch was given before row 0: loop over w.batches(loader), or call w.batch(batch)")
            self._present = None
            return
        update = self._present = RecordedUpdate(row.step, self._numbers, self._random, synced=self._synced)
        self._numbers, self._random, self._synced = [], [], []
        self._flight.updates[row.step] = update
        self._pending = {}
        if self._outputs is not None:
            self._outputs.detach()
        if self._is_full(row.step):
            if self._outputs is not None:
                self._pending["outputs"] = self._outputs
            if self._left is not None:
                self._pending["left"] = self._left
            self._pending["gradient"] = self._sketcher.of(self._gradients())
            update.full = {}
        self._outputs = self._left = None
        self._waiting.append(update)

    def after_step(self, number: int) -> None:
        update = self._present
        if update is None or self._why_not:
            return
        update.stepped = True
        if update.full is not None and number == len(self._watched.optimizers) - 1:
            self._pending["after"] = self._sketcher.of(self._tensors())

    def row_read(self, row: Any) -> None:
        if self._why_not or not self._waiting or self._waiting[0].step != row.step:
            return
        update = self._waiting.pop(0)
        if update.settings is not None:
            update.settings = [[settings_of(group) for group in groups] for groups in update.settings]
        if update.full is not None:
            pending, self._pending = self._pending, {}
            update.full = {
                name: one.read() if isinstance(one, OutputDigests) else one.as_dict() for name, one in pending.items()
            }
        loss = row.read()[0].get("loss")
        update.loss = loss
        if loss is not None:
            self._see(row.step, float(loss))
        if self._until is not None and row.step >= self._until:
            self._complete()

    def row_sent(self, row: Any) -> None:
        """Look if the alarm has spoken: then a snapshot is due, and what is held is written."""
        alarm = getattr(self._watched.sink, "alarm", None)
        count = 0 if alarm is None else len(alarm.alerts)
        is_new, self._alerts = count > self._alerts, count
        if is_new and not self._why_not and self._flight.updates:
            self._happened = True
            if self._until is None:
                self._write()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._outputs is not None:
            self._outputs.detach()
        if self._why_not or not self._flight.updates:
            return
        if self._until is not None:
            self._complete()
        elif not self._had_trouble:
            self._write()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing of the flight: a resumed run begins a new one, and the losses make the level."""
        return {"flight": {"losses": [list(pair) for pair in self._flight.losses], "count": self._count}}

    def load_state_dict(self, state: Any) -> None:
        kept_ = state.get("flight", {})
        self._flight.losses = [(int(step), float(loss)) for step, loss in kept_.get("losses", ())]
        self._count = int(kept_.get("count", 0))

    def _begin(self, t: int) -> None:
        """Begin an update: a snapshot, and hooks for a full look, where they are due."""
        flight, given = self._flight, self._given
        due = not flight.snapshots or t - max(flight.snapshots) >= given.every
        if self._happened and flight.snapshots and t - max(flight.snapshots) >= max(1, given.every // EVENTS):
            flight.event, due = t, True
        self._happened = False
        if due or (self._until is None and flight.is_over(given.cap)):
            flight.snapshots[t] = captured(self._watched.model, self._watched.optimizers, given.scaler, given.scheduler)
            if self._until is None and (told := flight.prune(given.keep, given.every, given.cap)):
                self._note(told)
        gradients = self._gradients() if self._is_full(t) else []
        if any(one is not None for one in gradients):
            self._left = self._sketcher.of(gradients)
        if self._is_full(t) and not self._compiled:
            self._outputs = OutputDigests(self._watched.model, self._sketcher)

    def _is_full(self, t: int) -> bool:
        return t in self._flight.snapshots or t % self._given.digests == 0

    def _stepping(self) -> None:
        """Called as the first optimizer begins its step, after clipping."""
        if self._present is None or self._why_not:
            return
        try:
            update = self._present
            groups = [one.param_groups for one in self._watched.optimizers]
            update.settings = [[settings_of(one, torch.clone) for one in each] for each in groups]
            if update.full is not None:
                self._pending["handed"] = self._sketcher.of(self._gradients())
                self._pending["before"] = self._sketcher.of(self._tensors())
        except Exception as error:
            self._cannot(f"{type(error).__name__}: {error}")
            self._watched.guard.instrument(type(self).__name__, (), error)

    def _forward(self, *_: Any) -> None:
        """Called before each forward pass of a DistributedDataParallel, which no_sync makes keep its gradients."""
        if self._synced:
            self._synced[-1] = bool(getattr(self._averaging, "require_backward_grad_sync", True))

    def _gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self._parameters().values()]

    def _tensors(self) -> list[Tensor | None]:
        return [parameter.detach() for parameter in self._parameters().values()]

    def _heard(self, fact: LedgerFact) -> None:
        self._flight.facts.append(fact.as_dict())
        del self._flight.facts[: -4 * HELD_LOSSES]
        compared = fact.kind != "write" or fact.before is not None
        self._happened |= compared and fact.kind in ("state", "flag", "write")

    def _see(self, step: int, loss: float) -> None:
        """Look at a loss: trouble is one that is not finite, or that leaves the level of those before."""
        flight = self._flight
        level = Level.of([one for _, one in flight.losses])
        flight.losses.append((step, loss))
        del flight.losses[:-HELD_LOSSES]
        if self._until is not None:
            return
        if not math.isfinite(loss):
            why = "the loss is not finite"
        elif level is not None and level.left_by(loss):
            why = f"the loss is {loss:.4g}, and was {level.median:.4g}"
        else:
            return
        if any(at < step for at in flight.snapshots):
            self._happened = True
            flight.trouble = {"step": step, "why": why, "level": None if level is None else level.median}
            self._until = step + self._given.after
            self._had_trouble = True
            self._write()

    def _complete(self) -> None:
        """End the recording of a trouble: its black box is written for the last time, and a new flight may begin."""
        self._write()
        self._until = None
        self._flight.trouble = None
        self._flight.prune(self._given.keep, self._given.every, self._given.cap)

    def _write(self) -> None:
        flight = self._flight
        step = flight.last if flight.trouble is None else flight.trouble["step"]
        if self._place is not None:
            try:
                black_box.save(self._place, step, flight, self._run_id, self._watched.ranks.rank)
            except StabilityLabError as error:
                self._note(str(error))

    def _note(self, told: str) -> None:
        if told not in self._flight.notes:
            self._flight.notes.append(told)
            log.warning("recorder: %s.", told.rstrip("."))

    def _cannot(self, why: str) -> None:
        """Say once why this loop cannot be replayed; the ledger goes on."""
        if not self._why_not:
            self._why_not = why
            self._flight.notes.append(why)
            log.warning("this loop cannot be replayed: %s. Its ledger is recorded.", why)
            if (record := getattr(self._watched.sink, "record", None)) is not None:
                record(not_replayable=why)

    def _announce(self, parameters: dict[str, nn.Parameter]) -> None:
        """Log how much of the host's memory the recorder may need: a warning if that is more than half of the free
        memory."""
        count = sum(parameter.numel() for parameter in parameters.values())
        snapshots = len(self._given.keep) + 1
        needed, free = snapshots * 12 * count + self._given.cap, free_memory()
        self._flight.start["memory"] = needed
        log.log(
            logging.WARNING if free is not None and needed > free / 2 else logging.INFO,
            "recorder: up to %d snapshots of %.3g MB each with Adam (12 bytes a parameter), and as many batches as fit "
            "into %.3g MB (cap=); give a shorter keep= or a smaller cap= if that is too much.",
            snapshots,
            12 * count / 1e6,
            self._given.cap / 1e6,
        )


def _whereabouts(sink: Any) -> tuple[Path | None, str]:
    """Return the path and the id of the run that a sink writes; those of the first process count for all."""
    path = getattr(sink, "path", None)
    return None if path is None else Path(path), getattr(sink, "run_id", "")


def _words(facts: Any) -> dict[str, Any]:
    return {key: value if type(value) in (bool, int, float, str) else str(value) for key, value in facts.items()}
