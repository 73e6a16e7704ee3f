"""The watcher: hooks -> accumulators -> one host read per row -> sink, around anybody's training loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from ..errors import UsageError
from ..schema import Cells, Sink, Table
from ._engine.board import Board
from ._engine.cadence import Cadence
from ._engine.neutral_pass import Audit
from ._engine.options import WatchOptions, takes
from ._engine.row import Metrics, RowMetrics, RowRecord, State, Template
from ._engine.watchable import check_unscaled
from ._engine.watched import Watched
from .incidents.report import Incident
from .instruments.agreement import Agreement
from .instruments.curvature_rows import CurvatureRows
from .instruments.first_row import FirstRow
from .instruments.forensics import Forensics
from .instruments.instrument import Instrument, Instruments
from .instruments.ledger import UpdateLedger
from .instruments.leftover import LeftoverGradients
from .instruments.loop_checks import LoopChecks
from .instruments.neutrality import NeutralityRecord
from .instruments.parameter_tables import ParameterTables
from .instruments.reference_rows import ReferenceRows
from .instruments.taps import Taps
from .instruments.training_pass import TrainingRows
from .parameters.pieces import Parameters
from .places.sites import Sites

B = TypeVar("B")


@dataclass
class Cost:
    """Wall seconds that watching took so far: in hooks, in ``step``, and apart in reference passes and at curvature."""

    hooks: float = 0.0
    step: float = 0.0
    reference: float = 0.0
    curvature: float = 0.0


class Watcher:
    """Records probes of ``model`` into ``sink``, one row per optimizer update; use it as a context manager.

    Each update: forward, backward, (``scaler.unscale_``), ``watcher.step(loss=loss)``, (clipping), optimizer's step.
    Row t describes theta_t; numbers about theta_t -> theta_{t+1} stand in row t too, so a row reaches the sink whole at
    the next ``step``, ``flush`` or ``finish``. What is known of it does when ``step`` returns, on a CPU without ranks;
    a GPU would have to be waited for, which is done only once a number was not finite. Leaving the ``with`` block
    finishes (after an error: flushes) and closes. A probe that raises ends its table, never the training.

    - ``optimizer``: one, or several that share the model's parameters: the row waits for the steps of all.
    - ``scaler``: the loop's GradScaler; a scaled loss without it is recorded with its scale.
    - ``probes``: "default", "all" (but fingerprints), "none", names, "-name" to leave one out; "standard" is cheapest:
      norms of each layer's output and its gradient, of each norm's input, of each sub-layer's parameters' gradients.
    - ``every``, ``update_every``: rows of the training pass and of the reference pass, a number or "log" (see
      :func:`~._engine.cadence.is_due`).
    - ``mask``: True on real tokens: a tensor, a dict by stack name, or a function that returns one, asked once per
      forward pass (so once per micro-batch); a stack without a mask counts all tokens.
    - ``reference``: runs the model on a fixed batch; numbers in a dict that it returns become metrics of the row.
      "first batch": copies of what the model's first training forward was given.
    - ``curvature_loss``: returns the loss of a fixed batch, one number or one a token or sentence, for the probes of
      curvature; what ``reference`` returns does too, as a number or as ``.loss``. ``curvature_every``: their rows, a
      number, "log" or "auto" (see :func:`~._engine.cadence.is_curved`). ``curvature_batch``: "fixed", or
      "update" for the batch that each row's update is made of, as critical sharpness is defined: what the model returns
      for it is the loss, or what ``curvature_loss`` returns between the optimizer's step and the next forward.
    - ``measured``: rows at which ``reference`` is run for these numbers alone, beside those of ``update_every``.
    - ``schedule``: lets ``model_update`` separate what alpha did from what the parameters did.
    - ``output_site``: the module whose output is F. ``sites``: a regular expression that narrows the places of all
      probes, or a dict of them by probe; by kind ("layers", "norms", "activations", "outputs") one that full names of
      modules match, instead of what is found (:func:`stabilitylab.sites` shows it).
    - ``recorder``: the held-out pass is recorded with it and replayed; and activations wait until they are measured
      many at a time, which a model that writes to them in place would spoil.
    - ``parallel``: "auto" finds DDP, FSDP2 and tensor parallelism; "later", "ddp", "off" and a pipeline's schedule say
      what cannot be found, see :func:`~.parameters.spreading.spread_out`.
    - ``share``: of code that splits parameters by hand, a function of a parameter's name and the parameter: the process
      group that it is split over, or None where all ranks hold it, see :func:`~.parameters.sharing.layout_by`.
    - ``restore``: reference and curvature passes keep a copy of the model's state each time and put it back, for a
      model whose forward changes it in eval mode too (weights rescaled in place, a queue, a momentum encoder). Without
      it the first such pass keeps a copy, and a pass that changes the model ends for good.
    - ``record``: by default, with ``optimizer=``, a sparse ledger stores what changed of settings, optimizer state and
      flags (:class:`.instruments.ledger.UpdateLedger`), so that ``diagnose`` can name it; not under CUDA graphs.
      "ledger" stores all rates and digests too, "off" nothing; a :class:`stabilitylab.Recorder` keeps snapshots and
      batches, so that ``explain`` can replay them.
    - ``strict``: an error of a probe is raised, as tests of probes want it.
    - ``tapped``: what an earlier attempt of the run knew of :func:`stabilitylab.tap`, as its ``state_dict`` has it.

    Under torch.compile the hooks become part of the compiled code, without a graph or a break more.

    On several ranks every one makes its watcher and calls ``step``; rank 0 alone writes. Tables are those of one
    process on the batches of all ranks, E being the mean of their losses. Numbers given to ``step`` or returned by
    ``reference`` are averaged over ranks, those given to ``note`` stay rank 0's. A row's metrics can be read after the
    optimizer's step. ``flush``, ``finish`` and ``state_dict`` (this rank's shards) are for all ranks at once.
    """

    @takes(WatchOptions)
    def __init__(self, model: nn.Module, sink: Sink, options: WatchOptions) -> None:
        self.every: Cadence = options.every
        self.update_every: Cadence = options.update_every
        self.t = 0
        self.last: tuple[int, dict[str, float | None], dict[str, Cells]] | None = None
        self._row: RowRecord | None = None  # waits for the optimizers' steps, or for its copy to arrive
        self._steps: set[int] = set()  # optimizers whose step it still waits for
        self._template: Template | None = None  # while an update is recorded for replays
        self._settled = False
        self._step_seconds = 0.0
        self._state = "open"
        self._process = os.getpid()
        self._watched = watched = Watched(model, sink, options, self._declare, Audit(changed=self._note_audit))
        self._training = training = TrainingRows()
        self._checks = checks = LoopChecks(training)
        self._reference = reference = None if watched.reference is None else ReferenceRows(training, checks)
        self._curvature = CurvatureRows(training, reference)
        self._forensics = Forensics(training, reference, checks)
        listed: list[Instrument] = [
            Agreement(),
            ParameterTables(),
            training,
            checks,
            LeftoverGradients(training, checks),
            *([] if reference is None else [reference]),
            self._curvature,
            Taps(training, reference),
            self._forensics,
            NeutralityRecord(),
            FirstRow(training, checks),
            *_recording(watched),
        ]
        for each in listed:
            if isinstance(each, UpdateLedger):
                each.training = training
        self._instruments = Instruments(listed, watched)
        watched.await_layout()
        self.sink: Sink = watched.sink  # the caller's, or on other ranks than the first, nothing
        self.parameters: Parameters = watched.parameters
        self.unseen: Mapping[str, list[str]] = self._checks.unseen  # table -> places that no call reached
        self.loop_warnings: Sequence[str] = self._checks.warnings
        self.ended: Mapping[str, str] = watched.guard.ended  # table -> why it ended before the run
        self.audit: dict[str, Any] = watched.audit.facts  # what was checked of the model and the loop
        self.not_neutral: Sequence[str] = watched.audit.not_neutral  # what watching changed and could not undo
        self._handles = [
            optimizer.register_step_post_hook(lambda *_, number=number: self._stepped(number))
            for number, optimizer in enumerate(watched.optimizers)
        ]
        self._declare()
        self._begin_row()

    @property
    def sites(self) -> Sites:
        """The places of the probes; those that the model shows by ``tap`` come in its first pass."""
        return self._watched.sites

    @property
    def dropped(self) -> Sequence[tuple[str, str]]:
        """(probe, why it is not recorded)."""
        return self._watched.dropped

    @property
    def tables(self) -> dict[str, Table]:
        """The definitions of the recorded tables, by name."""
        return self._watched.tables

    @property
    def total_every_step(self) -> bool:
        """True where each row has the norm of the whole gradient, probed or not."""
        return self._watched.total

    @total_every_step.setter
    def total_every_step(self, wanted: bool) -> None:
        self._watched.total = wanted

    @property
    def incident(self) -> Incident | None:
        """The first place that broke, if a recorded number was NaN or inf; known once the row reached the sink."""
        return self._forensics.incident

    @property
    def cost(self) -> Cost:
        apart = (self._reference.seconds if self._reference else 0.0, self._curvature.seconds)
        return Cost(self._training.passes.seconds, self._step_seconds, *apart)

    def due(self, row: int) -> bool:
        """Return True if the training pass of this row is probed, by what is recorded in it."""
        return self._watched.due(row)

    def due_reference(self, row: int) -> bool:
        """Return True if the reference pass is recorded at this row."""
        return self._reference is not None and self._reference.due(row)

    def step(self, loss: torch.Tensor | float | None = None, **metrics: torch.Tensor | float | None) -> Metrics:
        """Ends row t: call it after backward (and unscale), before clipping and the optimizer's step.

        Returns the row's metrics as a mapping that reads them from the device when it is first looked into. Looking
        after the optimizer's step keeps the one copy a row; not looking at all keeps the host from waiting for it.
        """
        self._check_open()
        watched = self._watched
        watched.lay_out()
        for optimizer in watched.optimizers:
            check_unscaled(watched.scaler, optimizer)
        if not self._settled:
            self._settled = True
            self._instruments.call("settle", self.t)
        with self._timed():
            row = self._next_row()
            if loss is not None or watched.stages is not None:  # of a pipeline, the last stage alone has one
                row.metric("loss", loss)
            for name, value in metrics.items():
                row.metric(name, value)
            with torch.no_grad():
                self._instruments.call("after_backward", row)
                if row.is_live:
                    self._instruments.call("host", row)
            self._hold(row)
            if row.is_live:
                if row.state is not State.OWED:
                    row.ship()
                self._begin_early()
                self.t += 1
                self._begin_row()
        return RowMetrics(row)

    def batch(self, batch: B) -> B:
        """Show the batch of the next forward pass to a recorder; return the batch.

        With ``record=`` call it once for each micro-batch, before its forward pass and after everything that ends the
        update before (optimizer, scheduler, ``zero_grad``). Without a recorder it does nothing.
        """
        self._check_open()
        self._instruments.call("batch", self.t, batch)
        return batch

    def batches(self, loader: Iterable[B]) -> Iterator[B]:
        """Yield the batches of ``loader``, each shown to a recorder by :meth:`batch`."""
        for batch in loader:
            yield self.batch(batch)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Leave out all forwards and backwards of this block: they are no part of the update.

        ``with watcher.off():`` stands around what the loop does with the model beside training it, such as the run of
        a discriminator for its generator, or an adversarial example's gradient. Gradients that the block leaves on
        parameters are the loop's business, as ever.
        """
        passes, before = self._training.passes, self._training.passes.paused
        passes.paused = True
        try:
            yield
        finally:
            passes.paused = before

    def note(self, **metrics: torch.Tensor | float | None) -> None:
        """Adds metrics to the row that ``step`` ended last, such as what the rest of the update took."""
        if self._row is None:
            raise UsageError("there is no pending row to add to: call note() after step(), before the next.")
        for name, value in metrics.items():
            self._row.metric(name, value, own=True)

    def flush(self) -> None:
        """Sends the pending row now: for interruptions, between the optimizer's step and the next forward."""
        self._settle()
        self._send()

    def salvage(self) -> None:
        """After an error: the pending row, unless other ranks, which may be elsewhere now, are needed for it."""
        if self._row is not None and self._row.waits:
            self._row = None
            self._instruments.call("abort")
        self._settle()
        self._send()

    def finish(self, **metrics: torch.Tensor | float | None) -> Metrics:
        """Sends the pending row, then row N, "after training": the reference pass alone, and ``metrics`` that were
        measured by then. Returns row N's metrics."""
        self._check_open()
        self._send()
        self._state = "finished"
        row = RowRecord(self.t, self._watched.parameters.device, self._watched.ranks)
        for name, value in metrics.items():
            row.metric(name, value)
        with torch.no_grad():
            self._instruments.call("finish", row)
        if self._reference is None:
            return {}
        self._hold(row)
        self._send()
        return self.last[1] if self.last else {}

    def close(self) -> None:
        """Removes every hook and closes the sink; closing twice is fine. In a forked child it does nothing."""
        if self._state != "closed" and not self._is_fork():
            self._state = "closed"
            self._instruments.close()
            self._watched.close()
            for handle in self._handles:
                handle.remove()
            self.sink.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to write the rows that an uninterrupted one would have written.

        Take it between the optimizer's step and the next forward. The pending row is in it, unless it was flushed.
        """
        self._settle()
        pending = self._row and self._row.state_dict()
        return {"t": self.t, "pending": pending, "reference": None, **self._instruments.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.t = state["t"]
        self._row = RowRecord.from_state(state["pending"]) if state["pending"] else None
        self._instruments.load_state_dict(state)
        self._begin_row()

    @contextmanager
    def recording(self) -> Iterator[Template]:
        """Around the device work of an update - forward, backward, ``step``, optimizer, :meth:`Template.pack` - while
        it is recorded instead of done: ``step`` computes a row like the coming one and neither sends nor ends any."""
        self._check_open()
        watched, pending = self._watched, self._row
        self._row, self._template = None, Template(self.t, self._watched.parameters.device)
        watched.guard.recording = True
        try:
            self._begin_row()
            yield self._template
        finally:
            watched.guard.recording = False
            self._row, self._template = pending, None
            for board in watched.boards:
                board.clear()
            self._begin_row()

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
            row = RowRecord(self.t, self._watched.parameters.device)
            with torch.no_grad():
                self._instruments.call("host", row)
                run()
                row.adopt(template)
                self._instruments.call("host_after_update", row)
                row.ship()
            self._send()
            self._hold(row)
            self.t += 1
            self._begin_row()
        return RowMetrics(row)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_fork():
            return
        try:
            if kind is not None:
                self.salvage()
            elif self._state == "open":
                self.finish()
        finally:
            self.close()

    def _declare(self) -> None:
        self.sink.open(list(self.tables.values()))

    def _note_audit(self) -> None:
        """Called when what was checked of the run has changed; a subclass records it at once."""

    def _begin_row(self) -> None:
        self._instruments.call("before_forward", self.t)

    def _next_row(self) -> RowRecord:
        """The row that this ``step`` fills; the one before is sent, unless the update is recorded."""
        if self._template is not None:
            return self._template
        self._send()
        return RowRecord(self.t, self._watched.parameters.device, self._watched.ranks)

    def _hold(self, row: RowRecord) -> None:
        """This row is sent next; one that is owed numbers waits for the steps of all optimizers."""
        self._row = row
        self._steps = set(range(len(self._watched.optimizers))) if row.state is State.OWED else set()

    def _stepped(self, number: int) -> None:
        """An optimizer has stepped."""
        with self._timed():
            self._instruments.call("after_step", number)
            self._steps.discard(number)
            if not self._steps:
                self._complete()

    def _complete(self) -> None:
        """Adds to the row what the update did. One that never came left the parameters as they were: numbers of 0."""
        row = self._row
        if row is not None and row.state is State.OWED:
            with torch.no_grad():
                self._instruments.call("after_update", row)
                if row.is_live:
                    self._instruments.call("host_after_update", row)
            row.ship()

    def _settle(self) -> None:
        """The row as far as it is known: a scaler skipped the update, or the interruption came before it."""
        if self._watched.scaler is not None:
            self._complete()
        elif self._row is not None and self._row.state is State.OWED:
            self._instruments.call("skipped", self._row)
            self._row.ship()
            self._row.state = State.SHIPPED

    def _begin_early(self) -> None:
        """Give the known numbers of the row to a sink that takes them (``begin``): if reading them waits for nothing,
        and on a GPU too once a number was not finite, since each row may then be the last."""
        begin = getattr(self.sink, "begin", None)
        if self._row is None or begin is None or self._row.waits or not self._reads_at_once():
            return
        metrics, tables = self._row.read()
        self._instruments.call("row_begun", self._row, metrics)
        begin(self._row.step, metrics, tables)

    def _reads_at_once(self) -> bool:
        return self._watched.parameters.device.type == "cpu" or self.incident is not None

    def _send(self) -> None:
        """The row to the sink, which waits for the device."""
        self._complete()
        if self._row is None:
            return
        row, self._row = self._row, None
        row.ship()
        metrics, tables = row.read()
        for board in self._watched.boards:
            if board.table.name in row.ended:
                self._end(board)
        self._watched.guard.trying = False
        self._instruments.call("row_read", row)
        self.last = (row.step, metrics, tables)
        self._watched.sink.append(*self.last)
        self._instruments.call("row_sent", row)

    def _end(self, board: Board) -> None:
        """A table ended on another rank, or on all, which found that they do not agree."""
        ranks, guard = self._watched.ranks, self._watched.guard
        if not board.ended and (why := ranks.apart.get(board.table.name)):
            guard.disagree([board], why, ranks.rank == 0)
        else:
            guard.elsewhere(board)

    def _is_fork(self) -> bool:
        """Return True in a forked child of the process that watches: the record is the parent's to end."""
        return os.getpid() != self._process

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began, apart = time.perf_counter(), self.cost.reference + self.cost.curvature
        yield
        self._step_seconds += time.perf_counter() - began - (self.cost.reference + self.cost.curvature - apart)

    def _check_open(self) -> None:
        if self._state != "open":
            raise UsageError(f"this watcher is {self._state}: make a new one to record more.")


def _recording(watched: Watched) -> Sequence[Instrument]:
    """Return the instruments of the ledger and of the flight recorder, as ``record=`` asks for them."""
    record = watched.options.record
    if record is None:
        kept = bool(watched.optimizers) and watched.options.recorder is None and hasattr(watched.sink, "ledger")
        return (UpdateLedger(digests=0, sparse=True),) if kept else ()
    if isinstance(record, str):
        return (UpdateLedger(),) if record == "ledger" else ()
    return record.instruments()
