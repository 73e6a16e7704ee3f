"""The file of a calibrated alarm: the bound of its thresholds, its content, and files that are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrated import made
from rest_slow import rest_slow

from stabilitylab.alarm import Calibration
from stabilitylab.alarm.cadence import ranges
from stabilitylab.alarm.calibration import FORMAT, VERSION, RecordedTable, thresholds
from stabilitylab.alarm.recipe import MOST, differences, in_lines, recipe_of
from stabilitylab.errors import InputError, UsageError

RULES = {"a": 0.5, "b": -2.0, "c": 10.0}
SETS = 1500


def runs_of_one_recipe(random: np.random.Generator, runs: int) -> np.ndarray:
    """(runs, rules, rows): scores that depend on their past, on each other and on their run, with tails that differ
    between rules; runs are exchangeable, rows and rules are not."""
    rows = 30
    own = random.standard_t(3, (runs, 1, 1)) * 0.5
    common = random.standard_normal((runs, 1, rows))
    noise = random.standard_normal((runs, 3, rows)) + 0.7 * common
    for row in range(1, rows):
        noise[:, :, row] += 0.8 * noise[:, :, row - 1]
    scale = np.array([0.3, 1.0, 3.0])[:, None] * np.linspace(1, 2, rows)
    return own + noise * scale + np.array([0.0, -3.0, 8.0])[:, None]


def alarmed(k: int, choose: Callable[[np.ndarray], dict[str, float]], seed: int) -> float:
    """The share of ``SETS`` sets of k + 1 runs whose last run reaches a threshold that ``choose`` makes of the others'
    largest scores."""
    random, found = np.random.default_rng(seed), 0
    for _ in range(SETS):
        largest = runs_of_one_recipe(random, k + 1).max(axis=2)
        at = choose(largest[:-1])
        found += any(score > at[rule] for rule, score in zip(RULES, largest[-1], strict=True))
    return found / SETS


def calibrated(largest: np.ndarray) -> dict[str, float]:
    return thresholds(RULES, [dict(zip(RULES, map(float, own), strict=True)) for own in largest])


def each_alone(largest: np.ndarray) -> dict[str, float]:
    """What would be no bound for all rules together: each rule's own largest score."""
    return dict(zip(RULES, largest.max(axis=0), strict=True))


@pytest.mark.parametrize("k", rest_slow([1, 4, 9], [4]))
def test_the_union_of_rules_keeps_the_bound(k: int) -> None:
    """Scores have no ties, so the rate is 1 / (k + 1) itself, within four standard deviations of a binomial."""
    bound = 1 / (k + 1)
    away = 4 * math.sqrt(bound * (1 - bound) / SETS)
    assert abs(alarmed(k, calibrated, seed=k) - bound) < away
    assert alarmed(k, each_alone, seed=k) > bound + away  # so the test can fail


def test_ties_are_no_alarms() -> None:
    """Scores of few values, as a score has that is cut at 20: a new run that equals the largest is silent."""
    random, found = np.random.default_rng(0), 0
    for _ in range(SETS):
        one, *others = (float(value) for value in random.integers(0, 3, 5))
        found += one > thresholds({"a": 0.1}, [{"a": value} for value in others])["a"]
    assert 0 < found / SETS < 0.2 - 4 * math.sqrt(0.16 / SETS)


def test_thresholds_by_hand() -> None:
    runs = [{"a": 1.0, "b": 1.5}, {"a": 2.5, "b": None}]  # above their own thresholds: 0, -.5; 1.5
    found = thresholds({"a": 1.0, "b": 2.0}, runs)
    assert found == {"a": 2.5, "b": 3.5}


def test_no_run_that_calibrated_reaches_a_threshold() -> None:
    """However numbers are rounded: 0.1 + (0.7 - 0.1) is less than 0.7."""
    random = np.random.default_rng(0)
    for _ in range(2000):
        own, score = random.standard_normal(2) * 10 ** random.uniform(-3, 3, 2)
        assert thresholds({"a": float(own)}, [{"a": float(score)}])["a"] >= score


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], ()),
        ([7], ((7, 7, 1),)),
        ([0, 1, 2, 3], ((0, 3, 1),)),
        ([0, 10, 20, 25], ((0, 20, 10), (25, 25, 1))),
        ([0, 1, 2, 5, 8, 11, 12], ((0, 2, 1), (5, 11, 3), (12, 12, 1))),
    ],
)
def test_steps_are_ranges(steps: list[int], expected: tuple[tuple[int, int, int], ...]) -> None:
    found = ranges(steps)
    assert found == expected
    assert [step for first, last, by in found for step in range(first, last + 1, by)] == steps


def test_rows_that_are_like_the_calibrated_rows() -> None:
    known = made(steps=((0, 2, 1), (5, 11, 3), (12, 12, 1)))
    assert known.rows == 7
    for number, step in enumerate([0, 1, 2, 5, 8, 11, 12], 1):
        assert known.unlike_row(number, step, ["grad_norm"]) == ""
    assert known.unlike_row(4, 3, ["grad_norm"]) == "row 4 of this run is step 3, and step 5 in the calibrated runs"
    assert known.unlike_row(8, 13, ["grad_norm"]) == "this run is longer than the 7 rows of the calibrated runs"
    assert known.unlike_row(4, 5, ["x"]) == "table grad_norm has no row at step 5, and one in the calibrated runs"
    late = RecordedTable(places=3, steps=((1, 1, 1),))
    rare = made(steps=known.steps).model_copy(update={"tables": {"grad_norm": late}})
    assert rare.unlike_row(1, 0, []) == ""
    assert (
        rare.unlike_row(1, 0, ["grad_norm"]) == "table grad_norm has a row at step 0, and none in the calibrated runs"
    )


def test_the_bound_in_words() -> None:
    assert made(k=4).sentence == (
        "4 healthy runs of 61 rows: at most 1 in 5 new healthy runs of this recipe and length has a false alarm "
        "(1 in k + 1; k = 4)"
    )
    assert made(k=4).bound == 0.2
    assert "at most 1 in 5 healthy runs of this recipe has an alarm" in made(k=4).sure
    assert "at most 1 in 2 healthy runs" in made(k=1).sure


def test_a_file_is_written_and_read(tmp_path: Path) -> None:
    known = made()
    known.save(tmp_path / "mine.json")
    found = Calibration.read(tmp_path / "mine.json")
    assert found == known.model_copy(update={"file": "mine.json"})
    told = json.loads((tmp_path / "mine.json").read_text())
    assert (told["format"], told["version"], told["k"], told["rows"]) == (FORMAT, VERSION, 4, 61)
    assert (told["sentence"], told["bound"]) == (known.sentence, 0.2)
    with pytest.raises(UsageError, match=r"mine\.json exists"):
        known.save(tmp_path / "mine.json")
    with pytest.raises(UsageError, match=r"must end in \.json"):
        known.save(tmp_path / "mine")


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        document = json.loads(text)
        change(document)
        return json.dumps(document)

    return apply


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda _: "", "Expecting value"),
        (lambda _: "[1]", "it is no such file"),
        (lambda _: "{}", "it is no such file"),
        (lambda text: text[: len(text) // 2], "is not a calibrated alarm"),
        (lambda _: "[" * 100_000, "is not a calibrated alarm"),
        (edited(lambda own: own.update(version=0)), "its version is unknown"),
        (edited(lambda own: own.update(version=True)), "its version is unknown"),
        (edited(lambda own: own.update(bound=0.01)), "its k, bound or rows are not those of its runs"),
        (edited(lambda own: own.update(k=9)), "its k, bound or rows are not those of its runs"),
        (edited(lambda own: own.update(rows=1000)), "its k, bound or rows are not those of its runs"),
        (edited(lambda own: own.update(runs=[])), "runs: Tuple should have at least 1 item"),
        (edited(lambda own: own.pop("steps")), "steps: Field required"),
        (edited(lambda own: own.update(steps=[[5, 3, 1]])), "steps: steps do not rise"),
        (edited(lambda own: own["tables"]["grad_norm"].update(steps=[[0, 5, 1], [5, 6, 1]])), "steps do not rise"),
        (edited(lambda own: own.update(more=1)), "more: Extra inputs are not permitted"),
        (edited(lambda own: own["rules"][0].update(threshold=0.5)), "thresholds do not follow from the scores"),
        (edited(lambda own: own["runs"][0]["scores"].update(z=9.0)), "thresholds do not follow from the scores"),
        (edited(lambda own: own["runs"][0]["scores"].update(z="9")), "runs.0.scores.z: Input should be a valid number"),
        (edited(lambda own: own["runs"][0]["scores"].update(y=1.0)), "a run has scores of other rules"),
        (edited(lambda own: own["rules"][0].update(own_threshold=math.nan)), "Out of range float"),
        (edited(lambda own: own["rules"][0].update(title="a\nb")), "it cannot be printed on one line"),
        (edited(lambda own: own["rules"][0]["weights"].update({"no.z": 1.0})), "no signal 'no.z'"),
    ],
)
def test_another_file_is_refused_in_one_sentence(tmp_path: Path, change: Callable[[str], str], why: str) -> None:
    made().save(tmp_path / "mine.json")
    text = (tmp_path / "mine.json").read_text()
    (tmp_path / "bad.json").write_text(change(text))
    with pytest.raises(InputError) as caught:
        Calibration.read(tmp_path / "bad.json")
    told = str(caught.value)
    assert why in told
    assert "\n" not in told
    assert told.endswith("make it with `stabilitylab alarm --calibrate RUN... --out FILE.json`.")


def test_a_newer_file_and_a_missing_one(tmp_path: Path) -> None:
    made().save(tmp_path / "mine.json")
    document = json.loads((tmp_path / "mine.json").read_text())
    (tmp_path / "new.json").write_text(json.dumps({**document, "version": VERSION + 1}))
    with pytest.raises(InputError, match=r"newer stabilitylab .* upgrade"):
        Calibration.read(tmp_path / "new.json")
    with pytest.raises(InputError, match=r"cannot read .*absent\.json"):
        Calibration.read(tmp_path / "absent.json")


def test_a_recipe_has_no_seeds_and_no_names() -> None:
    manifest = {
        "label": "Model",
        "config": {
            "seed": 1,
            "train": {"lr": 1e-3, "data_seed": 3, "seeds": [1]},
            "out": "runs/a",
            "betas": (0.9, 0.99),
        },
        "numerics": {"deterministic": False},
        "torch": "2",
        "argv": ["x"],
    }
    assert recipe_of(manifest) == {
        "label": "Model",
        "train.lr": 1e-3,
        "betas": [0.9, 0.99],
        "numerics.deterministic": False,
        "torch": "2",
    }
    assert recipe_of({}) == {"label": ""}
    assert recipe_of({"config": {1: {2: Path("a")}, None: 3}}) == {"label": "", "1.2": "a", "None": 3}


def test_differences_are_a_few_lines() -> None:
    found = differences({"a": {"lr": 1, "x": 2}, "b": {"lr": 1, "x": 3}, "c": {"lr": 1}})
    assert found == {"x": "2 in a; 3 in b; not given in c"}
    many = differences({"a": {f"s{n}": 0 for n in range(10)}, "b": {f"s{n}": 1 for n in range(10)}})
    lines = in_lines(many)
    assert len(lines) == MOST + 1
    assert lines[0] == "s0 differs: 0 in a; 1 in b"
    assert lines[-1] == f"{10 - MOST} more settings differ: s4, s5, s6 and 3 more"
    assert in_lines({}) == []
