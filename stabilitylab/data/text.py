"""Local parallel text: two files with one sentence a line, plain or gzip."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Callable
from pathlib import Path

from ..errors import InputError, UsageError
from . import bpe
from .corpus import Corpus


def load_text(files: str, valid: str | None, vocab_size: int) -> Corpus:
    """``files`` and ``valid`` are "SRC,TGT"."""
    paths = {"train": _two(files, "--data text:SRC,TGT")}
    if valid is not None:
        paths["valid"] = _two(valid, "data.valid = SRC,TGT")
    raw = {path: _bytes(path) for pair in paths.values() for path in pair}
    hashes = {path: hashlib.sha256(content).hexdigest() for path, content in raw.items()}
    return bpe.encode_corpus(
        [hashes[path] for pair in paths.values() for path in pair],
        lambda: {split: _lines(pair, raw.__getitem__) for split, pair in paths.items()},
        vocab_size,
        {"files_sha256": {str(path): digest for path, digest in hashes.items()}},
        lines=lambda split: _lines(paths[split], _bytes),  # read again: a run need not hold the text in memory
    )


def read_pair(files: str, form: str) -> bpe.Lines:
    """The lines of both files of "SRC,TGT"; ``form`` is how a message says that they are named."""
    return _lines(_two(files, form), _bytes)


def _lines(pair: tuple[Path, Path], content: Callable[[Path], bytes]) -> bpe.Lines:
    source, target = pair
    lines = decoded(source, content(source)), decoded(target, content(target))
    if len(lines[0]) != len(lines[1]):
        raise InputError(
            f"{source} has {len(lines[0])} lines and {target} has {len(lines[1])}: "
            "parallel text needs the translation of line n in line n."
        )
    return lines


def decoded(path: Path, content: bytes) -> list[str]:
    """The lines of a file. Only a newline ends one: text may well contain the other separators of Unicode."""
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path} is not a whole gzip file ({error}): fetch it again.") from error
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


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): check the path.") from error
