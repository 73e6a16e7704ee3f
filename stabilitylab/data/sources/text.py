"""Reads local text, plain or gzip: two files of parallel text, one sentence a line, or one file of running text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...config import DataConfig
from ...errors import InputError, UsageError
from ...inputs import contents, unpacked
from .. import bpe
from ..corpus import Corpus, Pairs
from ..running import RunningText
from ..source import Files, source

MORE = "--set data.max_file_mb"


class Bounds(NamedTuple):
    """The largest sizes in bytes of an unpacked file and of one line; a corpus is held in memory."""

    file: int = 1_000_000_000
    line: int = 1_000_000

    @classmethod
    def of(cls, config: DataConfig) -> Bounds:
        return cls(config.max_file_mb * 1_000_000, config.max_line_kb * 1000)


def text_files(spec: str, valid: str | None) -> Mapping[str, Files]:
    """Return the files that ``data.source`` and ``data.valid`` name."""

    def paths(names: str) -> Files:
        return Files(tuple(Path(name.strip()).expanduser() for name in names.split(",")))

    return {"data.source": paths(spec), **({"data.valid": paths(valid)} if valid is not None else {})}


@source("text", "text:SRC[,TGT]", files=text_files)
def text(spec: str, config: DataConfig) -> Corpus:
    """Reads two local files of parallel text, or one text for a single stack, plain or .gz, and trains a BPE on it."""
    if "," in spec:
        return load_text(spec, config.valid, config.vocab_size, Bounds.of(config))
    return load_running(spec, config)


def load_running(file: str, config: DataConfig) -> Corpus:
    """Load one file, and ``config.valid``, as running text: blocks of ``config.max_length`` tokens."""
    bounds = Bounds.of(config)
    paths = {"train": _one(file, "--data text:FILE")}
    if config.valid is not None:
        paths["valid"] = _one(config.valid, "data.valid = FILE, as --data text:FILE is one file")
    raw = {path: _bytes(path, bounds) for path in paths.values()}
    hashes = {path: hashlib.sha256(content).hexdigest() for path, content in raw.items()}

    def lines(split: str) -> bpe.Lines:
        return [], decoded(paths[split], raw[paths[split]], bounds)

    corpus = bpe.encode_corpus(
        ["running text", *(hashes[path] for path in paths.values())],  # two files may be parallel text elsewhere
        lambda: {split: lines(split) for split in paths},
        config.vocab_size,
        {"files_sha256": {str(path): digest for path, digest in hashes.items()}},
        lines=lambda split: ([], decoded(paths[split], _bytes(paths[split], bounds), bounds)),
    )

    def cut(pairs: Pairs) -> RunningText:
        return RunningText.of(pairs.target, config.max_length)

    valid = None if corpus.valid is None else cut(corpus.valid)
    return replace(corpus, train=cut(corpus.train), valid=valid, rows=f"blocks of {config.max_length} tokens")


def load_text(files: str, valid: str | None, vocab_size: int, bounds: Bounds = Bounds()) -> Corpus:
    """Load the parallel text of ``files`` and ``valid``, each "SRC,TGT"."""
    paths = {"train": _two(files, "--data text:SRC,TGT")}
    if valid is not None:
        paths["valid"] = _two(valid, "data.valid = SRC,TGT")
    raw = {path: _bytes(path, bounds) for pair in paths.values() for path in pair}
    hashes = {path: hashlib.sha256(content).hexdigest() for path, content in raw.items()}
    return bpe.encode_corpus(
        [hashes[path] for pair in paths.values() for path in pair],
        lambda: {split: _lines(pair, raw.__getitem__, bounds) for split, pair in paths.items()},
        vocab_size,
        {"files_sha256": {str(path): digest for path, digest in hashes.items()}},
        # read again: a run need not hold the text in memory
        lines=lambda split: _lines(paths[split], lambda path: _bytes(path, bounds), bounds),
    )


def read_pair(files: str, form: str, bounds: Bounds) -> bpe.Lines:
    """Return the lines of both files of "SRC,TGT". ``form``: the form of ``files``, for error messages."""
    return _lines(_two(files, form), lambda path: _bytes(path, bounds), bounds)


def _lines(pair: tuple[Path, Path], content: Callable[[Path], bytes], bounds: Bounds) -> bpe.Lines:
    source, target = pair
    lines = decoded(source, content(source), bounds), decoded(target, content(target), bounds)
    if len(lines[0]) != len(lines[1]):
        raise InputError(
            f"{source} has {len(lines[0])} lines and {target} has {len(lines[1])}: "
            "parallel text needs the translation of line n in line n."
        )
    return lines


def decoded(path: Path, content: bytes, bounds: Bounds) -> list[str]:
    """Return the lines of a file. Only a newline ends a line, since text may contain Unicode's other separators."""
    content = unpacked(path, content, bounds.file, MORE)
    if b"\n" not in content and b"\r" in content.rstrip(b"\r"):
        raise InputError(
            f"{path} ends its lines by carriage returns alone: convert it, with tr '\\r' '\\n' for instance."
        )
    number, longest = _longest(content)
    if longest > bounds.line:
        raise InputError(
            f"line {number} of {path} has {longest:,} bytes, where a sentence or paragraph stands on each: is it the "
            "right file? "
            "--set data.max_line_kb raises the bound."
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path} is not UTF-8 in line {line}: convert it, with iconv for instance.") from error
    lines = [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]
    if not text.strip():
        raise InputError(f"{path} is empty: it should hold one sentence a line.")
    return lines


def _two(files: str, form: str) -> tuple[Path, Path]:
    names = [name.strip() for name in files.split(",")]
    if len(names) != 2 or not all(names):
        raise UsageError(f"{files!r} does not name two files: the form is {form}.")
    return Path(names[0]).expanduser(), Path(names[1]).expanduser()


def _one(file: str, form: str) -> Path:
    if not file.strip() or "," in file:
        raise UsageError(f"{file!r} does not name one file: the form is {form}.")
    return Path(file.strip()).expanduser()


def _bytes(path: Path, bounds: Bounds) -> bytes:
    return contents(path, bounds.file, MORE)


def _longest(content: bytes) -> tuple[int, int]:
    """Return the number (from 1) and the bytes of the longest line."""
    ends = np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n"))
    lengths = np.diff(ends, prepend=-1, append=len(content)) - 1
    return int(lengths.argmax()) + 1, int(lengths.max())
