"""What a report read of runs lies beside it: the next one reads what has changed, and no file there can break it."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from making import Made, make_run, sublayer_rows

from stabilitylab.diagnose import DETECTORS
from stabilitylab.reports import collection, kept
from stabilitylab.reports.base import Map, Panel, Picture, Series
from stabilitylab.reports.build import build
from stabilitylab.reports.collection import Record, built_in
from stabilitylab.reports.kept import END, FOLDER, Kept, keepable
from stabilitylab.reports.page import overview
from stabilitylab.schema import Row
from stabilitylab.store import Run, RunWriter
from stabilitylab.store.frame import Frame
from stabilitylab.store.reader import Snapshot

pytestmark = pytest.mark.usefixtures("unprinted")
STEPS = 24
HEAD = {"run": "/nowhere"}


def made(folder: Path, name: str, seed: int, level: float = 1.0, **options: Any) -> Path:
    """A run with a loss and two tables, so that figures, claims, a diagnosis and maps need its numbers."""
    rows = sublayer_rows(2)
    tables = {
        "grad_norm": Made(rows, ("value",), lambda t, row: level * (row.layer + t), range(0, STEPS, 4)),
        "ln_input": Made(rows, ("value", "branch", "shortcut", "p99"), lambda t, row: (level,) * 4, (0, 8)),
    }
    loss = [7.0 - 0.1 * t * level for t in range(STEPS)]
    metrics = {"loss": loss, "nll": loss, "held_out_nll": loss, "held_out_accuracy": [0.1] * STEPS}
    return make_run(folder, name, seed=seed, layers=2, tables=tables, metrics=metrics, **options)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    made(tmp_path / "runs", "first", 3)
    made(tmp_path / "runs", "second", 4, arch="deepnorm")
    made(tmp_path / "runs", "own", 5, kind="watched", verdict="")
    return tmp_path / "runs"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The runs and tables that are read, in order."""
    found: list[tuple[str, str]] = []
    whole = Snapshot._read

    def noted(run: Snapshot, name: str, schema: pa.Schema | None) -> pa.Table:
        found.append((run.name, name))
        return whole(run, name, schema)

    monkeypatch.setattr(Snapshot, "_read", noted)
    return found


def report(runs: Path, out: Path) -> tuple[bytes, bytes]:
    built = build(runs, out)
    assert not built.failed
    return built.page.read_bytes(), (out / "claims.json").read_bytes()


def test_a_second_report_reads_no_table_and_is_the_same(runs: Path, read: list[tuple[str, str]]) -> None:
    out = runs.parent / "report"
    first = report(runs, out)
    assert {name for name, _ in read} == {"first", "second", "own"}
    read.clear()
    assert report(runs, out) == first
    assert read == []
    assert len(list((out / FOLDER).glob(f"*{END}"))) == 3


@pytest.fixture
def uncompared(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two runs are compared on the page, which needs the tables of both."""
    monkeypatch.setattr(overview, "COMPARED", 0)


@pytest.mark.usefixtures("uncompared")
def test_of_a_run_that_changed_all_is_read_again_and_of_others_nothing(runs: Path, read: list[tuple[str, str]]) -> None:
    out = runs.parent / "report"
    before = report(runs, out)
    with RunWriter.resume(runs / "own", 1) as writer:
        for step in range(STEPS):
            writer.append(step, {"loss": 5.0 + step, "nll": 5.0 + step}, {})
        writer.set_status("finished", STEPS)
    read.clear()
    after = report(runs, out)
    assert {name for name, _ in read} == {"own"}
    assert after[0] != before[0]
    assert report(runs, runs.parent / "another") == after, "the same page as one that is made from nothing"


@pytest.mark.slow
def test_two_runs_are_compared_again_if_either_changed(runs: Path) -> None:
    """The run that did not change has what both made."""
    out = runs.parent / "report"
    report(runs, out)
    with RunWriter.resume(runs / "second", 1) as writer:
        for step in range(STEPS):
            writer.append(step, {"loss": 2.0, "nll": 2.0}, {})
        writer.set_status("finished", STEPS)
    assert report(runs, out) == report(runs, runs.parent / "another")


@pytest.mark.slow
@pytest.mark.usefixtures("uncompared")
def test_a_run_that_goes_on_is_always_read(runs: Path, read: list[tuple[str, str]]) -> None:
    out = runs.parent / "report"
    with RunWriter.resume(runs / "own", 1) as writer:
        writer.append(0, {"loss": 4.0, "nll": 4.0}, {})
        report(runs, out)
        read.clear()
        report(runs, out)
        assert {name for name, _ in read} == {"own"}


def _garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xff no report wrote this")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


def _inside(path: Path) -> None:
    """Pieces that are sound as a file and mean nothing."""
    _, line, _ = path.read_bytes().split(b"\n", 2)
    index = json.loads(line)
    index["index"] = [[name, 0, 9] for name, _, _ in index["index"]]
    body = json.dumps(index).encode() + b"\n" + b"no numbers"
    path.write_bytes(b"%08x\n" % zlib.crc32(body) + body)


@pytest.mark.parametrize("harm", [Path.unlink, _garbage, _cut, _bit, _inside, lambda path: path.write_bytes(b"")])
def test_a_file_that_is_lost_or_damaged_is_made_again(tmp_path: Path, harm: Any) -> None:
    again(tmp_path, np.arange(100.0))
    (path,) = tmp_path.iterdir()
    harm(path)
    one = Kept(path, HEAD)
    assert one.get("it", lambda: "made") == "made"
    one.save()
    assert Kept(path, HEAD).get("it", lambda: pytest.fail("it was not mended")) == "made"


@pytest.mark.slow
def test_damaged_files_leave_the_report_as_it_is(runs: Path, read: list[tuple[str, str]]) -> None:
    out = runs.parent / "report"
    before = report(runs, out)
    for path, harm in zip(sorted((out / FOLDER).glob(f"*{END}")), (Path.unlink, _bit, _inside), strict=True):
        harm(path)
    read.clear()
    assert report(runs, out) == before
    assert {name for name, _ in read} == {"first", "second", "own"}
    read.clear()
    assert report(runs, out) == before
    assert read == [], "it was mended"


@pytest.mark.slow
def test_other_code_reads_again(runs: Path, read: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    out = runs.parent / "report"
    report(runs, out)
    read.clear()
    monkeypatch.setattr(collection, "code", lambda: "of another version")
    report(runs, out)
    assert {name for name, _ in read} == {"first", "second", "own"}


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_no_error(runs: Path) -> None:
    out = runs.parent / "report"
    out.mkdir()
    (out / FOLDER).write_text("a file where the folder would be")
    first = report(runs, out)
    assert report(runs, out) == first


@pytest.mark.slow
def test_files_of_runs_that_are_gone_are_removed(runs: Path) -> None:
    out = runs.parent / "report"
    report(runs, out)
    (runs / "own").rename(runs.parent / "elsewhere")
    report(runs, out)
    assert len(list((out / FOLDER).glob(f"*{END}"))) == 2


def test_findings_of_a_plugin_are_not_kept(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows when its code changes."""

    def find(evidence: Any) -> list[Any]:
        return []

    kind, detector = next(iter(DETECTORS.items()))
    assert built_in()
    with monkeypatch.context() as patch:
        patch.setitem(DETECTORS._entries, kind, replace(detector, find=find))
        assert not built_in()
    record = Record(Run.open(runs / "own").snapshot(), "own")
    asked: list[bool] = []
    monkeypatch.setattr(record, "remember", lambda key, make, keep=False: asked.append(keep) or make())
    monkeypatch.setattr(collection, "built_in", lambda: False)
    assert record.diagnosis is not None
    assert asked == [False]


def again(folder: Path, value: Any) -> Any:
    """What a file returns of a value that was kept in it."""
    path = folder / f"{len(list(folder.iterdir()))}.kept"
    one = Kept(path, HEAD)
    assert one.get("it", lambda: value) is value
    one.save()
    return Kept(path, HEAD).get("it", lambda: pytest.fail("it was not kept"))


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -0.0, math.inf, 1e-310, "ä\n\"", (), [1, (2, "x")], {"a": 1, ("b", 2): [None]}, Row("a", "b", 1),
     np.float64(0.1), np.bool_(True), [Series("a", [1, 2], [0.5, math.nan])]],
)  # fmt: skip
def test_a_value_comes_back_as_it_was(tmp_path: Path, value: Any) -> None:
    found = again(tmp_path, value)
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_numbers_come_back_bit_for_bit(tmp_path: Path) -> None:
    values = np.array([[0.1, -0.0, math.nan], [math.inf, 5e-324, 1e308]])
    picture = Picture([Panel("a", "x", "y", map=Map([1, 2, 3], [1, 2], values, np.zeros((2, 3), np.int8), "u"))], "f")
    heat = again(tmp_path, picture).panels[0].map
    assert heat.z.tobytes() == values.tobytes()
    assert (heat.z.dtype, heat.finding.dtype, heat.z.flags.writeable) == (values.dtype, np.int8, True)
    for array in (values.T, values[:, ::2], np.array(["a", "bcd"]), np.empty((0, 3)), np.arange(4)[::-1]):
        found = again(tmp_path, array)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array, equal_nan=array.dtype.kind == "f")
    table = pa.table({"step": [0, 1], "loss": pa.array([None, math.nan])})
    assert again(tmp_path, table).equals(table) or again(tmp_path, table)["loss"].null_count == 1


def test_frames_come_back_with_their_names_and_types(runs: Path) -> None:
    record = Record(Run.open(runs / "first").snapshot(), "first")
    for data in (record.run.frame("grad_norm"), record.run.frame_at("grad_norm", (0, 8), by="layer"), record.metrics):
        found = again(runs, data)
        assert type(found) is type(data)
        pd.testing.assert_frame_equal(found, data)
    late = record.metrics.loc[record.metrics["step"] > 3, ["step", "loss"]]
    pd.testing.assert_frame_equal(again(runs, late), late)
    assert isinstance(again(runs, record.run.frame("grad_norm")), Frame)


@dataclass
class Foreign:
    a: int


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, np.array([None]), Foreign(1), pd.DataFrame({"a": ["x"]}), [Foreign(1)], Path("a")]
)
def test_what_has_no_form_in_a_file_is_made_again(tmp_path: Path, value: Any) -> None:
    one = Kept(tmp_path / "a.kept", HEAD)
    one.get("it", lambda: value)
    one.save()
    assert not (tmp_path / "a.kept").exists()
    made_again: list[int] = []
    Kept(tmp_path / "a.kept", HEAD).get("it", lambda: made_again.append(1))
    assert made_again == [1]


def test_what_is_too_large_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "LARGEST", 1000)
    one = Kept(tmp_path / "a.kept", HEAD)
    one.get("small", lambda: 1)
    one.get("large", lambda: np.random.default_rng(0).random(1000))
    one.save()
    assert Kept(tmp_path / "a.kept", HEAD).get("small", lambda: 2) == 1
    assert Kept(tmp_path / "a.kept", HEAD).get("large", lambda: "again") == "again"


def test_a_file_makes_no_object_of_a_class_that_it_names(tmp_path: Path) -> None:
    """A report may come from somebody else: its files hold numbers and text, and run nothing."""
    piece = zlib.compress(b'%d\n{"class":"Popen","fields":{"args":"true"}}' % 42)
    index = {"head": json.dumps(HEAD), "index": [['"it"', 0, len(piece)]]}
    body = json.dumps(index).encode() + b"\n" + piece
    (tmp_path / "a.kept").write_bytes(b"%08x\n" % zlib.crc32(body) + body)
    assert Kept(tmp_path / "a.kept", HEAD).get("it", lambda: "made") == "made"
    with pytest.raises(TypeError, match="no dataclass"):
        keepable(Path)
