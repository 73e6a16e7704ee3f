"""The watcher: hooks -> accumulators -> one host read per row -> sink, around anybody's training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..schema import Cells, Sink, Table
from ._engine.cadence import Cadence
from ._engine.neutral_pass import Audit
from ._engine.options import WatchOptions, takes
from ._engine.row import Metrics, RowMetrics, RowRecord, State
from ._engine.watchable import check_unscaled
from ._engine.watched import Watched
from ._watching.assembly import Assembly
from ._watching.course import Course
from ._watching.delivery import Delivery
from .incidents.report import Incident
from .instruments.agreement import Agreement
from .instruments.curvature_rows import CurvatureRows
from .instruments.instrument import Instruments
from .instruments.leftover import LeftoverGradients
from .instruments.loop_checks import LoopChecks
from .instruments.parameter_tables import ParameterTables
from .instruments.reference_rows import ReferenceRows
from .instruments.training_pass import TrainingRows
from .parameters.pieces import Parameters
from .places.sites import Sites


class Watcher(Course):
    """Records probes of ``model`` into ``sink``, one row per optimizer update; use it as a context manager.

    Each update: forward, backward, (``scaler.unscale_``), ``watcher.step(loss=loss)``, (clipping), optimizer's step.
    Row t describes theta_t; numbers about theta_t -> theta_{t+1} stand in row t too, so a row reaches the sink whole at
    the next ``step``, ``flush`` or ``finish``. What is known of it does when ``step`` returns, on a CPU without ranks;
    a GPU would have to be waited for, which is done only once a number was not finite. Leaving the ``with`` block
    finishes (after an error: flushes) and closes. A probe that raises ends its table, never the training.

    - ``optimizer``: one, or several that share the model's parameters: the row waits for the steps of all.
    - ``scaler``: the loop's GradScaler; a scaled loss without it is recorded with its scale.
    - ``probes``: "default", "all", "none", names, "-name" to leave one out; "standard" is cheapest: norms of each
      layer's output and its gradient, of each norm's input, of each sub-layer's parameters' gradients.
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
        self._watched = watched = Watched(model, sink, options, self._declare, Audit(changed=self._note_audit))
        self._training = training = TrainingRows()
        self._checks = checks = LoopChecks(training)
        self._reference = reference = None if watched.reference is None else ReferenceRows(training, checks)
        self._curvature = curvature = CurvatureRows(reference)
        listed = [
            Agreement(),
            ParameterTables(),
            training,
            checks,
            LeftoverGradients(training, checks),
            *([reference] if reference is not None else []),
            curvature,
        ]
        self._instruments = Instruments(listed, watched)
        self._parts = Assembly(watched, training, reference)
        watched.await_layout()
        self.sink: Sink = watched.sink  # the caller's, or on other ranks than the first, nothing
        self.parameters: Parameters = watched.parameters
        self.unseen: Mapping[str, list[str]] = checks.unseen  # table -> places that no call came by
        self.loop_warnings: Sequence[str] = checks.warnings
        self.ended: Mapping[str, str] = watched.guard.ended  # table -> why it ended before the run
        self.audit: dict[str, Any] = watched.audit.facts  # what was checked of the model and the loop
        self.not_neutral: Sequence[str] = watched.audit.not_neutral  # what watching changed and could not undo
        self._delivery = Delivery(watched, self._instruments, checks, self._parts)
        super().__init__()
        self._handles = [
            optimizer.register_step_post_hook(lambda *_, number=number: self._updated(number))
            for number, optimizer in enumerate(watched.optimizers)
        ]
        self._declare()
        self._arm()

    @property
    def sites(self) -> Sites:
        """Where probes look; what the model shows by ``tap`` comes in its first pass."""
        return self._watched.sites

    @property
    def dropped(self) -> Sequence[tuple[str, str]]:
        """(probe, why it is not recorded)."""
        return self._watched.dropped

    @property
    def tables(self) -> dict[str, Table]:
        """What is recorded: the definitions of the tables, by name."""
        return self._watched.tables

    @property
    def total_every_step(self) -> bool:
        """True where each row has the norm of the whole gradient, probed or not."""
        return self._watched.total

    @total_every_step.setter
    def total_every_step(self, wanted: bool) -> None:
        self._watched.total = wanted

    @property
    def last(self) -> tuple[int, dict[str, float | None], dict[str, Cells]] | None:
        """The row that the sink got last: its number, metrics and tables."""
        return self._delivery.last

    @property
    def incident(self) -> Incident | None:
        """Where the run first broke, if a recorded number was NaN or inf; known once the row reached the sink."""
        return self._parts.forensics.incident

    def step(self, loss: torch.Tensor | float | None = None, **metrics: torch.Tensor | float | None) -> Metrics:
        """Ends row t: call it after backward (and unscale), before clipping and the optimizer's step.

        Returns the row's metrics as a mapping that reads them from the device when it is first looked into. Looking
        after the optimizer's step keeps the one copy a row; not looking at all keeps the host from waiting for it.
        """
        self._check_open()
        watched, template = self._watched, self._template
        watched.lay_out()
        for optimizer in watched.optimizers:
            check_unscaled(watched.scaler, optimizer)
        self._parts.settle_places(self.t)
        with self._timed():
            if template is None:
                self._delivery.send()
            row = template or RowRecord(self.t, watched.parameters.device, watched.ranks)
            if loss is not None or watched.stages is not None:  # of a pipeline, the last stage alone has one
                row.metric("loss", loss)
            for name, value in metrics.items():
                row.metric(name, value)
            with torch.no_grad():
                self._instruments.call("after_backward", row)
                if row.is_live:
                    self._instruments.call("host", row)
            self._delivery.hold(row)
            if template is None:
                if row.state is not State.OWED:
                    row.ship()
                self._delivery.begin()
                self.t += 1
                self._arm()
        return RowMetrics(row)

    def note(self, **metrics: torch.Tensor | float | None) -> None:
        """Adds metrics to the row that ``step`` ended last, such as what the rest of the update took."""
        if self._delivery.row is None:
            raise UsageError("there is no pending row to add to: call note() after step(), before the next.")
        for name, value in metrics.items():
            self._delivery.row.metric(name, value, own=True)

    def flush(self) -> None:
        """Sends the pending row now: for interruptions, between the optimizer's step and the next forward."""
        self._delivery.settle()
        self._delivery.send()

    def salvage(self) -> None:
        """After an error: the pending row, unless other ranks, which may be elsewhere now, are needed for it."""
        self._delivery.settle(alone=True)
        self._delivery.send()

    def finish(self, **metrics: torch.Tensor | float | None) -> Metrics:
        """Sends the pending row, then row N, "after training": the reference pass alone, and ``metrics`` that were
        measured by then. Returns row N's metrics."""
        self._check_open()
        self._delivery.send()
        self._state = "finished"
        row = RowRecord(self.t, self._watched.parameters.device, self._watched.ranks)
        for name, value in metrics.items():
            row.metric(name, value)
        with torch.no_grad():
            self._instruments.call("finish", row)
        if self._reference is None:
            return {}
        self._delivery.hold(row)
        self._delivery.send()
        return self.last[1] if self.last else {}

    def close(self) -> None:
        """Removes every hook and closes the sink; closing twice is fine. In a forked child it does nothing."""
        if self._state != "closed" and not self._is_fork():
            self._state = "closed"
            self._parts.forensics.finish()
            self._parts.close()
            self._instruments.close()
            self._watched.close()
            for handle in self._handles:
                handle.remove()
            self.sink.close()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to write the rows that an uninterrupted one would have written.

        Take it between the optimizer's step and the next forward. The pending row is in it, unless it was flushed.
        """
        self._delivery.settle()
        return {"t": self.t, **self._delivery.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.t = state["t"]
        self._delivery.load_state_dict(state)
        self._arm()

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

    def _updated(self, number: int) -> None:
        """An optimizer has stepped."""
        with self._timed():
            self._instruments.call("after_step", number)
            self._delivery.stepped(number)
