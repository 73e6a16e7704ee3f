"""``stabilitylab explain``: exit codes, output, the reference trainer's runs, a factory, errors in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import faults
import pytest
from loops import Loop, recorder, train

import stabilitylab as sl

HERE = Path(__file__).parent
PROBE = (
    *("probe", "--arch", "branchnorm", "--depth", "2", "--steps", "13", "--data", "synthetic", "--record", "-q"),
    *("--set", "probes.record_every=6", "--set", "model.dropout=0.1", "--set", "train.clip_norm=1", "--name", "mine"),
)


@pytest.mark.slow
def test_a_run_of_probe_is_replayed_bit_for_bit_without_its_data(run: Any, tmp_path: Path) -> None:
    code, *_ = run(*PROBE, "--set", "train.accumulate=2")
    assert code == 0
    code, out, _ = run("explain", "runs/mine", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["verdict"] == "no trouble"
    assert found["audit"] == {"replayed": 13, "equal": 13, "full": 4, "parted": []}
    assert found["findings"] == [], "alpha of BranchNorm is the model's own affair"
    assert found["unchecked"] == []


@pytest.mark.slow
def test_a_recorded_probe_run_has_the_numbers_of_an_unrecorded_one(run: Any, tmp_path: Path) -> None:
    run(*PROBE, "--probes", "grad_norm")
    run(*(part for part in PROBE if part not in ("--record", "mine")), "plain", "--probes", "grad_norm")
    one, other = (sl.Run.open(tmp_path / "runs" / name).metrics for name in ("mine", "plain"))
    for column in ("loss", "nll", "grad_norm_total", "held_out_nll"):
        assert one[column].equals(other[column]), f"{column} differs under --record"


def test_a_watched_run_is_explained_with_a_factory(run: Any, tmp_path: Path) -> None:
    train(faults.LargeRate(), tmp_path / "run", 44, recorder())
    code, out, _ = run("explain", "run", "--audit", "--factory", "loops:ready")
    assert code == 1
    assert out.startswith("run: Trouble at step 2")
    assert "the learning rate of optimizer 0 group 0 changed from 0.01 to 0.4 at step 22 (x40)" in out
    assert "Not checked: interventions: leave --audit out to try them." in out
    code, out, _ = run("explain", "run")
    assert code == 1
    assert "Not checked: nothing was replayed: give --factory" in out


@pytest.mark.slow
def test_a_black_box_is_explained_in_a_fresh_process_after_one_that_was_killed(tmp_path: Path) -> None:
    train(faults.LargeRate(), tmp_path / "run", 44, recorder())
    code = "from stabilitylab import cli; cli.main()"
    command = [sys.executable, "-c", code, "explain", str(tmp_path / "run"), "--factory", "loops:ready"]
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    killed = subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True)
    with pytest.raises(subprocess.TimeoutExpired):
        killed.wait(1.5)
    killed.kill()
    assert killed.communicate()[0] == "", "it was killed before it knew the cause"
    ended = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert after == before, "explain wrote to the run"
    assert ended.returncode == 1, ended.stderr
    assert "Cause: learning rate at step 22 (x40). Evidence: with the learning rate of step 21" in ended.stdout
    assert "6 of 6 repeats" in ended.stdout


def test_errors_are_one_sentence(run: Any, tmp_path: Path) -> None:
    train(Loop(), tmp_path / "run", 3, recorder())
    train(Loop(), tmp_path / "plain", 3)
    for arguments, exit_code, said in (
        (("nowhere",), 4, "there is no run at nowhere"),
        (("plain",), 4, "has no black box: record the loop"),
        (("run", "--factory", "loops"), 2, "must be PACKAGE.MODULE:FACTORY"),
        (("run", "--factory", "loops:batch"), 4, "loops:batch failed: TypeError"),
        (("run", "--factory", "loops:Tiny"), 2, "must return (model, batch, loss_fn, optimizer)"),
    ):
        code, _, err = run("explain", *arguments)
        assert (code, said in err) == (exit_code, True), (arguments, code, err)
        assert len(err.strip().splitlines()) == 1, err
