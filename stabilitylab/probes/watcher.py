"""The watcher: hooks -> accumulators -> one host read per row -> sink, around anybody's training loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..schema import Cells, Sink, Table
from ._engine.board import Board, CleanPasses, Mask, Masks, allocate
from ._engine.cadence import Cadence, checked, is_due
from ._engine.passes import TrainingPass
from ._engine.record import Metrics, RowMetrics, RowRecord, Template
from ._engine.recorder import Recorder
from ._engine.reference_rows import AlphaSchedule, ReferenceRows
from ._engine.selection import Names, boards_for, find_sites, split_sites
from ._engine.unseen import say, unseen
from ._engine.watchable import check_arguments, check_unscaled, check_watchable, compiled_modules
from .base import ParameterProbe, When
from .incidents.report import Forensics, Incident
from .parameters.pieces import Parameters
from .parameters.ranks import NullSink, Parallel, ranks_of

log = logging.getLogger("stabilitylab")


@dataclass
class Cost:
    """Wall seconds that watching took so far: in hooks, in ``step``, and in reference passes (apart)."""

    hooks: float = 0.0
    step: float = 0.0
    reference: float = 0.0


class Watcher:
    """Records probes of ``model`` into ``sink``, one row per optimizer update; use it as a context manager.

    Each update: forward, backward, (``scaler.unscale_``), ``watcher.step(loss=loss)``, (clipping), optimizer's step.
    Row t describes theta_t; numbers about theta_t -> theta_{t+1} stand in row t too, so a row reaches the sink whole at
    the next ``step``, ``flush`` or ``finish``. What is known of it does when ``step`` returns, on a CPU without ranks;
    a GPU would have to be waited for, which is done only once a number was not finite. Leaving the ``with`` block
    finishes (after an error: flushes) and closes.

    - ``scaler``: the loop's GradScaler; a scaled loss without it is recorded with its scale.
    - ``probes``: "default", "all", "none", names, "-name" to leave one out; "standard" is cheapest: norms of each
      layer's output and its gradient, of each norm's input, of each sub-layer's parameters' gradients.
    - ``every``, ``update_every``: rows of the training pass and of the reference pass, a number or "log" (see
      :func:`~._engine.cadence.is_due`).
    - ``mask``: True on real tokens: a tensor, a dict by stack name, or a function that returns one, asked once per
      forward pass (so once per micro-batch); a stack without a mask counts all tokens.
    - ``reference``: runs the model on a fixed batch; numbers in a dict that it returns become metrics of the row.
    - ``measured``: rows at which ``reference`` is run for these numbers alone, beside those of ``update_every``.
    - ``schedule``: lets ``model_update`` separate what alpha did from what the parameters did.
    - ``output_site``: the module whose output is F. ``sites``: a regular expression that narrows the places of all
      probes, or a dict of them by probe; by kind ("layers", "norms", "activations", "outputs") one that full names of
      modules match, instead of what is found (:func:`stabilitylab.sites` shows it).
    - ``recorder``: the held-out pass is recorded with it and replayed; and activations wait until they are measured
      many at a time, which a model that writes to them in place would spoil.
    - ``parallel``: "auto" finds DDP and FSDP2, see :func:`~.parameters.ranks.ranks_of` for "ddp" and "off".

    On several ranks every one makes its watcher and calls ``step``; rank 0 alone writes. Tables are those of one
    process on the batches of all ranks, E being the mean of their losses. Numbers given to ``step`` or returned by
    ``reference`` are averaged over ranks, those given to ``note`` stay rank 0's. A row's metrics can be read after the
    optimizer's step. ``flush``, ``finish`` and ``state_dict`` (this rank's shards) are for all ranks at once.
    """

    def __init__(
        self,
        model: nn.Module,
        sink: Sink,
        *,
        probes: Names = "default",
        every: Cadence = "log",
        update_every: Cadence = "log",
        optimizer: torch.optim.Optimizer | None = None,
        scaler: torch.amp.GradScaler | None = None,
        mask: Mask | Callable[[], Mask | None] | None = None,
        schedule: AlphaSchedule | None = None,
        reference: Callable[[], Any] | None = None,
        output_site: str | None = None,
        sites: str | Mapping[str, str] | None = None,
        total_every_step: bool = True,
        parallel: Parallel = "auto",
        recorder: Recorder | None = None,
        measured: Callable[[int], bool] = lambda row: False,
    ) -> None:
        self.every: Cadence = checked(every, "every")
        self.update_every: Cadence = checked(update_every, "update_every")
        self.t = 0
        self.unseen: dict[str, list[str]] = {}  # table -> places that no call of the first probed rows came by
        self._looked: set[str] = set()  # kinds of pass of which that is known
        self.last: tuple[int, dict[str, float | None], dict[str, Cells]] | None = None  # the row that the sink got last
        check_watchable(model)
        check_arguments(optimizer, scaler, mask, reference)
        own, narrowed = split_sites(sites)
        self._ranks = ranks = ranks_of(model, parallel)
        self.sites = find_sites(model, output_site, own)
        self.sink = sink if ranks is None or ranks.rank == 0 else NullSink()
        self._optimizer, self._scaler = optimizer, scaler
        self._total_every_step = total_every_step
        self._parameters = Parameters(model, self.sites.place, optimizer, ranks)
        lacks = [name for name, given in (("optimizer", optimizer), ("reference", reference)) if given is None]
        self._boards, self.dropped = boards_for(
            probes, self.sites, self._parameters, narrowed, lacks=lacks, compiled=compiled_modules(model)
        )
        self._probes_training = any(board.probe.on != "reference" for board in self._boards)
        sums = allocate(self._boards, self._parameters.device)
        if ranks is not None:
            ranks.check_alike([board.table for board in self._boards])

        stacks = [stack.name for stack in self.sites.stacks]
        share = 1.0 if ranks is None else 1 / ranks.size
        self._clean = CleanPasses(sums) if ranks is None else None
        self._training = TrainingPass(
            model,
            self._on("forward", "backward"),
            Masks(mask, stacks),
            scaler,
            share,
            self._clean,
            recorder is not None,
        )
        self._reference = reference and ReferenceRows(
            model,
            self._on("reference"),
            Masks(mask, stacks),
            reference,
            self.update_every,
            schedule,
            self._parameters,
            ranks,
            recorder,
            measured,
        )
        scaled = scaler is not None and scaler.is_enabled()
        self._forensics = Forensics(self._boards, self._parameters, self._order, self.sink, scaled)
        self._record: RowRecord | None = None  # the row that waits for the optimizer's step, or for its copy to arrive
        self._template: Template | None = None  # while an update is recorded for replays
        self._owed = False  # whether its numbers about the update are still to come
        self._step_seconds = 0.0
        self._warned = self._early = False  # early: an optimizer's step before the first row
        self._state = "open"
        self._hook = optimizer.register_step_post_hook(lambda *_: self._updated()) if optimizer else None
        self.sink.open([board.table for board in self._boards])
        self._arm()

    def due(self, row: int) -> bool:
        """Whether the training pass of this row is probed, by what is recorded in it."""
        return self._probes_training and is_due(row, self.every)

    def due_reference(self, row: int) -> bool:
        """Whether the reference pass is recorded at this row."""
        return self._reference is not None and self._reference.due(row)

    @property
    def tables(self) -> dict[str, Table]:
        """What is recorded: the definitions of the tables, by name."""
        return {board.table.name: board.table for board in self._boards}

    @property
    def parameters(self) -> Parameters:
        return self._parameters

    @property
    def incident(self) -> Incident | None:
        """Where the run first broke, if a recorded number was NaN or inf; known once the row reached the sink."""
        return self._forensics.incident

    @property
    def cost(self) -> Cost:
        return Cost(self._training.seconds, self._step_seconds, self._reference.seconds if self._reference else 0.0)

    def step(self, loss: torch.Tensor | float | None = None, **metrics: torch.Tensor | float | None) -> Metrics:
        """Ends row t: call it after backward (and unscale), before clipping and the optimizer's step.

        Returns the row's metrics as a mapping that reads them from the device when it is first looked into. Looking
        after the optimizer's step keeps the one copy a row; not looking at all keeps the host from waiting for it.
        """
        self._check_open()
        check_unscaled(self._scaler, self._optimizer)
        began, reference = time.perf_counter(), self.cost.reference
        if self._template is None:
            self._send()
        self._owed = False
        record = self._template or RowRecord(self.t, self._parameters.device, self._ranks)
        for name, value in (() if loss is None else (("loss", loss),)) + tuple(metrics.items()):
            record.metric(name, value)
        with torch.no_grad():
            self._probe(record)
            if self._reference is not None and self._template is None:
                self._reference.fill(record)
                if self._reference.due(self.t):
                    self._look("reference", self._on("reference"), self._reference.order)
        self._record = record
        if self._template is not None:
            return RowMetrics(record)
        if not self._owed:
            record.ship()
        self._begin(record)
        self.t += 1
        self._arm()
        self._step_seconds += time.perf_counter() - began - (self.cost.reference - reference)
        return RowMetrics(record)

    @contextmanager
    def recording(self) -> Iterator[Template]:
        """Around the device work of an update - forward, backward, ``step``, optimizer, :meth:`Template.pack` - while
        it is recorded instead of done: ``step`` computes a row like the coming one and neither sends nor ends any."""
        self._check_open()
        pending, self._record = self._record, None
        self._template = template = Template(self._parameters.device)
        self._arm()
        try:
            yield template
        finally:
            self._template, self._record, self._owed = None, pending, False
            for board in self._boards:
                board.clear()
            self._arm()

    def replay(self, template: Template, run: Callable[[], None]) -> Metrics:
        """Row t by ``run``, which replays what was recorded with ``template``, in place of ``step`` and all around it.

        The reference pass comes first, since the optimizer's step is in the replay; the row before is read last, while
        the device is busy with this one. Metrics that the host knows are added by :meth:`note`.
        """
        self._check_open()
        began, reference = time.perf_counter(), self.cost.reference
        record = RowRecord(self.t, self._parameters.device)
        with torch.no_grad():
            if self._reference is not None:
                self._reference.fill(record)
            run()
            record.adopt(template)
            record.ship()
        self._send()
        self._record = record
        self.t += 1
        self._arm()
        self._step_seconds += time.perf_counter() - began - (self.cost.reference - reference)
        return RowMetrics(record)

    def note(self, **metrics: torch.Tensor | float | None) -> None:
        """Adds metrics to the row that ``step`` ended last, such as what the rest of the update took."""
        if self._record is None:
            raise UsageError("there is no pending row to add to: call note() after step(), before the next.")
        for name, value in metrics.items():
            self._record.metric(name, value, own=True)

    def flush(self) -> None:
        """Sends the pending row now: for interruptions, between the optimizer's step and the next forward."""
        self._settle()
        self._send()

    def salvage(self) -> None:
        """After an error: the pending row, unless other ranks, which may be elsewhere now, are needed for it."""
        if self._record is not None and self._record.waits and self._ranks is not None:
            self._record, self._owed = None, False
        self.flush()

    def finish(self, **metrics: torch.Tensor | float | None) -> Metrics:
        """Sends the pending row, then row N, "after training": the reference pass alone, and ``metrics`` that were
        measured by then. Returns row N's metrics."""
        self._check_open()
        self._send()
        self._state = "finished"
        if self._reference is not None:
            self._record = RowRecord(self.t, self._parameters.device, self._ranks)
            for name, value in metrics.items():
                self._record.metric(name, value)
            with torch.no_grad():
                self._reference.fill(self._record, last=True)
            self._send()
        return self.last[1] if self._reference is not None and self.last else {}

    def close(self) -> None:
        """Removes every hook and closes the sink; closing twice is fine."""
        if self._state != "closed":
            self._state = "closed"
            self._forensics.finish()
            self._training.detach()
            if self._hook is not None:
                self._hook.remove()
            self.sink.close()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to write the rows that an uninterrupted one would have written.

        Take it between the optimizer's step and the next forward. The pending row is in it, unless it was flushed.
        """
        self._settle()
        return {
            "t": self.t,
            "pending": self._record and self._record.state_dict(),
            "reference": self._reference and self._reference.state_dict(),
            "incident": None if self.incident is None else asdict(self.incident),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.t = state["t"]
        self._record = RowRecord.from_state(state["pending"]) if state["pending"] else None
        self._owed = False
        if (incident := state.get("incident")) is not None:
            self._forensics.incident = Incident(**incident)  # a run has one, the first
        if self._reference is not None and state["reference"] is not None:
            self._reference.load_state_dict(state["reference"])
        self._arm()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None:
                self.salvage()
            elif self._state == "open":
                self.finish()
        finally:
            self.close()

    def _order(self) -> dict[tuple[str, int], int]:
        """When each place is called in a forward pass; the held-out pass comes after."""
        held_out = self._reference.order if self._reference is not None else {}
        return {**self._training.order, **{key: len(self._training.order) + n for key, n in held_out.items()}}

    def _on(self, *when: When) -> list[Board]:
        return [board for board in self._boards if board.probe.on in when]

    def _arm(self) -> None:
        """Hooks for the coming row: there while it is probed, gone (and free of cost) while it is not."""
        self._training.start_row()
        if not self.due(self.t):
            self._training.detach()
        elif not self._training.attached:
            self._training.attach()

    def _probe(self, record: RowRecord) -> None:
        if self.due(self.t):
            self._training.end()
            self._warn_once()
            if self._training.order:  # else there was no forward pass to be seen, which is said above
                self._look("training", self._on("forward", "backward"), self._training.order)
            self._collect(record, "step")
            for board in self._on("forward", "backward"):
                record.table(board)
            for name, passes in (self._clean.take(self._on("forward", "backward")) if self._clean else {}).items():
                record.set_aside(f"clean {name}", passes)
            for board in self._on("update"):
                assert isinstance(board.probe, ParameterProbe)
                board.probe.before(self._parameters)
                self._owed = True
        elif is_due(self.t, self.every):
            self._warn_once()
        total = "grad_norm_total"
        if self._total_every_step and total not in record:
            record.metric(total, self._parameters.total_norm())

    def _look(self, which: str, boards: list[Board], called: Mapping[tuple[str, int], int]) -> None:
        """Once for each kind of pass: which places it did not come by."""
        if which in self._looked:
            return
        self._looked.add(which)
        if found := unseen(boards, called):
            self.unseen |= found
            if self._ranks is None or self._ranks.rank == 0:
                say(self.t, which, found)

    def _warn_once(self) -> None:
        """Warns of a loop in which step() stands in the wrong place, or that never trains."""
        if self._warned:
            return
        boards = self._on("forward", "backward")
        found = ""
        if not self._parameters.have_gradients:
            found = "no parameter has a gradient: call step() after backward and before zero_grad"
        elif boards and all(board.is_empty for board in boards):
            found = (
                "there is no number of the forward pass: watch sees forwards in training mode with gradients on, so "
                "call model.train() before them, and step() after each backward"
            )
        elif self._early:
            found = "the optimizer's step came before this one: call step() after backward and before optimizer.step"
        if found:
            self._warned = True
            log.warning("row %d: %s.", self.t, found)

    def _collect(self, record: RowRecord, when: When) -> None:
        for board in self._on(when):
            assert isinstance(board.probe, ParameterProbe)
            board.collect(*board.probe.collect(self._parameters))
            record.table(board)
            for name, value in board.probe.metrics().items():
                record.metric(name, value)
            for name, squares in board.probe.pieces().items() if self._ranks is None else ():
                record.set_aside(f"pieces {name}", squares)

    def _updated(self) -> None:
        self._early |= self._record is None and self.t == 0
        began = time.perf_counter()
        self._after_update()
        self._step_seconds += time.perf_counter() - began

    def _after_update(self) -> None:
        if self._owed and self._record is not None:
            self._owed = False
            with torch.no_grad():
                self._collect(self._record, "update")
            self._record.ship()

    def _settle(self) -> None:
        """The pending row as far as it is known: a scaler skipped the update, or the interruption came before it."""
        if self._scaler is not None:
            self._after_update()
        elif self._owed and self._record is not None:
            self._owed = False
            self._record.ship()

    def _send(self) -> None:
        """The pending row to the sink. An update that never came left the parameters as they were: numbers of 0."""
        self._after_update()
        if self._record is not None:
            self._record.ship()
            metrics, tables = self._record.read()
            self.last, record = (self._record.step, metrics, tables), self._record
            self._record = None
            self.sink.append(*self.last)
            self._forensics.examine(*self.last, record.broken, record.aside)

    def _begin(self, record: RowRecord) -> None:
        """What is known of the row to a sink that takes it (``begin``): where reading it waits for nothing, and on a
        GPU too once a number was not finite, since then each row may be the last."""
        begin = getattr(self.sink, "begin", None)
        if begin is None or record.waits or (self._parameters.device.type != "cpu" and self.incident is None):
            return
        begin(record.step, *record.read())

    def _check_open(self) -> None:
        if self._state != "open":
            raise UsageError(f"this watcher is {self._state}: make a new one to record more.")
