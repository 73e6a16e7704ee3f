"""The ledger: keys that hold on any machine, lines that survive, and sweeps that make nothing twice."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from edited_runs import edit
from sweep_cases import FakeLauncher, Heard, config, experiment, finishes, leave, left, on, planned

from stabilitylab.config import resolve
from stabilitylab.errors import InputError, ResourceError, UsageError
from stabilitylab.experiments import Experiment
from stabilitylab.store import Run
from stabilitylab.sweep import Job, Ledger, commands, plan, run, runner, status_table
from stabilitylab.sweep import ledger as ledgers
from stabilitylab.sweep.cells import COLUMNS, cell_of
from stabilitylab.sweep.identity import key_of
from stabilitylab.verdict import Trend, Verdict


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POLL", 0.0)


def known(out: Path, ledger: Ledger, *names: str, **settings: Any) -> list[Job]:
    """Jobs of one experiment each, told apart by their seeds."""
    return plan([experiment(name, seed=ord(name), **settings) for name in names], out, ledger)


# The file


def ended(out: Path, name: str = "a", **settings: Any) -> Run:
    job = plan([experiment(name, **settings)], out)[0]
    left(job, "finished", step=job.steps, verdict="trained", nll_gap=-0.5, accuracy_gap=0.1)
    return Run.open(job.path)


def test_a_line_says_what_was_run_by_what_and_how_it_ended(texts: Path, tmp_path: Path) -> None:
    conf = on(texts, model={"arch": "branchnorm", "d_model": 32, "T": 7}, train={"lr": 1e-3, "seed": 9, "threads": 2})
    job = plan([experiment("a")], tmp_path)[0]
    job = Job(type(job.experiment)("a", conf), tmp_path)
    writer = leave(job, "running", step=1)
    writer.append(1, {"held_out_nll": 0.1 + 0.2, "held_out_accuracy": math.nan, "loss": None}, {})
    verdict = Verdict("diverged", 3, "so it was", -0.25, 0.1, Trend(0.1 + 0.2, 0.25, 0.35, 8), 400)
    writer.set_status("diverged", 160, "so it was", verdict=verdict.recorded())
    writer.close()
    cell = cell_of(Run.open(job.path))
    assert {*cell} == {*COLUMNS}
    text = {key: cell[key] for key in ("label", "arch", "layers", "seed", "steps", "lr", "warmup", "T", "step")}
    assert text == {"label": "branchnorm", "arch": "branchnorm", "layers": "2", "seed": "9", "steps": "240",
                    "lr": "0.001", "warmup": "120", "T": "7", "step": "160"}  # fmt: skip
    assert cell["settings"] == "model.d_model=32 data.seed=0"
    assert cell["data"].startswith("text:a.de@")
    assert (cell["state"], cell["verdict"], cell["nll_gap"], cell["accuracy_gap"]) == (
        "diverged",
        "diverged",
        "-0.25",
        "0.1",
    )
    assert cell["evidence"] == (
        "step=3 trend.fall=0.30000000000000004 trend.low=0.25 trend.high=0.35 trend.evaluations=8 sentences=400 rule=3"
    )
    assert cell["metrics"] == "held_out_nll=0.30000000000000004 held_out_accuracy=nan"
    assert cell["key"] == key_of(conf)
    assert str(tmp_path) not in str(cell)


def test_options_of_an_architecture_stand_in_a_line(tmp_path: Path) -> None:
    settings = {"model": {"arch": "deepnorm", "options": {"beta": 3.5}}, "train": {"steps": 4}}
    job = plan([Experiment("a", resolve(settings, depth=2))], tmp_path)[0]
    left(job, "finished", step=job.steps, verdict="trained", nll_gap=-0.5, accuracy_gap=0.1)
    ledger = Ledger(tmp_path / "ledger.csv")
    assert ledger.add(Run.open(job.path))
    assert "model.options.beta=3.5" in ledger.cells()[key_of(job.experiment.config)]["settings"].split()
    assert ledger.frame()["model.options.beta"].tolist() == [3.5]


def test_a_run_counts_by_the_files_that_it_read(texts: Path, tmp_path: Path) -> None:
    job = Job(type(experiment("a"))("a", on(texts)), tmp_path)
    writer = leave(job, "finished")
    digests = {str(texts / name): name * 8 for name in ("a.de", "a.en", "v.de", "v.en")}
    writer._document["data"] = {"files_sha256": digests}
    writer.set_status("finished", 2, "")
    from stabilitylab.store.layout import write_run_json

    write_run_json(job.path, writer._document)
    writer.close()
    assert cell_of(Run.open(job.path))["key"] == key_of(on(texts), digests) != key_of(on(texts))


def test_lines_are_appended_once_and_read_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "deep" / "ledger.csv")
    assert ledger.cells() == {}
    first = ended(tmp_path, "a", seed=1)
    assert (ledger.add(first), ledger.add(first)) == (True, False)
    assert ledger.add(ended(tmp_path, "b", seed=2))
    lines = ledger.path.read_text().splitlines()
    assert lines[0] == ",".join(COLUMNS)
    assert len(lines) == 3
    frame = Ledger(ledger.path).frame()
    assert frame["seed"].tolist() == [1, 2]
    assert frame["metrics.loss"].tolist() == [1.0, 1.0]
    assert frame["data.sentences"].tolist() == [4, 4]
    found = Ledger(ledger.path).find(config(seed=2))
    assert found is not None
    assert (found["verdict"], found["nll_gap"]) == ("trained", "-0.5")
    assert ledger.find(config(seed=3)) is None


@pytest.mark.parametrize("cut", [1, 2, 12, 30, 300])
def test_a_torn_last_line_is_said_and_then_removed(cut: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(tmp_path / "ledger.csv")
    runs = [ended(tmp_path, name, seed=ord(name)) for name in "ab"]
    ledger.add(runs[0])
    one = ledger.path.read_bytes()
    ledger.add(runs[1])
    two = ledger.path.read_bytes()
    ledger.path.write_bytes(two[: -min(cut, len(two) - len(one) - 1)])
    kept = Ledger(ledger.path).cells()
    if cut == 1:  # the newline alone
        assert len(kept) == 2
        assert not caplog.messages
    else:
        assert [cell["seed"] for cell in kept.values()] == [str(ord("a"))]
        assert "ends in a torn line, which is not counted" in caplog.messages[0]
        assert ledger.add(runs[1])
        assert "ended in a torn line, which was removed" in caplog.messages[-1]
    ledger.add(ended(tmp_path, "c", seed=ord("c")))
    assert ledger.path.read_bytes().startswith(two)
    assert len(Ledger(ledger.path).cells()) == 3


def test_a_torn_header_is_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(tmp_path / "ledger.csv")
    ledger.path.write_text("key,label,ar")
    ledger.add(ended(tmp_path))
    assert ledger.path.read_text().splitlines()[0] == ",".join(COLUMNS)
    assert "'key,label,ar'" in caplog.text


def test_what_git_leaves_is_read_or_named_by_its_line(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.csv")
    for name in "ab":
        ledger.add(ended(tmp_path, name, seed=ord(name)))
    header, a, b = ledger.path.read_text().splitlines()
    ledger.path.write_text("\r\n".join([header, a, "", header, b, a, ""]))  # a union; and a checkout on Windows
    assert len(ledger.cells()) == 2
    ledger.path.write_text("\n".join([header, a, "<<<<<<< HEAD", b, ""]))
    with pytest.raises(InputError, match=r"line 3 of .*ledger.csv is no line of a ledger: remove the line, or resolve"):
        ledger.cells()
    ledger.path.write_text("\n".join([header, a, ">>>>>>> mine"]))  # at the end, too, this is not ours to remove
    with pytest.raises(InputError, match="line 3"):
        ledger.add(ended(tmp_path, "c"))
    ledger.path.write_text("\n".join([header, a[:-9], b, ""]))
    with pytest.raises(InputError, match="line 2"):
        ledger.cells()
    ledger.path.write_text("name,age\nx,3\n")
    with pytest.raises(InputError, match="is no ledger, which begins with the names of its columns"):
        ledger.cells()


def test_a_table_of_other_columns_keeps_them(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.csv")
    ledger.path.write_text("key,arch,note,finished\n")
    ledger.add(ended(tmp_path))
    key, arch, note, finished = ledger.path.read_text().splitlines()[1].split(",")
    assert (len(key), arch, note, finished[-6:]) == (16, "deepnorm", "", "+00:00")


def test_a_file_that_git_puts_in_its_place_is_the_one_that_grows(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.csv")
    ledger.add(ended(tmp_path, "a", seed=1))
    shutil.copy(ledger.path, tmp_path / "new")
    os.replace(tmp_path / "new", ledger.path)
    ledger.add(ended(tmp_path, "b", seed=2))
    assert len(ledger.cells()) == 2


def test_a_disk_that_refuses_leaves_the_table_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "ledger.csv")
    ledger.add(ended(tmp_path, "a", seed=1))
    before = ledger.path.read_bytes()

    def half(file: int, data: bytes) -> None:
        os.write(file, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ledgers, "write_all", half)
    with pytest.raises(
        ResourceError, match=r"cannot write the ledger .*No space left.*the same sweep adds their lines"
    ):
        ledger.add(ended(tmp_path, "b", seed=2))
    assert ledger.path.read_bytes() == before
    with pytest.raises(ResourceError, match="cannot write the ledger"):
        Ledger(tmp_path).prepare()
    with pytest.raises(InputError, match="cannot read the ledger"):
        Ledger(tmp_path / "ledger.csv" / "x").cells()


MANY = """
import sys
from pathlib import Path
from stabilitylab.store import Run
from stabilitylab.sweep import Ledger
ledger = Ledger(sys.argv[1])
for path in sys.argv[2:]:
    ledger.add(Run.open(path))
"""


@pytest.mark.slow
def test_several_processes_write_one_table(tmp_path: Path) -> None:
    paths = [str(ended(tmp_path, name, seed=ord(name)).path) for name in "abcdefgh"]
    file = tmp_path / "ledger.csv"
    shares = [paths, paths[::-1], paths[2:] + paths[:2]]
    crowd = [subprocess.Popen([sys.executable, "-c", MANY, str(file), *share]) for share in shares]
    assert [process.wait(120) for process in crowd] == [0, 0, 0]
    assert len(file.read_text().splitlines()) == 9
    assert len(Ledger(file).cells()) == 8


def test_a_lock_that_nobody_gives_back_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    ledger = Ledger(tmp_path / "ledger.csv")
    ledger.prepare()
    monkeypatch.setattr(ledgers, "PATIENCE", 0.0)
    with ledger.path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ResourceError, match=r"kept .* locked"):
            ledger.cells()
        with pytest.raises(ResourceError, match=r"kept .* locked"):
            ledger.add(ended(tmp_path))


# The sweep


def test_what_ends_is_appended_and_skipped_where_its_directory_is_gone(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.csv")
    assert run(known(tmp_path / "one", ledger, *"ab"), launcher=FakeLauncher()).exit_code == 0
    assert len(ledger.cells()) == 2
    shutil.rmtree(tmp_path / "one")
    crew, heard = FakeLauncher(), Heard()
    jobs = known(tmp_path / "two", Ledger(ledger.path), *"abc")
    assert [(job.state, job.verdict, job.step) for job in jobs[:2]] == [("finished", "trained", 4)] * 2
    outcome = run(jobs, launcher=crew, audience=heard)
    assert [job.name for job in crew.started] == ["c"]
    assert outcome.sentence() == f"3 runs: 3 finished (2 only in {ledger.path})"
    assert outcome.exit_code == 0
    assert len(ledger.cells()) == 3


def test_what_had_ended_before_is_appended_and_what_failed_is_not(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.csv")
    left(known(tmp_path, ledger, "a")[0], "diverged", verdict="diverged")
    fails = lambda job: left(job, "failed", reason="no") or 5  # noqa: E731
    run(known(tmp_path, ledger, *"ab"), launcher=FakeLauncher({"b": [fails]}), retries=0)
    assert [cell["state"] for cell in ledger.cells().values()] == ["diverged"]


def test_a_cell_that_another_sweep_ends_meanwhile_is_not_begun(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.csv")

    def elsewhere(job: Job) -> int:
        other = known(tmp_path / "other", Ledger(ledger.path), "b")
        run(other, launcher=FakeLauncher())
        return finishes(job)

    crew = FakeLauncher({"a": [elsewhere]})
    outcome = run(known(tmp_path / "here", ledger, *"ab"), launcher=crew)
    assert [job.name for job in crew.started] == ["a"]
    assert [job.state for job in outcome.jobs] == ["finished", "finished"]


def test_a_run_that_was_interrupted_here_and_ended_elsewhere_is_left_alone(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.csv")
    run(known(tmp_path / "there", ledger, "a"), launcher=FakeLauncher())
    left(known(tmp_path / "here", ledger, "a")[0], "interrupted", checkpoint=2)
    job = known(tmp_path / "here", ledger, "a")[0]
    assert (job.state, job.resumable) == ("finished", False)
    assert commands([job]) == []
    row = status_table([job])[0]
    assert row["reason"].startswith(f"in {ledger.path} since 20")
    assert known(tmp_path / "here", Ledger(tmp_path / "empty.csv"), "a")[0].state == "interrupted"


def test_another_configuration_is_another_cell(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.csv")
    run(known(tmp_path / "one", ledger, "a", lr=1e-3), launcher=FakeLauncher())
    assert known(tmp_path / "two", ledger, "a", lr=2e-3)[0].state == "new"
    same = known(tmp_path / "two", ledger, "a", lr=1e-3, device="cuda:3", threads=4, checkpoint_every=7)
    assert same[0].state == "finished"


def test_a_run_of_one_step_is_made_anyway(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.csv")
    one = plan([experiment("a", kind="onestep")], tmp_path, ledger)
    left(one[0], "finished", step=1)
    run([job.now() for job in one], launcher=FakeLauncher())
    assert ledger.cells() == {}


def test_a_ledger_that_cannot_be_written_shows_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    crew = FakeLauncher()
    job = planned(tmp_path / "out", "a")[0]
    lost = Job(job.experiment, job.out, ledger=Ledger(tmp_path / "file" / "x.csv"))
    with pytest.raises(ResourceError, match="cannot write the ledger"):
        run([lost], launcher=crew)
    assert crew.started == []


def test_a_setting_of_a_run_from_before_it_existed_counts_at_its_default(tmp_path: Path) -> None:
    import json

    job = planned(tmp_path, "a")[0]
    left(job, "finished")
    document = json.loads((job.path / "run.json").read_text())
    del document["config"]["train"]["accumulate"]
    edit(job.path / "run.json", document)
    assert planned(tmp_path, "a")[0].state == "finished"
    with pytest.raises(UsageError, match=r"a has train.accumulate = 1, where 2 is asked for"):
        planned(tmp_path, "a", accumulate=2)


@pytest.mark.slow
def test_the_command_line_says_which_are_skipped(run, tmp_path: Path) -> None:
    small = ["sweep", "--grid", "arch=deepnorm", "depth=2", "train.steps=2", "--set=data.sentences=4",
             "--set=data.held_out=6", "--ledger", "cells.csv"]  # fmt: skip
    code, out, err = run(*small, "seed=3")
    assert (code, err.splitlines()[0]) == (0, "1 run, 1 to be made"), err
    shutil.rmtree("runs")
    line = (tmp_path / "cells.csv").read_text().splitlines()[1]
    assert "held_out_nll=" in line
    code, out, err = run(*small, "seed=3,4", "--status")
    assert "in cells.csv since" in out
    assert out.count(" new ") == 1
    code, out, err = run(*small, "seed=3,4", "--print")
    assert (len(out.splitlines()), err) == (1, "1 skipped, since cells.csv has it: deepnorm-2-steps2-s3\n")
    code, out, err = run(*small, "seed=3")
    assert (code, out) == (0, "runs: 1 run: 1 finished (1 only in cells.csv)\n")
    assert err == "1 run, 0 to be made, 1 skipped, since cells.csv has it\n"
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").glob("deepnorm*"))


@pytest.mark.slow
def test_the_stability_table_says_what_the_ledger_alone_has(run, tmp_path: Path) -> None:
    asked = ["sweep", "table", "--archs", "deepnorm", "--depths", "2", "--seeds", "1", "-q", "--set=train.steps=2",
             "--set=data.sentences=4", "--set=data.held_out=6", "--ledger", "cells.csv"]  # fmt: skip
    assert run(*asked)[0] == 0
    shutil.rmtree("runs")
    code, _, err = run(*asked)
    assert code == 0
    assert "not in the table below: 1 run of which only the ledger has the result" in err
