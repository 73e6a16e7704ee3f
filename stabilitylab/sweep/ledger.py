"""The ledger of a sweep: a table of finished training runs, one line a cell, that outlives the machine that made them.

A CSV for git: lines are only ever appended, and two branches that both did merge as a union.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import Config, complete, depth_layers, validated
from ..errors import InputError, ResourceError
from ..store import Run
from ..store.files import NO_LOCKS, make_directory, sync_directory, write_all
from ..store.layout import METRICS, flat
from .identity import DIGITS, SOURCES, data_of, deciding, key_of

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

COLUMNS = (
    "key",  # what the run is, see identity.key_of
    *("label", "arch", "layers", "seed", "steps", "lr", "warmup", "T", "data"),  # layers: encoder and decoder together
    "settings",  # what else differs from the defaults
    *("version", "git_revision", "torch", "cpu_capability", "device"),
    *("state", "verdict", "nll_gap", "accuracy_gap", "step"),
    "metrics",  # all numbers of the last row by name
    "finished",  # last: a line that ends with a time was written whole
)
NUMBERS = ("layers", "seed", "steps", "lr", "warmup", "T", "nll_gap", "accuracy_gap", "step")
BOM = b"\xef\xbb\xbf"
KEY = re.compile(rf"[0-9a-f]{{{DIGITS}}}")
BEGINNING = re.compile(rf"[0-9a-f]{{0,{DIGITS}}}")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")
OWN = {  # settings that have a column
    "model.arch": "arch",
    "train.seed": "seed",
    "train.steps": "steps",
    "train.lr": "lr",
    "train.warmup": "warmup",
    "model.T": "T",
}
PATIENCE, POLL = 60.0, 0.02  # seconds for another process to finish its line

Cell = Mapping[str, str]  # a line by column


class _Content(NamedTuple):
    columns: Sequence[str]
    cells: list[Cell]
    whole: int  # bytes up to the end of the last line that is whole
    torn: str  # what stands behind them


class Ledger:
    """The table at ``path``, which need not exist yet; read again whenever it has changed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._seen: tuple[int, ...] | None = None
        self._cells: dict[str, Cell] = {}

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r})"

    def find(self, config: Config) -> Cell | None:
        """The line of the run that ``config`` describes, on whatever machine it was made."""
        return self.cells().get(key_of(config))

    def cells(self) -> dict[str, Cell]:
        """The lines by key, of several with one key the last; a torn last line is not among them, and said once.

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
        """Append the line of a run that has ended, unless its key stands there already; whether it was appended."""
        return self._append(cell_of(run))

    def frame(self) -> pd.DataFrame:
        """All lines as a table of numbers and words, each setting and metric in a column of its own by name."""
        import pandas as pd

        rows = []
        for cell in self.cells().values():
            split = {
                f"{column}.{name}" if column == METRICS else name: _read(value)
                for column in ("settings", METRICS)
                for name, value in (word.split("=", 1) for word in cell.get(column, "").split(" ") if word)
            }
            own = {column: cell[column] for column in cell if column not in ("settings", METRICS)}
            rows.append({**own, **{column: _read(own[column]) for column in NUMBERS if column in own}, **split})
        return pd.DataFrame(rows)

    def _append(self, cell: Cell | None) -> bool:
        try:
            make_directory(self.path.parent)
            with _opened(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, fcntl.LOCK_EX) as file:
                content = _bytes(file)
                found = _parsed(self.path, content)
                if found.torn:  # whoever wrote it was killed; its run still stands where it was made
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


def cell_of(run: Run) -> dict[str, str]:
    """The line of a training run that has ended."""
    manifest, status = run.manifest, run.status
    recorded = complete(run.config)
    config = validated(recorded)
    digests = manifest.get("data", {}).get("files_sha256")
    own = {column: dict(flat(recorded))[key] for key, column in OWN.items()}
    verdict = run.verdict
    values: dict[str, Any] = {
        "key": key_of(config, digests),
        "label": manifest.get("label"),
        "layers": config.model.depth,
        **own,
        "data": data_of(config, digests),
        "settings": " ".join(f"{key}={_word(value)}" for key, value in _others(config)),
        "version": manifest.get("stabilitylab"),
        **{key: manifest.get(key) for key in ("git_revision", "torch", "cpu_capability", "device")},
        "state": status.state,
        "verdict": verdict and verdict.state,
        **{key: getattr(verdict, key, None) for key in ("nll_gap", "accuracy_gap")},
        "step": status.step,
        "metrics": " ".join(f"{name}={value!r}" for name, value in last_row(run).items()),
        "finished": datetime.fromisoformat(status.updated).astimezone(UTC).isoformat(timespec="seconds"),
    }
    return {column: "" if value is None else " ".join(str(value).split()) for column, value in values.items()}


def last_row(run: Run) -> dict[str, float]:
    """The metrics of the last row, without those that were not given there; a NaN was measured."""
    table = run.arrow(METRICS)
    rows = table.slice(max(0, table.num_rows - 1)).to_pylist()
    return {name: value for row in rows for name, value in row.items() if name != "step" and value is not None}


def _others(config: Config) -> Iterator[tuple[str, Any]]:
    """Settings without a column that differ from the defaults, or from what the columns let expect."""
    model, usual = config.model, deciding(Config().model_dump(mode="json"))
    if model.depth % 2 == 0 or model.stack != "encoder-decoder":
        layers = depth_layers(model.depth, model.stack)
        usual |= zip(("model.encoder_layers", "model.decoder_layers"), layers, strict=True)
    usual["data.seed"] = config.train.seed
    for key, value in deciding(config.model_dump(mode="json")).items():
        if value != usual[key] and key not in (*OWN, *SOURCES):
            yield key, value


def _word(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return "".join(text.split())


def _read(text: str) -> Any:
    """A number where it is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None


def _parsed(path: Path, content: bytes) -> _Content:
    """The lines of a ledger; the last one may be torn, any other damage is an error that names its line."""
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
                f"line {number} of {path} is no line of a ledger: remove it, or resolve a merge's conflict."
            )
        else:
            raise InputError(f"{path} is no ledger, which begins with the names of its columns: give another file.")
    return _Content(columns, cells, len(content), "")


def _is_cell(fields: Sequence[str], columns: Sequence[str]) -> bool:
    if not columns or len(fields) != len(columns) or not KEY.fullmatch(fields[0]):
        return False
    return TIME.fullmatch(fields[-1]) is not None


def _is_torn(text: str, fields: Sequence[str], columns: Sequence[str]) -> bool:
    """Could ``text`` be the beginning of a line? Anything else is not ours to remove."""
    if not columns:
        return ",".join(COLUMNS).startswith(text)
    return len(fields) <= len(columns) and BEGINNING.fullmatch(fields[0]) is not None


@contextmanager
def _opened(path: Path, flags: int, kind: int) -> Iterator[int]:
    """A descriptor of the file that ``path`` names, locked; git puts a new file there, whose lock is another one."""
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
            return  # a line is one write at the end of the file, which few file systems tear


def _bytes(file: int) -> bytes:
    with open(file, "rb", closefd=False) as stream:
        stream.seek(0)
        return stream.read()


def _append_to(file: int, text: str) -> None:
    """All of ``text``, on the disk, or nothing of it."""
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
