"""The map of collapse, from made-up courses of what the source is worth."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from in_memory import remembered

from stabilitylab.experiments import experiments
from stabilitylab.reports import FIGURES, MissingRuns, figures
from stabilitylab.reports.collection import Record, Runs
from stabilitylab.reports.figures.collapse.map import (
    CONSTANT,
    GRID,
    JUDGED,
    LATER,
    largest_reading_rate,
    of_record,
    state_at,
    trial,
)
from stabilitylab.verdict import READS_NATS

assert figures
RATES, WARMUP = (1e-3, 2e-3, 4e-3), 240
JUDGE = WARMUP + JUDGED
Worth = Callable[[float, int, int], float]  # of rate, T, seed


def run(rate: float, T: int, seed: int, courses: dict[int, tuple[float, float]], steps: int = JUDGE) -> Record:
    """``courses``: update -> source worth and distance between sentences."""
    settings: dict[str, Any] = {"train": {"lr": rate, "warmup": WARMUP, "steps": steps, "horizon": 6000}}
    settings["model"] = {"T": T or 4000}
    arch = "branchnorm" if T else "deepnorm"
    record = remembered(f"{arch}-{rate:g}-{T}-{seed}", arch=arch, seed=seed, settings=settings)
    worths, between = zip(*courses.values(), strict=True)
    table = {"step": [*courses], "source_worth": worths, "encoder_distance_between": between}
    record.run.metrics = record.metrics = pd.DataFrame(table)  # type: ignore[misc]
    return record


def grid(worth: Worth, between: float = 1e-6) -> Runs:
    found = []
    for T in (0, 1, 12, 240):
        for rate in RATES:
            for seed in (3, 4):
                value = worth(rate, T, seed)
                course = {0: (0.0, 0.5), JUDGE: (value, 0.2 if value >= READS_NATS else between)}
                long = seed == 3
                found.append(
                    run(rate, T, seed, {**course, **({LATER: (0.5, 0.2)} if long else {})}, LATER if long else JUDGE)
                )
    return Runs(found)


@pytest.mark.parametrize(
    ("worth", "between", "state"),
    [
        (READS_NATS, 0.2, "reads"),
        (READS_NATS - 1e-9, 0.2, "unread"),
        (0.0, CONSTANT * 0.99, "constant"),
        (0.0, CONSTANT * 1.01, "unread"),
        (math.inf, 0.2, "failed"),
    ],
)
def test_the_state_of_a_run_at_an_update(worth: float, between: float, state: str) -> None:
    record = run(1e-3, 12, 3, {0: (0.0, 0.5), JUDGE: (worth, between)})
    found = of_record(record)
    assert found is not None
    assert (found.state, found.later, found.place, found.row) == (state, None, (6, WARMUP), ("branchnorm", 12))
    assert state_at(record.metrics, LATER) is None  # it was not measured there


@pytest.mark.parametrize("measured", [0, JUDGE - 100, JUDGE - 10])
def test_a_run_that_diverged_before_it_is_judged_has_failed(measured: int) -> None:
    """Its later measurements are NaN, which are no measurements."""
    courses = {0: (0.0, 0.5), measured: (0.4, 0.2), JUDGE: (math.nan, math.nan)}
    own = {"label": "deepnorm", "layers": 6, "warmup": WARMUP, "T": 0, "rate": 1e-3, "seed": 3}
    found = trial(run(1e-3, 0, 3, courses).metrics, **own, diverged=True)
    assert found is not None
    assert (found.state, found.later) == ("failed", "failed")
    whole = trial(run(1e-3, 0, 3, {0: (0.0, 0.5), JUDGE: (0.4, 0.2)}).metrics, **own, diverged=True)
    assert whole is not None
    assert whole.state == "reads"  # it diverged afterwards


def test_the_map_counts_the_seeds_that_read_and_says_which_read_later() -> None:
    picture = FIGURES["collapse:map"]().picture(grid(lambda rate, T, seed: 0.0 if T >= 12 and rate > 1e-3 else 0.4))
    (panel,) = picture.panels
    heat = panel.map
    assert heat is not None
    assert list(heat.y_names) == ["BranchNorm, T = 1", "BranchNorm, T = 12", "BranchNorm, T = 240", "DeepNorm"]
    assert list(heat.x_names) == ["0.001", "0.002", "0.004"]
    assert heat.z.tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0], [1, 1, 1]]
    assert heat.text is not None
    assert heat.text[0].tolist() == ["2/2"] * 3
    assert heat.text[1].tolist() == ["2/2", "0/2\n2 c +", "0/2\n2 c +"]
    assert "BranchNorm, T = 12 0.001" in picture.finding
    assert "DeepNorm 0.004" in picture.finding


def test_the_largest_reading_rate_ends_below_the_first_that_fails() -> None:
    runs = grid(lambda rate, T, seed: 0.0 if (rate, seed) in ((2e-3, 3), (1e-3, 4)) else 0.4)
    own = [one for run in runs.where(label="deepnorm") if (one := of_record(run))]
    assert largest_reading_rate(own) == {3: 1e-3}
    assert largest_reading_rate(reversed(own)) == {3: 1e-3}


def test_without_a_measured_source_there_is_no_map() -> None:
    with pytest.raises(MissingRuns, match="several learning rates"):
        FIGURES["collapse:map"]().picture(Runs([remembered("a"), remembered("b", seed=4)]))


def test_the_runs_of_the_map() -> None:
    found = experiments("collapse:map", "tiny")
    cells = {6: 5 * 5 * 2 * 6, 18: 4 * 4 * 1 * 4}
    assert {*GRID} == {*cells}
    assert len({one.name for one in found}) == len(found) == sum(cells.values())
    trains = [one.config.train for one in found]
    assert all(train.span == 6000 and train.schedule == "linear" for train in trains)
    assert {train.steps for train in trains} == {60 + JUDGED, 240 + JUDGED, LATER}
    for one in found:  # a measurement stands where the run is judged
        every = one.config.train.span // one.config.train.evaluations
        assert (one.config.train.warmup + JUDGED) % every == 0
