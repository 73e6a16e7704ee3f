"""Shape buckets: a few fixed batch shapes that waste little on padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TWO = 2  # the default number of shapes
WORTH = 0.9  # two shapes are made if they need at most this share of the padded tokens of one


@dataclass(frozen=True)
class Bucket:
    """One batch shape and the training pairs that go into it."""

    rows: int
    lengths: tuple[int, ...]  # padded tokens of each side
    members: np.ndarray  # (n,) indices of training pairs

    @property
    def batches(self) -> int:
        """The batches of an epoch. The start of the bucket's permutation fills up the last batch."""
        return -(-len(self.members) // self.rows)


def choose_buckets(lengths: np.ndarray, sentences: int, shapes: int = TWO, multiple: int = 1) -> tuple[Bucket, ...]:
    """Choose at most ``shapes`` shapes whose lengths are multiples of ``multiple``: by :func:`by_the_longest` for two
    shapes of any length, else by :func:`by_either_side`."""
    if (shapes, multiple) == (TWO, 1):
        return by_the_longest(lengths, sentences)
    return by_either_side(lengths, sentences, shapes, multiple)


def by_either_side(lengths: np.ndarray, sentences: int, shapes: int, multiple: int) -> tuple[Bucket, ...]:
    """Cut the pairs in two at a length of one side, repeatedly, where the cut saves most padded tokens of an epoch.

    Each bucket holds as many rows as fit into the padded tokens of ``sentences`` of the longest shape; one with fewer
    pairs than rows is not made.
    """
    budget = sentences * int(_up(lengths.max(axis=0), multiple).sum())
    parts = [_Part(np.arange(len(lengths)), lengths, multiple, budget)]
    while len(parts) < shapes:
        cuts = [part.best_cut() for part in parts]
        place = max(range(len(parts)), key=lambda number: cuts[number][0])  # the first of equals
        saved, inside = cuts[place]
        if saved <= 0:
            break
        members = parts[place].members
        parts[place : place + 1] = [
            _Part(part, lengths, multiple, budget) for part in (members[inside], members[~inside])
        ]
    return tuple(
        Bucket(max(sentences, budget // sum(part.shape)), part.shape, part.members)
        for part in sorted(parts, key=lambda part: (sum(part.shape), part.shape))
    )


class _Part:
    """Pairs that share a batch shape, and the padded tokens that two shapes would save."""

    def __init__(self, members: np.ndarray, lengths: np.ndarray, multiple: int, budget: int) -> None:
        self.members, self._lengths = members, lengths[members]
        self._multiple, self._budget = multiple, budget
        self.shape: tuple[int, ...] = tuple(_up(self._lengths.max(axis=0), multiple).tolist())
        self._best: tuple[int, np.ndarray] | None = None

    def best_cut(self) -> tuple[int, np.ndarray]:
        """Return (padded tokens saved, mask of the pairs on the short side). 0 or less saved: no cut is possible."""
        self._best = self._best or max(map(self._cut, range(self._lengths.shape[1])), key=lambda found: found[0])
        return self._best

    def _cut(self, side: int) -> tuple[int, np.ndarray]:
        own = self._lengths
        order = np.argsort(own[:, side], kind="stable")
        below = np.maximum.accumulate(own[order])  # the shape that holds the n + 1 shortest pairs
        above = np.maximum.accumulate(own[order][::-1])[::-1]  # and all from the n-th on
        cut = np.flatnonzero(np.diff(own[order, side])) + 1  # pairs on the short side, one boundary each
        short, long = (_up(shape, self._multiple).sum(axis=1) for shape in (below[cut - 1], above[cut]))
        left = len(own) - cut
        possible = (cut >= self._budget // short) & (left >= self._budget // long)
        if not possible.any():
            return 0, np.zeros(len(own), bool)
        saved = len(own) * sum(self.shape) - cut * short - left * long
        best = np.flatnonzero(possible)[np.argmax(saved[possible])]
        return int(saved[best]), own[:, side] <= below[cut[best] - 1, side]


def _up(lengths: np.ndarray, multiple: int) -> np.ndarray:
    return -(-lengths // multiple) * multiple


def by_the_longest(lengths: np.ndarray, sentences: int) -> tuple[Bucket, ...]:
    """Choose a short and a long bucket whose boundary minimises an epoch's padded tokens; one, if that saves under
    10 %.

    The longest bucket holds ``sentences`` rows, a shorter one as many more as fit into the same padded tokens.
    A bucket with fewer pairs than rows is not made.
    """
    pairs = len(lengths)  # lengths: (N, sides)
    longest = lengths.max(axis=1)
    order = np.argsort(longest, kind="stable")
    shapes = np.maximum.accumulate(lengths[order])  # (N, sides): the shape that holds the n + 1 shortest pairs
    whole = shapes[-1]

    short = np.flatnonzero(np.diff(longest[order])) + 1  # pairs in the short bucket, one boundary each
    area = shapes[short - 1].sum(axis=1)
    rows = sentences * whole.sum() // area
    cost = short * area + (pairs - short) * whole.sum()
    possible = (short >= rows) & (pairs - short >= sentences) & (cost <= WORTH * pairs * whole.sum())
    if not possible.any():
        return (Bucket(sentences, tuple(whole.tolist()), np.arange(pairs)),)
    best = np.flatnonzero(possible)[np.argmin(cost[possible])]
    cut = short[best]
    return (
        Bucket(int(rows[best]), tuple(shapes[cut - 1].tolist()), np.sort(order[:cut])),
        Bucket(sentences, tuple(whole.tolist()), np.sort(order[cut:])),
    )
