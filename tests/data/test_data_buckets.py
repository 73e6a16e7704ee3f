"""Shape buckets against an exhaustive search."""

from __future__ import annotations

import numpy as np
import pytest

from stabilitylab.data.buckets import Bucket, by_either_side, by_the_longest, choose_buckets


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


def padded(buckets: tuple[Bucket, ...]) -> int:
    """Tokens of an epoch, apart from what fills up a bucket's last batch."""
    return sum(len(bucket.members) * sum(bucket.lengths) for bucket in buckets)


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("shapes", [1, 3, 8])
def test_any_number_of_shapes(shapes: int, multiple: int, sides: int) -> None:
    random = np.random.default_rng(shapes)
    lengths = np.minimum(48, 1 + random.poisson(random.gamma(4, 4, size=(3000, 1)), size=(3000, sides)))
    buckets = choose_buckets(lengths, 16, shapes, multiple)
    assert 1 <= len(buckets) <= shapes
    assert sorted(np.concatenate([b.members for b in buckets])) == list(range(len(lengths)))
    longest = -(-lengths.max(axis=0) // multiple) * multiple
    budget = 16 * longest.sum()
    for bucket in buckets:
        inside = -(-lengths[bucket.members].max(axis=0) // multiple) * multiple
        assert bucket.lengths == tuple(inside)
        assert budget - sum(bucket.lengths) < bucket.rows * sum(bucket.lengths) <= budget
        assert len(bucket.members) >= bucket.rows >= 16
        assert not any(length % multiple for length in bucket.lengths)
    assert len({bucket.lengths for bucket in buckets}) == len(buckets) or multiple > 1
    if shapes > 1:
        assert padded(buckets) < 0.8 * padded(choose_buckets(lengths, 16, 1, multiple))


@pytest.mark.parametrize("seed", range(4))
def test_each_cut_is_the_best_there_is(seed: int) -> None:
    """Of two shapes, by trying every boundary of either side; three are one of these two cut again."""
    random = np.random.default_rng(seed)
    lengths = 1 + random.poisson(random.uniform(2, 12, size=2), size=(200, 2))
    budget, best = 4 * int(lengths.max(axis=0).sum()), len(lengths) * int(lengths.max(axis=0).sum())
    for side in range(2):
        for boundary in range(1, lengths[:, side].max()):
            inside = lengths[:, side] <= boundary
            parts = lengths[inside], lengths[~inside]
            if all(len(part) and len(part) >= budget // part.max(axis=0).sum() for part in parts):
                best = min(best, sum(len(part) * int(part.max(axis=0).sum()) for part in parts))
    two, three = (by_either_side(lengths, 4, shapes, 1) for shapes in (2, 3))
    assert padded(two) == best
    assert padded(three) < best
    whole = {tuple(sorted(b.members.tolist())) for b in two}
    assert len(whole & {tuple(sorted(b.members.tolist())) for b in three}) == 1


def test_two_shapes_stay_what_they_were() -> None:
    """Runs from before there was a choice had two, and their batches are in them."""
    random = np.random.default_rng(0)
    lengths = 1 + random.poisson(9, size=(400, 2))
    for one, two in zip(choose_buckets(lengths, 8), by_the_longest(lengths, 8), strict=True):
        assert (one.rows, one.lengths) == (two.rows, two.lengths)
        assert (one.members == two.members).all()
    assert len(choose_buckets(np.full((100, 2), 9), 8, shapes=8)) == 1
