"""The reader of a run, whether it has finished, was killed or is still going on."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import pyarrow as pa

from ..errors import DamagedError, InputError, ResourceError, StabilityLabError, UsageError
from ..inputs import shown
from ..schema import Row, Table
from ..verdict import RULE, Verdict, judge_recorded
from .arrays import floats, numbers, steps_in
from .combine import By, combine
from .documents import damaged, read_document
from .evaluation import read_evaluation
from .files import is_locked, reading
from .identity import identity_of
from .incident import read_incident
from .layout import METRICS, flat, read_run_json
from .ledger import read_facts
from .names import moved, today
from .parts import LABELS, encode, part_schema
from .pieces import HeldPieces, Pieces, ReplacedError, Stamp, stamps_of
from .views import VIEWS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

ATTEMPTS = 20  # attempts to read while a writer moves files; one retry is nearly always enough
PAUSE = 0.01  # seconds between two attempts
T = TypeVar("T")
Version = tuple[int, int]  # inode and time of the last change of run.json, which is only ever replaced
Stamps = Mapping[Path, Stamp]
STEP = pa.schema([("step", pa.int64())])


@dataclass(frozen=True)
class Status:
    """The status of a run. ``state``: ``running``, ``finished``, ``diverged``, ``interrupted`` or ``failed``. ``step``:
    the last step. ``reason``: the reason for the state, in words. ``updated``: the time of the last change. ``facts``:
    further facts that were recorded at the end."""

    state: str
    step: int
    reason: str
    updated: str
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class TableColumn:
    """One column of a table as arrays (steps, rows): ``values``; ``absent``, True where there was no gradient; and
    ``missing``, True where the cell is absent or does not exist."""

    steps: np.ndarray
    rows: Sequence[Row]
    values: np.ndarray
    absent: np.ndarray
    missing: np.ndarray


KINDS: dict[str, type | tuple[type, ...]] = {"state": str, "step": int, "reason": str, "updated": str, "facts": dict}


class Run:
    """A run directory, opened for reading. :meth:`open` reads run.json once. Tables and status are read from disk at
    each access.

    While a run goes on, it grows between two reads, so two tables may have different lengths. Take a :meth:`snapshot`
    to read several tables of the same moment.
    """

    def __init__(self, path: Path, document: Mapping[str, Any], version: Version | None = None) -> None:
        self.path = path
        self.name = path.resolve().name
        self._version = version  # version of run.json
        self.manifest = {key: value for key, value in document.items() if key != "tables"}
        self.identity = identity_of(document)
        self._tables: Mapping[str, Table] = document["tables"]

    @classmethod
    def open(cls, path: str | Path) -> Run:
        path = Path(path)
        version = _version(path)
        return cls(path, read_run_json(path), version)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return self.manifest.get("config", {})

    @property
    def kind(self) -> str:
        """The kind of the run: ``train``, ``onestep``, or ``watched`` (the user's own loop, with any configuration)."""
        sections = (self.config.get(name) for name in ("model", "train"))
        ours = "train" if all(isinstance(section, Mapping) for section in sections) else "watched"
        return str(self.manifest.get("kind", ours))

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the probes' tables. The same methods also read ``"metrics"``."""
        return tuple(self._tables)

    @property
    def stamp(self) -> Stamps | None:
        """The files of a snapshot, each with its size and time. Two snapshots with the same stamp hold the same
        numbers. None for a run that goes on, and for a run that is not a snapshot."""
        return None

    def snapshot(self) -> Run:
        """Return the run as it is now: every table, the status and run.json of one moment, no matter how long it takes
        to read them.

        If the run goes on, the steps in its journal are read now, and all other steps when you ask for them. If the run
        is resumed in between and files of the snapshot are replaced, reading them raises InputError.
        """
        found = None
        for _ in range(ATTEMPTS):
            found = Snapshot.taken(self)
            if found is not None and found.settled:
                return found
            time.sleep(PAUSE)
        if found is None:
            raise self._vanishing()
        return found  # nobody writes so fast: files that do not fit are damaged, and reading them says so

    @property
    def status(self) -> Status:
        """The status in status.json. If no end is recorded, the status has the last step on disk, and its state is
        ``running`` only if a process still writes."""
        alive = is_locked(self.path)  # asked first: a writer sets its last state before it lets go
        return self._status(alive, read_document(self.path, "status.json", self.identity))

    def _status(self, alive: bool, entry: Mapping[str, Any]) -> Status:
        try:
            status = Status(**{name: _told(entry, name, kind) for name, kind in KINDS.items()})
        except (KeyError, ValueError) as error:
            raise damaged(self.path / "status.json", repr(error), self.path) from error
        if status.state != "running":
            return status
        last = numbers(self._read(METRICS, STEP)["step"]).max(initial=status.step)
        state, reason = (
            ("running", status.reason) if alive else ("interrupted", "the process was killed, or its machine was lost")
        )
        return Status(state, int(last), reason, status.updated, status.facts)

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on a run that has ended, by the present rule (:func:`stabilitylab.verdict.judge`).

        A verdict by an older rule is judged again. None before the end of the run, and if there is no held-out loss or
        no baseline.
        """
        status = self.status
        if status.state not in ("finished", "diverged"):
            return None
        try:
            recorded = status.facts.get("verdict") or {}
            if recorded.get("rule") == RULE:
                return Verdict.of(recorded)
            return judge_recorded(self.arrow(METRICS).to_pydict(), self.manifest, whole=True)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            told = f"{self.path} has a damaged verdict or settings ({error!r:.100}): restore it from a copy."
            raise DamagedError(told, self.path) from error

    def table(self, name: str) -> Table:
        if name not in self._tables:
            raise InputError(f"{self.path} has no table {name!r}; it has {', '.join([METRICS, *self._tables])}.")
        return self._tables[name]

    @property
    def incident(self) -> dict[str, Any] | None:
        """The place of the first number that was not finite (:class:`stabilitylab.probes.Incident`); None if there is
        none."""
        return read_incident(self.path, self.identity)

    @property
    def ledger(self) -> list[dict[str, Any]]:
        """The recorded changes of settings, optimizer state and flags (``watch(optimizer=...)``), each with ``step``,
        ``kind``, ``name``, ``before`` and ``after``; [] for a run without them."""
        return read_facts(self.path, self.identity)

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """The result of ``stabilitylab evaluate``; None for a run that was not evaluated."""
        return read_evaluation(self.path, self.identity)

    @property
    def metrics(self) -> pd.DataFrame:
        """The metrics as a data frame with one row per step: loss, learning rate, total gradient norm, ..."""
        return self.frame(METRICS)

    def frame(
        self,
        name: str,
        *,
        columns: Sequence[str] | None = None,
        config: Sequence[str] | bool = (),
        by: By | None = None,
    ) -> pd.DataFrame:
        """Return a table as a tidy data frame: step, stack_name, layer, sublayer, site, the value columns (or only
        ``columns``), absent.

        ``config``: settings to add as columns, such as ``["model.arch", "train.seed"]``; True: all of them. ``by``:
        "layer" or "sublayer", to combine the rows of each. Where ``absent`` is False, a NaN either was measured or
        stands for a cell that does not exist; :meth:`arrow` distinguishes the two.
        """
        from .frame import Frame  # here, since pandas takes its time

        settings = self._settings(config)
        if name == METRICS:
            if by is not None:
                raise UsageError(f"metrics have one row a step: leave out by={by!r}.")
            data = self.arrow(METRICS, columns=columns)
            content: dict[str, Any] = {column: data[column].to_numpy() for column in data.column_names}
        else:
            content, _ = self._rows(self.table(name), columns, by)
        for key, value in settings.items():
            content[key] = _repeat(value, len(content["step"]))
        return Frame(content)

    def frame_at(
        self,
        name: str,
        step: int | Sequence[int] | None = None,
        *,
        columns: Sequence[str] | None = None,
        by: By | None = None,
    ) -> pd.DataFrame:
        """Return the rows of :meth:`frame` for the probed step nearest to ``step`` (None: the last step), or for the
        steps nearest to several. The other steps are not laid out."""
        from .frame import Frame

        wanted = step if isinstance(step, Sequence) else [step]
        content, _ = self._rows(
            self.table(name), columns, by, lambda steps: sorted({_nearest(steps, one) for one in wanted})
        )
        return Frame(content)

    def steps(self, name: str) -> np.ndarray:
        """Return the steps at which a table was recorded, in ascending order."""
        return steps_in(numbers(self._read(name, STEP)["step"]))

    def arrow(self, name: str, *, columns: Sequence[str] | None = None, by: By | None = None) -> pa.Table:
        """Return a table as an Arrow table, with nulls as stored: null where the cell is absent or does not exist (in
        metrics: was not given), NaN where NaN was measured."""
        if by is not None:
            content, missing = self._rows(self.table(name), columns, by)
            return pa.table(
                {
                    column: floats(values, ~missing[column]) if column in missing else pa.array(values)
                    for column, values in content.items()
                }
            )
        if name != METRICS:
            schema = part_schema(self.table(name))
            left_out = {*self.table(name).columns} - {*self._chosen(self.table(name).columns, columns, name)}
            return self._read(name, pa.schema([field for field in schema if field.name not in left_out]))
        data = self._read(name, None)
        return data.select(["step", *self._chosen(data.column_names[1:], columns, name)])

    def plot(
        self,
        name: str,
        *,
        kind: Literal["lines", "map"] = "lines",
        column: str = "",
        stack: str = "",
        axes: Axes | None = None,
    ) -> Axes:
        """Draw a probe's table or a metric, and return the matplotlib Axes.

        For a table, ``kind="lines"`` draws each layer over the updates, and ``kind="map"`` draws layers by updates as a
        heat map. If the table has a rule for it, the rows of a layer are combined. ``column``: the column to draw; by
        default the main column, in the unit and on the scale that the table declares. ``stack``: one stack, such as
        ``"decoder"``. A number that is not finite is a red mark at its step. ``axes``: the Axes to draw on; new Axes by
        default.

        Raises InputError for a name that the run does not have; the message lists the names that it has. Raises
        UsageError for another ``kind``, for a column or stack that the table does not have, and for a map of a metric.

        Example::

            run = sl.Run.open("runs/branchnorm-200-s0")
            axes = run.plot("grad_norm", stack="decoder")
            axes.set_xlim(0, 100)
            run.plot("grad_norm", kind="map")
            run.plot("loss").figure.savefig("loss.png")
        """
        return VIEWS["plot"](self, name, kind=kind, column=column, stack=stack, axes=axes)

    def _repr_html_(self) -> str:
        """Return what a notebook shows of the run: status, model, last loss, first sign, and the loss as a line."""
        return VIEWS["card"](self)

    def cells(self, name: str, column: str = "", *, by: By | None = None) -> TableColumn:
        """Return one column of a table (by default its main column) as an array of steps by rows, without a data frame.
        ``by``: "layer" or "sublayer", to combine the rows of each."""
        table = self.table(name)
        column = column or table.main
        steps, rows, values, missing, absent = self._arrays(table, [column], by)
        return TableColumn(steps, rows, values[column], absent, missing[column])

    def _arrays(
        self,
        table: Table,
        columns: Sequence[str] | None,
        by: By | None,
        choose: Callable[[np.ndarray], Sequence[int]] | None = None,
    ) -> tuple[np.ndarray, Sequence[Row], dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
        """Return steps (steps,), rows, and arrays (steps, rows): values and missing cells by column, and ``absent``.
        ``choose`` returns the indices of the steps to keep; None: all."""
        names = self._chosen(table.columns, columns, table.name)
        fields = [("step", pa.int64()), *((name, pa.float64()) for name in names), ("absent", pa.bool_())]
        # Sites are not read: every step holds all rows of the table's definition, in the order of the definition.
        data = self._read(table.name, pa.schema(fields))
        if data.num_rows % len(table.rows):
            raise DamagedError(f"{self.path} holds half a step of {table.name!r}: restore it from a copy.", self.path)
        shape = (-1, len(table.rows))
        steps = numbers(data["step"]).reshape(shape)[:, 0]
        values = {name: numbers(data[name]).reshape(shape) for name in names}
        absent, rows = numbers(data["absent"]).reshape(shape), table.rows
        missing = {name: numbers(data[name].is_null()).reshape(shape) for name in names}
        if choose is not None and len(steps):
            kept = list(choose(steps))
            steps, absent = steps[kept], absent[kept]
            values, missing = ({name: own[kept] for name, own in some.items()} for some in (values, missing))
        if by is not None:
            rows, values, missing, absent = combine(table, values, absent, by, missing)
        return steps, rows, values, missing, absent

    def _rows(
        self,
        table: Table,
        columns: Sequence[str] | None,
        by: By | None,
        choose: Callable[[np.ndarray], Sequence[int]] | None = None,
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Read the columns of a frame, and for each value column the cells without a number."""
        import pandas as pd

        columns = self._chosen(table.columns, columns, table.name)  # here, so that a warning names the caller's line
        steps, rows, values, missing, absent = self._arrays(table, columns, by, choose)
        content: dict[str, Any] = {"step": np.repeat(steps, len(rows))}
        for name in ("stack_name", "layer", "sublayer", "site")[: {"layer": 2, "sublayer": 3}.get(by or "", 4)]:
            labels = [getattr(row, LABELS.get(name, name)) for row in rows]
            if name == "layer":
                content[name] = np.tile(np.array(labels, np.int32), len(steps))
            else:
                codes, categories = encode(labels)
                content[name] = pd.Categorical.from_codes(np.tile(codes, len(steps)), pd.Index(categories))
        content |= {name: array.ravel() for name, array in values.items()} | {"absent": absent.ravel()}
        return content, {name: array.ravel() for name, array in missing.items()}

    def _read(self, name: str, schema: pa.Schema | None) -> pa.Table:
        for _ in range(ATTEMPTS):
            try:
                with reading(self.path):
                    pieces = Pieces(self.path, name, self.identity, self.manifest["schema_version"])
                    return self._gathered(pieces, name, schema)
            except FileNotFoundError:  # a table without rows in that journal, or a resume that set parts aside
                time.sleep(PAUSE)
        raise self._vanishing()

    def _gathered(self, pieces: Pieces, name: str, schema: pa.Schema | None) -> pa.Table:
        empty = pa.Table.from_batches([], schema or STEP)
        try:
            found = list(pieces.read(name, schema, self._tables.get(name)))
            return pa.concat_tables([empty, *found], promote_options="default").combine_chunks()
        except MemoryError as error:
            told = f"{name!r} of {self.path} does not fit into memory"
            raise ResourceError(f"{told}: read fewer columns= of it, or use a larger machine.") from error

    def _vanishing(self) -> DamagedError:
        told = f"the files of {self.path} keep vanishing while they are read: is something deleting them?"
        return DamagedError(told, self.path)

    def _chosen(self, known: Sequence[str], columns: Sequence[str] | None, name: str) -> list[str]:
        if columns is None:
            return list(known)
        for old, new in ((column, today(column, known)) for column in columns):
            if old != new:
                warnings.warn(moved(old, new), FutureWarning, stacklevel=4)
        columns = [today(column, known) for column in columns]
        if unknown := [column for column in columns if column not in known]:
            raise UsageError(f"{name!r} of {self.path} has no column {unknown[0]!r}; it has {', '.join(known)}.")
        return columns

    def _settings(self, config: Sequence[str] | bool) -> dict[str, Any]:
        if config is False:
            return {}
        known = dict(flat(self.config))
        wanted = list(known) if config is True else list(config)
        if unknown := [key for key in wanted if key not in known]:
            raise UsageError(f"{self.path} has no setting {unknown[0]!r}; it has {', '.join(known) or 'none'}.")
        return {key: known[key] for key in wanted}


class Snapshot(Run):
    """A run at one moment; see :meth:`Run.snapshot`."""

    def __init__(
        self,
        path: Path,
        document: Mapping[str, Any],
        alive: bool,
        documents: Stamps,
        facts: Mapping[str, Any],
        pieces: HeldPieces,
    ) -> None:
        super().__init__(path, document)
        self.settled = True  # False if a file changed while the snapshot was taken, so that not all files may fit
        self._alive, self._documents, self._facts, self._pieces = alive, documents, facts, pieces
        self._metrics = None
        # The metrics of a run that goes on are read now: its first part is written again when a new metric comes.
        if alive:
            self._metrics = _kept(lambda: self._read(METRICS, None))
        self._ledger = _kept(lambda: read_facts(path, self.identity))  # after the tables: it explains their last rows

    @classmethod
    def taken(cls, run: Run) -> Snapshot | None:
        """Return a snapshot of ``run``; None if files disappeared meanwhile."""
        path, version = run.path, _version(run.path)
        same = version is not None and version == run._version
        document = {**run.manifest, "tables": run._tables} if same else read_run_json(path)
        alive = is_locked(path)  # first, as for every status: a writer sets its last state before it lets go
        documents = stamps_of(path.glob("*.json*"))  # before they are read
        identity = identity_of(document)
        facts = {
            # read before the tables, which may then be ahead of the status
            "status": _kept(lambda: read_document(path, "status.json", identity)),
            "incident": _kept(lambda: read_incident(path, identity)),
            "evaluation": _kept(lambda: read_evaluation(path, identity)),
        }
        try:
            with reading(path):
                pieces = HeldPieces(path, document["tables"], identity, document["schema_version"], alive)
                found = cls(path, document, alive, documents, facts, pieces)
        except (FileNotFoundError, ReplacedError):
            return None
        except MemoryError as error:
            raise ResourceError(f"the journal of {path} does not fit into memory: use a larger machine.") from error
        resumed = not alive and is_locked(path)
        found.settled = version == _version(path) and not resumed and (pieces.settled or not alive)
        return found

    def snapshot(self) -> Run:
        return self

    @property
    def stamp(self) -> Stamps | None:
        return None if self._alive else {**self._documents, **self._pieces.stamps}

    @property
    def status(self) -> Status:
        return self._status(self._alive, _given(self._facts["status"]))

    @property
    def incident(self) -> dict[str, Any] | None:
        return _given(self._facts["incident"])

    @property
    def evaluation(self) -> dict[str, Any] | None:
        return _given(self._facts["evaluation"])

    @property
    def ledger(self) -> list[dict[str, Any]]:
        return [{**fact} for fact in _given(self._ledger)]

    def _read(self, name: str, schema: pa.Schema | None) -> pa.Table:
        if name == METRICS and self._metrics is not None:
            return _given(self._metrics) if schema is None else _given(self._metrics).select(schema.names)
        with reading(self.path):
            return self._gathered(self._pieces, name, schema)


def of_snapshots(make: Callable[..., T], *runs: Run) -> T:
    """Call ``make`` with a snapshot of each of ``runs``, and call it again if a run was resumed while it was read (at
    most :data:`ATTEMPTS` times)."""
    for _ in range(ATTEMPTS - 1):
        try:
            return make(*(run.snapshot() for run in runs))
        except ReplacedError as error:
            if any(isinstance(run, Snapshot) and run.path == error.run for run in runs):
                raise  # the caller took this snapshot, and must take another
    return make(*(run.snapshot() for run in runs))


def _nearest(steps: np.ndarray, step: int | None) -> int:
    """Return the index of the step nearest to ``step`` (None: of the last step); of two equally near, the earlier."""
    order = np.argsort(steps, kind="stable")
    return int(order[-1] if step is None else order[np.abs(steps[order] - step).argmin()])


def _kept(read: Callable[[], T]) -> T | StabilityLabError:
    """Return the result of ``read``, or the error that it raises, to be raised when the result is asked for."""
    try:
        return read()
    except ReplacedError:
        raise
    except StabilityLabError as error:
        return error


def _given(kept: Any) -> Any:
    if isinstance(kept, StabilityLabError):
        raise kept
    return kept


def _version(path: Path) -> Version | None:
    """Return the version of run.json, which is a new file at each change; None without run.json."""
    try:
        found = os.stat(path / "run.json")
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _told(entry: Mapping[str, Any], name: str, kind: Any) -> Any:
    value = entry[name]
    if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and not 0 <= value < 2**62):
        raise ValueError(f"{name} = {shown(value)}")
    return value


def _repeat(value: Any, count: int) -> Any:
    """Repeat a setting as a column: numbers unchanged, text as a category, lists joined by commas."""
    import pandas as pd

    if isinstance(value, list):
        value = ",".join(map(str, value))
    if isinstance(value, str):
        return pd.Categorical.from_codes(np.zeros(count, np.int8), pd.Index([value]))
    return np.full(count, value)
