"""A zip file that says what it should hash to: its comment is the SHA-256 of the file without it.

``torch.load`` reads such a checkpoint as any other, and checks none of its own CRCs.
"""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

NAME, LENGTH = b"sha256=", 7 + 64
BARE = b"\0\0"  # how a zip file without a comment ends: the comment's length
CHUNK = 1 << 20


class Hashed:
    """A file to write to; :meth:`seal` ends it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash = file, sha256()

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        self._hash.update(view)
        self._file.write(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def seal(self) -> None:
        self._file.seek(-len(BARE), os.SEEK_END)
        self._file.write(LENGTH.to_bytes(2, "little") + NAME + self._hash.hexdigest().encode())


def is_whole(path: Path) -> bool | None:
    """Is it what was written? None where it does not say, as checkpoints of schema 2 did not."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LENGTH - 2))
        tail = file.read()
        if tail[:2] != LENGTH.to_bytes(2, "little") or not tail[2:].startswith(NAME):
            return None
        file.seek(0)
        hashed, left = sha256(), size - len(tail)
        while left and (chunk := file.read(min(CHUNK, left))):
            hashed.update(chunk)
            left -= len(chunk)
    hashed.update(BARE)
    return hashed.hexdigest().encode() == tail[2 + len(NAME) :]
