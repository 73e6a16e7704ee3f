"""What runs at scale h200 share, which one GPU makes of Multi30k in half an hour.

The papers' recipe (lr 5e-4, warm-up and T of 4000 updates, Adam .9 / .98) on one device: batches of at least 4,096
target tokens, as the 4k-token batches for which lr 5e-4 is the custom on small data, in place of 524k. Fixed before any
run at this scale was made; results/h200/README.md gives the reasons and the thresholds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..config import merge
from .recipe import SEEDS, Recipe

TEXT = {"data": {"sentences": 192, "max_length": 48, "held_out": 200}}  # rows of 48 tokens, of which half are padding
WIDE = merge(TEXT, {"preset": "base", "data": {"vocab_size": 8000}, "train": {"precision": "bf16"}})
# 100L-100L at d = 512 would leave 9 GB a run, and write them every ten minutes
NO_WEIGHTS = {"train": {"final_checkpoint": False, "checkpoint_minutes": 0.0}}
SIX = (*SEEDS, 8)


def by_seed(ask: Recipe, own: Sequence[int]) -> Iterator[Recipe]:
    """Yields one recipe a seed, so that whatever is finished has as many seeds of one architecture as of another."""
    for seed in ask.seeds or own:
        yield ask.only(seed)
