"""A smaller copy of a run: without checkpoints, and with fewer rows of the probes' tables."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from . import inventory
from .identity import Identity, identity_of


def thinned(run: Path, keep: Callable[[int], bool] | None = None) -> Iterator[tuple[Path, bytes]]:
    """Yield (path below ``run``, content) for each file of a smaller copy of a run that has ended, without its
    checkpoints.

    ``keep(step)``: True for the rows of the probes' tables that stay. The last row of each part always stays, and
    metrics stay whole. None: all rows stay. The inventory describes the parts as they are yielded, so that the copy
    reads and verifies as a run.
    """
    parts: dict[tuple[str, int], bytes] = {}
    for file in sorted(each for each in run.rglob("*") if each.is_file()):
        within = file.relative_to(run)
        if within.parts[0] == "checkpoints" or file.name.startswith("."):
            continue
        data = file.read_bytes()
        if within.parts[0] == "probes" and file.suffix == ".parquet" and keep is not None:
            data = parts[within.parts[1], int(file.stem.rpartition("-")[2])] = _fewer_rows(file, keep)
        if file.name != inventory.FILE:
            yield within, data
    identity = identity_of(json.loads((run / "run.json").read_bytes()))
    if (found := inventory.read(run, identity)) is not None:
        listed = {key: [_as_it_is(entry, parts, identity) for entry in own] for key, own in found.entries.items()}
        yield Path(inventory.FILE), inventory.text_of(replace(found, entries=listed), identity).encode()


def _as_it_is(entry: inventory.Entry, parts: Mapping[tuple[str, int], bytes], identity: Identity) -> inventory.Entry:
    if (data := parts.get((entry.table, entry.part))) is None:
        return entry
    steps = pq.read_table(io.BytesIO(data), columns=["step"])["step"].to_numpy()
    return inventory.entry_of(entry.table, entry.part, steps, memoryview(data), identity)


def _fewer_rows(path: Path, keep: Callable[[int], bool]) -> bytes:
    rows = pq.ParquetFile(path).read()
    steps = rows["step"].to_numpy()
    kept = [step for step in np.unique(steps).tolist() if keep(step) or step == steps.max()]
    buffer = io.BytesIO()
    pq.write_table(rows.filter(pa.array(np.isin(steps, kept))), buffer, write_page_checksum=True)  # type: ignore[arg-type]
    return buffer.getvalue()
