"""A run as TensorBoard scalars: metrics as they are, tables by stack as minimum, median and maximum, and by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import ResourceError
from ..store import Run
from ..store.layout import METRICS

MOST_PLACES = 48  # places of a stack with a tag of their own; of more places, 48 that are evenly spaced
LABELS = ("step", "site", "stack_name", "layer", "sublayer", "absent")


def writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ResourceError("TensorBoard is not installed: pip install tensorboard.") from error
    return SummaryWriter


def scalars(run: Run, tables: Mapping[str, pa.Table], out: Path) -> list[Path]:
    """Write one event file. TensorBoard keeps float32; NaN and inf stay, "no gradient" and "no such cell" have no
    point.

    Tags: ``metrics/<name>``; ``<table>.<column>/<stack>/min``, ``median``, ``max`` over the finite places, and
    ``not_finite``, the number of places with NaN or inf, if there are any;
    ``<table>.<column>/<stack>/<layer>.<sublayer>`` for at most 48 places of a stack.
    """
    writer = writer_class()(log_dir=str(out))
    try:
        for name, data in tables.items():
            for tag, step, value in _points(name, data):
                writer.add_scalar(tag, value, step)
    finally:
        writer.close()
    return sorted(path for path in out.iterdir() if path.is_file())


def _points(name: str, data: pa.Table) -> Iterator[tuple[str, int, float]]:
    if name == METRICS:
        steps = data["step"].to_pylist()
        for column in data.column_names[1:]:
            for step, value in zip(steps, data[column].to_pylist(), strict=True):
                if value is not None:
                    yield f"{METRICS}/{column}", step, value
        return
    steps = np.unique(data["step"].to_numpy())
    shape = (len(steps), data.num_rows // len(steps))
    stacks = np.array(data["stack_name"].to_pylist()[: shape[1]])
    places = _places(data, shape[1])
    for column in (column for column in data.column_names if column not in LABELS):
        values = np.array(data[column].to_pylist(), float).reshape(shape)
        measured = data[column].is_valid().to_numpy().reshape(shape)  # neither absent nor missing; NaN is
        for stack in dict.fromkeys(stacks.tolist()):
            inside = np.flatnonzero(stacks == stack)
            head = f"{name}.{column}" + (f"/{stack}" if stack else "")
            shown = inside[np.unique(np.linspace(0, len(inside) - 1, min(MOST_PLACES, len(inside))).astype(int))]
            for at, step in enumerate(steps.tolist()):
                known = values[at, inside[measured[at, inside]]]
                usual = known[np.isfinite(known)]
                if broken := len(known) - len(usual):
                    yield f"{head}/not_finite", step, broken
                if len(usual):
                    yield f"{head}/min", step, float(usual.min())
                    yield f"{head}/median", step, float(np.median(usual))
                    yield f"{head}/max", step, float(usual.max())
                for place in shown[measured[at, shown]].tolist():
                    yield f"{head}/{places[place]}", step, float(values[at, place])


def _places(data: pa.Table, count: int) -> list[str]:
    """Return the tags of places: ``003.self_attn``, ``003``, or the site outside of layers; unique within a stack."""
    first = data.slice(0, count).to_pydict()
    names: list[str] = []
    taken: set[tuple[str, str]] = set()
    for place in range(count):
        site, sublayer = (first[key][place] if key in first else "" for key in ("site", "sublayer"))
        layer = first["layer"][place]
        name = f"{layer:03d}" + (f".{sublayer}" if sublayer else "") if layer else (site or sublayer or "outside")
        stack = first["stack_name"][place]
        names.append(name if (stack, name) not in taken else f"{name}.{site or place}")
        taken.add((stack, names[-1]))
    return names
