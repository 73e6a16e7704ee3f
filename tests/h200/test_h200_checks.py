"""The checks of a GPU: what is concluded from a recorded run beside direct ones, and what comes after a failure."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from loose_scripts import scripts_of

from stabilitylab.config import resolve
from stabilitylab.store import RunWriter


def pair_run(script, name: str, losses: list[float], recorded: bool = False, state: str = "finished") -> None:
    path = script.checks.PAIRS / script.checks.fresh(name)
    config = resolve({"train": {"steps": len(losses)}}, depth=2)
    facts = {"label": "branchnorm", "config": config.model_dump(mode="json"), "cuda_graphs": recorded}
    with RunWriter.create(path, facts) as run:
        for step, loss in enumerate([*losses, None]):
            run.append(step, {"loss": loss, "tokens_per_second": 1.0}, {})
        run.set_status(state, len(losses), "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recorded", "again", "was", "expected", "graphs"),
    [
        (0.0, 0.0, True, "done", "on"),
        (5e-4, 0.0, True, "done", "on"),  # as little as digits of a sum
        (2e-3, 0.0, True, "failed: a recorded run is not the direct one", "off"),
        (2e-3, 3e-4, True, "done", "on"),  # two direct runs are not equal either
        (0.0, 0.0, False, "failed: the run that was to be recorded was not", "off"),
        (np.nan, 0.0, True, "failed: a recorded run is not the direct one", "off"),
    ],
)
def test_runs_are_recorded_where_a_recorded_run_is_the_direct_one(
    script, recorded: float, again: float, was: bool, expected: str, graphs: str
) -> None:
    place = script.at(smoke=False)
    place.state.decided["checks"] = {}
    losses = [4.0, 3.0, 2.0]
    Path("checks").mkdir()
    pair_run(script, "direct", losses)
    pair_run(script, "recorded", [9.0, 9.0, 9.0], was)  # an earlier try
    pair_run(script, "recorded", [4.0, 3.0, 2.0 + recorded], was)
    pair_run(script, "again", [4.0, 3.0 + again, 2.0])
    assert place.graphs == "off"  # as long as nobody has looked
    assert script.checks.verdict_on_graphs(place).startswith(expected)
    assert place.graphs == graphs
    facts = json.loads(Path("checks/graphs.json").read_text())
    assert facts["equal"] == (graphs == "on" or not was)
    assert script.at(place.work / "trial").graphs == "off"  # on a CPU


def test_a_check_that_failed_is_done_again_by_the_next_call_and_the_others_are_not(script, monkeypatch) -> None:
    place, checks = script.at(smoke=False), script.checks
    called: list[str] = []
    codes: dict[str, int | None] = {"tests": 1, "again": None}

    def call(self, command, clock, output, cwd=None):
        called.append(output.stem)
        output.parent.mkdir(exist_ok=True)
        return codes.get(output.stem, 0)

    monkeypatch.setattr(script.place.Place, "call", call)
    progress = checks.checks(place, script.place.Clock(600))
    names = [check.name for check in checks.CHECKS if check.command]
    assert called == names
    assert progress.state == "failed"
    assert "tests: failed with exit code 1" in progress.sentence
    assert "again: did not end in time" in progress.sentence
    assert "no finished run recorded, direct, again; all further runs go without CUDA graphs" in progress.sentence
    assert place.graphs == "off"
    called.clear()
    codes.clear()
    checks.checks(place, script.place.Clock(600))
    assert called == ["tests", "recorded", "direct", "compared", "again", "compared-again"]  # no run is on this machine
    assert Path("out/kept-0.tar.gz").exists()
    assert checks.checks(place, script.place.Clock(1)).state == "failed"  # no time for anything


def test_gpu_tests_are_named_by_file_with_their_own_filter(script) -> None:
    command = script.checks.gpu_tests(script.at(smoke=False))
    files = [Path(word).name for word in command if word.endswith(".py")]
    assert {"test_replays.py", "test_probes_gpu.py", "test_resume.py", "test_lean.py"} <= {*files}
    assert all("mark.gpu" in Path(word).read_text() for word in command if word.endswith(".py"))
    assert " ".join(command).count("-W default -o filterwarnings=default") == 1


def test_the_checks_fit_into_nine_minutes(script) -> None:
    assert sum(check.seconds for check in script.checks.CHECKS) <= 9 * 60 + 30


def test_runs_go_on_directly_where_updates_cannot_be_recorded(script, monkeypatch) -> None:
    """And what was begun stays as it was begun."""
    place, parts = script.at(smoke=False), script.parts
    Path("data").mkdir()
    place.state.decided["graphs"] = "on"
    runs = parts.wanted(place, "branchnorm:3")[:3]
    out = parts.RUNS / parts.FOLDERS["branchnorm:3"]
    for run, state in zip(runs, ("finished", "failed", "interrupted"), strict=True):
        facts = {"label": "x", "config": run.config.model_dump(mode="json")}
        with RunWriter.create(out / run.name, facts) as written:
            written.append(0, {"loss": 1.0}, {})
            written.set_status(state, 1, "this update cannot be recorded as a CUDA graph (x)")  # type: ignore[arg-type]
    asked: list[list[tuple[str, str]]] = []

    def carried_out(place, clock, jobs, workers):
        asked.append([(job.state, job.experiment.config.train.cuda_graphs) for job in jobs])
        return jobs

    monkeypatch.setattr(parts, "_carried_out", carried_out)
    progress = parts._made(place, script.place.Clock(60), out, runs, 2)
    assert asked == [
        [("finished", "on"), ("failed", "on"), ("interrupted", "on")],
        [("finished", "on"), ("new", "off"), ("interrupted", "on")],
    ]
    assert progress.sentence == "1 of 3 runs finished"
    assert place.graphs == "off"
    assert "all further runs go without CUDA graphs" in Path("log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["capture", "memory-direct", "memory-recorded", "kernels"])
def test_a_check_of_its_own_ends_well_on_a_cpu(script, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = next(check.command for check in script.checks.CHECKS if check.name == name)(script.at())
    with scripts_of("results/h200", "benchmarks") as load:
        one_check = load("one_check")
        monkeypatch.setattr(sys, "argv", command[1:])
        assert Path(command[1]) == Path(one_check.__file__)
        assert one_check.main() == 0
    entry = json.loads(Path(command[command.index("--out") + 1]).read_text())
    assert entry["environment"]["torch"]
    assert entry["rows"]
