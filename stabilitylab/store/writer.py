"""The writer of a run: every step goes to the journal at once, and the journal to Parquet parts from time to time."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa

from ..errors import DamagedError, InputError, UsageError
from ..schema import Cells, Table
from . import inventory
from .arrays import numbers
from .aside import check_complete, free_place, set_aside
from .damage import tell
from .documents import plain, read_object, write_document
from .evaluation import FILE as EVALUATION
from .existing import exists, in_the_way
from .files import Lock, is_locked, make_directory, replace_file, sync_directory, writing
from .identity import Identity, identity_of, later_identity, new_identity
from .incident import FILE as INCIDENT
from .incident import Kept, write_incident
from .incident import keep_until as keep_incident_until
from .journal import Journal, read_records
from .layout import (
    METRICS,
    OWN_KEYS,
    SCHEMA_VERSION,
    TABLE_NAME,
    is_name,
    journal_path,
    journals,
    parts,
    read_run_json,
    write_run_json,
)
from .ledger import FILE as LEDGER
from .ledger import add_facts, keep_until
from .names import PLACES
from .parts import MOST_CELLS, compact, part_schema, read_part, renew

State = Literal["running", "finished", "diverged", "interrupted", "failed"]
log = logging.getLogger("stabilitylab")
JOURNAL_LIMIT = 32 * 2**20  # bytes; compacting that many takes a few tenths of a second


class _Begun(NamedTuple):
    """A step that is partly in the journal ``number``: the metrics and tables of these names."""

    step: int
    number: int
    names: frozenset[str]


class RunWriter:
    """Records a run as it happens (a :class:`stabilitylab.schema.Sink`); begins with :meth:`create` or :meth:`resume`.

    A step survives ``kill -9`` once :meth:`append` has returned, and a power cut once :meth:`seal` has. :meth:`close`
    may be followed by a last :meth:`set_status`.

    A run has one writer, in the process that began it. In a fork of that process :meth:`close`, ``__exit__`` and
    :meth:`set_status` do nothing, since the end of the run is not the fork's to record. All other methods raise
    UsageError there.
    """

    def __init__(self, path: Path, lock: Lock, document: dict[str, Any], part: int) -> None:
        self.path = path
        self.journal_limit = JOURNAL_LIMIT
        self._lock, self._document, self._number = lock, document, part
        self._identity, self._process = identity_of(document), os.getpid()
        self._tables: tuple[Table, ...] = ()
        self._journal: Journal | None = None
        self._names: set[str] = set()  # names of the metrics in the journal
        self._last_step: int | None = None
        self._fresh = False  # a new run that holds no step yet
        self._resumed = False  # a continued run that has no step since
        self._begun: _Begun | None = None
        self._closed = False

    @classmethod
    def create(cls, path: str | Path, manifest: Mapping[str, Any]) -> RunWriter:
        """Make a new run directory. ``manifest`` goes to run.json; its ``"config"`` is the resolved configuration.

        A run that ended before its first row is begun again. Raises UsageError if anything else is at ``path``.
        """
        path = Path(path)
        _refuse_own_keys(manifest)
        with writing(path):
            if path.exists() and (in_the_way(path) or ((path / "run.json").exists() and is_locked(path))):
                raise UsageError(exists(path))
            make_directory(path)
        document = {
            "schema_version": SCHEMA_VERSION,
            **new_identity().as_dict(),
            **{"created": _now(), **manifest, "attempts": [], "tables": {}},
        }
        lock = Lock(path)
        try:
            if in_the_way(path):  # another process was faster and has ended already
                raise UsageError(exists(path))
            if (path / "run.json").exists():
                log.info("%s held no row, so that it is begun anew.", path)
                with writing(path):
                    os.unlink(path / "run.json")  # first: status.json will soon be that of another run
                    (path / LEDGER).unlink(missing_ok=True)
            writer = cls(path, lock, document, part=1)
            writer._fresh = True
            writer._begin(manifest.get("argv", ()))
        except BaseException:
            lock.release()
            raise
        return writer

    @classmethod
    def resume(
        cls,
        path: str | Path,
        part: int,
        argv: Sequence[str] = (),
        *,
        manifest: Mapping[str, Any] | None = None,
        run_id: str = "",
    ) -> RunWriter:
        """Continue at ``part``, the number that :meth:`seal` gave to the checkpoint; later records move to aside/.

        ``manifest`` replaces entries of run.json; the former entries are kept with the new attempt. ``run_id``: the run
        that the checkpoint names. Raises UsageError if that is another run; "": the checkpoint names none, and nothing
        is checked.
        """
        path = Path(path)
        manifest = manifest or {}
        _refuse_own_keys(manifest)
        read_run_json(path)  # before the lock, which would put a file into a directory that is not a run
        lock = Lock(path)
        try:
            document = read_run_json(path)
            before = identity_of(document)
            if run_id and run_id != before.run_id:
                raise UsageError(f"the checkpoint belongs to another run than {path}: resume with what it gave itself.")
            identity = before if before.run_id else later_identity((path / "run.json").read_bytes(), since=part)
            document |= {"schema_version": SCHEMA_VERSION, **identity.as_dict()}
            writer = cls(path, lock, document, part)
            writer._resumed = True
            check_complete(path, part, before)
            inventory.keep_before(path, part, before, identity)
            set_aside(path, part, attempt=len(document["attempts"]))
            writer._compact()
            with writing(path):
                for table in document["tables"].values():
                    renew(path, table, identity)
                if not before.run_id:
                    _adopt(path, identity)
            if earlier := parts(path, METRICS):
                steps = read_part(path, earlier[max(earlier)], pa.schema([("step", pa.int64())]), identity)
                writer._last_step = int(np.max(numbers(steps["step"])))
            last = -1 if writer._last_step is None else writer._last_step
            keep_until(path, last, before, identity)
            keep_incident_until(path, last, len(document["attempts"]), before)
            new = {key: value for key, value in plain(manifest).items() if key != "created"}
            replaced = {key: document.get(key) for key, value in new.items() if document.get(key) != value}
            document.update(new)
            writer._begin(argv or manifest.get("argv", ()), replaced=replaced)
        except BaseException:
            lock.release()
            raise
        return writer

    @property
    def run_id(self) -> str:
        """Return the id of the run, which its checkpoints name."""
        return self._identity.run_id

    def _begin(self, argv: Sequence[str], **facts: Any) -> None:
        self._document["attempts"].append(
            {"started": _now(), "argv": list(argv), "pid": os.getpid(), "part": self._number, **facts}
        )
        inventory.add(self.path, [])  # makes the file if there is none
        # run.json last: if it exists, status.json exists too
        self.set_status("running", self._last_step or 0)
        write_run_json(self.path, self._document)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def open(self, tables: Sequence[Table]) -> None:
        """Declare the tables of the following steps. A table that holds a step, or is an earlier attempt's, must keep
        its rows and columns; otherwise UsageError is raised."""
        self._check_writable()
        known: dict[str, Table] = {} if self._fresh else self._document["tables"]
        for table in tables:
            _check(table)
            before = known.get(table.name, table)
            if (before.columns, before.rows) != (table.columns, table.rows):
                raise UsageError(
                    f"{self.path} holds the table {table.name!r} with other rows or columns: "
                    "resume with the same model and probes, or choose another --name."
                )
        self._tables = tuple(tables)
        self._roll()  # a journal has one schema
        self._document["tables"] = known | {table.name: table for table in tables}
        write_run_json(self.path, self._document)

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None:
        """Append one step with everything in it. When this returns, the whole step is in the run. If this raises,
        nothing of the call is in the run."""
        begun = self._begun if self._begun is not None and self._begun.step == step else None
        if begun is None:
            self._add(step, metrics, tables)
            return
        self._begun = None
        metrics = {name: value for name, value in metrics.items() if name not in begun.names}
        tables = {name: cells for name, cells in tables.items() if name not in begun.names}
        if (metrics or tables) and begun.number == self._number:  # else the part was sealed with what was known then
            self._add(step, metrics, tables, rest=True)

    def begin(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None:
        """Record the part of a step that is known by now. If the process dies before the step is appended whole, this
        part is in the run."""
        self._add(step, metrics, tables)
        self._begun = _Begun(step, self._number, frozenset((*metrics, *tables)))

    def _add(
        self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells], rest: bool = False
    ) -> None:
        self._check_process()
        if self._closed:
            raise ValueError(f"{self.path} was closed: resume it to append")
        if self._last_step is not None and step <= self._last_step and not rest:
            if self._resumed:
                raise DamagedError(
                    f"{self.path} has rows up to step {self._last_step}, but its checkpoint goes on at step {step}: "
                    "these rows are of another run or attempt, so restore the files from a copy.",
                    self.path,
                )
            raise ValueError(f"step {step} comes after step {self._last_step}: each step is appended once, in order")
        if unknown := tables.keys() - {table.name for table in self._tables}:
            raise ValueError(f"tables {sorted(unknown)} were not given to open()")
        if wrong := [name for name in metrics if not is_name(name)]:
            raise ValueError(f"a metric is called {wrong[0][:60]!r}: give it a name of one printable line")
        self._lock.check()
        self._keep_journal()
        if self._journal is not None and self._is_full(self._journal, metrics) and not rest:
            self._roll()
            self._compact()
        if self._journal is None:
            self._journal = self._new_journal()
        self._journal.append(step, metrics, tables)
        self._last_step, self._fresh, self._resumed = step, False, False

    def _is_full(self, journal: Journal, metrics: Mapping[str, float | None]) -> bool:
        """True if the journal is to become parts now: it is large, or its metrics would make a part that is too large
        (a new name at each step is a column of all rows)."""
        self._names.update(metrics)
        return journal.size >= self.journal_limit or (journal.count + 1) * len(self._names) > MOST_CELLS // 10

    def _new_journal(self) -> Journal:
        self._names = set()
        journal = Journal(journal_path(self.path, self._number), self._tables, self._identity, self._number)
        try:
            inventory.begin(self.path, self._number, self._identity)
        except BaseException:
            journal.release()
            os.unlink(journal.path)
            raise
        return journal

    def _keep_journal(self) -> None:
        """Restore a journal that another process removed, replaced or cut, and warn about lost records.

        This process still holds its own records through the open descriptor, even if the name is gone.
        """
        journal = self._journal
        if journal is None or not (changed := journal.changed()):
            return
        held = journal.held()
        with writing(self.path):
            if journal.is_elsewhere():
                if os.path.lexists(journal.path):
                    os.replace(journal.path, free_place(self.path, "replaced", journal.path))
                replace_file(journal.path, held)
        journal.reopen()
        records = read_records(journal.path, self._identity, self._number)
        lost = journal.count - (0 if records.table is None else records.table.num_rows)
        if lost > 0:
            inventory.leave_out(self.path, self._number, lost, self._identity)
        kept = f"{lost} of its {journal.count} records are lost" if lost > 0 else "none of its records is lost"
        tell(f"{journal.path} {changed} while it was written: {kept}")

    def flush(self) -> None:
        """Sync the appended steps to the disk, so that they survive a power cut."""
        self._check_process()
        self._keep_journal()
        if self._journal is not None:
            self._journal.sync()
            with writing(self.path):
                sync_directory(self.path)

    def seal(self) -> int:
        """End the current part and return the next one's number, which a checkpoint stores for :meth:`resume`."""
        self._check_writable()
        self._roll()
        self._compact()
        return self._number

    def set_status(self, state: State, step: int, reason: str = "", **facts: Any) -> None:
        """Replace status.json; ``facts`` are kept beside the state."""
        if state not in get_args(State):
            raise ValueError(f"unknown state {state!r}; choose one of {', '.join(get_args(State))}")
        if self._is_fork():
            return
        self._lock.check()
        status = {"state": state, "step": step, "reason": reason, "updated": _now(), "facts": facts}
        write_document(self.path, "status.json", status, self._identity)

    def record(self, **facts: Any) -> None:
        """Add entries to run.json that were not known at :meth:`create`, such as the probes that found no site."""
        _refuse_own_keys(facts)
        self._check_writable()
        self._document.update(facts)
        write_run_json(self.path, self._document)

    def incident(self, facts: Mapping[str, Any], rows: Sequence[Kept]) -> None:
        """Record the place at which the run first broke, and the rows around it. Another call with more rows replaces
        them."""
        self._check_writable()
        with writing(self.path):
            write_incident(self.path, facts, rows, {table.name: table for table in self._tables}, self._identity)

    def ledger(self, facts: Sequence[Mapping[str, Any]]) -> None:
        """Append recorded changes of settings, optimizer state and flags (:mod:`.ledger`)."""
        self._check_writable()
        add_facts(self.path, facts, self._identity)

    def close(self) -> None:
        """Turn the journal into parts and release the directory."""
        if self._closed or self._is_fork():
            return
        self._closed = True
        try:
            self.seal()
        finally:
            if self._journal is not None:
                self._journal.release()
            self._lock.release()

    def _is_fork(self) -> bool:
        return os.getpid() != self._process

    def _check_process(self) -> None:
        if self._is_fork():
            raise UsageError(
                f"{self.path} is written by process {self._process}, of which this is a fork: record in that process, "
                "or begin another run here."
            )

    def _check_writable(self) -> None:
        self._check_process()
        self._lock.check()

    def _roll(self) -> None:
        """Close the journal; the next append starts another. An empty journal stays open: its number is not used up."""
        self._keep_journal()
        if self._journal is not None and (self._journal.size or self._journal.count):
            journal, self._journal, self._number = self._journal, None, self._number + 1
            journal.release()

    def _compact(self) -> None:
        """Turn every closed journal into parts, also those that a crash or a full disk left behind."""
        with writing(self.path):
            for number, path in journals(self.path).items():
                if number < self._number:
                    records = compact(self.path, number, path, self._document["tables"], self._identity)
                    if complaint := records.complaint():
                        tell(f"{path}: {complaint}")
                    if records.left_out or records.table is None:
                        inventory.leave_out(self.path, number, records.left_out, self._identity)
                    # only now: until all parts exist, readers take this journal for the missing ones
                    if records.left_out:
                        os.replace(path, free_place(self.path, "damaged", path))
                    else:
                        os.unlink(path)
                    sync_directory(self.path)


def _check(table: Table) -> None:
    reserved = {*part_schema(Table("", (), ())).names, *PLACES}
    if not TABLE_NAME.fullmatch(table.name) or table.name in ("step", METRICS):
        raise UsageError(f"{table.name!r} cannot name a table: use letters, digits, - and _, not 'step' or 'metrics'.")
    if not table.rows or not table.columns or reserved & {*table.columns}:
        raise UsageError(f"table {table.name!r} needs rows and columns, none named {', '.join(sorted(reserved))}.")
    told = [*table.columns, table.unit, table.definition, table.total]
    told += [text for row in table.rows for text in (row.site, row.stack, row.sublayer)]
    if wrong := [text for text in told if not is_name(text)]:
        raise UsageError(f"table {table.name!r} calls something {wrong[0][:60]!r}, which is not one printable line.")


def _adopt(path: Path, identity: Identity) -> None:
    """Give the JSON files that an older version wrote beside run.json and status.json a checksum and the run's id."""
    for name in (INCIDENT, EVALUATION):
        if os.path.lexists(path / name):
            with suppress(InputError):  # a damaged file stays unreadable
                write_document(path, name, read_object(path, name)[0], identity)


def _refuse_own_keys(manifest: Mapping[str, Any]) -> None:
    if own := manifest.keys() & {*OWN_KEYS}:
        raise ValueError(f"{sorted(own)} in run.json are the store's own")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
