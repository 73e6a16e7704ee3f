"""The trainer under torchrun: the run of one process, its end, its resumption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rank_runs import Silent, prepared
from rest_slow import rest_slow

from stabilitylab.errors import ResourceError, UsageError
from stabilitylab.store import Run
from stabilitylab.store.layout import journals
from stabilitylab.train import checkpoint, resume, start
from stabilitylab.train.ranks import Team, device_of

CLOCKS = ["tokens_per_second", "memory_bytes"]


@cache
def alone(folder: Path, arch: str) -> Run:
    return Run.open(start(prepared("none", arch=arch), folder, arch, Silent()).path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.mark.parametrize(
    ("kind", "arch"), rest_slow(product(("ddp", "fsdp"), ("branchnorm", "admin")), {("ddp", "branchnorm")})
)
def test_the_run_of_two_ranks_is_that_of_one_process(ranks: Any, folder: Path, kind: str, arch: str) -> None:
    """Step 0 to 1e-6, in float32; later rows to what a few AdamW updates make of the difference in rounding."""
    several, one = Run.open(ranks(f"{kind}_{arch}")[0]), alone(folder, arch)
    assert several.tables == one.tables
    assert len(one.tables) == 7
    assert (several.manifest["ranks"], one.manifest["ranks"]) == (2, 1)
    for name in one.tables:
        got, expected = several.frame(name), one.frame(name)
        assert got["step"].tolist() == expected["step"].tolist()
        for column in one.table(name).columns:
            if name == "grad_norm" and column in ("bias", "qk"):
                continue  # what is recorded of key biases, whose gradient is 0, is rounding
            for rows, tolerance in ((expected["step"] == 0, 1e-6), (expected["step"] > 0, 2e-2)):
                if name == "update_ratio" and tolerance == 1e-6:
                    tolerance = 1e-3  # that is theta_1
                np.testing.assert_allclose(got[rows][column], expected[rows][column], tolerance, err_msg=name)
    weights = [checkpoint.load(run.path / "checkpoints", torch.device("cpu"))["model"] for run in (several, one)]
    assert weights[0].keys() == weights[1].keys()  # whole, under the names of one process: evaluate reads it
    for key, tensor in weights[1].items():
        torch.testing.assert_close(weights[0][key], tensor, rtol=0, atol=3e-3)
    start_of = [run.metrics.drop(columns=CLOCKS).iloc[0].to_numpy(float) for run in (several, one)]
    np.testing.assert_allclose(*start_of, rtol=1e-6)
    later = [run.metrics.drop(columns=CLOCKS).to_numpy(float) for run in (several, one)]
    np.testing.assert_allclose(*later, rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_resumed_run_equals_an_uninterrupted_one(ranks: Any, kind: str) -> None:
    for result in ranks(f"{kind}_resumed"):  # the signal that rank 1 got ended both after the same update
        assert result["broken"] == ("interrupted", 3, signal.SIGTERM)
        assert result["done"] == ("finished", 6, True)
    paths = [Path(path) for path in result["paths"]]
    whole, broken = map(Run.open, paths)
    for name in whole.tables:
        pd.testing.assert_frame_equal(whole.frame(name), broken.frame(name), check_exact=True)
    metrics = [run.metrics.drop(columns=CLOCKS) for run in (whole, broken)]
    pd.testing.assert_frame_equal(*metrics, check_exact=True, check_like=True)
    states = [checkpoint.load(path / "checkpoints", torch.device("cpu")) for path in paths]
    assert all(torch.equal(states[0]["model"][key], states[1]["model"][key]) for key in states[0]["model"])
    first, second = (own["rng"] for own in states[0]["ranks"])
    assert not torch.equal(first, second)  # each rank has a stream of dropout of its own


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_layers_computed_again_make_the_same_run(ranks: Any, kind: str) -> None:
    paths = ranks(f"{kind}_checkpointed")[0]
    kept, again = map(Run.open, paths)
    for name in kept.tables:
        pd.testing.assert_frame_equal(kept.frame(name), again.frame(name), check_exact=True)
    metrics = [run.metrics.drop(columns=CLOCKS) for run in (kept, again)]
    pd.testing.assert_frame_equal(*metrics, check_exact=True, check_like=True)
    weights = [checkpoint.load(path / "checkpoints", torch.device("cpu"))["model"] for path in paths]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_first_ranks_clock_says_when_all_write_a_checkpoint(ranks: Any, kind: str) -> None:
    first, second = ranks(f"{kind}_timed")
    assert first["rows"] == second["rows"] == [2, 4, 6]
    plain, several = map(Run.open, first["paths"])
    for name in plain.tables:
        pd.testing.assert_frame_equal(plain.frame(name), several.frame(name), check_exact=True)
    states = [checkpoint.load(run.path / "checkpoints", torch.device("cpu")) for run in (plain, several)]
    assert all(torch.equal(states[0]["model"][key], states[1]["model"][key]) for key in states[0]["model"])


@pytest.mark.slow
def test_all_ranks_agree_on_what_there_is_to_be_done(ranks: Any) -> None:
    first, second = ranks("found")
    assert first == second
    assert first[:3] == [("new", False), ("interrupted", True), ("finished", False)]
    assert first[3].startswith("UsageError: ")
    assert "has train.lr = 0.001, where 0.01 is asked for" in first[3]


def test_what_cannot_start_says_so_on_every_rank(ranks: Any) -> None:
    for said in ranks("refused"):
        assert said[0].startswith("UsageError: ")
        assert "exists already" in said[0]
        assert said[1].startswith("UsageError: a batch of 1 sentences leaves some of 2 processes without one")


@pytest.mark.slow
def test_a_run_of_two_ranks_needs_two_to_go_on(ranks: Any) -> None:
    path = Path(ranks("ddp_resumed")[0]["paths"][1])
    with pytest.raises(UsageError, match="--parallel ddp needs torchrun: torchrun --nproc-per-node 2 -m"):
        resume(path, 9, Silent())
    state = checkpoint.load(path / "checkpoints", torch.device("cpu"))
    with pytest.raises(UsageError, match=r"2 processes .* 3 would go on: resume with torchrun --nproc-per-node 2"):
        Team("ddp", 0, 3).own(state)
    with pytest.raises(UsageError, match=r"1 processes .* 2 would go on: resume with one process"):
        Team("ddp", 0, 2).own({"watcher": {}})


def test_the_command_line_says_what_is_missing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run("probe", "--parallel", "fsdp")
    assert (code, err.count("\n")) == (2, 1)
    assert "needs torchrun: torchrun --nproc-per-node 2 -m stabilitylab probe --parallel fsdp" in err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run("probe", "--depth", "2")
    assert (code, err) == (
        2,
        "stabilitylab: torchrun started 2 processes: say with --parallel ddp or fsdp what they share.\n",
    )


def test_each_process_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    team, cuda = Team("ddp", rank=3, size=4), torch.device("cuda")
    assert device_of(team, cuda, "auto") == torch.device("cuda", 1)
    assert taken == [1]
    assert device_of(team, torch.device("cpu"), "cpu") == torch.device("cpu")
    assert device_of(Team(), torch.device("cuda", 0), "cuda:0") == torch.device("cuda", 0)
    with pytest.raises(UsageError, match="--device cuda:0 would put every process on one GPU"):
        device_of(team, torch.device("cuda", 0), "cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ResourceError, match="process 2 of this machine has no GPU of its own, there are 2"):
        device_of(team, cuda, "auto")


def torchrun(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "stabilitylab", "probe", "--depth", "2", "--name", "run", "--out", str(folder), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_torchrun_prints_one_object_and_shows_one_progress(tmp_path: Path) -> None:
    process = torchrun(tmp_path, "--parallel", "fsdp", "--steps", "2", "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["state"] == "finished"
    assert err.count("step 1/2") == 1
    assert Run.open(tmp_path / "run").metrics["step"].tolist() == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_sigterm_to_torchrun_leaves_a_checkpoint(kind: str, tmp_path: Path) -> None:
    process = torchrun(tmp_path, "--parallel", kind, "--steps", "100000", "--every", "1")
    run, until = tmp_path / "run", time.monotonic() + 100
    while not (run.is_dir() and any(path.stat().st_size for path in journals(run).values())):
        assert time.monotonic() < until, "no row was written"
        time.sleep(0.2)
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    status = Run.open(run).status
    assert status.state == "interrupted"
    assert status.reason.startswith("SIGTERM; continue with --resume")
    assert len(checkpoint.found(run / "checkpoints")) == 1
