"""A zip file with a seal in its comment: the SHA-256 of the file without the comment, and the id of the run.

``torch.load`` reads such a checkpoint as any other, and checks none of its own CRCs.
"""

from __future__ import annotations

import os
import re
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, NamedTuple

from .identity import Identity

COMMENT = re.compile(rb"sha256=(.{64})(?: run=(.{32}))?", re.DOTALL)  # also with damaged digits
LENGTHS = (7 + 64, 7 + 64 + 5 + 32)  # bytes of a comment without a run's id, as in schema 3, and with one
BARE = b"\0\0"  # the end of a zip file without a comment: the comment's length
CHUNK = 1 << 20


class Hashed:
    """A file to write to; :meth:`seal` ends it with the digest and, if given, the id of its run."""

    def __init__(self, file: BinaryIO, run_id: str = "") -> None:
        self._file, self._hash, self._run = file, sha256(), run_id

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        self._hash.update(view)
        self._file.write(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def seal(self) -> None:
        run = f" run={self._run}".encode() if self._run else b""
        self._hash.update(run)
        comment = b"sha256=" + self._hash.hexdigest().encode() + run
        self._file.seek(-len(BARE), os.SEEK_END)
        self._file.write(len(comment).to_bytes(2, "little") + comment)


class Seal(NamedTuple):
    """The seal of a checkpoint. ``whole``: True if the content has the recorded digest; None without a digest, as in
    schema 2. ``run_id``: None if the checkpoint names no run, as in schema 3."""

    whole: bool | None
    run_id: str | None = None


def seal_of(path: Path) -> Seal:
    """Read a checkpoint's comment and compare its digest."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        for length in LENGTHS:
            file.seek(max(0, size - length - 2))
            tail = file.read()
            found = COMMENT.fullmatch(tail[2:])
            if found is not None and tail[:2] == length.to_bytes(2, "little"):
                break
        else:
            return Seal(None)
        file.seek(0)
        hashed, left = sha256(), size - len(tail)
        while left and (chunk := file.read(min(CHUNK, left))):
            hashed.update(chunk)
            left -= len(chunk)
    hashed.update(BARE)
    if found[2] is not None:
        hashed.update(b" run=" + found[2])
    return Seal(
        hashed.hexdigest().encode() == found[1], None if found[2] is None else found[2].decode(errors="replace")
    )


def fault(path: Path, identity: Identity) -> str:
    """Say why a checkpoint is not one that the run ``identity`` wrote; "" if it is, or if it is too old to tell."""
    whole, run_id = seal_of(path)
    if whole is False:
        return "its content is not what was written: its digest is another"
    if not identity.run_id:
        return ""
    if run_id is None:  # a checkpoint from before the run had an id
        return "" if identity.since > 1 else "it names no run"
    return "" if run_id == identity.run_id else "it belongs to another run"
