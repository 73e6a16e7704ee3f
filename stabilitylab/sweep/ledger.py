"""The ledger of a sweep: a table of finished training runs, one line a cell, that outlives the machine that made them.

A CSV for git: lines are only ever appended, and two branches that both did merge as a union.
"""

from __future__ import annotations

import csv
import fcntl
import io
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import InputError, ResourceError
from ..store import Run
from ..store.files import NO_LOCKS, make_directory, sync_directory, write_all
from .cells import COLUMNS, Cell, cell_of, spread
from .identity import DIGITS, key_of

if TYPE_CHECKING:
    import pandas as pd

    from ..config import Config

log = logging.getLogger(__name__)

BOM = b"\xef\xbb\xbf"
KEY = re.compile(rf"[0-9a-f]{{{DIGITS}}}")
BEGINNING = re.compile(rf"[0-9a-f]{{0,{DIGITS}}}")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")
PATIENCE, POLL = 60.0, 0.02  # seconds to wait for another process's line, and between two attempts


class _Content(NamedTuple):
    columns: Sequence[str]
    cells: list[Cell]
    whole: int  # bytes up to the end of the last line that is whole
    torn: str  # the text behind it


class Ledger:
    """The table at ``path``, which need not exist yet; it is read again whenever it has changed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._seen: tuple[int, ...] | None = None
        self._cells: dict[str, Cell] = {}

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r})"

    def find(self, config: Config) -> Cell | None:
        """Return the line of the run of ``config``, from any machine; None if there is none."""
        return self.cells().get(key_of(config))

    def cells(self) -> dict[str, Cell]:
        """Return the lines by key. If several lines have one key, the last one counts. A torn last line is left out,
        with one warning.

        Raises InputError for a file that is no ledger, or has a damaged line.
        """
        try:
            with _opened(self.path, os.O_RDONLY, fcntl.LOCK_SH) as file:
                stat = os.fstat(file)
                if (now := (stat.st_ino, stat.st_size, stat.st_mtime_ns)) != self._seen:
                    found = _parsed(self.path, _bytes(file))
                    self._seen, self._cells = now, {cell["key"]: cell for cell in found.cells}
                    if found.torn:
                        log.warning("%s ends in a torn line, which is not counted: %r", self.path, found.torn)
        except FileNotFoundError:
            self._seen, self._cells = None, {}
        except OSError as error:
            raise InputError(f"cannot read the ledger {self.path} ({error.strerror}): check the path.") from error
        return self._cells

    def prepare(self) -> None:
        """Make sure that lines can be written, before anything is computed for them."""
        self._append(None)

    def add(self, run: Run) -> bool:
        """Append the line of a run that has ended, unless its key is there already; return True if it was appended."""
        return self._append(cell_of(run))

    def frame(self) -> pd.DataFrame:
        """Return all lines as a table of numbers and words, with a column for each setting and metric."""
        import pandas as pd

        return pd.DataFrame([spread(cell) for cell in self.cells().values()])

    def _append(self, cell: Cell | None) -> bool:
        try:
            make_directory(self.path.parent)
            with _opened(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, fcntl.LOCK_EX) as file:
                content = _bytes(file)
                found = _parsed(self.path, content)
                if found.torn:  # its writer was killed; the run's directory still exists
                    os.ftruncate(file, found.whole)
                    log.warning("%s ended in a torn line, which was removed: %r", self.path, found.torn)
                columns = found.columns or COLUMNS
                new = cell is not None and all(cell["key"] != other["key"] for other in found.cells)
                rows = [*([] if found.columns else [columns])]
                rows += [[cell.get(column, "") for column in columns]] if new and cell is not None else []
                if rows:
                    ended = not found.whole or content[: found.whole].endswith(b"\n")
                    _append_to(file, ("" if ended else "\n") + _lines(rows))
            sync_directory(self.path.parent)
        except OSError as error:
            raise ResourceError(
                f"cannot write the ledger {self.path} ({error.strerror}): the runs themselves are safe, and the same "
                "sweep adds their lines once it can be written."
            ) from error
        return new


def _parsed(path: Path, content: bytes) -> _Content:
    """Parse the lines of a ledger; the last one may be torn, any other damage is an error that names its line."""
    columns: Sequence[str] = ()
    cells: list[Cell] = []
    *ended, rest = content.removeprefix(BOM).split(b"\n")
    for number, line in enumerate([*ended, rest], start=1):
        text = line.decode(errors="replace").rstrip("\r")
        fields = next(csv.reader([text]), [])
        if not fields or fields == columns:  # empty, or the header once more after a merge
            continue
        if not columns and fields[0] == "key" and fields[-1] == "finished":
            columns = fields
        elif _is_cell(fields, columns):
            cells.append(dict(zip(columns, fields, strict=True)))
        elif number > len(ended) and _is_torn(text, fields, columns):
            return _Content(columns, cells, len(content) - len(line), text)
        elif columns:
            raise InputError(
                f"line {number} of {path} is no line of a ledger: remove the line, or resolve the merge conflict."
            )
        else:
            raise InputError(f"{path} is no ledger, which begins with the names of its columns: give another file.")
    return _Content(columns, cells, len(content), "")


def _is_cell(fields: Sequence[str], columns: Sequence[str]) -> bool:
    if not columns or len(fields) != len(columns) or not KEY.fullmatch(fields[0]):
        return False
    return TIME.fullmatch(fields[-1]) is not None


def _is_torn(text: str, fields: Sequence[str], columns: Sequence[str]) -> bool:
    """True if ``text`` can be the beginning of a line. Anything else is not ours to remove."""
    if not columns:
        return ",".join(COLUMNS).startswith(text)
    return len(fields) <= len(columns) and BEGINNING.fullmatch(fields[0]) is not None


@contextmanager
def _opened(path: Path, flags: int, kind: int) -> Iterator[int]:
    """Open and lock the file at ``path``. If git has put a new file there meanwhile, open that one."""
    while True:
        file = os.open(path, flags, 0o666)
        try:
            _lock(path, file, kind)
            if os.fstat(file).st_ino == path.stat().st_ino:
                yield file
                return
        finally:
            os.close(file)


def _lock(path: Path, file: int, kind: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ResourceError(
                    f"another process has kept {path} locked for {PATIENCE:g} seconds: end it, or give another ledger."
                ) from None
            time.sleep(POLL)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return  # no lock: a line is one write at the end of the file, which few file systems tear


def _bytes(file: int) -> bytes:
    with open(file, "rb", closefd=False) as stream:
        stream.seek(0)
        return stream.read()


def _append_to(file: int, text: str) -> None:
    """Write all of ``text`` to the disk, or nothing of it."""
    size = os.fstat(file).st_size
    try:
        write_all(file, text.encode())
        os.fsync(file)
    except OSError:
        os.ftruncate(file, size)
        raise


def _lines(rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
