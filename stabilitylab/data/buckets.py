"""Sorts rows into shape buckets: at most two fixed batch shapes that waste little on padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Bucket:
    """One batch shape and the training pairs that go into it."""

    rows: int
    lengths: tuple[int, ...]  # padded tokens of each side
    members: np.ndarray  # (n,) indices of training pairs

    @property
    def batches(self) -> int:
        """Counts the batches of an epoch; the last one is filled up from the beginning of the bucket's permutation."""
        return -(-len(self.members) // self.rows)


def choose_buckets(lengths: np.ndarray, sentences: int, worth: float = 0.9) -> tuple[Bucket, ...]:
    """Chooses a short and a long bucket whose boundary minimises an epoch's padded tokens; one, if that saves under
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
    possible = (short >= rows) & (pairs - short >= sentences) & (cost <= worth * pairs * whole.sum())
    if not possible.any():
        return (Bucket(sentences, tuple(whole.tolist()), np.arange(pairs)),)
    best = np.flatnonzero(possible)[np.argmin(cost[possible])]
    cut = short[best]
    return (
        Bucket(int(rows[best]), tuple(shapes[cut - 1].tolist()), np.sort(order[:cut])),
        Bucket(sentences, tuple(whole.tolist()), np.sort(order[cut:])),
    )
