"""The watcher: hooks fill accumulators, one read by the host per row sends them to a sink, around any training loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from .instruments.given_optimizers import GivenOptimizers
from .instruments.instrument import Instrument, Instruments
from .instruments.ledger import UpdateLedger
from .instruments.leftover import LeftoverGradients
from .instruments.loop_checks import LoopChecks
from .instruments.neutrality import NeutralityRecord
from .instruments.parameter_tables import ParameterTables
from .instruments.reference_rows import ReferenceRows
from .instruments.step_order import StepOrder
from .instruments.stepping import after_step
from .instruments.taps import Taps
from .instruments.training_pass import TrainingRows
from .parameters.pieces import Parameters
from .places.sites import Sites

B = TypeVar("B")


@dataclass
class Cost:
    """The wall seconds that watching took so far: in hooks and in ``step``, and separately in reference passes and in
    passes for curvature."""

    hooks: float = 0.0
    step: float = 0.0
    reference: float = 0.0
    curvature: float = 0.0


class Watcher:
    """A recorder of probes: it reads ``model`` and writes one row per optimizer update to ``sink``. Use it as a context
    manager.

    The order in each update is: forward, backward, (``scaler.unscale_``), ``watcher.step(loss=loss)``, (clipping), the
    optimizer's step. Row t describes theta_t. Numbers about the update theta_t -> theta_{t+1} also stand in row t, so
    the complete row reaches the sink at the next ``step``, ``flush`` or ``finish``. On a CPU without ranks, the numbers
    that are already known reach the sink when ``step`` returns. On a GPU this would mean waiting for the device, so it
    happens only after a number that was not finite.

    Leaving the ``with`` block finishes the record (after an error: flushes it) and closes the watcher. If a probe
    raises an error, its table ends; the training goes on.

    - ``optimizer``: one optimizer, or several that share the model's parameters. The row waits for the steps of all.
    - ``scaler``: the loop's GradScaler. Without it, a scaled loss is recorded with its scale.
    - ``probes``: "default", "all", "none", "standard", names, or "-name" to leave one out. "all" leaves out probes that
      must be named: fingerprints, histograms, ``attention_sink`` and ``gradient_alignment``. "standard" is the cheapest
      group: norms of each layer's output and of its gradient, of each norm's input, and of the gradients of each
      sub-layer's parameters.
    - ``every``, ``update_every``: the rows of the training pass and of the reference pass. A number n means every n-th
      row. "log" means every row at first, and later rows at least 10 % apart (reference pass: 20 %).
    - ``mask``: True on real tokens. It is a tensor, a dict of tensors by stack name, or a function that returns one of
      these. The function is called once per forward pass, so once per micro-batch. A stack without a mask counts all
      tokens. ``reference_mask``: the same for the batch that the function ``reference`` runs; without it, ``mask`` is
      asked there too.
    - ``batch_first``: True if samples lie along the first dimension of what a layer returns (samples, tokens, width),
      False if they lie along the second. None: the first is taken, except in layers with ``nn.MultiheadAttention`` that
      say ``batch_first=False``. The probes ``rank``, ``fingerprint`` and those of attention need to know it. With
      False, a mask is (samples, tokens), as in a batch; with None or True it has the layout of the hidden states.
    - ``reference``: a function that runs the model on a fixed batch. If it returns a dict, the numbers in the dict
      become metrics of the row. "first batch": the arguments of the model's first training forward are copied and used.
    - ``curvature_loss``: a function that returns the loss of a fixed batch, for the probes of curvature: one number, or
      one per token or sentence. If ``reference`` returns such a loss, as a number or as ``.loss``, it is used too.
    - ``curvature_every``: the rows of the probes of curvature: a number, "log" (20 % apart), or "auto" (every 200th row
      up to 20,000, then 1 % apart).
    - ``curvature_batch``: "fixed", or "update" for the batch from which each row's update is made (the definition of
      critical sharpness). With "update" the loss is the model's output for that batch, or the result of
      ``curvature_loss``, which is called between the optimizer's step and the next forward.
    - ``measured``: a function of the row; where it returns True, ``reference`` runs for its own numbers alone, in
      addition to the rows of ``update_every``.
    - ``schedule``: the schedule of alpha. With it, ``model_update`` separates the effect of alpha from that of the
      parameters.
    - ``output_site``: the module whose output is F.
    - ``sites``: a regular expression that narrows the places of all probes, or a dict of them by probe. By kind
      ("layers", "norms", "activations", "outputs"), a regular expression that must match the full names of modules;
      these modules then replace the ones that were found. :func:`stabilitylab.sites` shows the places.
    - ``recorder``: a device recorder. The held-out pass is recorded with it and replayed. Activations are then kept,
      and many are measured at a time; a model that writes to them in place would spoil the numbers.
    - ``parallel``: "auto" finds DDP, FSDP2 and tensor parallelism. "later": ``parallelize_module`` comes after this
      call, before the first forward. "ddp": gradients are averaged over all ranks by something that cannot be found
      here. "off": the model of this rank is its own. A schedule of ``torch.distributed.pipelining``: ``model`` is its
      stage on this rank.
    - ``share``: for code that splits parameters by hand: a function of a parameter's name and the parameter. It returns
      the process group over which the parameter is split, or None if all ranks hold it.
    - ``restore``: True for a model whose forward changes its state in eval mode too (weights rescaled in place, a
      queue, a momentum encoder). Each reference or curvature pass then keeps a copy of the state and restores it.
      Without ``restore``, the first such pass keeps a copy, and if the pass changes the model, these passes end for
      good.
    - ``stateless``: True for a model whose passes in eval mode are known to write to nothing. The first reference pass
      and the first curvature pass are compared with a copy, and later ones, which run the same code, are not looked at:
      in a deep narrow model the comparison takes as long as the pass.
    - ``record``: by default, with ``optimizer=``, a sparse ledger stores the changes of settings, optimizer state and
      flags (not under CUDA graphs), so that ``diagnose`` can name them. "ledger" also stores all rates and digests.
      "off" stores nothing. A :class:`stabilitylab.Recorder` also keeps snapshots and batches, so that ``explain`` can
      replay them.
    - ``strict``: True to raise the errors of probes, for tests of probes.
    - ``tapped``: the places of :func:`stabilitylab.tap` that an earlier attempt of the run knew, from its
      ``state_dict``.

    Under torch.compile the hooks become part of the compiled code. They add no graph and no graph break.

    On several ranks, every rank makes its watcher and calls ``step``; rank 0 alone writes. The tables are those of one
    process on the batches of all ranks, where E is the mean of the ranks' losses. Numbers that are given to ``step`` or
    returned by ``reference`` are averaged over ranks. Numbers that are given to ``note`` are those of rank 0. The
    metrics of a row can be read after the optimizer's step. All ranks must call ``flush``, ``finish`` and
    ``state_dict`` (which has this rank's shards) together.
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
        with ExitStack() as hooks:  # of a watcher that cannot begin, none is left
            self._watched = watched = Watched(model, sink, options, self._declare, Audit(changed=self._note_audit))
            hooks.callback(watched.close)
            self._training = training = TrainingRows()
            self._checks = checks = LoopChecks(training)
            self._reference = reference = None if watched.reference is None else ReferenceRows(training, checks)
            self._curvature = CurvatureRows(training, reference)
            self._forensics = Forensics(training, reference, checks)
            given = GivenOptimizers(checks)
            listed: list[Instrument] = [
                Agreement(),
                ParameterTables(checks),
                training,
                checks,
                StepOrder(training, checks),
                LeftoverGradients(training, checks),
                given,
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
                    each.training, each.given = training, given
            self._instruments = Instruments(listed, watched)
            hooks.callback(self._instruments.close)
            watched.await_layout()
            self.sink: Sink = watched.sink  # the caller's, or on other ranks than the first, nothing
            self.parameters: Parameters = watched.parameters
            self.unseen: Mapping[str, list[str]] = self._checks.unseen  # table -> places that no call reached
            self.loop_warnings: Sequence[str] = self._checks.warnings
            self.ended: Mapping[str, str] = watched.guard.ended  # table -> why it ended before the run
            self.audit: dict[str, Any] = watched.audit.facts  # what was checked of the model and the loop
            self.not_neutral: Sequence[str] = watched.audit.not_neutral  # what watching changed and could not undo
            for number, optimizer in enumerate(watched.optimizers):
                hooks.callback(after_step(optimizer, lambda *_, number=number: self._stepped(number)).remove)
            self._declare()
            self._begin_row()
            self._hooks = hooks.pop_all()

    @property
    def sites(self) -> Sites:
        """The places that the probes read. Places that the model shows by ``tap`` are added in its first pass."""
        return self._watched.sites

    @property
    def dropped(self) -> Sequence[tuple[str, str]]:
        """The probes that are not recorded: (probe, reason)."""
        return self._watched.dropped

    @property
    def tables(self) -> dict[str, Table]:
        """The definitions of the recorded tables, by name."""
        return self._watched.tables

    @property
    def total_every_step(self) -> bool:
        """True if each row has the norm of the whole gradient, whether the row is probed or not."""
        return self._watched.total

    @total_every_step.setter
    def total_every_step(self, wanted: bool) -> None:
        self._watched.total = wanted

    @property
    def incident(self) -> Incident | None:
        """The first place that broke, if a recorded number was NaN or inf. It is known once the row has reached the
        sink."""
        return self._forensics.incident

    @property
    def cost(self) -> Cost:
        apart = (self._reference.seconds if self._reference else 0.0, self._curvature.seconds)
        return Cost(self._training.passes.seconds, self._step_seconds, *apart)

    def due(self, row: int) -> bool:
        """Return True if the training pass of this row is probed."""
        return self._watched.due(row)

    def due_reference(self, row: int) -> bool:
        """Return True if the reference pass is recorded at this row."""
        return self._reference is not None and self._reference.due(row)

    def step(self, loss: torch.Tensor | float | None = None, **metrics: torch.Tensor | float | None) -> Metrics:
        """End row t. Call it after backward (and ``unscale_``), before clipping and the optimizer's step.

        Returns the row's metrics as a mapping, which reads them from the device at the first access. After the
        optimizer's step an access needs no second copy from the device. If you never access the mapping, the host never
        waits for it.
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
        """Show the batch of the next forward pass to a flight recorder, and return the batch.

        With ``record=stabilitylab.Recorder(...)``, call it once for each micro-batch: before its forward pass, and
        after everything that ends the previous update (optimizer, scheduler, ``zero_grad``). Without a recorder it does
        nothing.
        """
        self._check_open()
        self._instruments.call("batch", self.t, batch)
        return batch

    def batches(self, loader: Iterable[B]) -> Iterator[B]:
        """Yield the batches of ``loader``, after :meth:`batch` has shown each of them to a flight recorder."""
        for batch in loader:
            yield self.batch(batch)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Ignore all forwards and backwards inside this block, since they are not part of the update.

        Put ``with watcher.off():`` around anything else that the loop does with the model, such as running a
        discriminator for its generator, or computing the gradient of an adversarial example. Gradients that the block
        leaves on parameters stay there; the loop has to handle them.
        """
        passes, before = self._training.passes, self._training.passes.paused
        passes.paused = True
        try:
            yield
        finally:
            passes.paused = before

    def note(self, **metrics: torch.Tensor | float | None) -> None:
        """Add metrics to the row that the last ``step`` ended, such as the time that the rest of the update took."""
        if self._row is None:
            raise UsageError("there is no pending row to add to: call note() after step(), before the next step().")
        for name, value in metrics.items():
            self._row.metric(name, value, own=True)

    def flush(self) -> None:
        """Send the pending row to the sink now. Call it at an interruption, between the optimizer's step and the next
        forward."""
        self._settle()
        self._send()

    def salvage(self) -> None:
        """Send the pending row after an error, unless it needs other ranks, which may be elsewhere now."""
        if self._row is not None and self._row.waits:
            self._row = None
            self._instruments.call("abort")
        self._settle(failed=True)
        self._send()

    def finish(self, **metrics: torch.Tensor | float | None) -> Metrics:
        """Send the pending row, then row N, "after training": the reference pass alone, and ``metrics`` that were
        measured by then. Returns the metrics of row N; {} without a reference pass and without ``metrics``, since then
        there is no row N.

        A run of :func:`stabilitylab.watch` is then *finished*. The end of a ``with`` block calls ``finish`` and
        :meth:`close`; without such a block, call both.
        """
        self._check_open()
        self._send()
        self._state = "finished"
        row = RowRecord(self.t, self.parameters.device, self._watched.ranks)
        for name, value in metrics.items():
            row.metric(name, value)
        with torch.no_grad():
            self._instruments.call("finish", row)
        if self._reference is None and not metrics:
            return {}
        self._hold(row)
        self._send()
        return self.last[1] if self.last else {}

    def close(self) -> None:
        """Remove every hook and close the sink. Closing twice is allowed. In a forked child this does nothing.

        A run of :func:`stabilitylab.watch` that is closed without :meth:`finish` keeps the status *running*.
        """
        if self._state != "closed" and not self._is_fork():
            self._state = "closed"
            self._hooks.close()
            self.sink.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which a resumed run writes the same rows as an uninterrupted one.

        Call it between the optimizer's step and the next forward. The state contains the pending row, unless it was
        flushed.
        """
        self._settle()
        pending = self._row and self._row.state_dict()
        return {"t": self.t, "pending": pending, "reference": None, **self._instruments.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.t = state["t"]
        self._row = RowRecord.from_state(state["pending"]) if state["pending"] else None
        self._instruments.load_state_dict(state)
        self._begin_row()

    def begin_at(self, t: int) -> None:
        """Begin the record at row t, for a model that has had t updates without a watcher. Call it before the first
        forward."""
        self.t = t
        self._begin_row()

    @contextmanager
    def recording(self) -> Iterator[Template]:
        """Record the device work of an update inside this context instead of doing it: forward, backward, ``step``,
        optimizer, :meth:`Template.pack`. ``step`` then computes a row like the coming one; it neither sends nor ends a
        row."""
        self._check_open()
        watched, pending = self._watched, self._row
        self._row, self._template = None, Template(self.t, self.parameters.device)
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
        """Add up the numbers of a micro-batch that is recorded separately, from the next micro-batches (``more``) and
        from ``step``, which otherwise add them up."""
        self._training.end_pass(more)

    def replay(self, template: Template, run: Callable[[], None]) -> Metrics:
        """Make row t by calling ``run``, which replays the update that was recorded with ``template``. This replaces
        ``step`` and the whole update around it. Returns the metrics of the row.

        The reference pass comes first, since the optimizer's step is part of the replay. The previous row is read last,
        while the device is busy with this one. Add metrics that the host knows with :meth:`note`.
        """
        self._check_open()
        with self._timed():
            row = RowRecord(self.t, self.parameters.device)
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
        """Do nothing when the audit has changed. A subclass records the change at once."""

    def _begin_row(self) -> None:
        self._instruments.call("before_forward", self.t)

    def _next_row(self) -> RowRecord:
        """Return the row that this ``step`` fills. The row before is sent, unless the update is recorded."""
        if self._template is not None:
            return self._template
        self._send()
        return RowRecord(self.t, self.parameters.device, self._watched.ranks)

    def _hold(self, row: RowRecord) -> None:
        """Hold the row that is sent next. If numbers are still owed to it, it waits for the steps of all optimizers."""
        self._row = row
        self._steps = set(range(len(self._watched.optimizers))) if row.state is State.OWED else set()

    def _stepped(self, number: int) -> None:
        """Note that an optimizer has stepped."""
        with self._timed():
            self._instruments.call("after_step", number)
            self._steps.discard(number)
            if not self._steps:
                self._complete()

    def _complete(self) -> None:
        """Add to the row what the update did. An update that never came left the parameters as they were: numbers of
        0."""
        row = self._row
        if row is not None and row.state is State.OWED:
            with torch.no_grad():
                self._instruments.call("after_update", row)
                if row.is_live:
                    self._instruments.call("host_after_update", row)
            row.ship()

    def _settle(self, failed: bool = False) -> None:
        """Close the row as far as it is known: a scaler skipped the update, only some of the optimizers step in it, or
        the interruption came before it. ``failed``: an error may have come between the steps of two optimizers."""
        has_begun = len(self._steps) < len(self._watched.optimizers)
        if self._watched.scaler is not None or (has_begun and not failed):
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
        return self.parameters.device.type == "cpu" or self.incident is not None

    def _send(self) -> None:
        """Send the row to the sink; the call waits for the device."""
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
        """End a table that ended on another rank, or on all ranks, which found that they do not agree."""
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
