"""The JSON files of a run: each begins with the checksum of the rest and names its run.

``{"checksum": "crc32 0123abcd", ...}``: the CRC-32 of all bytes after that line. Schema 3 and before had none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

from ..errors import DamagedError, InputError
from .files import contents, replace_file
from .identity import Identity

KEY = "checksum"
HEAD = re.compile(rb'\{\n  "checksum": "crc32 ([0-9a-f]{8})",\n')


def write_document(run: Path, name: str, document: Mapping[str, Any], identity: Identity, escaped: bool = True) -> None:
    """Write ``document`` to the JSON file ``name`` of ``run``, with the run's id and a checksum, or not at all.

    ``escaped``: write letters beyond ASCII as escapes, so that any text can be written.
    """
    named = {"run_id": identity.run_id} if identity.run_id else {}
    text = json.dumps(plain({**document, **named}), indent=2, ensure_ascii=escaped)
    replace_file(run / name, sealed(text + "\n"))


def sealed(text: str) -> bytes:
    """Return the bytes of the JSON object ``text`` (one entry a line), with its checksum as the first entry."""
    rest = text.removeprefix("{\n").encode()
    return b'{\n  "%s": "crc32 %08x",\n' % (KEY.encode(), crc32(rest)) + rest


def read_document(run: Path, name: str, identity: Identity) -> dict[str, Any]:
    """Read the JSON file ``name`` of ``run``; raises DamagedError if it is not the file that the run wrote.

    ``identity``: that of run.json. If the run has an id, each JSON file must have a checksum and that id.
    """
    path = run / name
    document, checked = read_object(run, name)
    if identity.run_id:
        if not checked:
            raise damaged(path, "it has no checksum", run)
        if document.pop("run_id", None) != identity.run_id:
            raise DamagedError(f"{path} belongs to another run than run.json: restore it from a copy.", run)
    else:
        document.pop("run_id", None)
    return document


def read_object(run: Path, name: str) -> tuple[dict[str, Any], bool]:
    """Return the object in the JSON file ``name``, and True if it has a checksum, which holds (False: it has none).

    Raises DamagedError for a missing or damaged file. NaN and infinities are not JSON, so they count as damage.
    """
    path = run / name
    try:
        data = contents(run, path)
        head = HEAD.match(data)
        if head is not None and int(head[1], 16) != crc32(data[head.end() :]):
            advice = f"or, if somebody changed it on purpose, run `stabilitylab verify --reseal {run}`"
            told = f"{path} is damaged (its checksum is another): restore it from a copy, {advice}."
            raise DamagedError(told, run)
        document = json.loads(data.decode(), parse_constant=_no_number)
        if not isinstance(document, dict):
            raise ValueError("it holds no JSON object")
        if head is None and KEY in document:
            raise ValueError("its checksum stands in another place")
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing: restore it from a copy.", run) from error
    except MemoryError as error:
        raise damaged(path, "it needs more memory than there is", run) from error
    except (RecursionError, ValueError) as error:  # covers broken JSON and broken UTF-8
        raise damaged(path, str(error), run) from error
    document.pop(KEY, None)
    return document, head is not None


def damaged(path: Path, why: object, run: Path) -> DamagedError:
    """Return the error for a damaged file of a run; ``why`` is the reason."""
    return DamagedError(f"{path} is damaged ({why}): restore it from a copy.", run)


def reseal(path: Path) -> bool:
    """Give a JSON file that somebody changed on purpose the checksum of its present content.

    Returns False if its checksum holds already. Raises InputError if the file is no JSON object.
    """
    data = contents(path.parent, path)
    head = HEAD.match(data)
    if head is not None and int(head[1], 16) == crc32(data[head.end() :]):
        return False
    try:
        document = json.loads(data, parse_constant=_no_number)
        if not isinstance(document, dict) or not {*document} - {KEY}:
            raise ValueError("it holds no JSON object, or an empty one")
    except (RecursionError, ValueError) as error:
        raise InputError(f"{path} is no JSON file ({error}): restore it from a copy.") from error
    document.pop(KEY, None)
    text = json.dumps(document, indent=2) + "\n" if head is None else data[head.end() :].decode()
    replace_file(path, sealed(text))
    return True


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def plain(value: Any) -> Any:
    """Convert ``value`` into JSON's own types. NaN and infinities become text, since JSON has none and null means "not
    given"."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return plain(value.item()) if hasattr(value, "item") else str(value)
