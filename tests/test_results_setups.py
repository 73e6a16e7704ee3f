"""results/setups: the promised counts, the pages that say them, and ledgers that are what the check says now."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from loose_scripts import ROOT, scripts_of
from rest_slow import EVERY

from stabilitylab.check.ranks import NAMES, SOURCES

HERE = ROOT / "results" / "setups"


def rows(name: str, folder: Path = HERE) -> list[dict[str, str]]:
    with (folder / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def scripts() -> Iterator[dict[str, ModuleType]]:
    with scripts_of("results/setups", "results") as load:
        yield {name: load(name) for name in ("faults", "later", "setups", "score")}


def test_the_ledgers_have_the_lists_that_were_committed_first(scripts: dict[str, ModuleType]) -> None:
    faults, setups = scripts["faults"].FAULTS, scripts["setups"].SETUPS
    assert [(one.name, one.source) for one in faults] == [(row["bug"], row["source"]) for row in rows("faults")]
    assert [one.name for one in setups] == [row["set-up"] for row in rows("setups")]
    later = scripts["later"].LATER
    assert [(one.name, one.source) for one in later] == [(row["bug"], row["source"]) for row in rows("later")]
    assert (len(faults), len(later), len(setups)) == (15, 10, 30)
    assert len({one.source for one in faults}) == 15
    for one in faults:
        assert set(one.checks) <= set(NAMES), f"{one.name} names a question that is not asked"
        assert all(one.source in SOURCES[name] for name in one.checks), f"{one.name}: the question names another source"


def test_bugs_are_found_by_their_question_and_no_correct_set_up_is_accused(
    scripts: dict[str, ModuleType],
) -> None:
    own = [*scripts["faults"].FAULTS, *scripts["later"].LATER]
    for one, row in zip(own, [*rows("faults"), *rows("later")], strict=True):
        assert row["found"] == str(row["first finding"] in one.checks and not row["findings without the bug"])
        assert not row["findings without the bug"]
    assert sum(row["found"] == "True" for row in rows("faults")) == 15
    assert sum(row["found"] == "True" for row in rows("later")) == 8
    assert sum(row["accused"] == "True" for row in rows("setups")) == 0


def test_the_pages_say_what_the_ledgers_say(scripts: dict[str, ModuleType], run: Any) -> None:
    score = scripts["score"]
    text = score.PAGE.read_text(encoding="utf-8")
    assert score.anew(text) == text, "run python results/setups/score.py --write"
    assert score.anew(text.replace("| 15 of 15 |", "| 14 of 15 |")) == text
    helped = " ".join(run("check", "--help")[1].replace("│", " ").split())
    assert "found 23 of 25 published bugs and accused none of 30 correct set-ups" in helped
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "found 23 of 25 published bugs and accused 0 of 30 correct [set-ups]" in readme


def test_the_page_lists_every_question_with_its_sources() -> None:
    text = (ROOT / "docs" / "setups.md").read_text(encoding="utf-8")
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    sources = {cells[0]: tuple(cells[2].replace("`", "").split(", ")) for cells in lines if cells[0] in SOURCES}
    assert sources == dict(SOURCES), "docs/setups.md, table of questions, differs from SOURCES"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_ledgers_are_what_the_check_says_now(tmp_path: Path) -> None:
    """But for the last digits of what was measured. Every third case, and all of them with EVERY=1."""
    ledgers = {name: rows(name) for name in ("faults", "later", "setups")}
    chosen = {name: own if EVERY else own[::3] for name, own in ledgers.items()}
    cases = [row["set-up"] for row in chosen["setups"]]
    for row in (*chosen["faults"], *chosen["later"]):
        cases += [row["bug"], f"without: {row['bug']}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(HERE / "make.py"), "--folder", str(tmp_path)]
    command += [word for case in cases for word in ("--only", case)]
    made = subprocess.run(command, env=env, capture_output=True, text=True, timeout=880, check=False)
    assert made.returncode == 0, made.stderr
    for name, own in chosen.items():
        now, then = ([{**row, "measured": ""} for row in ledger] for ledger in (rows(name, tmp_path), own))
        assert now == then
