"""Parts of results/h200/make.py: their time, what they decide, what they leave out, what they keep."""

from __future__ import annotations

import json
import os
import signal
import sys
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from made_verdict import made_verdict

from stabilitylab.config import resolve
from stabilitylab.errors import InputError
from stabilitylab.probes._engine.cadence import is_due
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import Run, RunWriter

CLOCKS = ["tokens_per_second", "memory_bytes"]


@pytest.mark.parametrize(
    ("left", "start", "pace", "expected"),
    [
        (600.0, 20.0, 0.1, 1700),  # (.85 * 600 / 2 - 20 - 60) / .1 = 1750
        (1000.0, 15.0, 0.05, 6000),  # 7000: longer than anybody needs
        (300.0, 20.0, 0.1, 400),  # 475
        (100.0, 20.0, 0.1, 200),  # less than nothing is left: the least that shows something, and fewer pairs
    ],
)
def test_two_pairs_of_runs_fit_into_what_is_left(script, left: float, start: float, pace: float, expected: int) -> None:
    steps = script.parts.steps_that_fit(left, start, pace)
    assert steps == expected
    if 200 < steps < 6000:
        taken = 2 * (start + pace * steps + 2 * 30.0)
        assert taken <= 0.85 * left < taken + 2 * pace * 100


def test_the_length_is_decided_once(script, monkeypatch: pytest.MonkeyPatch) -> None:
    place = script.at()
    place.state.decided["steps"] = 700
    monkeypatch.setattr(script.parts.sweep, "run", lambda *_, **__: pytest.fail("measured again"))
    assert script.parts.decided_steps(place, script.place.Clock(10)) == 700


def test_parts_have_their_limits_and_failed_ones_are_not_repeated(script) -> None:
    place = script.at()
    assert [name for name, _ in script.parts.due(place)] == [*script.parts.MAKING]
    place.state.parts = {
        "tests": {"state": "complete", "seconds": 5.0, "sentence": ""},
        "benchmarks": {"state": "partial", "seconds": 329.0, "sentence": ""},
        "figure5": {"state": "partial", "seconds": 330.0, "sentence": ""},
        "figure3": {"state": "failed", "seconds": 9.0, "sentence": ""},
    }
    assert [*script.parts.due(place)] == [("benchmarks", 1.0), ("figures89", float("inf"))]


def test_a_command_ends_with_its_time_and_its_log_names_no_absolute_path(script) -> None:
    place = script.at()
    long = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    began = time.monotonic()
    assert place.call(long, script.place.Clock(3.0), Path("a/long.txt")) is None
    assert time.monotonic() - began < 30
    assert place.call([sys.executable, "-c", "raise SystemExit(3)"], script.place.Clock(60), Path("a/short.txt")) == 3
    log = Path("log.txt").read_text()
    assert "$ python -c" in log
    assert "exit 3" in log
    assert str(script.place.ROOT) not in log
    assert script.collect.without_paths("see /tmp/some.where/x.py:3, runs/a and http://b/c/d") == (
        "see x.py:3, runs/a and http://b/c/d"
    )


def test_benchmarks_that_are_not_there_or_fail_are_named_and_done_ones_stay_done(script, monkeypatch) -> None:
    place = script.at()
    root = Path("project")
    (root / "benchmarks").mkdir(parents=True)
    good = "import sys\nflags = [\"--device\", \"--out\"]\nopen('calls', 'a').write('x')\nprint(*sys.argv[1:])\n"
    (root / "benchmarks" / "good.py").write_text(good)
    (root / "benchmarks" / "bad.py").write_text("'\"--device\"'; raise SystemExit(5)")
    (root / "benchmarks" / "old.py").write_text("pass")
    monkeypatch.setattr(script.parts, "ROOT", root)
    monkeypatch.setattr(script.parts, "TRIALS", {"good": {"--depth": "9"}, "old": {}, "none": {}})
    progress = script.parts.benchmarks(place, script.place.Clock(60))
    assert progress.state == "complete"
    assert progress.sentence == "good: done; old: has no --device yet; none: is not there yet"
    assert Path("benchmarks/good.txt").read_text() == "--device cpu --out benchmarks/good\n"  # it knows no --depth
    monkeypatch.setattr(script.parts, "TRIALS", {"good": {}, "bad": {}})
    progress = script.parts.benchmarks(place, script.place.Clock(60))
    assert (progress.state, Path("calls").read_text()) == ("failed", "x")
    assert "bad: failed with exit code 5" in progress.sentence
    del place.state.decided["benchmarks"]["bad"]
    assert script.parts.benchmarks(place, script.place.Clock(1)).state == "partial"


def test_a_run_that_cannot_translate_holds_nobody_up_and_one_without_time_is_asked_again(script, monkeypatch) -> None:
    place, run = script.at(), Path("runs/a/b/c")
    codes: dict[str, int | None] = {"code": 4}
    monkeypatch.setattr(script.place.Place, "call", lambda *_, **__: codes["code"])
    (run / "checkpoints").mkdir(parents=True)
    assert script.parts._scored(place, script.place.Clock(9), run)
    assert (run / "checkpoints").exists()
    codes["code"] = None
    assert not script.parts._scored(place, script.place.Clock(9), run)
    codes["code"] = 0
    assert script.parts._scored(place, script.place.Clock(9), run)
    assert not (run / "checkpoints").exists()


def test_a_damaged_state_is_one_sentence(script) -> None:
    script.at()
    Path("state.json").write_text("{")
    with pytest.raises(InputError, match=r"state\.json is damaged"):
        script.place.State.read(Path("state.json"))


def ended_run(path: Path, steps: int, state: str = "finished") -> None:
    config = resolve({"train": {"steps": steps, "seed": 3}}, depth=2)
    table = Table("grad_norm", ("value",), (Row("encoder.1", "encoder", 1),), "L2 norm", "", "norm")
    with RunWriter.create(path, {"label": "branchnorm", "config": config.model_dump(mode="json")}) as run:
        run.open([table])
        for step in range(steps):
            run.append(
                step, {"loss": 1.0 / (step + 1)}, {"grad_norm": Cells(np.array([[step / 7]]), np.zeros(1, bool))}
            )
        run.set_status(state, steps, "", verdict=made_verdict("trained"))  # type: ignore[arg-type]
    (path / "checkpoints").mkdir()
    (path / "checkpoints" / "step-00000120.pt").write_bytes(b"weights")
    (path / "evaluation.tsv").write_text("ein Satz\ta sentence\n")
    (path / "evaluation.json").write_text(
        json.dumps({"bleu": 30.0, "chrf": 50.0, "examples": [{"source": "ein Satz"}]})
    )


def names_in(piece: Path) -> list[str]:
    with tarfile.open(piece) as archive:
        return archive.getnames()


def test_archives_hold_ended_runs_without_weights_or_text_and_another_machine_goes_on(script, monkeypatch) -> None:
    place = script.at()
    ended_run(Path("runs/h200/branchnorm-3/one"), 120)
    ended_run(Path("runs/h200/branchnorm-3/two"), 120)
    ended_run(Path("runs/h200/branchnorm-3/cut"), 9, "interrupted")
    place.state.parts["tests"] = {"state": "complete", "seconds": 1.0, "sentence": "fine"}
    place.state.save()
    place.log.line("hello")
    monkeypatch.setattr(script.collect, "PIECE", 1)
    pieces = script.collect.keep()
    assert [piece.name for piece in pieces] == ["kept-1.tar.gz", "kept-2.tar.gz", "kept-3.tar.gz"]
    inside = [name for piece in pieces for name in names_in(piece)]
    assert not any("checkpoints" in name or name.endswith(".tsv") or "/cut/" in name for name in inside)
    before = {name: Run.open(f"runs/h200/branchnorm-3/{name}") for name in ("one", "two")}
    kept = {name: (run.metrics, run.frame("grad_norm")) for name, run in before.items()}
    content = {piece.name: piece.read_bytes() for piece in pieces}

    again = script.at(place.out / "elsewhere")
    for name, data in content.items():
        Path(name).write_bytes(data)
    assert script.collect.unpack() == 3
    assert script.collect.unpack() == 0  # what is there is not written over
    assert script.place.State.read(Path("state.json")).stands("tests") == "complete"
    for name, (metrics, table) in kept.items():
        run = Run.open(f"runs/h200/branchnorm-3/{name}")
        pd.testing.assert_frame_equal(run.metrics, metrics)
        fewer = table[[is_due(step, "log") or step in (50, 100, 119) for step in table["step"]]].reset_index(drop=True)
        pd.testing.assert_frame_equal(run.frame("grad_norm"), fewer)
        assert 20 < len(fewer) < 60
    assert "ein Satz" not in Path("runs/h200/branchnorm-3/one/evaluation.json").read_text()
    script.collect.runs(Path("runs.csv"))
    rows = pd.read_csv("runs.csv")
    assert [*rows["run"]] == ["h200/branchnorm-3/one", "h200/branchnorm-3/two"]
    assert [*rows["bleu"]] == [30.0, 30.0]
    monkeypatch.setattr(script.collect, "PIECE", 2**20)
    assert [piece.name for piece in script.collect.keep()] == ["kept-1.tar.gz"]
    assert [*Path().glob("kept-*")] == [Path("kept-1.tar.gz")]
    assert again.out.name == "elsewhere"


@pytest.mark.slow
def test_a_part_that_is_stopped_goes_on_from_its_checkpoint(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM in the middle of its runs: the next call ends with the tables of a call that nobody stopped."""
    longer = {"steps": 120, "final_checkpoint": False}
    tiny = script.parts._tiny
    monkeypatch.setattr(script.parts, "_tiny", lambda run: script.parts._changed(tiny(run), **longer))

    def names(place) -> list[Path]:
        return [
            job.path for job in script.parts._jobs(place, "branchnorm:3", script.parts.wanted(place, "branchnorm:3"))
        ]

    def stop_one_under_way(paths: list[Path]) -> None:
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline and not any([*path.glob("journal-*")] for path in paths):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    place = script.at(tmp_path / "stopped")
    paths = [place.out / path for path in names(place)]
    caller = threading.Thread(target=stop_one_under_way, args=(paths,))
    caller.start()
    with pytest.raises(SystemExit) as end:
        script.parts.figure3(place, script.place.Clock(200))
    caller.join()
    assert end.value.code == 128 + signal.SIGTERM
    assert any((path / "checkpoints").is_dir() for path in paths)
    assert script.parts.figure3(place, script.place.Clock(200)).state == "complete"
    found = [Run.open(path) for path in paths]
    assert max(len(run.manifest["attempts"]) for run in found) == 2

    whole = script.at(place.out.parent / "whole")
    assert script.parts.figure3(whole, script.place.Clock(200)).state == "complete"
    for run, path in zip(found, names(whole), strict=True):
        other = Run.open(path)
        pd.testing.assert_frame_equal(
            run.metrics.drop(columns=CLOCKS), other.metrics.drop(columns=CLOCKS), check_like=True
        )
        pd.testing.assert_frame_equal(run.frame("grad_norm"), other.frame("grad_norm"))
        assert len(run.metrics) == 121
