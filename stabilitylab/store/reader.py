"""Reads a run: finished, killed or still going."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ..errors import DamagedError, InputError, ResourceError, UsageError
from ..inputs import shown
from ..schema import Table
from ..verdict import RULE, Verdict, judge_recorded
from . import inventory
from .arrays import floats
from .combine import By, combine
from .documents import damaged, read_document
from .evaluation import read_evaluation
from .files import is_locked, reading
from .identity import identity_of
from .incident import read_incident
from .inventory import Entry, Inventory
from .journal import read_records
from .layout import METRICS, flat, journal_path, journals, part_path, parts, read_run_json
from .names import moved, today
from .parts import LABELS, encode, metrics_of, part_schema, read_part, table_of
from .telling import tell

if TYPE_CHECKING:
    import pandas as pd

ATTEMPTS = 20  # to read while a writer moves files; one retry is nearly always enough
STEP = pa.schema([("step", pa.int64())])


@dataclass(frozen=True)
class Status:
    """How a run is doing: ``running``, ``finished``, ``diverged``, ``interrupted`` or ``failed``, and since when."""

    state: str
    step: int
    reason: str
    updated: str
    facts: Mapping[str, Any]


KINDS: dict[str, type | tuple[type, ...]] = {"state": str, "step": int, "reason": str, "updated": str, "facts": dict}


class Run:
    """A run directory, read-only. Opened once; tables and status are read from disk whenever they are asked for."""

    def __init__(self, path: Path, document: Mapping[str, Any]) -> None:
        self.path = path
        self.name = path.resolve().name
        self.manifest = {key: value for key, value in document.items() if key != "tables"}
        self.identity = identity_of(document)
        self._tables: Mapping[str, Table] = document["tables"]

    @classmethod
    def open(cls, path: str | Path) -> Run:
        path = Path(path)
        return cls(path, read_run_json(path))

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return self.manifest.get("config", {})

    @property
    def kind(self) -> str:
        """``train``, ``onestep``, or ``watched``: a loop of somebody's own, whose configuration may be anything."""
        sections = (self.config.get(name) for name in ("model", "train"))
        ours = "train" if all(isinstance(section, Mapping) for section in sections) else "watched"
        return str(self.manifest.get("kind", ours))

    @property
    def tables(self) -> tuple[str, ...]:
        """The probes' tables; ``"metrics"`` is read by the same methods."""
        return tuple(self._tables)

    @property
    def status(self) -> Status:
        """status.json; of a run without its end, the last step on disk and whether anybody still writes."""
        alive = is_locked(self.path)  # asked first: a writer sets its last state before it lets go
        entry = read_document(self.path, "status.json", self.identity)
        try:
            status = Status(**{name: _told(entry, name, kind) for name, kind in KINDS.items()})
        except (KeyError, ValueError) as error:
            raise damaged(self.path / "status.json", repr(error), self.path) from error
        if status.state != "running":
            return status
        last = self._read(METRICS, STEP)["step"].to_numpy().max(initial=status.step)
        state, reason = ("running", status.reason) if alive else ("interrupted", "the process ended without a word")
        return Status(state, int(last), reason, status.updated, status.facts)

    @property
    def verdict(self) -> Verdict | None:
        """The state of a run that has ended, by the present rule (:func:`stabilitylab.verdict.judge`): what an older
        version said of it is judged anew. None before its end, and where no held-out loss stands beside a baseline."""
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
        """Where the first number that was not finite stood (:class:`stabilitylab.probes.Incident`); None for none."""
        return read_incident(self.path, self.identity)

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """What ``stabilitylab evaluate`` found; None for a run that was not evaluated."""
        return read_evaluation(self.path, self.identity)

    @property
    def metrics(self) -> pd.DataFrame:
        """Reads one row a step: loss, learning rate, total gradient norm, ..."""
        return self.frame(METRICS)

    def frame(
        self,
        name: str,
        *,
        columns: Sequence[str] | None = None,
        config: Sequence[str] | bool = (),
        by: By | None = None,
    ) -> pd.DataFrame:
        """Reads a tidy frame: step, stack_name, layer, sublayer, site, the value columns (or only ``columns``), absent.

        ``config``: settings to add as columns, such as ``["model.arch", "train.seed"]``; True: all of them.
        ``by``: combine the rows of each layer or sub-layer. A NaN where ``absent`` is False was measured, or there is
        no such cell: :meth:`arrow` tells them apart.
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

    def arrow(self, name: str, *, columns: Sequence[str] | None = None, by: By | None = None) -> pa.Table:
        """Reads the same as stored: null where absent, or where there is no such cell (of metrics: not given), and NaN
        where NaN was measured."""
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

    def _rows(
        self, table: Table, columns: Sequence[str] | None, by: By | None
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Reads the columns of a frame; and says of the value columns where there is no number."""
        import pandas as pd

        names = self._chosen(table.columns, columns, table.name)
        fields = [("step", pa.int64()), *((name, pa.float64()) for name in names), ("absent", pa.bool_())]
        # Places are not read but repeated from the definition: every step holds all rows, in its order.
        data = self._read(table.name, pa.schema(fields))
        if data.num_rows % len(table.rows):
            raise DamagedError(f"{self.path} holds half a step of {table.name!r}: restore it from a copy.", self.path)
        shape = (-1, len(table.rows))
        steps = data["step"].to_numpy().reshape(shape)[:, 0]
        values = {name: data[name].to_numpy().reshape(shape) for name in names}
        absent, rows = data["absent"].to_numpy().astype(bool).reshape(shape), table.rows
        missing = {name: data[name].is_null().to_numpy().reshape(shape) for name in names}
        if by is not None:
            rows, values, missing, absent = combine(table, values, absent, by, missing)
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
                    pieces = list(self._pieces(name, schema))
            except FileNotFoundError:  # a table without rows in that journal, or a resume that set parts aside
                time.sleep(0.01)
                continue
            except MemoryError as error:
                raise self._too_large(name) from error
            empty = (schema or STEP).empty_table()
            try:
                return pa.concat_tables([empty, *pieces], promote_options="default").combine_chunks()
            except MemoryError as error:
                raise self._too_large(name) from error
        told = f"the files of {self.path} keep vanishing while they are read: is something deleting them?"
        raise DamagedError(told, self.path)

    def _too_large(self, name: str) -> ResourceError:
        return ResourceError(
            f"{name!r} of {self.path} does not fit into memory: read fewer columns= of it, or use a larger machine."
        )

    def _pieces(self, name: str, schema: pa.Schema | None) -> Iterator[pa.Table]:
        """Yields each part, or its journal where the part does not stand yet."""
        waiting = journals(self.path)  # listed before the parts: what leaves the one has entered the other
        done = parts(self.path, name)
        listed = self._listed(name, {*waiting, *done}, {*done})
        for number in sorted({*waiting, *done}):
            if number in done:
                yield read_part(self.path, done[number], schema, self.identity, listed.get(number, ()))
                continue
            try:
                records = read_records(waiting[number], self.identity, number)
            except FileNotFoundError:  # gone since it was listed, so its part stands by now
                yield read_part(self.path, part_path(self.path, name, number), schema, self.identity)
                continue
            if (complaint := records.complaint()) and not is_locked(self.path):  # else it is being written
                tell(f"{waiting[number]}: {complaint}")
            if records.table is not None:
                data = metrics_of if name == METRICS else partial(table_of, table=self._tables[name])
                found = data(records.table, run=self.path)
                yield found if schema is None else found.select(schema.names)

    def _listed(self, name: str, present: set[int], done: set[int]) -> dict[int, list[Entry]]:
        """Lists the parts that ``name`` must have; what is lost of them is said once, and what may be lost unseen.

        ``present``: numbers of the parts and journals that were found; ``done``: those of the parts.
        """
        # read after the files were listed: a resume shortens it before it moves any
        found = inventory.read(self.path, self.identity)
        if found is None and self.manifest["schema_version"] >= inventory.SINCE:
            tell(f"{self.path}: {inventory.FILE} is missing, so that lost parts would not show")
        listed = {} if found is None else found.of(name)
        advice = "restore it from a copy; the other steps are read"
        if lost := sorted(listed.keys() - present):
            again = {*journals(self.path), *parts(self.path, name)}  # some may have come since
            lost = [number for number in lost if number not in again]
        for number in lost[:1]:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            tell(f"{self.path}: part {number} of {name} ({listed[number][-1].steps()}){more} is missing: {advice}")
        empty: set[int] = set() if found is None else {*found.left_out}
        gaps = {*range(1, max(present, default=0))} - present - listed.keys() - empty
        if name == METRICS and gaps:
            tell(f"{self.path}: part {min(gaps)} of {name} is missing: {advice}")
        if found is not None:
            for sentence in self._doubts(found, name, present, done):
                tell(f"{self.path}: {sentence}")
        return listed

    def _doubts(self, found: Inventory, name: str, present: set[int], done: set[int]) -> Iterator[str]:
        """Yields what the inventory says of lost records, and what makes it doubtful."""
        if lost := found.unread() - present:
            lost -= {*journals(self.path), *parts(self.path, METRICS)}  # some may have come since
        if lost:
            missing = journal_path(self.path, min(lost)).name
            yield f"{missing} is missing, with rows that no part holds: restore it; the other steps are read"
        yield from found.complaints()
        if unlisted := found.unlisted(name, done, self.identity):
            unlisted &= parts(self.path, name).keys()  # a resume may have moved them since
        if unlisted:
            yield f"{inventory.FILE} does not list part {min(unlisted)} of {name}, so that lost parts may not show"

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


def _told(entry: Mapping[str, Any], name: str, kind: Any) -> Any:
    value = entry[name]
    if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and not 0 <= value < 2**62):
        raise ValueError(f"{name} = {shown(value)}")
    return value


def _repeat(value: Any, count: int) -> Any:
    """Repeats a setting as a column: numbers as they are, text as a category, lists joined by commas."""
    import pandas as pd

    if isinstance(value, list):
        value = ",".join(map(str, value))
    if isinstance(value, str):
        return pd.Categorical.from_codes(np.zeros(count, np.int8), pd.Index([value]))
    return np.full(count, value)
