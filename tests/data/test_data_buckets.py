"""Shape buckets against an exhaustive search."""

from __future__ import annotations

import numpy as np
import pytest

from stabilitylab.data.buckets import choose_buckets


def exhaustive(lengths: np.ndarray, sentences: int) -> tuple[float, int | None]:
    """(padded tokens of an epoch, boundary) of the best choice, written as loops."""
    whole = [max(row[side] for row in lengths) for side in range(lengths.shape[1])]
    best: tuple[float, int | None] = (0.9 * len(lengths) * sum(whole), None)
    for boundary in range(1, lengths.max()):
        short = [row for row in lengths if max(row) <= boundary]
        if not short:
            continue
        area = sum(max(row[side] for row in short) for side in range(lengths.shape[1]))
        rows = sentences * sum(whole) // area
        cost = len(short) * area + (len(lengths) - len(short)) * sum(whole)
        if len(short) >= rows and len(lengths) - len(short) >= sentences and cost < best[0]:
            best = (cost, boundary)
    return best


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_the_boundary_is_the_best_there_is(seed: int, sides: int) -> None:
    random = np.random.default_rng(seed)
    lengths = 1 + random.poisson(random.uniform(2, 12), size=(int(random.integers(40, 300)), sides))
    buckets = choose_buckets(lengths, 8)
    cost, boundary = exhaustive(lengths, 8)
    assert len(buckets) == (1 if boundary is None else 2)
    if boundary is not None:
        assert sum(len(b.members) * sum(b.lengths) for b in buckets) == cost
    assert sorted(np.concatenate([b.members for b in buckets])) == list(range(len(lengths)))
    budget = 8 * lengths.max(axis=0).sum()
    for bucket in buckets:
        assert bucket.lengths == tuple(lengths[bucket.members].max(axis=0)) or bucket is buckets[-1]
        assert (lengths[bucket.members] <= np.array(bucket.lengths)).all()
        assert budget - sum(bucket.lengths) < bucket.rows * sum(bucket.lengths) <= budget
        assert len(bucket.members) >= bucket.rows
        assert bucket.batches * bucket.rows >= len(bucket.members) > (bucket.batches - 1) * bucket.rows
    assert buckets[-1].rows == 8


def test_equal_lengths_and_little_text_need_one_bucket() -> None:
    assert len(choose_buckets(np.full((100, 2), 9), 8)) == 1
    few = np.array([[3, 3]] * 7 + [[20, 20]] * 7)
    assert len(choose_buckets(few, 8)) == 1
    assert len(choose_buckets(np.repeat(few, 8, axis=0), 8)) == 2
