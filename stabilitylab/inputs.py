"""Users' input: files of any kind and size, and values of any length. Each input is read within bounds, or refused in
one sentence."""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import warnings
import zlib
from pathlib import Path
from typing import Any

from .errors import InputError, UsageError, bounded

CHUNK = 1 << 20
SHOWN = 80  # the most letters of a value that a sentence shows
KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def shown(value: Any, most: int = SHOWN) -> str:
    """Return ``repr`` on one line of bounded length, for any value: a number of 5,000 digits has no repr of its own."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__} too long to be shown"
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def expression(text: str, named: str, use: str) -> re.Pattern[str]:
    """Return a user's regular expression. Raises UsageError for text that is none: ``named`` says where it was given,
    and ``use`` what to give."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of "[[", which is a bracket in a set
            return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"{named} {shown(text)} is no regular expression ({error}): give {use}.") from error


def regular(path: Path) -> int:
    """Return the size of ``path``; raises InputError if it is no file that can be read to its end."""
    try:
        found = os.stat(path)
    except ValueError as error:  # a NUL in the name
        raise InputError(f"{shown(str(path))} cannot name a file: check the path.") from error
    except OSError as error:
        raise InputError(f"cannot read {bounded(str(path), 400)} ({error.strerror}): check the path.") from error
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"cannot read {path} (Is {KINDS.get(stat.S_IFMT(found.st_mode), 'no file')}): give a file.")
    return found.st_size


def contents(path: Path, most: int, option: str) -> bytes:
    """Return all bytes of a file. Raises InputError for more than ``most`` bytes; ``option`` raises the bound."""
    if regular(path) > most:
        raise _too_large(path, "holds", most, option)
    try:
        with path.open("rb") as file:
            found = file.read(most + 1)
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): check the path.") from error
    if len(found) > most:
        raise _too_large(path, "holds", most, option)
    return found


def unpacked(path: Path, content: bytes, most: int, option: str) -> bytes:
    """Return the unpacked ``content`` of a ``.gz``, or ``content`` of another file. Raises InputError for more than
    ``most`` bytes."""
    if path.suffix != ".gz":
        return content
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            pieces: list[bytes] = []
            left = most + 1
            while left and (piece := file.read(min(CHUNK, left))):
                pieces.append(piece)
                left -= len(piece)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is not a whole gzip file ({error}): fetch it again.") from error
    if not left:
        raise _too_large(path, "unpacks to", most, option)
    return b"".join(pieces)


def _too_large(path: Path, what: str, most: int, option: str) -> InputError:
    return InputError(
        f"{path} {what} more than {most / 1e6:g} MB: check that it is the right file ({option} raises the bound)."
    )
