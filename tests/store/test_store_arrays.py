"""Arrow columns as numpy arrays: what ``to_numpy`` makes of them, slices and chunks and nulls included."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from stabilitylab.store.arrays import numbers

COLUMNS = {
    "numbers": pa.array([1.5, None, float("nan"), -0.0, 3.0]),
    "whole numbers": pa.array([1, 2, 3], pa.int32()),
    "a whole number that is null": pa.array([1, None, 2], pa.int64()),
    "flags": pa.array([True, False, False] * 9),
    "a flag that is null": pa.array([True, None, False]),
    "nulls alone": pa.nulls(5, pa.float64()),
    "no number": pa.array([], pa.float64()),
    "no flag": pa.array([], pa.bool_()),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_the_numbers_of_a_column_are_those_of_to_numpy(name: str) -> None:
    array = COLUMNS[name]
    chunked = pa.chunked_array([array, array])
    for column in (array, array[1:], array[1:3], chunked, chunked[2:], pa.chunked_array([], array.type)):
        known = column.fill_null(False) if pa.types.is_boolean(column.type) else column
        expected = known.to_numpy(**({} if isinstance(column, pa.ChunkedArray) else {"zero_copy_only": False}))
        found = numbers(column)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(np.signbit(found.astype(float)), np.signbit(expected.astype(float)))
