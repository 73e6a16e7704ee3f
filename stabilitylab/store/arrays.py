"""Arrow arrays straight from numpy's buffers: ``pa.array`` has rules of its own for NaN, and imports pandas. Beside
them, the steps of a column."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa


def integers(values: np.ndarray | Sequence[int], kind: pa.DataType) -> pa.Array:
    return _array(kind, np.ascontiguousarray(values, kind.to_pandas_dtype()), None)


def floats(values: np.ndarray, valid: np.ndarray | None = None) -> pa.Array:
    """Wrap float64 values bit for bit; null where not ``valid``."""
    return _array(pa.float64(), np.ascontiguousarray(values, np.float64), valid)


def flags(values: np.ndarray) -> pa.Array:
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, _bits(values)])


def steps_in(column: np.ndarray) -> np.ndarray:
    """Return the different steps of a column in which equal steps are neighbours, in rising order."""
    begins = np.flatnonzero(np.diff(column)) + 1
    return np.unique(column[np.concatenate([[0], begins])]) if len(column) else column


def strings(values: Sequence[str]) -> pa.Array:
    encoded = [value.encode() for value in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(encoded), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded)))


def _array(kind: pa.DataType, values: np.ndarray, valid: np.ndarray | None) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None if valid is None else _bits(valid), pa.py_buffer(values)])


def _bits(values: np.ndarray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(np.ascontiguousarray(values, bool), bitorder="little"))
