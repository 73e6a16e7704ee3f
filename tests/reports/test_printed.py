"""A figure is printed again only where its picture, its words or its files have changed; one alone is made alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from making import Made, make_run, sublayer_rows
from pages import heat, lines
from rest_slow import rest_slow
from test_page import Document

from stabilitylab.reports import build as building
from stabilitylab.reports.base import Map, Panel, Picture, Reference, Series
from stabilitylab.reports.build import build
from stabilitylab.reports.page import press
from stabilitylab.reports.page.press import Press
from stabilitylab.reports.page.printed import FILE, digest


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of figures in the order in which they are printed."""
    printed: list[str] = []
    whole = press.quietly

    def noted(picture: Picture, folder: Path, name: str, title: str, source: str) -> None:
        printed.append(name)
        whole(picture, folder, name, title, source)

    monkeypatch.setattr(press, "quietly", noted)
    return printed


def printed(out: Path, picture: Picture, title: str = "A") -> None:
    with Press(out) as one:
        one.section("made:1", title, "", picture, "figures", files=True)
        sections, failed = one.printed()
    assert (len(sections), failed) == (1, [])


@pytest.mark.slow
def test_a_figure_is_printed_once(tmp_path: Path, names: list[str]) -> None:
    picture = Picture([Panel("a", "x", "y", [Series("Post-LN", [1, 2], [1.0, 2.0], arch="postln")])], "found")
    printed(tmp_path, picture)
    printed(tmp_path, picture)
    assert names == ["made-1"]
    printed(tmp_path, replace(picture, finding="another"))
    printed(tmp_path, replace(picture, finding="another"), title="B")
    assert names == ["made-1"] * 3
    csv = tmp_path / "figures" / "made-1.csv"
    csv.write_text("changed by hand")
    printed(tmp_path, replace(picture, finding="another"), title="B")
    assert "Post-LN" in csv.read_text()
    csv.unlink()
    printed(tmp_path, replace(picture, finding="another"), title="B")
    assert csv.exists()
    (tmp_path / "figures" / FILE).write_text("[no list")
    printed(tmp_path, replace(picture, finding="another"), title="B")
    assert names == ["made-1"] * 6


def test_the_digest_is_of_numbers_words_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = heat(), heat()
    assert digest(one, "t") == digest(other, "t") != digest(one, "u")
    assert other.panels[0].map is not None
    other.panels[0].map.z[0, 5] *= 1.0000001
    assert digest(one, "t") != digest(other, "t")
    before = digest(one, "t")
    monkeypatch.setattr("stabilitylab.reports.page.printed._printers", lambda: ("another version",))
    assert digest(one, "t") != before


@pytest.mark.parametrize("count", [1, 3, 19, 20, 21, 500])
@pytest.mark.parametrize("make", [lines, heat])
def test_the_head_of_a_table_is_that_of_the_whole(make, count: int) -> None:
    picture = make()
    whole = picture.frame()
    pd.testing.assert_frame_equal(picture.head(count), whole.head(count))
    assert picture.rows == len(whole)
    pieces = pd.concat(picture.pieces(), ignore_index=True)
    pd.testing.assert_frame_equal(pieces, whole)


def test_types_are_those_of_all_rows() -> None:
    """The first point of a line may be an integer, and a later one not."""
    z = np.arange(6.0).reshape(2, 3)
    heat_ = Map([1, 2, 3], [1, 2], z, np.zeros(z.shape, int), "u", seeds=np.arange(6).reshape(2, 3))
    panels = [
        Panel("a", "x", "y", [Series("s", [1, 2.5], [1, 0.5])], [Reference(0.5, "r")]),
        Panel("b", "x", "y", map=heat_),
    ]
    picture = Picture(panels, "")
    pd.testing.assert_frame_equal(picture.head(1), picture.frame().head(1))
    pd.testing.assert_frame_equal(pd.concat(picture.pieces(), ignore_index=True), picture.frame())


def some(folder: Path, count: int) -> Path:
    values = Made(sublayer_rows(2), ("value",), lambda s, r: float(r.layer), (0, 1))
    for place in range(count):
        made = {"layers": 2, "seed": 3 + place, "tables": {"grad_norm": values}, "metrics": {"loss": [2.0, 1.0]}}
        make_run(folder, f"run-{place}", arch="postln", **made)
    return folder


@pytest.mark.usefixtures("unprinted")
def test_a_figure_alone_diagnoses_no_run_and_judges_its_claims_without_holm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a run was diagnosed")

    for name in ("diagnose", "overview"):
        monkeypatch.setattr(building, name, never)
    monkeypatch.setattr("stabilitylab.reports.collection.diagnose", never)
    built = build(some(tmp_path / "runs", 2), tmp_path / "out", figures=["branchnorm:4"])
    assert {one.claim.figure for one in built.findings} == {"branchnorm:4"}
    assert {one.survives for one in built.findings} == {None}
    assert built.failed == []
    told = json.loads((tmp_path / "out" / "claims.json").read_text())["claims"]
    assert {one["figure"] for one in told} == {"branchnorm:4"}
    assert Document(built.page).named("table", id="table")


@pytest.mark.usefixtures("unprinted")
@pytest.mark.parametrize(("count", "files"), rest_slow([(3, True), (4, False)], [(3, True)]))
def test_maps_of_runs_are_printed_where_there_are_few(tmp_path: Path, count: int, files: bool) -> None:
    built = build(some(tmp_path / "runs", count), tmp_path / "out")
    runs = [section for section in built.sections if section.group == "runs"]
    assert runs
    assert all(bool(section.files) == files for section in runs)
    assert ("stabilitylab report --run run-0" in built.page.read_text()) != files
    if not files:
        named = build(tmp_path / "runs", tmp_path / "out", diagnosed=["run-1"])
        assert [bool(one.files) for one in named.sections if one.group == "runs"] == [True]


@pytest.mark.usefixtures("unprinted")
def test_two_runs_whose_names_make_one_file_name_have_files_of_their_own(tmp_path: Path) -> None:
    picture = Picture([Panel("a", "x", "y", [Series("a", [1], [1.0])])], "found")
    with Press(tmp_path) as one:
        for name in ("lr1/seed3", "lr1-seed3", "lr1"):
            one.section(f"run:{name}", name, "", picture, "runs", files=True)
        one.section("run:lr1-seed3-column", "lr1-seed3-column", "", picture, "runs", files=True)
        sections, failed = one.printed()
    assert failed == []
    assert [section.files["csv"] for section in sections] == [
        f"figures/run-{name}.csv" for name in ("lr1-seed3", "lr1-seed3-2", "lr1", "lr1-seed3-column-2")
    ]
    files = [path for section in sections for path in section.files.values()]
    assert len(files) == len({*files})
