"""``probe --resume auto``: one command that starts a run, goes on with it, and has nothing to do once it has ended."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from edited_runs import edit
from rest_slow import rest_slow

from stabilitylab.config import parse_set, resolve
from stabilitylab.store import Run
from stabilitylab.store.files import Lock
from stabilitylab.train import checkpoint, plan, start
from stabilitylab.train.loop import Report

SETTINGS = ["model.arch=deepnorm", "data.sentences=4", "data.held_out=6", "train.steps=7", "model.dropout=0.1"]
COMMAND = ["probe", "--resume", "auto", "--depth", "2", *(word for text in SETTINGS for word in ("--set", text))]
NAME = "deepnorm-2-s0"
CLOCKS = ["tokens_per_second", "memory_bytes"]


class InterruptedAt:
    def __init__(self, row: int) -> None:
        self.row = row

    def opened(self, path: Path, manifest: object) -> None: ...

    def show(self, report: Report) -> None:
        if report.row == self.row:
            os.kill(os.getpid(), signal.SIGTERM)


def broken(out: Path, name: str = NAME, row: int = 3) -> Path:
    """A run of that command that was interrupted."""
    result = start(plan(resolve(parse_set(SETTINGS), depth=2)), out, name, InterruptedAt(row))
    assert result.state == "interrupted"
    return result.path


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_it_starts_and_then_has_nothing_to_do(run: Any, tmp_path: Path) -> None:
    code, out, _ = run(*COMMAND, "-q")
    assert (code, out) == (0, f"runs/{NAME}\n")
    before = contents(tmp_path)
    code, out, err = run(*COMMAND)
    assert (code, out) == (0, f"runs/{NAME}\n")
    assert err == f"nothing to do: runs/{NAME} has ended already, finished at step 7\n"
    assert run(*COMMAND, "-q") == (0, f"runs/{NAME}\n", "")
    facts = json.loads(run(*COMMAND, "--json")[1])
    assert (facts["run"], facts["state"], facts["step"]) == (f"runs/{NAME}", "finished", 7)
    assert facts["verdict"]["state"]
    assert facts["summary"]
    assert contents(tmp_path) == before
    assert (
        run(*COMMAND, "--device", "cpu", "--threads", "2", "--set", "train.checkpoint_minutes=1")[0] == 0
    )  # the same run


def test_a_run_that_ended_on_another_text_is_refused(run: Any, tmp_path: Path) -> None:
    text = tmp_path / "train.txt"
    text.write_text("".join(f"the {n} birds of {n % 7} trees sing {n % 5} songs\n" for n in range(200)))
    settings = [*SETTINGS[:3], "data.vocab_size=64", "data.validation=0", "probes.names=['none']", "train.steps=1"]
    command = ["probe", "--resume", "auto", "--stack", "decoder", "--depth", "2", "--data", f"text:{text}", "-q"]
    command += [word for setting in settings for word in ("--set", setting)]
    assert run(*command)[0] == 0
    assert run(*command)[0] == 0, "nothing to do"
    text.write_text(f"{text.read_text()}one more line\n")
    code, out, err = run(*command)
    assert (code, out) == (4, "")
    assert f"the data of runs/{NAME} have changed since it started ({text}): restore them" in err
    assert len(err.strip().splitlines()) == 1


def test_it_knows_a_run_again_that_left_out_what_it_cannot_measure(run: Any, tmp_path: Path) -> None:
    settings = ["model.arch=gpas", *SETTINGS[1:3], "train.steps=1", "probes.names=['all']"]
    command = [
        "probe",
        "--resume",
        "auto",
        "--depth",
        "2",
        "-q",
        *(word for text in settings for word in ("--set", text)),
    ]
    assert run(*command)[0] == 0
    done = Run.open(tmp_path / "runs/gpas-2-s0")
    assert done.config["probes"]["names"] == ["all"]
    assert not {"sharpness", "preconditioned_sharpness"} & {*done.tables}
    assert "gpas detaches a part" in done.manifest["probes_dropped"]["sharpness"]
    assert run(*command) == (0, "runs/gpas-2-s0\n", "")


@pytest.mark.slow
def test_it_goes_on_bit_for_bit(run: Any, tmp_path: Path) -> None:
    assert run(*COMMAND, "--name", "whole", "-q")[0] == 0
    path = broken(tmp_path / "runs")
    code, out, _ = run(*COMMAND, "-q")
    assert (code, out) == (0, f"runs/{NAME}\n")
    whole, done = Run.open(tmp_path / "runs" / "whole"), Run.open(path)
    assert (done.status.state, len(done.manifest["attempts"])) == ("finished", 2)
    for name in whole.tables:
        pd.testing.assert_frame_equal(whole.frame(name), done.frame(name), check_exact=True)
    frames = [run.metrics.drop(columns=CLOCKS) for run in (whole, done)]
    pd.testing.assert_frame_equal(*frames, check_exact=True, check_like=True)


@pytest.mark.slow
def test_without_a_checkpoint_it_starts_anew_and_nothing_is_lost(run: Any, tmp_path: Path) -> None:
    path = broken(tmp_path / "runs", "mine")
    rows = Run.open(path).metrics
    for each in checkpoint.found(path / "checkpoints"):
        each.unlink()  # as after kill -9 within the first ten minutes
    assert run(*COMMAND, "--name", "mine", "-q")[:2] == (0, "runs/mine\n")
    assert len(Run.open(path).manifest["attempts"]) == 1
    aside = tmp_path / "runs/sweep/aside/mine-1"
    (aside / "run.json.aside").rename(aside / "run.json")
    np.testing.assert_array_equal(Run.open(aside).metrics["loss"], rows["loss"])


def test_fewer_steps_than_were_made_are_refused(run: Any, tmp_path: Path) -> None:
    path = broken(tmp_path / "runs")
    before = contents(tmp_path)
    code, out, err = run("probe", "--resume", str(path), "--steps", "3", "-q")
    assert (code, out) == (2, "")
    assert err == f"stabilitylab: {path} has made 4 steps already; give --steps N with a larger N.\n"
    assert contents(tmp_path) == before, "its configuration still says 7 steps"


@pytest.mark.parametrize("state", rest_slow(["finished", "interrupted"], ["interrupted"]))
def test_another_configuration_is_refused(run: Any, state: str, tmp_path: Path) -> None:
    if state == "finished":
        run(*COMMAND, "-q")
    else:
        broken(tmp_path / "runs")
    before = contents(tmp_path)
    code, out, err = run(*COMMAND, "--set", "train.lr=0.5")
    assert (code, out) == (2, "")
    assert err == (
        f"stabilitylab: runs/{NAME} has train.lr = 0.0003, where 0.5 is asked for: choose another --out, or move it "
        "away.\n"
    )
    assert contents(tmp_path) == before


def test_a_run_that_somebody_writes_is_left_alone(run: Any, tmp_path: Path) -> None:
    path = broken(tmp_path / "runs")
    edit(path / "status.json", state="running")
    lock = Lock(path)
    code, _, err = run(*COMMAND)
    lock.release()
    assert (code, err.count("\n")) == (2, 1)
    assert "is being written by another process: wait for it to end." in err


@pytest.mark.slow
def test_a_run_that_had_diverged_fails_where_it_is_asked_to(run: Any) -> None:
    wild = [*COMMAND, "--set", "train.lr=1e30", "--set", "train.warmup=0", "-q", "--fail-on-divergence"]
    assert run(*wild)[0] == 3
    code, out, err = run(*wild)
    assert (code, out) == (3, f"runs/{NAME}\n")
    assert "the run diverged: " in err


@pytest.mark.slow
def test_a_folder_of_that_name_is_a_run_to_continue(run: Any, tmp_path: Path) -> None:
    broken(tmp_path, "auto")
    assert run("probe", "--resume", "./auto", "-q")[:2] == (0, "auto\n")


def test_a_dry_run_starts_nothing(run: Any, tmp_path: Path) -> None:
    assert run(*COMMAND, "--dry-run")[0] == 0
    assert not (tmp_path / "runs").exists()
