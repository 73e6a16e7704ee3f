"""A run as TensorBoard scalars: metrics as they are, tables by stack as minimum, median and maximum, and by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import ResourceError
from ..histograms import COLUMNS, HIGH, LOW, NONFINITE, TABLES, ZERO
from ..store import Run
from ..store.layout import METRICS

MOST_PLACES = 48  # places of a stack with a tag of their own; of more places, 48 that are evenly spaced
POWERS = np.exp2(np.arange(LOW, HIGH + 2.0))  # the last bucket has no upper limit in the counts; 2^17 stands for it
LIMITS = np.array([*-POWERS[::-1], 0.0, np.nextafter(0.0, 1.0), *POWERS])  # ends of the columns up to the finite ones
MIDDLES = np.where(np.arange(NONFINITE) == ZERO, 0.0, (LIMITS[:-1] + LIMITS[1:]) / 2)
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
    ``<table>.<column>/<stack>/<layer>.<sublayer>`` for at most 48 places of a stack. Tables of histograms are its
    histograms ``<table>/<stack>/<site>``, of at most 48 places of a stack; what is not finite is in none.
    """
    writer = writer_class()(log_dir=str(out))
    try:
        for name, data in tables.items():
            if name in TABLES:
                for tag, step, facts in _histograms(name, data):
                    writer.add_histogram_raw(tag, global_step=step, **facts)
                continue
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


def _histograms(name: str, data: pa.Table) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield (tag, step, arguments of ``add_histogram_raw``) of each place and row that has a finite entry.

    Buckets end at powers of two. Sums, which TensorBoard keeps beside them, are those of the buckets' middles.
    """
    steps = np.unique(data["step"].to_numpy())
    sites, stacks = (data[key].to_pylist()[: data.num_rows // len(steps)] for key in ("site", "stack_name"))
    counts = np.stack([np.array(data[column].to_pylist(), float) for column in COLUMNS[:NONFINITE]], axis=1)
    counts = counts.reshape(len(steps), len(sites), NONFINITE)
    for stack in dict.fromkeys(stacks):
        inside = np.flatnonzero(np.array(stacks) == stack)
        shown = inside[np.unique(np.linspace(0, len(inside) - 1, min(MOST_PLACES, len(inside))).astype(int))]
        for place in shown.tolist():
            tag = "/".join(filter(None, (name, stack, sites[place])))
            for at, step in enumerate(steps.tolist()):
                if (own := counts[at, place]).sum() > 0:  # NaN: no gradient
                    yield tag, step, _raw(own)


def _raw(counts: np.ndarray) -> dict[str, Any]:
    held = np.flatnonzero(counts)
    cut = slice(int(held[0]), int(held[-1]) + 1)
    total = float((counts * MIDDLES).sum())
    return {
        "min": float(LIMITS[held[0]]), "max": float(LIMITS[held[-1] + 1]), "num": float(counts.sum()), "sum": total,
        "sum_squares": float((counts * MIDDLES**2).sum()),
        "bucket_limits": LIMITS[1:][cut].tolist(), "bucket_counts": counts[cut].tolist(),
    }  # fmt: skip


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
