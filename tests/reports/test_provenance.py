"""The line of provenance: how long a ramp is said to be."""

from __future__ import annotations

import pytest
from in_memory import remembered

from stabilitylab.reports.collection import Runs
from stabilitylab.reports.measures.provenance import provenance


@pytest.mark.parametrize(
    ("ramps", "words"),
    [
        ((4,), "100 updates, T 4 % of them"),
        ((4, 40), "100 updates, T 4 to 40 % of them"),
        ((4000,), "100 updates, T longer than the run"),
        ((4, 4000), "100 updates, T from 4 % of them to beyond their end"),
    ],
)
def test_a_ramp_is_a_share_of_the_run_or_longer_than_it(ramps: tuple[int, ...], words: str) -> None:
    metrics = {"held_out_nll": [1.0] * 101, "held_out_accuracy": [0.1] * 101}
    runs = [
        remembered(f"run-{T}", settings={"model": {"T": T}, "train": {"steps": 100}}, metrics=metrics) for T in ramps
    ]
    assert provenance(Runs(runs)).endswith(words)
