"""What fails in a report is listed with its sentence; everything else is written, and the exit code says so."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
from making import make_run
from test_page import Document
from test_report_command import some_runs

from stabilitylab.commands import listing
from stabilitylab.errors import UsageError, in_words
from stabilitylab.reports import (
    FIGURES,
    Figure,
    MissingRuns,
    Panel,
    Picture,
    Series,
    build,
    collection,
    figure,
    figures,
)
from stabilitylab.reports.claims import CLAIMS, claim
from stabilitylab.reports.page import live, press
from stabilitylab.store import RunWriter

assert figures
LINE = Series("x", [1, 2], [1.0, 2.0])
FACTS = {
    "paper": "Mine",
    "sentence": "It holds",
    "source": "",
    "statistic": "",
    "threshold": "",
    "sweep": "branchnorm:8",
}


def picture(line: Series = LINE, finding: str = "all is well") -> Picture:
    return Picture([Panel("Panel", "x", "y", [line])], finding)


@pytest.fixture
def register() -> Iterator:
    """Registers a figure that calls a function; figures and claims of a test are gone after it."""

    def made(id: str, draw) -> None:
        @figure(id, title=f"Figure {id}", source="Mine")
        class Mine(Figure):
            def picture(self, runs):
                return draw(runs)

    with FIGURES.restored(), CLAIMS.restored():
        yield made


def fails(_) -> Picture:
    raise ValueError("no column 'x'\nin this table")


def lacks(_) -> Picture:
    raise MissingRuns("needs runs of mine.")


WAYS = {
    "mine:exception": (fails, "ValueError: no column 'x' in this table"),
    "mine:sweep": (
        lacks,
        "needs runs of mine; which command makes them is not said: there is no sweep 'mine:sweep', and its",
    ),
    "mine:lengths": (lambda _: picture(Series("x", [1, 2, 3], [1.0])), "ValueError: "),  # it is no table
    "mine:page": (lambda _: picture(finding=3), "TypeError: "),
    "mine:paper": (lambda _: picture(Series("x", [1], [1.0], marker="none such")), "ValueError: "),
    "mine:nothing": (lambda _: None, "AttributeError: "),
}


@pytest.mark.slow
def test_what_fails_is_listed_and_everything_else_is_written(run, register, monkeypatch, tmp_path: Path) -> None:
    """In each way in which a figure can, a run's part of the page, and a claim's test."""
    some_runs(tmp_path / "runs", seeds=(3,))
    for id, (draw, _) in WAYS.items():
        register(id, draw)
    register("mine:sound", lambda _: picture())
    claim("C99", figure="mine:sound", **FACTS)(fails)
    diagnosed = build.diagnose
    monkeypatch.setattr(
        build, "diagnose", lambda r, **given: fails(r) if r.name == "deepnorm-3" else diagnosed(r, **given)
    )
    names = [*WAYS, "mine:sound", "deepnet:3"]
    arguments = [word for name in names for word in ("--figure", name)]
    code, out, err = run("report", *arguments, "--run", "deepnorm-3", "--run", "branchnorm-3")
    assert code == 1
    assert err == ""
    document = Document(tmp_path / "report" / "index.html")
    (wanting, listed, _) = document.classed("ul", "missing")  # the third: claims
    expected = {id: sentence for id, (_, sentence) in WAYS.items()} | dict.fromkeys(
        ("run:deepnorm-3", "C99"), "ValueError: no column 'x' in this table"
    )
    for id, sentence in expected.items():
        assert f"{id}: {sentence}" in out, out
        assert f"{id} {sentence}" in listed[1]
    assert "deepnet:3" in wanting[1]  # which only lacks its runs
    assert document.plots.keys() == {"mine-sound", "run-branchnorm-2d-3", "curves"}
    made = {path.name for path in (tmp_path / "report" / "figures").iterdir()}
    assert {"mine-sound.png", "mine-sound.csv", "run-branchnorm-3.pdf"} <= made
    assert not any(name.startswith("mine-") and not name.startswith("mine-sound") for name in made)  # no half of one
    ledger = {one["id"]: one for one in json.loads((tmp_path / "report" / "claims.json").read_text())["claims"]}
    assert ledger["C99"]["verdict"] == "not testable"
    assert "C11" in ledger  # of deepnet:3
    assert "C41" not in ledger  # of a figure that was not asked for
    assert "its test failed (ValueError: no column 'x' in this table)" in ledger["C99"]["why"]


@pytest.mark.usefixtures("unprinted")
def test_scripts_are_told_and_v_shows_where(run, register, tmp_path: Path) -> None:
    some_runs(tmp_path / "runs", seeds=(3,))
    register("mine:exception", fails)
    asked = ("report", "--figure", "mine:exception", "--run", "deepnorm-3")
    code, out, err = run(*asked, "--json")
    assert code == 1
    assert json.loads(out)["failed"] == [{"id": "mine:exception", "why": "ValueError: no column 'x' in this table"}]
    assert err == "mine:exception: ValueError: no column 'x' in this table\n"
    code, out, err = run(*asked, "--quiet", "-v")
    assert (code, out) == (1, "report/index.html\n")
    assert "in fails" in err
    assert "Traceback" in err


@pytest.mark.slow
@pytest.mark.usefixtures("unprinted")
def test_a_run_with_a_damaged_table_is_left_out_of_what_reads_it(run, register, tmp_path: Path) -> None:
    some_runs(tmp_path / "runs", seeds=(3, 4))
    register("mine:sound", lambda _: picture())
    for part in (tmp_path / "runs" / "deepnorm-4" / "probes" / "grad_norm").glob("part-*.parquet"):
        part.write_bytes(b"no table")
    names = ("deepnorm-3", "deepnorm-4")
    asked = ("--figure", "8", "--figure", "mine:sound", *(word for name in names for word in ("--run", name)))
    code, out, _ = run("report", *asked, "--json")
    assert code == 1
    facts = json.loads(out)
    assert [one["id"] for one in facts["figures"]] == ["branchnorm:8", "mine:sound", "run:deepnorm-3"]
    assert [one["id"] for one in facts["failed"]] == ["run:deepnorm-4"]  # which was asked for by name
    assert [Path(one["run"]).name for one in facts["unreadable"]] == ["deepnorm-4"]
    for one in (*facts["failed"], *facts["unreadable"]):
        assert "part-000001.parquet is damaged" in one["why"]
        assert "restore it from a copy" in one["why"]
    assert (tmp_path / "report" / "index.html").exists()


def test_a_claim_whose_test_fails_is_not_testable_and_the_others_are_judged(run, register, tmp_path: Path) -> None:
    some_runs(tmp_path / "runs")
    claim("C99", figure="branchnorm:8", **FACTS)(fails)
    code, out, err = run("claims", "--json", "--claim", "C99", "--claim", "C41")
    assert code == 1
    assert [one["verdict"] for one in json.loads(out)["claims"]] == ["inconclusive", "not testable"]
    assert err == "C99: its test failed (ValueError: no column 'x' in this table)\n"
    assert run("claims", "--claim", "C41")[0] == 0


def test_an_error_of_a_detector_is_the_line_of_that_run(monkeypatch, tmp_path: Path) -> None:
    """On the page that is written while runs go on, and on the last one; the other runs have all that they have."""
    for name in ("first", "second"):
        make_run(tmp_path / "runs", name, metrics={"loss": [3.0, 2.0, 1.0]}, kind="watched")
    diagnosed = collection.diagnose
    monkeypatch.setattr(collection, "diagnose", lambda r: fails(r) if r.name == "first" else diagnosed(r))
    why = "could not be diagnosed (ValueError: no column 'x' in this table)"
    page, _ = live.write([tmp_path / "runs"], tmp_path / "live", 1.0)
    document = Document(page)
    assert why in page.read_text().replace("&#39;", "'")
    assert document.plots.keys() == {"run-first", "run-second", "curves"}
    assert "ValueError: no column 'x' in this table" in document.classed("ul", "missing")[-1][1]
    runs = collection.Runs.load(tmp_path / "runs")
    view, failed = build.top(runs, list(runs))  # of the report, whose exit code it decides
    assert [(one.id, one.sentence) for one in failed] == [
        ("diagnosis:first", "ValueError: no column 'x' in this table")
    ]
    assert [why in one.sentence for one in view.told] == [True, False]


def test_an_error_of_a_runs_maps_is_a_line_of_the_page_while_runs_go_on(monkeypatch, tmp_path: Path) -> None:
    for name in ("first", "second"):
        make_run(tmp_path / "runs", name, metrics={"loss": [3.0, 2.0, 1.0]}, kind="watched")
    drawn = live.diagnose
    monkeypatch.setattr(live, "diagnose", lambda r, places: fails(r) if r.name == "first" else drawn(r))
    document = Document(live.write([tmp_path / "runs"], tmp_path / "live", 1.0)[0])
    assert document.plots.keys() == {"run-second", "curves"}
    assert "run:first ValueError: no column 'x' in this table" in document.classed("ul", "missing")[-1][1]


def test_an_error_of_the_top_of_the_page_leaves_the_rest(monkeypatch, tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "first", metrics={"loss": [3.0, 2.0, 1.0]}, kind="watched")
    monkeypatch.setattr(build, "overview", lambda *_: fails(_))
    document = Document(live.write([tmp_path / "runs"], tmp_path / "live", 1.0)[0])
    assert document.plots.keys() == {"run-first"}
    assert "Runs in a sentence overview ValueError" in document.classed("ul", "missing")[-1][1]


def test_an_error_of_any_kind_in_one_run_is_its_line_in_the_table(run, monkeypatch, tmp_path: Path) -> None:
    for name in ("first", "second"):
        make_run(tmp_path / "runs", name, metrics={"loss": [3.0, 2.0, 1.0]})
    described = listing._described
    monkeypatch.setattr(listing, "_described", lambda r: 1 / 0 if r.name == "first" else described(r))
    code, out, _ = run("runs", str(tmp_path / "runs"), "--json")
    rows = {row["run"]: row for row in json.loads(out)["runs"]}
    assert (code, rows["second"]["state"], rows["first"]["state"]) == (0, "finished", "unreadable")
    assert rows["first"]["reason"] == "it cannot be read (ZeroDivisionError: division by zero)"


def test_a_run_that_is_resumed_while_the_report_is_made_is_read_again(monkeypatch, tmp_path: Path) -> None:
    """Its figure is of what stands there afterwards."""
    path = make_run(tmp_path / "runs", "first", metrics={"loss": [3.0, 2.0, 1.0]}, kind="watched")
    drawn = live.diagnose
    seen: list[int] = []

    def resumed(record, places):
        seen.append(len(record.metrics))
        if len(seen) == 1:
            with RunWriter.resume(path, 1) as again:
                again.append(0, {"loss": 3.0}, {})
        return drawn(record)

    monkeypatch.setattr(live, "diagnose", resumed)
    page, _ = live.write([tmp_path / "runs"], tmp_path / "live", 1.0)
    assert seen == [3, 1]
    assert "Not readable" not in page.read_text()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.usefixtures("unprinted")
def test_what_no_other_process_prints_this_one_prints(register, monkeypatch, tmp_path: Path, begun: bool) -> None:
    """As in a program from standard input, for which Python starts no process: the first figure finds that out."""

    class Broken(Executor):
        def submit(self, *_: object) -> Future[None]:
            error = BrokenProcessPool("ended abruptly")
            if not begun:
                raise error
            lost: Future[None] = Future()
            lost.set_exception(error)
            return lost

    some_runs(tmp_path / "runs")
    monkeypatch.setattr(press, "ProcessPoolExecutor", lambda *_: Broken())
    register("made:1", lambda runs: picture())
    built = build.build(tmp_path / "runs", tmp_path / "report", figures=["made:1"])
    assert built.failed == []
    assert {path.suffix for path in (tmp_path / "report" / "figures").glob("made-1.*")} >= {
        ".png",
        ".pdf",
        ".svg",
        ".csv",
    }


def test_an_error_in_words() -> None:
    assert in_words(UsageError("give a\n  number")) == "give a number"
    assert in_words(KeyError("loss")) == "KeyError: 'loss'"
    assert in_words(RuntimeError()) == "RuntimeError"


@pytest.mark.usefixtures("unprinted")
def test_a_run_that_ended_without_a_number_is_listed_like_any_other(run, tmp_path: Path) -> None:
    """JSON has no NaN, so that status.json holds a text, which nothing may take for a number."""
    make_run(tmp_path / "runs", "lost", verdict="diverged", state="diverged", gap=math.nan)
    make_run(tmp_path / "runs", "well")
    code, out, _ = run("runs", str(tmp_path / "runs"))
    assert code == 0
    assert [line.split()[1:3] for line in out.splitlines()[-2:]] == [["diverged", "diverged"], ["finished", "trained"]]
    assert run("report", str(tmp_path / "runs"), "--figure", "table:stability", "--out", str(tmp_path / "out"))[0] == 0
    assert "diverged" in (tmp_path / "out" / "index.html").read_text()
