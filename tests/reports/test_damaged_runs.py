"""One damaged run never ends report, runs, claims or compare: it is listed with its sentence, and the rest is made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from edited_runs import edit
from rest_slow import rest_slow, slow
from test_report_command import some_runs

import stabilitylab as sl
from stabilitylab.commands.listing import run_table
from stabilitylab.reports.collection import Runs
from stabilitylab.verdict import RULE


def rewrite(name: str, **changes: object) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        edit(run / name, **changes)

    return damage


def flip(run: Path) -> None:
    path = run / "probes/cosine_similarity/part-000001.parquet"
    data = bytearray(path.read_bytes())
    for place in range(200, len(data) // 2, 20):
        data[place] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "half of run.json": lambda run: (run / "run.json").write_text("{"),
    "no status": lambda run: (run / "status.json").unlink(),
    "infinite step": lambda run: (run / "status.json").write_text('{"step": Infinity}'),
    "facts of another kind": rewrite("status.json", facts={"verdict": "trained"}),
    "a verdict of another kind": rewrite("status.json", facts={"verdict": {"rule": RULE, "x": 1}}),
    "settings of another kind": rewrite("run.json", config={"model": {"d_model": [1]}, "train": {"seed": "x"}}),
    "a list for a configuration": rewrite("run.json", config=[1]),
    "a flipped bit": flip,
    "a foreign file": lambda run: (run / "metrics/x").write_text(""),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "runs"
    some_runs(folder)
    return folder


@pytest.mark.parametrize("case", rest_slow(DAMAGE, {"no status", "half of run.json", "a foreign file"}))
@pytest.mark.usefixtures("unprinted")
def test_one_damaged_run_is_listed_and_the_rest_is_made(run, whole: Path, tmp_path: Path, case: str) -> None:
    runs = shutil.copytree(whole, tmp_path / "runs")
    DAMAGE[case](runs / "branchnorm-4")
    code, out, err = run("runs", "runs", "--json")
    states = {row["run"]: row["state"] for row in json.loads(out)["runs"]}
    tables = case == "a flipped bit"  # which only who reads the table can see
    assert (code, len(states)) == (0, 6)
    if case not in ("a foreign file", "settings of another kind"):
        assert (states.pop("branchnorm-4") == "unreadable") is not tables
        assert {*states.values()} == {"finished"}
    if case in ("no status", "a flipped bit"):
        code, out, err = run("report", "runs", "--figure", "branchnorm:8", "--json")
        facts = json.loads(out)
        assert (code, facts["figures"][0]["id"]) == (0, "branchnorm:8"), err
        assert [Path(one["run"]).name for one in facts["unreadable"]] == ["branchnorm-4"]
        assert facts["failed"] == []
        page = (tmp_path / "report/index.html").read_text()
        assert "branchnorm-4" in page
    code, out, err = run("claims", "runs", "--claim", "C41", "--claim", "C42")
    assert code == 0, err
    paths = [f"runs/{name}" for name in ("deepnorm-3", "branchnorm-4", "deepnorm-5")]
    code, out, err = run("compare", *paths)
    if "flipped" not in case and "foreign" not in case:
        assert (code, err.count("left out: ")) == (0, 1), err


def test_a_report_on_damaged_runs_alone_is_refused(run, whole: Path, tmp_path: Path) -> None:
    for name in ("branchnorm-4", "deepnorm-3"):
        flip(shutil.copytree(whole / name, tmp_path / "runs" / name))
    code, out, err = run("report", "runs")
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert "no run can be read below runs: runs/" in err
    assert "is damaged" in err
    assert "1 more cannot be read either" in err
    assert not (tmp_path / "report" / "index.html").exists()


def test_a_run_without_its_metrics_is_not_said_to_have_just_begun(run, whole: Path, tmp_path: Path) -> None:
    lost = shutil.copytree(whole / "deepnorm-3", tmp_path / "runs" / "lost")
    for part in (lost / "metrics").iterdir():
        part.unlink()
    for command in (("diagnose", "runs/lost"), ("report", "runs")):
        code, out, err = run(*command)
        assert (code, out) == (4, "")
        assert "the metrics of runs/lost are missing: restore runs/lost/metrics from a copy" in err
        assert "stabilitylab verify" in err
    shutil.copytree(whole / "deepnorm-3", tmp_path / "runs" / "whole")
    assert run("compare", "runs/lost", "runs/whole")[0] == 4


@pytest.mark.parametrize(
    "config",
    [
        slow({"model": "gpt2"}),
        {"model": {"encoder_layers": "many", "d_model": None}, "train": "long"},
        slow({"train": {"seed": "first", "steps": [1, 2]}}),
        slow({"data": 3, "seed": None, "model": [1, 2]}),
        {"a": float("nan"), "b": 10**400},
    ],
)
def test_the_configuration_of_a_watched_run_may_be_anything(run, tmp_path: Path, config: dict) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    for name in ("a", "b"):
        with sl.watch(model, out=tmp_path / "runs" / name, config=config, every=1, probes="grad_norm") as w:
            for _ in range(3):
                model(torch.ones(1, 2)).square().sum().backward()
                w.step(loss=1.0)
    assert [row["state"] for row in run_table(tmp_path / "runs")] == ["finished"] * 2
    assert [record.kind for record in Runs.load(tmp_path / "runs")] == ["watched"] * 2
    assert run("claims", "runs", "--claim", "C41")[0] == 0
    both = run("compare", "runs/a", "runs/b")
    assert both[0] == 0
    assert run("compare", "runs") == both  # all runs of a folder
    for one, word in (("runs/a", "there is one run"), ("nowhere", "nowhere")):
        code, _, err = run("compare", one)
        assert (code, word in err) == (2 if one == "runs/a" else 4, True), err
    assert run("diagnose", "runs/a")[0] == 0
