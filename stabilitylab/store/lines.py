"""Lines of JSON that each end in their own CRC-32, in files to which a run only appends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from zlib import crc32


def line_of(document: Mapping[str, Any]) -> str:
    """Return a document as a line."""
    text = json.dumps(document)
    return f"{text} {crc32(text.encode()):08x}\n"


def document_in(line: bytes) -> dict[str, Any] | None:
    """Return the document in a line without its newline; None if the line is not what was written."""
    text, _, crc = line.rpartition(b" ")
    if crc != b"%08x" % crc32(text):
        return None
    try:
        document = json.loads(text)
    except (RecursionError, ValueError):
        return None
    return document if isinstance(document, dict) else None
