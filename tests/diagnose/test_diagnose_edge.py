"""A rate beyond Adam's edge of stability, from made-up measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from diagnose_cases import Made, falling, found, kinds, made, only

from stabilitylab.decisive import CONVERGED
from stabilitylab.diagnose.detectors.edge import BEYOND, EDGE_ROWS
from stabilitylab.schema import Row


def measured(
    folder: Path, values: Sequence[float], residuals: Sequence[float] | None = None, losses: list[float] | None = None
) -> Path:
    """``to_edge`` at every second step, all converged unless said."""
    steps = tuple(range(0, 2 * len(values), 2))
    off = residuals or [0.01] * len(values)
    columns = ("value", "to_edge", "residual", "converged")
    table = Made(
        (Row(""),),
        columns,
        lambda t: np.array([[1.0, values[t // 2], off[t // 2], float(off[t // 2] <= CONVERGED)]]),
        steps,
    )
    falls = losses or falling(2 * len(values))
    return made(folder, {"loss": falls}, {"preconditioned_sharpness": table})


@pytest.mark.parametrize(("times", "seen"), [(1.01, True), (0.99, False)])
def test_the_median_of_the_last_half_decides(tmp_path: Path, times: float, seen: bool) -> None:
    high = times * BEYOND
    diagnosis = found(measured(tmp_path / "run", [0.1] * 6 + [high, 0.1, high, high, high, 0.1]))
    assert ("beyond_the_edge" in kinds(diagnosis)) == seen
    if seen:
        event = only(diagnosis, "beyond_the_edge")
        assert (event.step, event.after, event.strength) == (16, 14, pytest.approx(times))
        assert (event.severity, diagnosis.verdict) == ("note", "healthy")


def test_it_is_a_warning_if_the_loss_rose(tmp_path: Path) -> None:
    high = 2 * BEYOND
    losses = [*falling(60), *[float(x) for x in np.linspace(1.2, 3.5, 20)], *[3.5] * 20]
    diagnosis = found(measured(tmp_path / "run", [high] * 50, losses=losses))
    event = only(diagnosis, "beyond_the_edge")
    assert (event.severity, event.consequence) == ("warning", "the loss rose")


def test_a_start_beyond_it_few_measurements_and_what_is_not_finite_count_for_nothing(tmp_path: Path) -> None:
    high = 100 * BEYOND
    assert kinds(found(measured(tmp_path / "start", [high] * 5 + [0.1] * 7))) == set()
    assert kinds(found(measured(tmp_path / "few", [high] * (EDGE_ROWS - 1) + [float("nan")] * 9))) == set()
    assert only(found(measured(tmp_path / "lost", [high, float("nan")] * EDGE_ROWS)), "beyond_the_edge").step == 0


def test_measurements_that_have_not_converged_decide_nothing(tmp_path: Path) -> None:
    """Neither for it (all that are beyond have not converged) nor against it (those below have not)."""
    high, count = 100 * BEYOND, 2 * EDGE_ROWS
    accused = found(measured(tmp_path / "accused", [0.1, high] * count, [0.01, 0.3] * count))
    assert kinds(accused) == set()
    assert "beyond_the_edge" in accused.checked
    hidden = found(measured(tmp_path / "hidden", [0.1, high] * count, [0.3, 0.01] * count))
    assert only(hidden, "beyond_the_edge").step == 2
    few = found(measured(tmp_path / "few", [high] * count, [0.01] * (EDGE_ROWS - 1) + [0.3] * (EDGE_ROWS + 1)))
    assert kinds(few) == set()
    assert few.unchecked["beyond_the_edge"] == "7 converged rows of 16 are too few, it takes 8"
