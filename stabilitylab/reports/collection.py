"""The runs of a report, among which figures and claims choose."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, overload

import numpy as np
import pyarrow as pa

from ..config import ModelConfig, complete, neutral_settings
from ..diagnose import DETECTORS, Diagnosis, Event, diagnose
from ..diagnose.attribution import Attribution
from ..diagnose.cause import Cause
from ..diagnose.detectors.rank import rank_collapse
from ..diagnose.evidence import Evidence
from ..errors import DamagedError, InputError, StabilityLabError, in_words
from ..labels import has_ramp, label_of, may_follow_ramp
from ..registry import BUILT_IN
from ..schema import Row
from ..store import Run, load_runs
from ..store.combine import By
from ..store.layout import BLACK_BOX, METRICS, flat, is_choice
from ..store.nonfinite import lost
from ..store.pieces import ReplacedError
from ..verdict import READS_NATS, Verdict
from . import style
from .kept import Kept, code, file_of, forget, keepable

T = TypeVar("T")
RENEWALS = 5  # times that one run is read again, since it was resumed while a figure was made of it
Frame = Any  # a pandas DataFrame; its bundled stubs call every selection a union of types

PILOT_SEEDS, PILOT_WIDTH = (0, 1, 2), 64  # the thresholds of claims were set next to these: no evidence for them
# Settings in which the runs of one comparison may differ: the label or seed stands for them, or they change nothing.
FREE = neutral_settings() | frozenset(
    [
        *("model.arch", "model.decoder_arch", "model.init", "model.alpha", "model.qk_gain", "model.v_gain"),
        *("model.growth", "model.T", "model.t0", "model.options", "train.seed", "data.seed", "train.on_divergence"),
        *("model.prores", "model.prores_T", "model.prores_t0", "model.prores_order"),
        *("train.cuda_graphs", "train.compile", "train.one_pass", "train.activation_checkpointing"),
        *("train.evaluations", "probes.names", "probes.every", "probes.update_every"),
    ]
)
LAYERS = ("model.encoder_layers", "model.decoder_layers")
for _kind in (Attribution, Cause, Diagnosis, Event, Row):
    keepable(_kind)


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens settings by section.key; an architecture's options are one of them, since the label tells them apart."""
    settings = complete(config)
    options = settings.get("model", {}).pop("options", None)
    return {**dict(flat(settings)), **({"model.options": options} if options else {})}


class Record:
    """One run, with the facts by which figures and claims choose it."""

    def __init__(self, run: Run, name: str) -> None:
        self.run, self.name = run, name
        self.kind: str = run.kind
        self.settings: Mapping[str, Any] = _settings(run.config) if self.kind != "watched" else {}
        self.label: str = label_of(run.manifest) or "unlabelled"
        seed = self.settings.get("train.seed")
        # An int, since figures count the seeds; None if no seed is known.
        self.seed: Any = None if seed is None else int(seed)
        self.layers: tuple[int, int] = (int(self.settings.get(LAYERS[0], 0)), int(self.settings.get(LAYERS[1], 0)))
        self.width: int = int(self.settings.get("model.d_model", 0))
        self.tables: frozenset[str] = frozenset(run.tables)
        self.error: Exception | None = None  # the error that prevented its diagnosis
        self.kept: Kept | None = None  # what lies beside the report
        self._remembered: dict[Hashable, Any] = {}

    def __repr__(self) -> str:
        return f"Record({self.name!r})"

    @cached_property
    def status(self) -> Any:
        return self.run.status

    @cached_property
    def judged(self) -> Verdict | None:
        """The verdict on a run that has ended; None if it has none."""
        return self.run.verdict

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """The diagnosis of the run. None for a one-step run, if nothing is recorded yet, and if an error prevented it
        (``undiagnosed``)."""
        if self.kind == "onestep":
            return None
        key = ("diagnosis", any((self.run.path / BLACK_BOX).glob("*.pt")))
        try:
            return self.remember(key, lambda: diagnose(self.run), keep=built_in())
        except DamagedError:
            raise
        except InputError:
            return None
        except Exception as error:  # an error of a detector: the run's tables can still be shown
            self.error = error
            return None

    @property
    def undiagnosed(self) -> str:
        """The error that prevented its diagnosis, in words; "" for none."""
        return f"it could not be diagnosed ({in_words(self.error)})" if self.error is not None else ""

    def renewed(self) -> Record:
        """Reads the run again, under the name that it has here."""
        return Record(Run.open(self.run.path).snapshot(), self.name)

    @property
    def verdict(self) -> str:
        """The verdict in a word (:data:`stabilitylab.verdict.STATES`); "" before the end of the run, and if nothing was
        held out."""
        return self.judged.state if self.judged else ""

    @property
    def reads(self) -> bool | None:
        """True if the decoder uses its source: another sentence's source raises the loss by .1 nats a token or more.
        None for a model without a source, and if this was not measured."""
        worth = self.judged.source_worth if self.judged else None
        return None if worth is None else worth >= READS_NATS

    @cached_property
    def lost(self) -> str:
        """The first number that was not finite, and its step; "" if all were finite."""
        return self.remember("lost", lambda: lost(self.run), keep=True)

    @property
    def found(self) -> Diagnosis | None:
        """The diagnosis if it was made already, else None: a list of a thousand runs has no time to make it."""
        return vars(self).get("diagnosis")

    @property
    def outcome(self) -> str:
        """The verdict. For a run without one: the verdict of a diagnosis that was made already, else "not finite" if
        a number was not finite; "" if nothing is known."""
        if self.verdict or self.kind == "onestep":
            return self.verdict
        return self.found.verdict if self.found else "not finite" if self.lost else ""

    @property
    def standing(self) -> str:
        """The outcome of the run in a word, or the status of its process if the status is worse news."""
        ended = self.status.state == "finished" or self.outcome not in ("open", "healthy")
        return (self.outcome if ended else "") or self.status.state

    @cached_property
    def collapsed(self) -> bool:
        """True if ``diagnose`` warns of rank collapse: the attention collapse lasted to the end of the run."""
        if "grad_norm" not in self.tables:
            return False

        def read() -> bool:
            return any(event.severity == "warning" for event in rank_collapse(Evidence(self.run)))

        return self.remember("collapsed", read, keep=True)

    @property
    def ended(self) -> bool:
        return self.status.state in ("finished", "diverged")

    @cached_property
    def is_cut_trial(self) -> bool:
        """True for a trial of ``sweep --choose-rate`` that stopped before the end of its schedule."""
        horizon = self.settings.get("train.horizon")
        cut = self.kind == "train" and bool(horizon) and self.updates < int(horizon)
        return cut and is_choice(self.run.path.parent)

    @property
    def updates(self) -> int:
        """The number of updates for which it was to be trained; 0 if not recorded."""
        return int(self.settings.get("train.steps", 0))

    @cached_property
    def ramp(self) -> int | None:
        """T, if alpha may grow and T is above 1; else None."""
        model = {key.partition(".")[2]: value for key, value in self.settings.items() if key.startswith("model.")}
        archs = [model[key] for key in ("arch", "decoder_arch") if model.get(key)]
        grows = any(map(may_follow_ramp, archs)) and has_ramp(ModelConfig.model_construct(**model))
        return int(model["T"]) if grows and model["T"] > 1 else None

    @property
    def layers_text(self) -> str:
        """The layers of each stack, such as ``18L-18L``; "" if they are not known."""
        return "-".join(f"{count}L" for count in self.layers if count)

    @property
    def depth(self) -> int:
        """The layers of the deeper stack: N for an N-layer encoder and decoder."""
        return max(self.layers)

    @cached_property
    def metrics(self) -> Frame:
        """The metrics as a data frame with one row per step."""
        return self.remember("metrics as a frame", lambda: self.run.metrics, keep=True)

    def held_out(self) -> Frame:
        """Return step and held_out_nll at the steps where the held-out batch was measured."""
        return self.remember("held out", self._held_out)

    def _held_out(self) -> Frame:
        import pandas as pd  # here, as whoever lists the runs of a figure reads this module too

        columns = ["step", "held_out_nll"]
        known = "held_out_nll" in self.metrics
        return self.metrics.loc[:, columns].dropna() if known else pd.DataFrame(columns=columns)

    @property
    def last_nll(self) -> float:
        """The cross-entropy after training [nats/token]: on the validation set if it was measured, else on the held-out
        batch; NaN if neither was measured."""
        if "validation_nll" in self.metrics and len(found := self.metrics["validation_nll"].dropna()):
            return float(found.iloc[-1])
        data = self.held_out()
        return float(data["held_out_nll"].iloc[-1]) if len(data) else math.nan

    @property
    def baseline(self) -> float:
        """The cross-entropy of the unigram baseline on the text of ``last_nll`` [nats/token]; NaN if none is known."""
        whole = "validation_nll" in self.metrics and self.metrics["validation_nll"].notna().any()
        found = self.run.manifest.get("validation_unigram" if whole else "unigram") or {}
        return float(found.get("cross_entropy", math.nan))

    def frame(self, table: str, columns: Sequence[str] | None = None, by: By | None = None) -> Frame:
        """Return a probe's table at all its steps. The table of a one-step run is cached, since figures and claims ask
        for it again."""
        if self.kind != "onestep":
            return self.run.frame(table, columns=columns, by=by)
        data = self.remember(("frame", table, by), lambda: self.run.frame(table, by=by), keep=True)
        return data if columns is None else data.drop(columns=[*{*self.run.table(table).columns} - {*columns}])

    def at(
        self,
        table: str,
        step: int | tuple[int, ...] | None = None,
        columns: Sequence[str] | None = None,
        by: By | None = None,
    ) -> Frame:
        """Return a table at the probed step nearest to ``step``, or at those nearest to several; None: the last.
        The frame's step says which.

        Kept, as many figures and claims ask for the same few steps."""
        if self.kind == "onestep":  # it has one step
            return self.frame(table, columns, by)
        key = ("at", table, step, None if columns is None else tuple(columns), by)
        return self.remember(key, lambda: self.run.frame_at(table, step, columns=columns, by=by), keep=True).copy()

    def probed(self, table: str) -> np.ndarray:
        """Return the steps at which a probe's table was recorded, in rising order."""
        return self.remember(("probed", table), lambda: self.run.steps(table), keep=True)

    def columns(self) -> pa.Table:
        """Return the metrics as they are stored."""
        return self.remember(METRICS, lambda: self.run.arrow(METRICS), keep=True)

    def remember(self, key: Hashable, make: Callable[[], T], *, keep: bool = False, other: Record | None = None) -> T:
        """Return the result of ``make``, which is called once for each ``key``: for small results of large tables,
        which several figures and claims need. ``keep``: the result depends on the run's files and the code of this
        package alone, and is also kept beside the report for the next one. ``other``: a second run that it depends
        on."""
        if key not in self._remembered:
            kept = self.kept if keep and (other is None or other.kept is not None) else None
            given = other.kept.digest if other is not None and other.kept is not None else ""
            self._remembered[key] = make() if kept is None else kept.get(key, make, given)
        return self._remembered[key]


def built_in() -> bool:
    """True if all detectors are those of this package. The findings of others may change while this code does not."""
    return all(one.find.__module__.partition(".")[0] == BUILT_IN for one in DETECTORS.values())


def _kept(run: Run, report: Path) -> Kept | None:
    """Return the results about a run that are kept beside the report; None for a run that goes on."""
    if run.stamp is None:
        return None
    files = sorted([str(file.relative_to(run.path)), *found] for file, found in run.stamp.items())
    head = {"run": str(run.path.resolve()), "path": str(run.path), "files": files}
    return Kept(file_of(report, run.path), head | {"code": code(), "looks": repr(style.looks())})


def save(records: Iterable[Record], report: Path) -> None:
    """Write the results about the records beside the report; delete the files of runs that no longer exist."""
    used = [record.kept for record in records if record.kept is not None]
    for kept in used:
        kept.save()
    forget(report, [kept.path for kept in used])


class Runs(Sequence[Record]):
    """Runs to choose from. Every choice returns a part of them."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = list(records)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        broken: list[tuple[Path, str]] | None = None,
        known: Mapping[Path, Record] = MappingProxyType({}),
        report: Path | None = None,
    ) -> Runs:
        """Open every run below ``folder``. A run that cannot be read is added to ``broken`` with the reason. (Damage in
        tables shows only when the tables are read: :func:`spared`.) ``known``: records that were loaded before, by
        path; a record whose run has ended and not changed since is used again, with everything that was read of it.
        ``report``: a folder that may have the last report's results about unchanged runs."""
        folder = Path(folder)
        records = []
        for run in load_runs(folder, broken):
            try:
                name = run.path.relative_to(folder).as_posix() if run.path != folder else run.name
                record = Record(run.snapshot(), name)
                before = known.get(run.path)
                if before is not None and record.run.stamp is not None and record.run.stamp == before.run.stamp:
                    record, before.name = before, name
                elif report is not None:
                    record.kept = _kept(record.run, report)
                _ = record.status, record.outcome
                records.append(record)
            except Exception as error:  # any error of one run must not hide the others
                if broken is None:
                    raise
                broken.append((run.path, _why_unreadable(error)))
        return cls(records)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Runs: ...
    def __getitem__(self, index: int | slice) -> Record | Runs:
        return Runs(self._records[index]) if isinstance(index, slice) else self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def where(
        self,
        test: Callable[[Record], bool] | None = None,
        *,
        kind: str | None = None,
        label: str | Sequence[str] | None = None,
        layers: tuple[int, int] | None = None,
        depth: int | None = None,
        seed: int | None = None,
        table: str | Sequence[str] = (),
        **settings: Any,
    ) -> Runs:
        """Return the runs of this kind, label(s), layers, depth and seed, with these tables and settings
        (``train__warmup=0``), for which ``test`` returns True."""
        labels = (label,) if isinstance(label, str) else label
        tables = {table} if isinstance(table, str) else set(table)
        wanted = {key.replace("__", "."): value for key, value in settings.items()}
        return Runs(
            record
            for record in self
            if (kind is None or record.kind == kind)
            and (labels is None or record.label in labels)
            and (layers is None or record.layers == layers)
            and (depth is None or record.depth == depth)
            and (seed is None or record.seed == seed)
            and tables <= record.tables
            and all(record.settings.get(key) == value for key, value in wanted.items())
            and (test is None or test(record))
        )

    def without_cut_trials(self) -> Runs:
        """Return the runs without the trials of ``sweep --choose-rate`` that stopped early; all if there are no
        others."""
        return self.where(lambda run: not run.is_cut_trial) or self

    def evidence(self) -> Runs:
        """Return the ended runs without the pilots next to which thresholds were set (seeds 0, 1, 2 at width 64)."""
        return self.where(lambda run: run.ended and not (run.seed in PILOT_SEEDS and run.width == PILOT_WIDTH))

    def groups(self, *free: str) -> list[Runs]:
        """Return groups of runs that differ only in architecture, seed, settings that change nothing (FREE) and the
        settings ``free``; the richest group first: more labels, then more runs, then more steps. Of runs that agree in
        all of these, the last one counts; runs whose seed is not known count each."""
        found: dict[Any, dict[Any, Record]] = {}
        for record in self:
            open_ = FREE | set(free)
            key = (record.kind, *sorted((k, repr(v)) for k, v in record.settings.items() if k not in open_))
            drawn = record.name if record.seed is None else record.seed
            own = (record.label, drawn, *(repr(record.settings.get(k)) for k in (*free, "model.T")))
            found.setdefault(key, {})[own] = record
        groups = [Runs(group.values()) for group in found.values()]
        return sorted(groups, key=lambda g: (len(g.labels), len(g), g[0].updates), reverse=True)

    @property
    def labels(self) -> list[str]:
        """Lists the labels present, in the fixed order of architectures."""
        order = {arch: place for place, arch in enumerate(style.looks())}
        return sorted({record.label for record in self}, key=lambda label: (order.get(style.family(label), 99), label))

    @property
    def depths(self) -> list[int]:
        return sorted({record.depth for record in self})

    @property
    def seeds(self) -> list[int]:
        """Lists the seeds that are known."""
        return sorted({record.seed for record in self if record.seed is not None})

    def describe(self) -> str:
        """Return what these runs have in common, their seeds, and the T of those that have a ramp, in a few words."""
        shared = {
            key: next(iter(values.values()))
            for key in {key: None for record in self for key in record.settings}
            if len(values := {repr(record.settings.get(key)): record.settings.get(key) for record in self}) == 1
        }
        steps = sorted({record.settings["train.steps"] for record in self if "train.steps" in record.settings})
        updates = f"{' to '.join(map(str, dict.fromkeys((steps[0], steps[-1]))))} updates" if steps else ""
        layers = {record.layers_text for record in self}
        words = [
            layers.pop() if len(layers) == 1 else f"{len(layers)} depths",
            f"{shared['model.d_model']} wide" if "model.d_model" in shared else "",
            "one step" if self[0].kind == "onestep" else updates,
            f"lr {rates(self)}" if self[0].kind == "train" else "",
            f"warm-up {shared['train.warmup']}" if "train.warmup" in shared and self[0].kind == "train" else "",
            f"{str(shared['data.source']).split(':')[0]} data" if "data.source" in shared else "",
            f"seed{'s' if len(self.seeds) > 1 else ''} {spans(self.seeds)}" if self.seeds else "",
            f"T = {', '.join(map(str, ramps))}" if (ramps := sorted({run.ramp for run in self if run.ramp})) else "",
        ]
        return ", ".join(word for word in words if word)

    def by_seed(self) -> dict[int, Record]:
        """Maps seed to run, of runs whose seed is known; of several with one seed the last counts."""
        ordered = sorted(self, key=lambda record: record.name)
        return {record.seed: record for record in ordered if record.seed is not None}


def _why_unreadable(error: Exception) -> str:
    if isinstance(error, StabilityLabError):
        return str(error)
    if isinstance(error, AttributeError | TypeError | ValueError):
        return f"its configuration is damaged ({error})"
    return f"it cannot be read ({in_words(error)})"


def spared(runs: Runs, broken: list[tuple[Path, str]], make: Callable[[Runs], T]) -> tuple[T, Runs]:
    """Return the result of ``make`` for ``runs``, and the runs that it was made from. If a run turns out to be damaged,
    it is added to ``broken``, and ``make`` is called again without it. If a run was resumed meanwhile, it is read
    again, and ``make`` is called again.
    """
    renewals = Counter[Path]()
    while True:
        try:
            return make(runs), runs
        except DamagedError as error:
            renewals[error.run] += 1
            if isinstance(error, ReplacedError) and renewals[error.run] <= RENEWALS:
                runs = _renewed(runs, error.run)
                continue
            left = runs.where(lambda record, damaged=error.run: record.run.path != damaged)
            if len(left) == len(runs):
                raise
            broken.append((error.run, str(error)))
            runs = left


def _renewed(runs: Runs, path: Path) -> Runs:
    """Return the runs with one of them read again. If it cannot be read now, its old record stays, and fails again."""

    def again(record: Record) -> Record:
        try:
            return record.renewed()
        except StabilityLabError:
            return record

    return Runs(again(record) if record.run.path == path else record for record in runs)


def pairs(first: Runs, second: Runs) -> list[tuple[int, Record, Record]]:
    """Pairs (seed, run, run) for each seed that both have: the same weights to begin with and the same order of
    data."""
    one, other = first.by_seed(), second.by_seed()
    return [(seed, one[seed], other[seed]) for seed in sorted(one.keys() & other.keys())]


def rates(runs: Iterable[Record]) -> str:
    """Write the learning rates that all have, or those of each architecture where they differ."""
    found: dict[str, set[float]] = {}
    for run in runs:
        found.setdefault(style.title(run.label), set()).add(float(run.settings.get("train.lr", math.nan)))
    said = {name: several([f"{rate:g}" for rate in sorted(own)]) for name, own in found.items()}
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return ", ".join(f"{own} ({name})" for name, own in said.items())


def several(values: Sequence[str]) -> str:
    """Write ``a / b / c``; of more than four values the first and the last."""
    return " / ".join(values) if len(values) <= 4 else f"{values[0]} ... {values[-1]}"


def spans(numbers: Sequence[int]) -> str:
    """Writes ``3-5, 8`` for 3, 4, 5, 8."""
    pieces: list[list[int]] = []
    for number in sorted(numbers):
        if pieces and number == pieces[-1][-1] + 1:
            pieces[-1].append(number)
        else:
            pieces.append([number])
    return ", ".join(f"{piece[0]}-{piece[-1]}" if len(piece) > 1 else f"{piece[0]}" for piece in pieces)
