"""What diagnose says of headroom: the last row, its spread, and how sure it is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from diagnose_cases import Made, made

from stabilitylab.diagnose import diagnose
from stabilitylab.schema import Row
from stabilitylab.store import Run

COLUMNS = ("headroom", "low", "high", "least", "most", "critical_rate")
NAN = math.nan


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (
            (12.0, 11.7, 12.3, 8.1, 16.0),
            "at 12 times the learning rate of step 20, 0.0001 (8.1 to 16 over three parts of it; 40 at step 0)",
        ),
        (
            (0.52, NAN, 0.52, NAN, NAN),
            "rise at less than 0.52 times the learning rate of step 20, 0.0001 (40 at step 0)",
        ),
        (
            (300.0, 300.0, NAN, NAN, NAN),
            "rise at more than 300 times the learning rate of step 20, 0.0001 (40 at step 0)",
        ),
        (
            (30.0, 10.0, 90.0, NAN, NAN),
            "would rise at 10 to 90 times the learning rate of step 20, 0.0001 (40 at step 0)",
        ),
        (
            (NAN, NAN, NAN, NAN, NAN),
            "would rise at 40 times the learning rate of step 0, 0.0001 (30 to 50 over three parts of it)",
        ),
    ],
)
def test_it_says_at_how_many_times_the_rate_the_loss_would_rise(tmp_path: Path, last: tuple, said: str) -> None:
    rows = {0: (40.0, 39.0, 41.0, 30.0, 50.0), 20: last}
    table = Made([Row("model")], COLUMNS, lambda step: [(*rows[step], rows[step][0] * 1e-4)], steps=(0, 20))
    path = made(tmp_path / "run", {"loss": [2.0 - 0.01 * n for n in range(30)]}, {"critical_sharpness": table})
    found = diagnose(Run.open(path))
    assert said in found.headroom
    assert f"On the fixed batch {found.headroom.partition('batch ')[2]}." in found.paragraph
    assert found.as_dict()["headroom"] == found.headroom


def test_a_run_without_it_says_nothing(tmp_path: Path) -> None:
    found = diagnose(Run.open(made(tmp_path / "run", {"loss": [2.0 - 0.01 * n for n in range(30)]})))
    assert found.headroom == ""
    assert "fixed batch" not in found.paragraph
