"""The function ``stabilitylab.watch``, which writes the probes of any model in any loop to a run directory."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

import torch
from torch import nn

from .alarm import Alarm, Alert
from .alarm.sink import AlarmSink
from .errors import UsageError
from .probes import (
    AlphaSchedule,
    Cadence,
    CurvatureBatch,
    CurvatureCadence,
    Mask,
    Names,
    Optimizers,
    Record,
    Sites,
    Watcher,
    WatchOptions,
    find_sites,
    split_sites,
)
from .probes.numerics import process_facts
from .probes.parameters.ranks import Parallel, is_first_rank, on_first_rank
from .probes.parameters.sharing import Share
from .probes.parameters.untrained import untrained
from .probes.places.naming import unwrapped
from .schema import Sink
from .store import AbsentRun, RunWriter
from .store.sparing import SparingWriter

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

log = logging.getLogger("stabilitylab")
T = TypeVar("T")


class WatchKeywords(TypedDict, total=False):
    """The options of :func:`watch` that a callback of a trainer also takes. The trainer gives the other options: the
    optimizer, the scaler, the layout of the model on ranks, and the state to resume from."""

    probes: Names
    every: Cadence
    update_every: Cadence | None
    reference_mask: Mask | Callable[[], Mask | None] | None
    batch_first: bool | None
    schedule: AlphaSchedule | None
    output_site: str | None
    sites: str | Mapping[str, str] | None
    config: Mapping[str, Any] | None
    share: Share | None
    tracker: str | GeneralTracker | None
    curvature_every: CurvatureCadence
    curvature_loss: Callable[[], torch.Tensor] | None
    curvature_batch: CurvatureBatch
    alarm: bool | str | Path | Alarm
    on_alarm: Callable[[Alert], object] | None
    restore: bool
    record: Record
    strict: bool


class RunWatcher(Watcher):
    """A :class:`~stabilitylab.probes.Watcher` with a run directory of its own, ``run.path``. It also records how the
    run ended."""

    def __init__(
        self, model: nn.Module, run: RunWriter | AbsentRun, options: WatchOptions, sink: Sink | None = None
    ) -> None:
        self.run = run
        self._is_new = True  # no row yet, in this attempt or an earlier one
        super().__init__(model, sink or run, **options.keywords())
        if self.dropped and is_first_rank():
            log.warning("%s: not recorded: %s.", run.path, "; ".join(f"{name} {why}" for name, why in self.dropped))

    @property
    def alarm(self) -> Alarm | None:
        """The alarm that reads each row, with its alerts so far (``.alerts``). None without an alarm, and on ranks
        other than the first."""
        return self.sink.alarm if isinstance(self.sink, AlarmSink) else None

    def state_dict(self) -> dict[str, Any]:
        own = {"alarm": self.sink.state_dict()} if isinstance(self.sink, AlarmSink) else {}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._is_new = self.t == 0
        if isinstance(self.sink, AlarmSink) and "alarm" in state:
            self.sink.load_state_dict(state["alarm"])

    def _declare(self) -> None:
        super()._declare()
        self.run.record(probes_dropped=dict(self.dropped))

    def step(
        self, loss: torch.Tensor | float | None = None, **metrics: torch.Tensor | float | None
    ) -> Mapping[str, float | None]:
        row = super().step(loss, **metrics)
        if self._is_new and self._watched.stages is None:  # a stage knows only its own places
            self.run.record(places_untrained=untrained(self.parameters), audit=dict(self.audit), **self._classes())
        self._is_new = False
        return row

    step.__doc__ = Watcher.step.__doc__

    def _classes(self) -> dict[str, int]:
        """Return the number of classes, if the model has one projection onto its vocabulary, all of it on this rank;
        else {}."""
        heads = [site.module for site in self.sites.logits]
        alone = self._watched.ranks.alone and len(heads) == 1
        return {"classes": heads[0].out_features} if alone and isinstance(heads[0], nn.Linear) else {}

    def finish(self, **metrics: torch.Tensor | float | None) -> Mapping[str, float | None]:
        row = super().finish(**metrics)
        self._record_noticed()
        self.run.set_status("finished", self.t)
        return row

    finish.__doc__ = Watcher.finish.__doc__

    def checkpoint(self) -> dict[str, Any]:
        """Return the state with which ``watch(..., resume=...)`` continues here.

        Save it with the model, between the optimizer's step and the next forward pass. Each of several ranks saves its
        own state; under DDP the state of rank 0 serves all ranks.
        """
        self.flush()
        return {"run": self.run.run_id, "part": self.run.seal(), "watcher": self.state_dict()}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_fork():  # the parent records how the run ends
            return
        try:
            if kind is not None:
                self.salvage()
            elif self._state == "open":
                super().finish()  # the status comes below
        except BaseException as raised:
            kind, error = type(raised), raised
            raise
        finally:
            self._conclude(kind, error)

    def _note_audit(self) -> None:
        self.run.record(audit=dict(self.audit), not_neutral=[*self.not_neutral])

    def _conclude(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        """Record everything noticed up to the last row, and how the run ended."""
        self._record_noticed()
        if kind is None:
            self.run.set_status("finished", self.t)
        else:
            # a generator around the loop that is closed has not failed
            interrupted = issubclass(kind, (KeyboardInterrupt, GeneratorExit))
            self.run.set_status(
                "interrupted" if interrupted else "failed",
                self.t,
                f"{kind.__name__}: {error}" if str(error) else kind.__name__,
            )
        self.close()

    def _record_noticed(self) -> None:
        noticed = {
            "places_unseen": dict(self.unseen),
            "loop_warnings": [*self.loop_warnings],
            "tables_ended": dict(self.ended),
            "audit": dict(self.audit),
            "not_neutral": [*self.not_neutral],
        }
        known = {"places_unseen"} if self._checks.has_looked else set[str]()  # an earlier attempt may have named others
        if facts := {name: found for name, found in noticed.items() if found or name in known}:
            self.run.record(**facts)


def sites(model: nn.Module, *, output_site: str | None = None, sites: Mapping[str, str] | None = None) -> Sites:
    """Return the places of ``model`` that probes read. They are found by structure; ``print`` shows them as a table.

    ``output_site`` and ``sites`` are those of :func:`watch`: the result has the places that ``watch`` would read.
    Raises UsageError for a name that matches no module.

    >>> print(sites(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3)))  # doctest: +SKIP
    """
    return find_sites(model, output_site, split_sites(sites)[0])


def watch(
    model: nn.Module,
    *,
    out: str | Path,
    probes: Names = "default",
    every: Cadence = "log",
    update_every: Cadence | None = None,
    optimizer: Optimizers = None,
    scaler: torch.amp.GradScaler | None = None,
    mask: Mask | Callable[[], Mask | None] | None = None,
    reference_mask: Mask | Callable[[], Mask | None] | None = None,
    batch_first: bool | None = None,
    schedule: AlphaSchedule | None = None,
    reference: Callable[[], Any] | Literal["first batch"] | None = "first batch",
    output_site: str | None = None,
    sites: str | Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    parallel: Parallel | PipelineScheduleSingle = "auto",
    share: Share | None = None,
    tracker: str | GeneralTracker | None = None,
    resume: Mapping[str, Any] | None = None,
    curvature_every: CurvatureCadence = "auto",
    curvature_loss: Callable[[], torch.Tensor] | None = None,
    curvature_batch: CurvatureBatch = "fixed",
    alarm: bool | str | Path | Alarm = False,
    on_alarm: Callable[[Alert], object] | None = None,
    restore: bool = False,
    record: Record = None,
    strict: bool = False,
) -> RunWatcher:
    """Watch ``model`` and record it in the new run directory ``out``. The result is a context manager for the training
    loop.

    Call ``.step(loss=loss)`` once per update: after backward (and ``scaler.unscale_``), before clipping and
    ``optimizer.step``. Without ``with``, call ``.finish()`` after the last update, and then ``.close()``.

    - ``every``: the distance between rows of the training pass, a number of updates or "log". ``update_every``: the
      same for the reference pass; by default that of ``every``.
    - ``reference``: a function that runs the model on a fixed batch. By default the first training batch is kept as the
      reference, with ``update_every="log"`` unless ``update_every`` is given. None: no reference pass.
    - ``config``: any facts that you want to find again in the run.
    - ``tracker``: "tensorboard", "wandb", "mlflow", ... or a tracker of Accelerate. It also gets aggregates of each row
      (:mod:`stabilitylab.trackers`).
    - ``alarm``: True, the name of a set of rules ("loud"), the file of an alarm that your own healthy runs
      calibrated ("mine.json"), or a :class:`stabilitylab.alarm.Alarm`. The alarm checks each row for signs of a
      failure. Its alerts go to the log, to run.json, to the tracker and to ``on_alarm`` (docs/alarm.md has its error
      rates).
    - ``resume``: the result of ``.checkpoint()``. The run in ``out`` goes on from there.

    The other arguments are those of :class:`stabilitylab.probes.Watcher`. Raises UsageError if ``out`` exists or a
    named probe finds no site.

    Under torchrun, call it on every rank, with the model of that rank. Rank 0 creates and writes ``out``.

    >>> with watch(model, out="runs/mine", every=10, reference=lambda: model(fixed)) as w:  # doctest: +SKIP
    ...     for batch in loader:
    ...         loss = model(**batch).loss
    ...         loss.backward()
    ...         w.step(loss=loss)
    ...         optimizer.step(), optimizer.zero_grad()
    """
    manifest = {
        "kind": "watched",
        "label": type(unwrapped(model)).__name__,
        "config": dict(config or {}),
        **process_facts(next((parameter.device for parameter in model.parameters()), torch.device("cpu"))),
        **({} if curvature_batch == "fixed" else {"curvature_batch": curvature_batch}),
        **({} if batch_first is None else {"batch_first": batch_first}),
    }

    def create() -> RunWriter:
        if resume is not None:
            return SparingWriter.resume(out, resume["part"], manifest=manifest, run_id=resume.get("run", ""))
        return SparingWriter.create(out, manifest)

    def with_tracker() -> Sink | None:
        if tracker is None or isinstance(run, AbsentRun):
            return None
        from .trackers import Tee, TrackerSink  # Accelerate, an extra

        return Tee(run, TrackerSink.of(tracker, run.path, manifest["config"]))

    def with_alarm() -> Sink | None:
        sink = with_tracker()
        if isinstance(run, AbsentRun) or own_alarm is None:
            return sink
        for line in () if own_alarm.calibration is None else own_alarm.calibration.other_settings(manifest):
            log.warning("%s: alarm: %s. Healthy runs of another recipe calibrated it.", run.path, line)
        return AlarmSink(sink or run, own_alarm, run.record, getattr(sink, "alert", None))

    def on_first(make: Callable[[], T]) -> T | None:
        return make() if parallel == "off" else on_first_rank(make)

    own_alarm = on_first(lambda: _alarm(alarm, on_alarm))
    if not isinstance(out, (str, Path)):
        raise UsageError(f"out = {out!r} must be the path of a new run directory.")
    if update_every is None:
        update_every = "log" if reference == "first batch" else every
    existed = os.path.exists(out)
    run = on_first(create) or AbsentRun(out)
    try:
        options = WatchOptions(
            probes=probes,
            every=every,
            update_every=update_every,
            optimizer=optimizer,
            scaler=scaler,
            mask=mask,
            reference_mask=reference_mask,
            batch_first=batch_first,
            schedule=schedule,
            reference=reference,
            output_site=output_site,
            sites=sites,
            parallel=parallel,
            share=share,
            curvature_every=curvature_every,
            curvature_loss=curvature_loss,
            curvature_batch=curvature_batch,
            restore=restore,
            record=record,
            strict=strict,
            tapped=() if resume is None else resume["watcher"].get("tapped", ()),
        )
        watcher = RunWatcher(model, run, options, on_first(with_alarm))
        if resume is not None:
            watcher.load_state_dict(resume["watcher"])
        return watcher
    except BaseException:
        run.close()
        if isinstance(run, RunWriter) and not existed:  # else hidden files of the user may lie there
            shutil.rmtree(run.path)  # nothing was recorded, and the next try needs the name
        raise


def _alarm(given: object, on_alarm: Callable[[Alert], object] | None) -> Alarm | None:
    """Return the alarm for ``alarm=`` and ``on_alarm=``; None without one."""
    if isinstance(given, Alarm):
        if on_alarm is not None:
            raise UsageError("on_alarm belongs to the Alarm that alarm= gives: write alarm=Alarm(on_alarm=...).")
        return given
    if not isinstance(given, bool | str | Path):
        raise UsageError(
            "alarm= takes True, the name of a set of rules, the file of a calibrated alarm, or an Alarm, not "
            f"{type(given).__name__}: for rules of your own, write alarm=Alarm(rules)."
        )
    if not (given or on_alarm):
        return None
    return Alarm(None if isinstance(given, bool) else given or None, on_alarm=on_alarm)
