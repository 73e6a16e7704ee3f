"""What tables say of themselves lasts in run.json, and runs from before they did stay readable."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from edited_runs import as_schema, edit
from store_cases import GRAD_NORM, new_run, put

from stabilitylab.diagnose import diagnose
from stabilitylab.errors import InputError
from stabilitylab.probes import PROBES
from stabilitylab.reports import Runs
from stabilitylab.reports.diagnosis import diagnose as drawn
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import SCHEMA_VERSION, Run, RunWriter
from stabilitylab.store.older import SCHEMA_1, facts

OLD = Path(__file__).parent / "run-schema-1.json"  # of `stabilitylab probe`, as schema 1 had it, and a foreign table
FACTS = ("phase", "main", "log", "undefined", "unit")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A run of schema 1 with five rows; only run.json has changed since."""
    path = tmp_path / "run"
    path.mkdir()
    shutil.copy(OLD, path / "run.json")
    tables = [Run.open(path).table(name) for name in Run.open(path).tables]
    shutil.rmtree(path)
    with RunWriter.create(path, {}) as writer:
        writer.open(tables)
        for step in range(5):
            cells = {t.name: Cells(np.full((len(t.rows), len(t.columns)), 1.0 + step), np.zeros(len(t.rows), bool))
                     for t in tables}  # fmt: skip
            writer.append(step, {"loss": 5.0 - step, "nll": 5.0 - step, "grad_norm_total": 1.0}, cells)
        writer.set_status("finished", 5)
    return as_schema(path, 1, json.loads(OLD.read_text()))


def test_tables_of_old_runs_are_completed_with_the_facts_of_our_probes(old: Path) -> None:
    run = Run.open(old)
    assert run.manifest["schema_version"] == 1
    ours = [name for name in run.tables if name in PROBES]
    assert len(ours) >= 16
    for name in ours:
        table = run.table(name)
        known = PROBES[name].table(table.rows, table.columns)
        assert {fact: getattr(table, fact) for fact in FACTS} == {fact: getattr(known, fact) for fact in FACTS}, name


@pytest.mark.parametrize("name", sorted(PROBES.keys() & SCHEMA_1))
def test_the_closed_list_does_not_contradict_the_registry(name: str) -> None:
    """A probe that changes what it is drawn as gets another name, or old runs would be drawn as what they are not."""
    table = PROBES[name].table((), tuple(PROBES[name].columns))
    assert facts(name, {"columns": list(table.columns), "unit": table.unit}) == {f: getattr(table, f) for f in FACTS}


@pytest.mark.parametrize(
    ("name", "phase"), [("my_grad_noise", "backward"), ("slow_update", "update"), ("gates", "forward")]
)
def test_of_a_foreign_old_table_the_name_is_all_that_tells(name: str, phase: str) -> None:
    guessed = facts(name, {"columns": ["scale", "other"], "unit": "ratio"})
    assert guessed == {"phase": phase, "main": "", "log": None, "undefined": (), "unit": "ratio"}


def test_a_probe_of_ours_without_its_main_column_is_drawn_by_its_first(old: Path) -> None:
    kept = facts("branch_variance", {"columns": ["sum"], "unit": "variance over d"})
    assert (kept["phase"], kept["main"], kept["log"]) == ("reference", "", None)


def test_an_old_run_is_diagnosed_and_drawn(old: Path) -> None:
    assert diagnose(Run.open(old)).verdict == "open"  # five rows
    (record,) = Runs.load(old.parent)
    titles = {panel.title for panel in drawn(record).panels}
    assert {"attention, encoder", "ln gain, decoder", "logits", "output norm", "my grad noise, encoder"} <= titles


def test_an_old_run_that_is_resumed_says_what_its_tables_are(old: Path) -> None:
    before = {name: Run.open(old).table(name) for name in Run.open(old).tables}
    with RunWriter.resume(old, part=2) as writer:
        writer.open(list(before.values()))
    document = json.loads((old / "run.json").read_text())
    assert document["schema_version"] == SCHEMA_VERSION
    assert document["tables"]["adam"]["phase"] == "update"
    run = Run.open(old)
    assert {name: run.table(name) for name in run.tables} == before
    assert len(run.frame("ln_gain")) == 5 * len(before["ln_gain"].rows)


def test_what_a_table_says_of_itself_lasts(tmp_path: Path) -> None:
    told = replace(GRAD_NORM, phase="update", main="entries", log=False, undefined=("value",))
    left_open = Table("mine", ("a", "b"), (Row("x"),))
    with RunWriter.create(tmp_path / "run", {}) as writer:
        writer.open([told, left_open])
        writer.append(0, {}, {})
    run = Run.open(tmp_path / "run")
    assert run.table("grad_norm") == told
    assert run.table("mine") == left_open
    assert (left_open.phase, left_open.main, left_open.log, left_open.unit) == ("forward", "a", None, "")


def test_the_sound_column_is_one_that_divides_by_nothing() -> None:
    assert replace(GRAD_NORM, main="entries").sound == "entries"
    assert replace(GRAD_NORM, undefined=("value",)).sound == "entries"
    assert replace(GRAD_NORM, undefined=GRAD_NORM.columns).sound == ""


@pytest.mark.parametrize(
    ("fact", "value", "sentence"),
    [
        ("phase", "sideways", "unknown phase 'sideways'"),
        ("main", "x", "no column 'x'"),
        ("undefined", ("x",), "no column 'x'"),
    ],
)
def test_a_table_cannot_say_what_is_not_so(tmp_path: Path, fact: str, value, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(GRAD_NORM, **{fact: value})
    with new_run(tmp_path / "run") as writer:
        put(writer, 0)
    path = tmp_path / "run" / "run.json"
    document = json.loads(path.read_text())
    document["tables"]["grad_norm"][fact] = value
    edit(path, document)
    with pytest.raises(InputError, match=r"run.json is damaged .*: restore it from a copy"):
        Run.open(tmp_path / "run")


@pytest.mark.parametrize("value", ["yes", 1, ...])
def test_a_scale_is_yes_no_or_left_open(tmp_path: Path, value) -> None:
    with new_run(tmp_path / "run") as writer:
        put(writer, 0)
    path = tmp_path / "run" / "run.json"
    document = json.loads(path.read_text())
    if value is ...:
        del document["tables"]["grad_norm"]["log"]
    else:
        document["tables"]["grad_norm"]["log"] = value
    edit(path, document)
    with pytest.raises(InputError, match="damaged"):
        Run.open(tmp_path / "run")
