"""An instrument that raises on one of two ranks ends its tables and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

BREAKS = 2
SPOILT = {"tables": BREAKS, "updates": BREAKS + 1}  # the first row whose norm of all parameters one rank does not have


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "ends"),
    [
        ("tables", {"grad_norm", "update_ratio"}),
        ("updates", {"grad_norm", "update_ratio"}),
        ("pass", {"ln_input"}),
    ],
)
def test_training_goes_on_and_the_other_tables_are_right(ranks: Any, case: str, ends: set[str]) -> None:
    both = ranks("broken")
    assert all(found[case]["same"] for found in both), "the model differs from that of an unwatched run"
    first = both[0][case]
    assert [step for step, *_ in first["rows"]] == [step for step, *_ in first["sound"]] == [0, 1, 2, 3, 4]
    for (step, expected, sound), (_, metrics, own) in zip(first["sound"], first["rows"], strict=True):
        for name, values in sound.items():
            if name not in ends or step < BREAKS:
                np.testing.assert_array_equal(own[name], values, err_msg=f"row {step} of {name}")
        # a sum to which one rank adds nothing is no number
        lost = {name for name, value in expected.items() if value is not None and metrics.get(name) is None}
        spoilt = {"grad_norm_total", "grad_under_eps"} & expected.keys()
        assert lost == (spoilt if step >= SPOILT.get(case, 5) else set())
        assert all(metrics[name] == value for name, value in expected.items() if name not in lost)
    assert set(both[1][case]["ended"]) == ends
