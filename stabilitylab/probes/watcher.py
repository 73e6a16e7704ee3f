"""The watcher: hooks -> accumulators -> one host read per row -> sink, around anybody's training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ..errors import UsageError
from ..schema import Cells, Sink, Table
from ._engine.board import Board, CleanPasses, allocate
from ._engine.cadence import Cadence, checked, is_due
from ._engine.curvature_rows import CurvatureCadence, CurvatureRows, checked_curvature
from ._engine.first_batch import FirstBatch
from ._engine.guard import Guard
from ._engine.hooks import RootHook
from ._engine.masks import Mask, Masks
from ._engine.notices import Notices
from ._engine.passes import TrainingPass
from ._engine.recorder import Recorder
from ._engine.reference_rows import AlphaSchedule, ReferenceRows
from ._engine.row import Metrics, RowMetrics, RowRecord, State, Template
from ._engine.selection import Names, boards_for, find_sites, split_sites
from ._engine.stages import agreed, check_for_stages
from ._engine.watchable import (
    Optimizers,
    check_arguments,
    check_current,
    check_unscaled,
    check_watchable,
    compiled_modules,
    listed,
)
from .base import Collected, ParameterProbe, When
from .incidents.report import Forensics, Incident
from .parameters.pieces import Parameters
from .parameters.pipeline import Pipeline
from .parameters.ranks import NullSink, Parallel, Ranks
from .parameters.spreading import spread_out

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle


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
      number, "log" or "auto" (see :func:`~._engine.curvature_rows.is_curved`).
    - ``measured``: rows at which ``reference`` is run for these numbers alone, beside those of ``update_every``.
    - ``schedule``: lets ``model_update`` separate what alpha did from what the parameters did.
    - ``output_site``: the module whose output is F. ``sites``: a regular expression that narrows the places of all
      probes, or a dict of them by probe; by kind ("layers", "norms", "activations", "outputs") one that full names of
      modules match, instead of what is found (:func:`stabilitylab.sites` shows it).
    - ``recorder``: the held-out pass is recorded with it and replayed; and activations wait until they are measured
      many at a time, which a model that writes to them in place would spoil.
    - ``parallel``: "auto" finds DDP, FSDP2 and tensor parallelism; "later", "ddp", "off" and a pipeline's schedule say
      what cannot be found, see :func:`~.parameters.spreading.spread_out`.
    - ``strict``: an error of a probe is raised, as tests of probes want it.

    Under torch.compile the hooks become part of the compiled code, without a graph or a break more.

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
        optimizer: Optimizers = None,
        scaler: torch.amp.GradScaler | None = None,
        mask: Mask | Callable[[], Mask | None] | None = None,
        schedule: AlphaSchedule | None = None,
        reference: Callable[[], Any] | Literal["first batch"] | None = None,
        output_site: str | None = None,
        sites: str | Mapping[str, str] | None = None,
        total_every_step: bool = True,
        parallel: Parallel | PipelineScheduleSingle = "auto",
        recorder: Recorder | None = None,
        measured: Callable[[int], bool] = lambda row: False,
        curvature_every: CurvatureCadence = "auto",
        curvature_loss: Callable[[], torch.Tensor] | None = None,
        strict: bool = False,
    ) -> None:
        self.every: Cadence = checked(every, "every")
        self.update_every: Cadence = checked(update_every, "update_every")
        curvature_every = checked_curvature(curvature_every)
        self.t = 0
        self.last: tuple[int, dict[str, float | None], dict[str, Cells]] | None = None  # the row that the sink got last
        check_watchable(model)
        check_arguments(optimizer, scaler, mask, reference)
        own, narrowed = split_sites(sites)
        self._ranks = ranks = spread_out(model, parallel)
        stages = ranks if isinstance(ranks, Pipeline) else None
        if stages is not None:
            check_for_stages(model, mask, reference)
            reference = None
        self.sites = find_sites(model, output_site, own)
        if ranks is not None:
            self.sites = ranks.own_sites(self.sites)
        self.sink = sink if ranks is None or ranks.rank == 0 else NullSink()
        self._optimizers, self._scaler = listed(optimizer), scaler
        self._total_every_step = total_every_step
        self._parameters = Parameters(model, self.sites.place, self._optimizers, ranks)
        given = {"optimizer": self._optimizers, "reference": reference, "loss": curvature_loss}
        lacks = [name for name, one in given.items() if not one]
        self._boards, self.dropped = boards_for(
            probes, self.sites, self._parameters, narrowed, lacks=lacks, elsewhere=stages is not None
        )
        if stages is not None:
            self._boards, self.dropped = agreed(self._boards, dict(self.dropped), probes, stages)
        self._probes_training = any(board.probe.on not in ("reference", "curvature") for board in self._boards)
        sums = allocate(self._boards, self._parameters.device)
        if ranks is not None:
            ranks.check_alike([board.table for board in self._boards])

        self._stages = stages
        stacks = [stack.name for stack in self.sites.stacks]
        scaled = scaler is not None and scaler.is_enabled()
        self._guard = Guard(strict)
        self._notices = Notices(model, ranks is None or ranks.rank == 0 or stages is not None, scaled)
        self._clean = CleanPasses(sums) if ranks is None else None
        self._training = TrainingPass(
            model,
            self._on("forward", "backward"),
            Masks(mask, stacks),
            self._guard,
            scaler,
            ranks,
            self._clean,
            recorder is not None,
        )
        if self._notices.compiled():
            self._training.stay()
        self._first = FirstBatch(model, self._training.masks) if isinstance(reference, str) else None
        runs = reference if self._first is None else self._first
        self._reference = None
        if callable(runs):
            self._reference = ReferenceRows(
                model,
                self._on("reference"),
                Masks(self._first.mask if self._first else mask, stacks),
                self._guard,
                runs,
                self.update_every,
                schedule,
                self._parameters,
                ranks,
                recorder,
                measured,
            )
        self._curvature = CurvatureRows(
            model, self._on("curvature"), self._guard, curvature_every, curvature_loss, runs, self._parameters, ranks
        )
        self._forensics = Forensics(self._boards, self._parameters, self._order, self.sink, scaled)
        self._row: RowRecord | None = None  # the row that waits for the optimizer's step, or for its copy to arrive
        self._template: Template | None = None  # while an update is recorded for replays
        self._steps: set[int] = set()  # optimizers whose step the row still waits for
        self._step_seconds = 0.0
        self._early = False  # an optimizer's step before the first row
        self._laid_out = False
        self._state = "open"
        self._handles: list[Any] = []
        if ranks is not None:
            if ranks.known:
                self._lay_out(ranks)
            else:
                self._handles.append(model.register_forward_pre_hook(RootHook(lambda *_: self._lay_out(ranks))))
        self._handles += [
            optimizer.register_step_post_hook(lambda *_, number=number: self._updated(number))
            for number, optimizer in enumerate(self._optimizers)
        ]
        self.sink.open(list(self.tables.values()))
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
        tables = [board.table for board in self._boards] if self._stages is None else self._stages.tables
        return {table.name: table for table in tables}

    @property
    def parameters(self) -> Parameters:
        return self._parameters

    @property
    def incident(self) -> Incident | None:
        """Where the run first broke, if a recorded number was NaN or inf; known once the row reached the sink."""
        return self._forensics.incident

    @property
    def unseen(self) -> Mapping[str, list[str]]:
        """Table -> places that no call of the first probed rows came by."""
        return self._notices.unseen

    @property
    def ended(self) -> Mapping[str, str]:
        """Table -> why it ended before the run: what its probe raised."""
        return self._guard.ended

    @property
    def cost(self) -> Cost:
        reference = self._reference.seconds if self._reference else 0.0
        return Cost(self._training.seconds, self._step_seconds, reference, self._curvature.seconds)

    def step(self, loss: torch.Tensor | float | None = None, **metrics: torch.Tensor | float | None) -> Metrics:
        """Ends row t: call it after backward (and unscale), before clipping and the optimizer's step.

        Returns the row's metrics as a mapping that reads them from the device when it is first looked into. Looking
        after the optimizer's step keeps the one copy a row; not looking at all keeps the host from waiting for it.
        """
        self._check_open()
        if self._ranks is not None:
            self._lay_out(self._ranks)
        for optimizer in self._optimizers:
            check_unscaled(self._scaler, optimizer)
        with self._timed():
            if self._template is None:
                self._send()
            row = self._template or RowRecord(self.t, self._parameters.device, self._ranks)
            for name, value in (() if loss is None and not self._stages else (("loss", loss),)) + tuple(
                metrics.items()
            ):
                row.metric(name, value)
            with torch.no_grad():
                self._probe(row)
                if self._reference is not None and self._template is None:
                    self._reference.fill(row)
                    if self._reference.due(self.t):
                        self._notices.look(self.t, "reference", self._on("reference"), self._reference.order)
            self._row = row
            if self._template is None:
                if row.state is not State.OWED:
                    row.ship()
                self._begin(row)
                self.t += 1
                self._arm()
        return RowMetrics(row)

    @contextmanager
    def recording(self) -> Iterator[Template]:
        """Around the device work of an update - forward, backward, ``step``, optimizer, :meth:`Template.pack` - while
        it is recorded instead of done: ``step`` computes a row like the coming one and neither sends nor ends any."""
        self._check_open()
        pending, self._row = self._row, None
        self._template = template = Template(self._parameters.device)
        self._guard.recording = True
        self._arm()
        try:
            yield template
        finally:
            self._guard.recording = False
            self._template, self._row = None, pending
            for board in self._boards:
                board.clear()
            self._arm()

    def replay(self, template: Template, run: Callable[[], None]) -> Metrics:
        """Row t by ``run``, which replays what was recorded with ``template``, in place of ``step`` and all around it.

        The reference pass comes first, since the optimizer's step is in the replay; the row before is read last, while
        the device is busy with this one. Metrics that the host knows are added by :meth:`note`.
        """
        self._check_open()
        with self._timed():
            row = RowRecord(self.t, self._parameters.device)
            with torch.no_grad():
                if self._reference is not None:
                    self._reference.fill(row)
                if curved := self._curvature.due(self.t):
                    self._curvature.start()
                run()
                row.adopt(template)
                if curved:
                    self._curvature.fill(row)
                row.ship()
            self._send()
            self._row = row
            self.t += 1
            self._arm()
        return RowMetrics(row)

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
        if self._row is not None and self._row.waits and self._ranks is not None:
            self._row = None
        self.flush()

    def finish(self, **metrics: torch.Tensor | float | None) -> Metrics:
        """Sends the pending row, then row N, "after training": the reference pass alone, and ``metrics`` that were
        measured by then. Returns row N's metrics."""
        self._check_open()
        self._send()
        self._state = "finished"
        if self._reference is not None:
            self._row = RowRecord(self.t, self._parameters.device, self._ranks)
            for name, value in metrics.items():
                self._row.metric(name, value)
            with torch.no_grad():
                self._reference.fill(self._row, last=True)
            self._send()
        return self.last[1] if self._reference is not None and self.last else {}

    def close(self) -> None:
        """Removes every hook and closes the sink; closing twice is fine."""
        if self._state != "closed":
            self._state = "closed"
            self._forensics.finish()
            self._training.close()
            if self._first is not None:
                self._first.close()
            if self._ranks is not None:
                self._ranks.close()
            for handle in self._handles:
                handle.remove()
            self.sink.close()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to write the rows that an uninterrupted one would have written.

        Take it between the optimizer's step and the next forward. The pending row is in it, unless it was flushed.
        """
        self._settle()
        return {
            "t": self.t,
            "pending": self._row and self._row.state_dict(),
            "reference": self._reference and self._reference.state_dict(),
            "curvature": self._curvature.state_dict(),
            "incident": None if self.incident is None else asdict(self.incident),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.t = state["t"]
        self._row = RowRecord.from_state(state["pending"]) if state["pending"] else None
        if (incident := state.get("incident")) is not None:
            self._forensics.incident = Incident(**incident)  # a run has one, the first
        if self._reference is not None and state["reference"] is not None:
            self._reference.load_state_dict(state["reference"])
        if (curvature := state.get("curvature")) is not None:
            self._curvature.load_state_dict(curvature)
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

    def _lay_out(self, ranks: Ranks) -> None:
        """Once the model lies on the ranks as it will: what each of them has of it."""
        if self._laid_out:
            return
        self._laid_out = True
        if ranks.found.tensor > 1 and compiled_modules(self._training.model):
            raise UsageError("a compiled tensor-parallel model cannot be watched: leave torch.compile out.")
        if ranks.late:
            check_current(self._optimizers, self._training.model)
            self._parameters.bind()
        shards = ranks.shards_of(self.sites)
        if shards is not None:
            for board in self._boards:
                board.probe.all_heads = shards.all_heads

    def _on(self, *when: When) -> list[Board]:
        return [board for board in self._boards if board.probe.on in when]

    def _arm(self) -> None:
        """Hooks for the coming row: there while it is probed, gone (and free of cost) while it is not."""
        self._training.start_row()
        if not self.due(self.t):
            self._training.detach()
        else:
            self._training.attach()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began, apart = time.perf_counter(), self.cost.reference + self.cost.curvature
        yield
        self._step_seconds += time.perf_counter() - began - (self.cost.reference + self.cost.curvature - apart)

    def _probe(self, row: RowRecord) -> None:
        """Fills the row with what the passes before left and what gradients tell now."""
        if self.due(self.t):
            passes = self._on("forward", "backward")
            self._training.end()
            self._notices.loop(self.t, self._training, self._parameters, self._early)
            if self._training.order:  # else there was no forward pass to be seen, which is said above
                self._notices.look(self.t, "training", passes, self._training.order)
            self._collect(row, "step")
            self._notices.apart(self.t, self._parameters)
            for board in passes:
                row.table(board)
            for name, clean in (self._clean.take(passes) if self._clean else {}).items():
                row.set_aside("clean", name, clean)
            for board in self._on("update"):
                row.state, self._steps = State.OWED, set(range(len(self._optimizers)))
                if not board.table.rows:
                    continue
                assert isinstance(board.probe, ParameterProbe)
                try:
                    board.probe.before(self._parameters)
                except Exception as error:
                    self._guard(board, error)
        elif is_due(self.t, self.every):
            self._notices.loop(self.t, self._training, self._parameters, self._early)
        if self._template is None and self._curvature.due(self.t):
            row.state, self._steps = State.OWED, set(range(len(self._optimizers)))
            self._curvature.start()
        if self._total_every_step and "grad_norm_total" not in row:
            row.metric("grad_norm_total", self._parameters.total_norm())

    def _collect(self, row: RowRecord, when: When) -> None:
        """Adds the tables of the probes of parameters."""
        for board in self._on(when):
            if not board.ended and board.table.rows:
                assert isinstance(board.probe, ParameterProbe)
                try:
                    found = Collected(*board.probe.collect(self._parameters))
                    board.collect(found)
                except Exception as error:
                    self._guard(board, error)
                else:
                    for name, value in found.metrics.items():
                        row.metric(name, value)
                    for name, squares in found.pieces.items() if self._ranks is None else ():
                        row.set_aside("pieces", name, squares)
            row.table(board)

    def _updated(self, number: int) -> None:
        """An optimizer has stepped."""
        self._early |= self._row is None and self.t == 0
        self._steps.discard(number)
        if not self._steps:
            with self._timed():
                self._after_update()

    def _after_update(self) -> None:
        if self._row is not None and self._row.state is State.OWED:
            with torch.no_grad():
                if self.due(self._row.step):
                    self._collect(self._row, "update")
                if self._template is None and self._curvature.due(self._row.step):
                    self._curvature.fill(self._row)
            self._row.ship()

    def _settle(self) -> None:
        """The pending row as far as it is known: a scaler skipped the update, or the interruption came before it."""
        if self._scaler is not None:
            self._after_update()
        elif self._row is not None and self._row.state is State.OWED:
            self._curvature.skip()
            self._row.ship()
            self._row.state = State.SHIPPED

    def _send(self) -> None:
        """The pending row to the sink. An update that never came left the parameters as they were: numbers of 0."""
        self._after_update()
        if self._row is not None:
            row, self._row = self._row, None
            row.ship()
            metrics, tables = row.read()
            for board in self._boards:
                if board.table.name in row.ended:
                    self._guard.elsewhere(board)
            self._guard.trying = False
            self.last = (row.step, metrics, tables)
            self.sink.append(*self.last)
            if self._stages is None:  # which have the places of their own
                self._forensics.examine(*self.last, row.broken, row.aside)

    def _begin(self, row: RowRecord) -> None:
        """What is known of the row to a sink that takes it (``begin``): where reading it waits for nothing, and on a
        GPU too once a number was not finite, since then each row may be the last."""
        begin = getattr(self.sink, "begin", None)
        if begin is None or row.waits or (self._parameters.device.type != "cpu" and self.incident is None):
            return
        begin(row.step, *row.read())

    def _check_open(self) -> None:
        if self._state != "open":
            raise UsageError(f"this watcher is {self._state}: make a new one to record more.")
