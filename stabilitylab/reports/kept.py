"""The results of a run that lie beside a report, so that the next report reads only runs that have changed.

A file holds values by key. It is of use only while its head is the same: the files of the run with size and time of
each, and the code that made the values. Numbers lie as they are in memory, everything else as JSON: reading a file
runs no code that the file names.
"""

from __future__ import annotations

import json
import logging
import math
import os
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

T = TypeVar("T")
C = TypeVar("C")

log = logging.getLogger(__name__)
FOLDER = ".read"  # in the folder of the report
END = ".kept"
LARGEST = 4 << 20  # bytes of a value; larger ones, such as the metrics of a million steps, are read again
ROOMS = ("", "alarm", "diagnose", "reports", "store")  # the folders of the package whose code decides a value
PACKAGES = ("numpy", "pandas", "pyarrow")
_CLASSES: dict[str, type] = {}


class UnkeepableError(Exception):
    """Raised for a value that has no form in a file."""


def keepable(kind: type[C]) -> type[C]:
    """Let instances of a dataclass be kept; usable as a decorator."""
    if not is_dataclass(kind):
        raise TypeError(f"{kind.__name__} is no dataclass")
    _CLASSES[kind.__name__] = kind
    return kind


class Kept:
    """The kept values of one run. ``head``: what they depend on, as JSON can write it."""

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path = path
        self._head = json.dumps(head, sort_keys=True)
        self._pieces = _read(path, self._head)
        self._fresh = False

    @property
    def digest(self) -> str:
        """Return a digest of what the values depend on."""
        return sha256(self._head.encode()).hexdigest()

    def get(self, key: Hashable, make: Callable[[], T], given: str = "") -> T:
        """Return the kept value of ``key``. If there is none, if it cannot be read, or if it was made with another
        ``given``, return what ``make`` returns, and keep that."""
        try:
            name = json.dumps(_packed(key, []))
        except UnkeepableError:
            return make()
        if (piece := self._pieces.get(name)) is not None:
            try:
                with_, value = _unpack(piece)
                if with_ == given:
                    return value
            except Exception as error:  # whatever is wrong with a file, the run itself is there
                log.debug("%s: %s cannot be read (%r)", self.path, name, error)
        value = make()
        try:
            piece = _pack((given, value))
        except UnkeepableError:
            return value
        if len(piece) <= LARGEST:
            self._pieces[name] = piece
            self._fresh = True
        return value

    def save(self) -> None:
        """Write what is new. An error is not raised: the values can be made again."""
        if not self._fresh:
            return
        index, at = [], 0
        for name, piece in self._pieces.items():
            index.append([name, at, len(piece)])
            at += len(piece)
        line = json.dumps({"head": self._head, "index": index}).encode() + b"\n"
        body = line + b"".join(self._pieces.values())
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(b"%08x\n" % zlib.crc32(body) + body)
            part.replace(self.path)
        except OSError as error:
            log.debug("%s cannot be written: %s", self.path, error)
            with suppress(OSError):
                part.unlink()
        self._fresh = False


def file_of(report: Path, run: Path) -> Path:
    """Return the file of a run beside the report in this folder."""
    return report / FOLDER / f"{sha256(os.fsencode(run.resolve())).hexdigest()[:32]}{END}"


def forget(report: Path, used: Iterable[Path]) -> None:
    """Remove the files of runs that no longer exist. ``used``: files of runs that do."""
    known = {path.name for path in used}
    with suppress(OSError):
        for path in (report / FOLDER).glob(f"*{END}"):
            if path.name not in known and not _stands(path):
                path.unlink(missing_ok=True)


def _stands(path: Path) -> bool:
    """Return True if the run of a file exists; False also if the file does not say which run it is of."""
    with path.open("rb") as file:
        file.readline()
        line = file.readline()
    try:
        return Path(json.loads(json.loads(line)["head"])["run"]).exists()
    except (KeyError, RecursionError, TypeError, ValueError):
        return False


@cache
def code() -> str:
    """Return a digest of the code that makes kept values, and of the versions of what it stands on."""
    from importlib.metadata import version

    package = Path(__file__).parents[1]
    found = sha256()
    for room in ROOMS:
        for path in sorted((package / room).glob("*.py" if not room else "**/*.py")):
            found.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    found.update(" ".join(version(name) for name in PACKAGES).encode())
    return found.hexdigest()


def _read(path: Path, head: str) -> dict[str, bytes]:
    """Return the values of a file, still packed; {} for another head, and for no file or a damaged one."""
    try:
        data = path.read_bytes()
        told, _, body = data.partition(b"\n")
        if int(told, 16) != zlib.crc32(body):
            return {}
        line, _, pieces = body.partition(b"\n")
        found = json.loads(line)
        if found["head"] != head:
            return {}
        return {name: pieces[at : at + size] for name, at, size in found["index"]}
    except (KeyError, OSError, RecursionError, TypeError, ValueError):
        return {}


def _pack(value: Any) -> bytes:
    """Return a value as bytes: the length of its JSON, the JSON, and the arrays that the JSON names."""
    arrays: list[bytes] = []
    told = json.dumps(_packed(value, arrays), separators=(",", ":")).encode()
    return zlib.compress(b"%d\n" % len(told) + told + b"".join(arrays), 1)


def _unpack(piece: bytes) -> Any:
    size, _, rest = zlib.decompress(piece).partition(b"\n")
    told, arrays = rest[: int(size)], rest[int(size) :]
    return _unpacked(json.loads(told), arrays)


def _packed(value: Any, arrays: list[bytes]) -> Any:
    """Return what JSON can write of a value; arrays are added to ``arrays``."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_packed(one, arrays) for one in value]
    if type(value) is tuple:
        return {"tuple": [_packed(one, arrays) for one in value]}
    if type(value) in (dict, MappingProxyType):
        return {"dict": [[_packed(key, arrays), _packed(one, arrays)] for key, one in value.items()]}
    if isinstance(value, np.ndarray | np.generic):
        return _array(value, arrays)
    if isinstance(value, pa.Table):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, value.schema) as writer:
            writer.write_table(value)
        return {"table": _array(np.frombuffer(sink.getvalue(), np.uint8), arrays)}
    if _CLASSES.get(type(value).__name__) is type(value):
        content = {one.name: _packed(getattr(value, one.name), arrays) for one in fields(value)}
        return {"class": type(value).__name__, "fields": content}
    if type(value).__name__ in ("DataFrame", "Frame"):
        return _frame(value, arrays)
    raise UnkeepableError(f"a {type(value).__name__}")


def _array(value: np.ndarray | np.generic, arrays: list[bytes]) -> dict[str, Any]:
    if value.dtype.kind not in "biufU":
        raise UnkeepableError(f"numbers of type {value.dtype}")
    at = sum(map(len, arrays))
    arrays.append(np.ascontiguousarray(value).tobytes())
    scalar = isinstance(value, np.generic)
    return {"array": value.dtype.str, "shape": list(value.shape), "at": at, **({"scalar": 1} if scalar else {})}


def _frame(value: Any, arrays: list[bytes]) -> dict[str, Any]:
    """Pack a data frame: each column is an array, or the codes and names of a categorical one."""
    import pandas as pd

    columns = []
    for name in value.columns:
        column = value[name]
        if isinstance(column.dtype, pd.CategoricalDtype):
            names = column.cat.categories
            if not all(type(one) is str for one in names) or column.cat.ordered:
                raise UnkeepableError("a column of ordered names")
            columns.append([name, _array(column.cat.codes.to_numpy(), arrays), list(names)])
        elif isinstance(column.dtype, np.dtype):
            columns.append([name, _array(column.to_numpy(), arrays), None])
        else:
            raise UnkeepableError(f"a column of type {column.dtype}")
    plain = isinstance(value.index, pd.RangeIndex) and value.index.start == 0 and value.index.step == 1
    index = None if plain else _array(value.index.to_numpy(), arrays)
    if not all(type(name) is str for name in value.columns) or value.index.nlevels > 1 or value.index.name:
        raise UnkeepableError("a frame with names of another kind")
    return {"frame": columns, "index": index, "kind": type(value).__name__, "length": len(value)}


def _unpacked(told: Any, arrays: bytes) -> Any:
    if isinstance(told, list):
        return [_unpacked(one, arrays) if isinstance(one, dict | list) else one for one in told]
    if not isinstance(told, dict):
        return told
    if "tuple" in told:
        return tuple(_unpacked(one, arrays) for one in told["tuple"])
    if "dict" in told:
        return {_unpacked(key, arrays): _unpacked(one, arrays) for key, one in told["dict"]}
    if "array" in told:
        count = math.prod(told["shape"])
        found = np.frombuffer(arrays, told["array"], count, told["at"]).reshape(told["shape"])
        return found[()] if "scalar" in told else found.copy()  # writable, as what was read
    if "table" in told:
        return pa.ipc.open_stream(pa.py_buffer(_unpacked(told["table"], arrays))).read_all()
    if "class" in told:
        return _CLASSES[told["class"]](**{name: _unpacked(one, arrays) for name, one in told["fields"].items()})
    return _framed(told, arrays)


def _framed(told: dict[str, Any], arrays: bytes) -> Any:
    import pandas as pd

    from ..store.frame import Frame

    content: dict[str, Any] = {}
    for name, codes, names in told["frame"]:
        column = _unpacked(codes, arrays)
        content[name] = column if names is None else pd.Categorical.from_codes(column, pd.Index(names))
    index = pd.RangeIndex(told["length"]) if told["index"] is None else pd.Index(_unpacked(told["index"], arrays))
    return (Frame if told["kind"] == "Frame" else pd.DataFrame)(content, index=index)
