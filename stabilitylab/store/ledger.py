"""The ledger of a run, ``ledger.jsonl``: a line for each recorded change of a setting, an optimizer state or a flag.

Each line is a JSON object, then its own CRC-32. A torn last line, which a crash left, is no part of the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import DamagedError
from .documents import plain
from .files import appending, contents, inside, replace_file, write_all
from .identity import Identity
from .lines import document_in, line_of

FILE = "ledger.jsonl"


def add_facts(run: Path, facts: Iterable[Mapping[str, Any]], identity: Identity) -> None:
    """Append a line for each fact. The lines are as safe from a power cut as the rows of the journal: not synced."""
    text = "".join(line_of({**plain(fact), "run": identity.run_id}) for fact in facts)
    with appending(run, FILE) as file:
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        write_all(file, ("\n" * torn + text).encode())


def read_facts(run: Path, identity: Identity) -> list[dict[str, Any]]:
    """Return the recorded facts in order; [] for a run without a ledger. Raises DamagedError for a damaged line."""
    try:
        lines = contents(run, run / FILE).split(b"\n")
    except FileNotFoundError:
        return []
    found = []
    for number, line in enumerate(lines, start=1):
        fact = document_in(line)
        if fact is None:
            if not line or _is_torn(line):
                continue
            raise DamagedError(f"line {number} of {run / FILE} is damaged: restore the file from a copy.", run)
        if identity.run_id and fact.pop("run", None) != identity.run_id:
            raise DamagedError(f"line {number} of {run / FILE} belongs to another run: restore it from a copy.", run)
        found.append(fact)
    return found


def keep_until(run: Path, step: int, before: Identity, identity: Identity) -> None:
    """Remove the facts about updates after ``step``, which a resumed run makes anew."""
    if os.path.lexists(run / FILE):
        kept = [fact for fact in read_facts(run, before) if fact.get("step", 0) <= step]
        lines = [line_of({**fact, "run": identity.run_id}) for fact in kept]
        replace_file(inside(run, run / FILE), "".join(lines).encode())


def _is_torn(line: bytes) -> bool:
    """Return True for a line that a crash cut off: it does not end in ``}``, a space and a CRC."""
    return not (len(line) > 9 and line[-9:-8] == b" " and line[-10:-9] == b"}")
