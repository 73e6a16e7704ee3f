"""Protocol 3 on a GPU: a process an arm, from the committed ledger on; the comparison waits for committed rates."""

from __future__ import annotations

import csv
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import pytest
from loose_scripts import scripts_of

from stabilitylab.experiments import protocol

TINY = Path(__file__).resolve().parents[2] / "results" / "tiny"
ARM = "--arm"


@pytest.fixture
def part(script, tmp_path, monkeypatch):
    """The part of the script, beside committed ledgers in which no arm has its rate at 18 layers yet."""
    with scripts_of("results/h200") as load:
        loaded = load("protocol3")
        committed = tmp_path / "committed"
        committed.mkdir()
        for name in loaded.CARRIED:
            shutil.copyfile(TINY / name, committed / name)
        chosen = pd.read_csv(TINY / "rungs-choice.csv")
        chosen[chosen.layers != loaded.LAYERS].to_csv(committed / "rungs-choice.csv", index=False)
        monkeypatch.setattr(loaded, "SCRIPT", committed / "make.py")
        yield loaded


def ended(part, arm: str, layers: int = 18) -> None:
    with (part.FOLDER / "rungs-choice.csv").open("a", newline="") as file:
        csv.writer(file).writerow((arm, layers, 0.001, 2400, 100, 2.0, 1.0, 1, 1))


def test_the_search_is_a_process_an_arm_and_ends_with_the_last(script, part, monkeypatch) -> None:
    place, called = script.at(smoke=False), []

    def call(self, command, clock, output, **environment):
        arm = command[command.index(ARM) + 1]
        called.append(arm)
        if arm != "preln":  # whose time is up
            ended(part, arm)
            return 0
        return None

    monkeypatch.setattr(script.place.Place, "call", call)
    found = part.rungs(place, script.place.Clock(60))
    assert sorted(called) == sorted(protocol.SEARCHED_ARMS)
    assert (found.state, found.sentence) == ("partial", "4 of 5 arms")
    for name in part.CARRIED:
        assert (part.FOLDER / name).read_text().startswith((part.SCRIPT.parent / name).read_text().strip())
    called.clear()
    ended(part, "preln")
    assert part.rungs(place, script.place.Clock(60)).state == "complete"
    assert called == []
    assert Path("out/kept-0.tar.gz").exists()


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_search_takes_the_idle_processor_where_runs_would_take_turns(script, part, monkeypatch, is_shared) -> None:
    place, on = script.at(smoke=False), {}

    def call(self, command, clock, output, environment):
        arm, workers = command[command.index(ARM) + 1], int(command[command.index("--workers") + 1])
        on[arm] = ("cpu" if environment == {"CUDA_VISIBLE_DEVICES": ""} else "cuda", workers)

    monkeypatch.setattr(script.place.Place, "call", call)
    monkeypatch.setattr(part, "ThreadPoolExecutor", OneAtATime)
    monkeypatch.setattr(part, "side_by_side", lambda *_: nullcontext(is_shared))
    part.rungs(place, script.place.Clock(60))
    if is_shared:
        assert set(on.values()) == {("cuda", part.WORKERS["rungs"])}
    else:
        assert [on[arm] for arm in protocol.SEARCHED_ARMS] == [*part.TURNS.items(), *part.TURNS.items(), ("cuda", 1)]
    on.clear()
    monkeypatch.setattr(protocol, "SEARCH", {arm: {18: 1e-3} for arm in protocol.SEARCHED_ARMS})
    part.judged(place, script.place.Clock(60))
    assert {device for device, _ in on.values()} == {"cuda"}  # one device, since digits differ


def test_an_arm_that_fails_is_named(script, part, monkeypatch) -> None:
    place = script.at(smoke=False)
    codes = dict.fromkeys(protocol.SEARCHED_ARMS, 143) | {"deepnorm": 5}
    monkeypatch.setattr(
        script.place.Place, "call", lambda self, command, *rest, **more: codes[command[command.index(ARM) + 1]]
    )
    found = part.rungs(place, script.place.Clock(60))
    assert (found.state, found.sentence) == ("failed", "0 of 5 arms; failed: deepnorm (exit code 5)")


def test_the_comparison_waits_for_rates_and_counts_its_seeds(script, part, monkeypatch) -> None:
    place = script.at(smoke=False)
    monkeypatch.setattr(protocol, "SEARCH", {arm: {6: 1e-3} for arm in protocol.SEARCHED_ARMS})
    found = part.judged(place, script.place.Clock(60))
    assert found.state == "failed"
    assert "postln gain=1" in found.sentence
    assert "commit those of the search" in found.sentence
    monkeypatch.setattr(protocol, "SEARCH", {arm: {18: 1e-3} for arm in protocol.SEARCHED_ARMS})
    (part.FOLDER / "third").mkdir(parents=True)

    def call(self, command, clock, output, **environment):
        arm = command[command.index(ARM) + 1]
        table = part.FOLDER / "third" / "ledger.csv"
        seeds = len(protocol.JUDGED_SEEDS) - (arm == "branchnorm")
        known = pd.read_csv(table).to_dict("records") if table.exists() else []
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, ("label", "layers"))
            writer.writeheader()
            writer.writerows([*known, *[{"label": arm, "layers": 36}] * seeds, {"label": arm, "layers": 12}])
        return 0

    monkeypatch.setattr(script.place.Place, "call", call)
    monkeypatch.setattr(part, "ThreadPoolExecutor", OneAtATime)
    found = part.judged(place, script.place.Clock(60))
    assert (found.state, found.sentence) == ("partial", "4 of 5 arms")
    assert not part.is_done("judged", "branchnorm")


class OneAtATime:
    """Stands for ThreadPoolExecutor, whose threads would share a file here."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def __enter__(self):
        return self

    def __exit__(self, *told: object) -> None:
        pass

    map = staticmethod(map)


CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then echo started >> {log}; exit {code}; fi
read word; echo "$word" >> {log}
"""


@pytest.mark.parametrize(("code", "is_gpu_there"), [(0, True), (0, False), (1, True)])
def test_runs_share_the_gpu_where_its_service_starts(script, part, monkeypatch, code, is_gpu_there) -> None:
    place, log = script.at(smoke=False), Path("service.txt").absolute()
    control = Path("bin").absolute() / "nvidia-cuda-mps-control"
    control.parent.mkdir()
    control.write_text(CONTROL.format(log=log, code=code))
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{control.parent}:{os.environ['PATH']}")
    with part.side_by_side(place.log, "true" if is_gpu_there else "false") as is_shared:
        assert is_shared is (code == 0 and is_gpu_there)
        assert ("CUDA_MPS_PIPE_DIRECTORY" in os.environ) is (code == 0 and is_gpu_there)
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert log.read_text().split() == ["started", "quit"]
    said = "run side by side" if code == 0 and is_gpu_there else "take turns"
    assert said in place.log.path.read_text()


def test_without_that_service_they_take_turns(script, part, monkeypatch) -> None:
    place = script.at(smoke=False)
    monkeypatch.setattr(part.shutil, "which", lambda name: None)
    with part.side_by_side(place.log, "true") as is_shared:
        assert not is_shared
    assert "take turns" in place.log.path.read_text()
