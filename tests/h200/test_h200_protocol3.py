"""Protocol 3 on a GPU: a process an arm, from the committed ledger on; the comparison waits for committed rates."""

from __future__ import annotations

import csv
import shutil
import sys
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
        for name in loaded.CARRIED["rungs"]:
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
    for name in part.CARRIED["rungs"]:
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
    monkeypatch.setattr(sys.modules["sharing"], "ThreadPoolExecutor", OneAtATime)
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
    assert (found.state, found.sentence) == ("failed", "0 of 5 arms; failed: rungs-deepnorm (exit code 5)")


def test_the_comparison_waits_for_rates_and_counts_its_seeds(script, part, monkeypatch) -> None:
    place = script.at(smoke=False)
    monkeypatch.setattr(protocol, "SEARCH", {arm: {6: 1e-3} for arm in protocol.SEARCHED_ARMS})
    found = part.judged(place, script.place.Clock(60))
    assert found.state == "failed"
    assert "postln gain=1" in found.sentence
    assert "commit those of the search" in found.sentence
    monkeypatch.setattr(protocol, "SEARCH", {arm: {18: 1e-3} for arm in protocol.SEARCHED_ARMS})
    (part.SCRIPT.parent / "third").mkdir()
    (part.SCRIPT.parent / "third" / "ledger.csv").write_text("label,layers,lr\ndeepnorm,36,0.001\n")  # committed

    def call(self, command, clock, output, **environment):
        arm = command[command.index(ARM) + 1]
        table = part.FOLDER / "third" / "ledger.csv"
        seeds = len(protocol.JUDGED_SEEDS) - (arm in ("branchnorm", "deepnorm"))
        with table.open("a", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([*[(arm, 36, 0.001)] * seeds, (arm, 36, 0.002), (arm, 12, 0.001)])
        return 0

    monkeypatch.setattr(script.place.Place, "call", call)
    monkeypatch.setattr(sys.modules["sharing"], "ThreadPoolExecutor", OneAtATime)
    found = part.judged(place, script.place.Clock(60))
    assert (found.state, found.sentence) == ("partial", "4 of 5 arms")
    assert not part.is_done("judged", "branchnorm")


def test_the_rest_runs_part_by_part_from_what_is_committed(script, part, monkeypatch) -> None:
    place, called = script.at(smoke=False), []
    monkeypatch.setattr(protocol, "SEARCH", {arm: {6: 1e-3, 18: 1e-3} for arm in protocol.SEARCHED_ARMS})
    of = {name: count() for name, count in part.REST.items()}
    assert of == {"half": 20, "map": 64, "searched-ramps": 6 * 2 * 4}  # the rate, its half, and that of Protocol 2
    (part.SCRIPT.parent / "map").mkdir()
    (part.SCRIPT.parent / "map" / "ledger.csv").write_text("layers\n" + "12\n" * 300 + "36\n" * 63)

    def call(self, command, clock, output, environment):
        called.append(command[2])
        if command[2] != "searched-ramps":
            table = part.FOLDER / command[2] / "ledger.csv"
            table.parent.mkdir(parents=True, exist_ok=True)
            known = table.read_text() if table.exists() else "layers\n"
            table.write_text(known + "36\n" * (1 if command[2] == "map" else of["half"]))
        return 0

    monkeypatch.setattr(script.place.Place, "call", call)
    found = part.rest(place, script.place.Clock(60))
    assert called == [*part.REST]
    assert (found.state, found.sentence) == ("partial", "2 of 3 parts")
    called.clear()
    part.rest(place, script.place.Clock(60))
    assert called == ["searched-ramps"]
    monkeypatch.setattr(protocol, "SEARCH", {arm: {6: 1e-3} for arm in protocol.SEARCHED_ARMS})
    assert part.rest(place, script.place.Clock(60)).state == "failed"


class OneAtATime:
    """Stands for ThreadPoolExecutor, whose threads would share a file here."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def __enter__(self):
        return self

    def __exit__(self, *told: object) -> None:
        pass

    map = staticmethod(map)
