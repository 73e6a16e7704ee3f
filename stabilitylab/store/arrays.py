"""Conversion between numpy arrays and Arrow arrays by their buffers, and the steps of a column.

``pa.array`` has rules of its own for NaN. ``pa.array``, ``to_numpy`` and ``fill_null`` import pandas.
"""

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


def numbers(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return the values of a column, which may be read-only: NaN for a number that is null, False for a flag."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    kind, (known, buffer) = array.type, array.buffers()
    chosen = slice(array.offset, array.offset + len(array))
    if buffer is None:
        values = np.zeros(len(array), kind.to_pandas_dtype())
    elif pa.types.is_boolean(kind):
        values = _flags_in(buffer)[chosen]
    else:
        values = np.frombuffer(buffer, kind.to_pandas_dtype(), chosen.stop)[chosen]
    if not array.null_count:
        return values
    return np.where(_flags_in(known)[chosen], values, False if values.dtype == bool else np.nan)


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


def _flags_in(buffer: pa.Buffer) -> np.ndarray:
    return np.unpackbits(np.frombuffer(buffer, np.uint8), bitorder="little").astype(bool)
