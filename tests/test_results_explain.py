"""results/explain: the cells that its page promises, its thresholds, its judging, and one fault with one control."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from loose_scripts import scripts_of
from rest_slow import complete
from scipy import stats

from stabilitylab.changes import rates, settings
from stabilitylab.explain import AuditFinding, audit, flight, harm, interventions, judge, relations

PAGE = (Path(__file__).resolve().parents[1] / "results" / "explain" / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def validate() -> Iterator[ModuleType]:
    with scripts_of("results/explain") as load:
        yield load("validate")


def test_there_are_as_many_kinds_as_the_page_says(validate: ModuleType) -> None:
    counts = {name: len(kinds) for name, kinds in validate.SETS.items()}
    new = len(validate.FAULTS) - len(validate.LISTED)
    assert counts["fault"] >= 30
    assert new >= 15
    assert counts["healthy"] == 12
    assert counts["decoy"] == 10
    total = sum(counts.values()) * len(validate.MODELS) * len(validate.SEEDS)
    assert f"| faults | {counts['fault']} | {len(validate.LISTED)} listed, {new} new;" in PAGE
    assert f"{total} cells" in PAGE
    assert all(kind.kinds or not kind.scope for kind in validate.FAULTS.values()), "a fault without a right answer"


def test_the_page_has_the_thresholds_of_the_code() -> None:
    """A threshold that moves must move on the page too, under Later changes."""
    rules = dict(re.findall(r"^\| ([A-Z][^|]+?) \| `(\w+\.py)` \|$", PAGE, re.MULTILINE))
    assert len(rules) == 16
    told = {
        "Level of a loss": (flight.WINDOW, flight.LEAST),
        "Trouble": (flight.SPREADS, 100 * flight.SHARE),
        "It lasted": (flight.LAST, flight.LASTING, 100 * flight.LASTING_SHARE),
        "A jump of the rate": (rates.JUMP, round(100 * rates.RAMP)),
        "Another setting": (settings.OFTEN,),
        "An update, not a write": (100 * audit.MOSTLY,),
        "Bad batch": (judge.SPREADS, 100 * judge.SHARE),
        "Shifted labels": (100 * judge.ROLLED,),
        "Mask": judge.MASKED,
        "Harm": (harm.SCORED, harm.SPREADS, 100 * harm.SHARE),
        "Controls": (4,),
    }
    for name, numbers in told.items():
        (text,) = [rule for rule in rules if rule.startswith(name)]
        for number in numbers:
            assert re.search(rf"(?<![\d.]){re.escape(f'{number:g}'.removeprefix('0'))}(?!\d)", text), (name, number)
    assert (audit.ROUNDED, relations.CLOSE, relations.ALIKE, interventions.NOISE) == (1e-6, 1e-4, 1e-3, 1e-4)
    assert interventions.REPEATS == 3


def explained(finding: AuditFinding | None, verdict: str = "finding") -> Any:
    return SimpleNamespace(
        findings=[] if finding is None else [finding], cause="", experiment=None, verdict=verdict, updates=7
    )


def test_a_name_is_right_by_kind_place_and_update(validate: ModuleType) -> None:
    kind = validate.FAULTS["WrittenMatrix"]
    right = AuditFinding("state written", "decoder.1.down.weight", 72, "")
    elsewhere = AuditFinding("state written", "head.weight", 72, "")
    late = AuditFinding("state written", "decoder.1.down.weight", 81, "")
    other = AuditFinding("rate", "decoder.1.down.weight", 70, "")
    for finding, is_right in ((right, 1), (elsewhere, 0), (late, 0), (other, 0), (None, 0)):
        row = validate.judged(kind, explained(finding))
        assert (row["right"], row["accused"]) == (is_right, int(finding is not None))
        assert row["wrong"] == int(finding is not None and not is_right)
    nothing = validate.FAULTS["StuckLoader"]
    assert validate.judged(nothing, explained(None, "no cause found"))["right"] == 1
    assert validate.judged(nothing, explained(other))["wrong"] == 1
    healthy = validate.HEALTHY["HiddenClipping"]
    note = AuditFinding("clipping", "the whole model", 0, "", accused=False)
    assert validate.judged(healthy, explained(note))["accused"] == 0


def test_the_kind_is_the_unit_of_the_interval(validate: ModuleType) -> None:
    rows = [{"kind": kind, "right": str(value)} for kind, value in [("a", 1)] * 6 + [("b", 0)] * 3 + [("b", 1)] * 3]
    middle, low, high, count = validate.share(rows, "right")
    means = np.array([1.0, 0.5])
    half = stats.t.ppf(0.975, 1) * means.std(ddof=1) / math.sqrt(2)
    assert (middle, count) == (0.75, 2)
    assert (low, high) == (max(0, 0.75 - half), min(1, 0.75 + half))


@pytest.mark.slow
@complete
def test_one_fault_and_one_control_are_made_judged_and_not_made_again(validate: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "cells.csv"
    kinds = ["RateTimes30", "Plain"]
    validate.run(["fault", "healthy"], kinds, ["decoder-only"], [1], file)
    before = file.read_bytes()
    with file.open(encoding="utf-8", newline="") as held:
        fault, control = csv.DictReader(held)
    assert (fault["kind"], fault["right"], fault["verdict"]) == ("RateTimes30", "1", "cause")
    assert (control["kind"], control["accused"], control["verdict"]) == ("Plain", "0", "no trouble")
    validate.run(["fault", "healthy"], kinds, ["decoder-only"], [1], file)
    assert file.read_bytes() == before, "a cell that is there was made again"
    assert "| accused, healthy changes | 0.00 [nan, nan] | 1 | at most .05 |" in validate.say(validate.rows_of(file))


def test_the_pages_show_the_tables_of_the_cells(validate: ModuleType) -> None:
    rows = validate.rows_of(validate.FILE)
    assert len(rows) == 6 * sum(map(len, validate.SETS.values())), "the validation is not whole"
    told = "run python results/explain/validate.py --write"
    assert validate.differing(validate.PAGES, validate.anew(rows)) == [], told
    assert validate.differing(validate.PAGES, validate.anew(rows[60:])) == ["README.md", "explain.md"], "it cannot fail"


def test_readme_says_the_share_that_was_measured(validate: ModuleType) -> None:
    every = validate.rows_of(validate.FILE)
    rows = [row for row in every if row["set"] == "fault" and validate.FAULTS[row["kind"]].scope]
    middle, *_, kinds = validate.share(rows, "right")
    readme = (validate.ROOT / "README.md").read_text(encoding="utf-8")
    listed = {kind.__name__ for kind in validate.LISTED}
    new, *_, others = validate.share([row for row in rows if row["kind"] not in listed], "right")
    told = f"right for {middle:.0%} of {kinds} kinds of fault ({new:.0%} of the {others} new to it)"
    assert told.replace("%", " %") in readme
