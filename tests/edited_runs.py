"""Runs that somebody changed: a JSON file edited with its checksum made anew, a run as an older version wrote it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zlib import crc32

import pyarrow.parquet as pq

from stabilitylab.store import journal
from stabilitylab.store.documents import reseal
from stabilitylab.store.identity import Identity
from stabilitylab.store.inventory import entry_of

JSON_FILES = ("run.json", "status.json", "incident.json", "evaluation.json")


def edit(path: Path, document: Mapping[str, Any] | None = None, **changes: Any) -> None:
    """Write ``document`` (if not given, what stands there) with ``changes`` to a JSON file of a run, its checksum too;
    ``...`` removes an entry. A new file is named after its run."""
    own = {key: value for key, value in json.loads((path.parent / "run.json").read_text()).items() if key == "run_id"}
    found = {**own, **(json.loads(path.read_text()) if document is None else document), **changes}
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not ...}))
    reseal(path)


def as_schema(run: Path, version: int, document: Mapping[str, Any] | None = None) -> Path:
    """Turn a run into one as schema 1, 2 or 3 wrote it: no id, no checksum in JSON files; below 3 no inventory.

    ``document``: what run.json shall hold instead.
    """
    for name in JSON_FILES:
        if (run / name).exists():
            found = json.loads((run / name).read_text())
            if name == "run.json":
                found = {**(found if document is None else document), "schema_version": version}
            for key in ("checksum", "run_id", "run_id_since", *["files"] * (name == "incident.json")):
                found.pop(key, None)
            (run / name).write_text(json.dumps(found))
    for path in run.rglob("part-*.parquet"):
        table = pq.read_table(path, partitioning=None)
        pq.write_table(table.replace_schema_metadata(None), path, write_page_checksum=True)
    for path in run.glob("journal-*.records"):
        path.write_bytes(b"".join(map(_old_record, journal._frames(path.read_bytes()))))
    (run / "inventory.jsonl").unlink(missing_ok=True)
    if version >= 3:
        (run / "inventory.jsonl").write_text("".join(map(_old_line, sorted(run.rglob("part-*.parquet")))))
    return run


def _old_record(frame: Any) -> bytes:
    payload = frame.payload or b""
    head = journal.OLD_HEAD.pack(journal.OLD_MARK, frame.number, len(payload), crc32(payload), 0)[:-4]
    return head + struct.pack("<I", crc32(head)) + payload


def _old_line(part: Path) -> str:
    steps = pq.read_table(part, columns=["step"], partitioning=None)["step"].to_numpy()
    entry = asdict(entry_of(part.parent.name, int(part.stem[5:]), steps, memoryview(part.read_bytes()), Identity()))
    del entry["run"]
    return f"{(text := json.dumps(entry))} {crc32(text.encode()):08x}\n"
