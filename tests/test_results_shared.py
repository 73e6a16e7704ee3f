"""What scripts of results/ share: lines that are added to CSV files, and the texts of Multi30k."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from loose_scripts import scripts_of


@pytest.fixture
def shared() -> Iterator[ModuleType]:
    with scripts_of("results") as load:
        yield load("shared")


def test_lines_are_added_once_and_found_again(shared: ModuleType, tmp_path: Path) -> None:
    lines = shared.Lines(tmp_path / "deep" / "cells.csv", ("arm", "seed", "loss"))
    assert lines.rows() == []
    assert not lines.has("keel", 3)
    lines.add(("keel", 3, 0.5), {"seed": 4, "arm": "keel"})
    lines.add({"arm": "postln, deep", "seed": 3, "loss": None})
    assert lines.path.read_bytes() == b'arm,seed,loss\nkeel,3,0.5\nkeel,4,\n"postln, deep",3,\n'
    assert [row["loss"] for row in lines.rows()] == ["0.5", "", ""]
    assert lines.has("keel", 3)
    assert lines.has("postln, deep")
    assert not lines.has("postln, deep", 4)
    assert shared.rows_of(lines.path) == lines.rows()


def test_lines_that_do_not_fit_are_refused_and_nothing_is_written(shared: ModuleType, tmp_path: Path) -> None:
    lines = shared.Lines(tmp_path / "cells.csv", ("arm", "seed"))
    lines.add(("keel", 3))
    before = lines.path.read_bytes()
    with pytest.raises(ValueError, match=r"a row of cells\.csv has 3 cells, and its header 2"):
        lines.add(("keel", 4), ("keel", 5, 6))
    with pytest.raises(ValueError, match=r"cells\.csv has no column rate"):
        lines.add({"arm": "keel", "rate": 1})
    with pytest.raises(SystemExit, match=r"has the columns arm,seed, not arm,rate: move it away first"):
        shared.Lines(lines.path, ("arm", "rate")).add(("keel", 1))
    assert lines.path.read_bytes() == before


def test_the_metrics_of_a_line_of_a_sweeps_ledger(shared: ModuleType) -> None:
    assert shared.metrics_of({"metrics": "held_out_nll=2.5 note=a=b", "arch": "x"}) == {
        "held_out_nll": "2.5",
        "note": "a=b",
    }
    assert shared.metrics_of({"metrics": ""}) == {}


def test_the_texts_of_multi30k(shared: ModuleType) -> None:
    found = shared.multi30k(Path("data"), "test")
    assert found == {
        "source": "text:data/train.de.gz,data/train.en.gz",
        "valid": "data/test.de.gz,data/test.en.gz",
    }
