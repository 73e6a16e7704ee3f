"""Writes a run: every step to the journal at once, the journal to Parquet parts now and then."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa

from ..errors import UsageError
from ..schema import Cells, Table
from . import inventory
from .aside import check_complete, free_place, set_aside
from .existing import exists, in_the_way
from .files import Lock, is_locked, make_directory, replace_file, sync_directory, writing
from .incident import Kept, write_incident
from .journal import Journal
from .layout import (
    METRICS,
    OWN_KEYS,
    SCHEMA_VERSION,
    TABLE_NAME,
    is_name,
    journal_path,
    journals,
    part_path,
    plain,
    read_run_json,
    write_run_json,
)
from .names import PLACES
from .parts import compact, part_schema, read_part, renew
from .telling import tell

State = Literal["running", "finished", "diverged", "interrupted", "failed"]
log = logging.getLogger("stabilitylab")
JOURNAL_LIMIT = 32 * 2**20  # bytes; compacting that many takes a few tenths of a second


class _Begun(NamedTuple):
    """A step of which a part is in the journal ``number``: the metrics and tables of these names."""

    step: int
    number: int
    names: frozenset[str]


class RunWriter:
    """Records a run as it happens (a :class:`stabilitylab.schema.Sink`); begins with :meth:`create` or :meth:`resume`.

    What :meth:`append` has returned from survives ``kill -9``; what :meth:`seal` has, a power cut. :meth:`close` may
    be followed by a last :meth:`set_status`.
    """

    def __init__(self, path: Path, lock: Lock, document: dict[str, Any], part: int) -> None:
        self.path = path
        self.journal_limit = JOURNAL_LIMIT
        self._lock, self._document, self._number = lock, document, part
        self._tables: tuple[Table, ...] = ()
        self._journal: Journal | None = None
        self._last_step: int | None = None
        self._fresh = False  # a new run that holds no step yet
        self._begun: _Begun | None = None
        self._closed = False

    @classmethod
    def create(cls, path: str | Path, manifest: Mapping[str, Any]) -> RunWriter:
        """Makes a new run directory; ``manifest`` goes to run.json, its ``"config"`` being the resolved
        configuration. A run that ended before its first row is begun anew."""
        path = Path(path)
        _refuse_own_keys(manifest)
        with writing(path):
            if path.exists() and (in_the_way(path) or ((path / "run.json").exists() and is_locked(path))):
                raise UsageError(exists(path))
            make_directory(path)
        document = {"schema_version": SCHEMA_VERSION, "created": _now(), **manifest, "attempts": [], "tables": {}}
        lock = Lock(path)
        try:
            if in_the_way(path):  # somebody else was faster and has ended already
                raise UsageError(exists(path))
            if (path / "run.json").exists():
                log.info("%s held no row, so that it is begun anew.", path)
            writer = cls(path, lock, document, part=1)
            writer._fresh = True
            writer._begin(manifest.get("argv", ()))
        except BaseException:
            lock.release()
            raise
        return writer

    @classmethod
    def resume(
        cls, path: str | Path, part: int, argv: Sequence[str] = (), *, manifest: Mapping[str, Any] | None = None
    ) -> RunWriter:
        """Continue at ``part``, the number that :meth:`seal` gave to the checkpoint; later records move to aside/.

        ``manifest`` replaces entries of run.json; what stood there before is kept with the new attempt.
        """
        path = Path(path)
        manifest = manifest or {}
        _refuse_own_keys(manifest)
        read_run_json(path)  # before the lock, which would put a file into a directory that is not a run
        lock = Lock(path)
        try:
            document = read_run_json(path)
            writer = cls(path, lock, document, part)
            check_complete(path, part)
            inventory.keep_before(path, part)
            set_aside(path, part, attempt=len(document["attempts"]))
            writer._compact()
            with writing(path):
                for table in document["tables"].values():
                    renew(path, table)
            if part > 1:
                steps = read_part(path, part_path(path, METRICS, part - 1), pa.schema([("step", pa.int64())]))
                writer._last_step = int(np.max(steps["step"].to_numpy()))
            new = {key: value for key, value in plain(manifest).items() if key != "created"}
            replaced = {key: document.get(key) for key, value in new.items() if document.get(key) != value}
            document.update(new)
            writer._begin(argv or manifest.get("argv", ()), replaced=replaced)
        except BaseException:
            lock.release()
            raise
        return writer

    def _begin(self, argv: Sequence[str], **facts: Any) -> None:
        self._document["attempts"].append(
            {"started": _now(), "argv": list(argv), "pid": os.getpid(), "part": self._number, **facts}
        )
        inventory.add(self.path, [])  # where there is none yet
        # run.json last: where it stands, status.json stands too
        self.set_status("running", self._last_step or 0)
        write_run_json(self.path, self._document)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def open(self, tables: Sequence[Table]) -> None:
        """Declare the tables that follow; those that hold a step, or an earlier attempt's, must have the same rows and
        columns."""
        self._lock.check()
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
        """Appends one step with everything in it: it is in the run when this returns, and no part of it is if this
        raises (of a step that was begun, no further part)."""
        begun = self._begun if self._begun is not None and self._begun.step == step else None
        if begun is None:
            self._add(step, metrics, tables)
            return
        self._begun = None
        metrics = {name: value for name, value in metrics.items() if name not in begun.names}
        tables = {name: cells for name, cells in tables.items() if name not in begun.names}
        if (metrics or tables) and begun.number == self._number:  # else it was sealed as it was known then
            self._add(step, metrics, tables, rest=True)

    def begin(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None:
        """Records what is known of a step by now: should the process die before it is appended whole, this much is
        there."""
        self._add(step, metrics, tables)
        self._begun = _Begun(step, self._number, frozenset((*metrics, *tables)))

    def _add(
        self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells], rest: bool = False
    ) -> None:
        if self._closed:
            raise ValueError(f"{self.path} was closed: resume it to append")
        if self._last_step is not None and step <= self._last_step and not rest:
            raise ValueError(f"step {step} comes after step {self._last_step}: each step is appended once, in order")
        if unknown := tables.keys() - {table.name for table in self._tables}:
            raise ValueError(f"tables {sorted(unknown)} were not given to open()")
        if wrong := [name for name in metrics if not is_name(name)]:
            raise ValueError(f"a metric is called {wrong[0][:60]!r}: give it a name of one printable line")
        self._lock.check()
        if self._journal is not None and self._journal.size >= self.journal_limit and not rest:
            self._roll()
            self._compact()
        if self._journal is None:
            self._journal = Journal(journal_path(self.path, self._number), self._tables)
        self._journal.append(step, metrics, tables)
        self._last_step, self._fresh = step, False

    def flush(self) -> None:
        """Bring what was appended to the disk itself: a power cut leaves it."""
        if self._journal is not None:
            self._journal.sync()
            with writing(self.path):
                sync_directory(self.path)

    def seal(self) -> int:
        """End the current part and return the next one's number, which a checkpoint stores for :meth:`resume`."""
        self._lock.check()
        self._roll()
        self._compact()
        return self._number

    def set_status(self, state: State, step: int, reason: str = "", **facts: Any) -> None:
        """Replace status.json; ``facts`` are kept beside the state."""
        if state not in get_args(State):
            raise ValueError(f"unknown state {state!r}; choose one of {', '.join(get_args(State))}")
        self._lock.check()
        status = {"state": state, "step": step, "reason": reason, "updated": _now(), "facts": facts}
        replace_file(self.path / "status.json", (json.dumps(plain(status), indent=2) + "\n").encode())

    def record(self, **facts: Any) -> None:
        """Add entries to run.json that were not known at :meth:`create`, such as the probes that found no site."""
        _refuse_own_keys(facts)
        self._lock.check()
        self._document.update(facts)
        write_run_json(self.path, self._document)

    def incident(self, facts: Mapping[str, Any], rows: Sequence[Kept]) -> None:
        """Records where the run first broke, and the rows around it; called again with more rows it writes them
        anew."""
        self._lock.check()
        with writing(self.path):
            write_incident(self.path, facts, rows, {table.name: table for table in self._tables})

    def close(self) -> None:
        """Compact the journal and let go of the directory."""
        if self._closed:
            return
        self._closed = True
        try:
            self.seal()
        finally:
            self._lock.release()

    def _roll(self) -> None:
        """Close the journal; the next append starts another. An empty one stays: its number is not used up."""
        if self._journal is not None and self._journal.size:
            journal, self._journal, self._number = self._journal, None, self._number + 1
            journal.close()

    def _compact(self) -> None:
        """Turn every closed journal into parts: also those that a crash or a full disk left behind."""
        with writing(self.path):
            for number, path in journals(self.path).items():
                if number < self._number:
                    records = compact(self.path, number, path, self._document["tables"])
                    if complaint := records.complaint():
                        tell(f"{path}: {complaint}")
                    # only now: until all parts stand, readers take this journal for the missing ones
                    if records.dropped:
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


def _refuse_own_keys(manifest: Mapping[str, Any]) -> None:
    if own := manifest.keys() & {*OWN_KEYS}:
        raise ValueError(f"{sorted(own)} in run.json are the store's own")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
