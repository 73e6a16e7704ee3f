"""Processes that share one GPU: its multi-process service, and what is said of those that fail."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from loose_scripts import scripts_of


@pytest.fixture
def sharing(script) -> Iterator[ModuleType]:
    with scripts_of("results/h200") as load:
        yield load("sharing")


CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then echo started >> {log}; exit {code}; fi
read word; echo "$word" >> {log}
"""


@pytest.mark.parametrize(("code", "is_gpu_there"), [(0, True), (0, False), (1, True)])
def test_runs_share_the_gpu_where_its_service_starts(script, sharing, monkeypatch, code, is_gpu_there) -> None:
    place, log = script.at(smoke=False), Path("service.txt").absolute()
    control = Path("bin").absolute() / "nvidia-cuda-mps-control"
    control.parent.mkdir()
    control.write_text(CONTROL.format(log=log, code=code))
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{control.parent}:{os.environ['PATH']}")
    with sharing.side_by_side(place.log, "true" if is_gpu_there else "false") as is_shared:
        assert is_shared is (code == 0 and is_gpu_there)
        assert ("CUDA_MPS_PIPE_DIRECTORY" in os.environ) is (code == 0 and is_gpu_there)
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert log.read_text().split() == ["started", "quit"]
    said = "run side by side" if code == 0 and is_gpu_there else "take turns"
    assert said in place.log.path.read_text()


def test_without_that_service_they_take_turns(script, sharing, monkeypatch) -> None:
    place = script.at(smoke=False)
    monkeypatch.setattr(sharing.shutil, "which", lambda name: None)
    with sharing.side_by_side(place.log, "true") as is_shared:
        assert not is_shared
    assert "take turns" in place.log.path.read_text()


def test_jobs_run_at_once_and_those_that_fail_are_named(script, sharing) -> None:
    place = script.at(smoke=False)
    shown = "import os, sys, time; time.sleep(0.2); print(os.environ.get('CUDA_VISIBLE_DEVICES')); sys.exit({})"
    jobs = [
        sharing.Job("fine", ("-c", shown.format(0)), Path("fine.txt"), "cpu"),
        sharing.Job("bad", ("-c", shown.format(3)), Path("bad.txt")),
        sharing.Job("long", ("-c", "import time; time.sleep(60)"), Path("long.txt")),
    ]
    place = type(place)(**{**vars(place), "python": sys.executable})
    codes = sharing.together(place, script.place.Clock(3.0), jobs)
    assert codes == {"fine": 0, "bad": 3, "long": None}
    assert Path("fine.txt").read_text().strip() == ""
    assert Path("bad.txt").read_text().strip() == os.environ.get("CUDA_VISIBLE_DEVICES", "None")
    found = sharing.progress(1, 3, "jobs", codes)
    assert (found.state, found.sentence) == ("failed", "1 of 3 jobs; failed: bad (exit code 3)")
    assert sharing.progress(1, 3, "jobs", {"long": None, "asked": 143}).state == "partial"
    assert sharing.progress(3, 3, "jobs", {"fine": 0}).state == "complete"


def test_committed_tables_are_carried_once(script, sharing) -> None:
    script.at()
    source = Path("committed")
    (source / "searches").mkdir(parents=True)
    (source / "searches" / "a.csv").write_text("a")
    for name in ("searches", "absent.csv"):
        sharing.carry(source / name, Path("here") / name)
    assert (Path("here/searches/a.csv").read_text(), Path("here/absent.csv").exists()) == ("a", False)
    Path("here/searches/a.csv").write_text("more")
    sharing.carry(source / "searches", Path("here/searches"))
    assert Path("here/searches/a.csv").read_text() == "more"
