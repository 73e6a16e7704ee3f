"""Parts of results/h200/make.py: their time, what they decide, what they leave out, what they keep."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from rest_slow import EVERY

from stabilitylab.errors import InputError
from stabilitylab.store import Run

CLOCKS = ["tokens_per_second", "memory_bytes"]


@pytest.mark.parametrize(
    ("left", "start", "pace", "expected"),
    [
        (1000.0, 20.0, 0.1, 900),  # (.85 * 1000 - 11 * 20) / (6 / 4 + 5) / .1 = 969
        (1000.0, 15.0, 0.01, 6000),  # 10500: longer than anybody needs
        (300.0, 20.0, 0.1, 200),  # 53: the least that shows something, and fewer runs
        (100.0, 20.0, 0.1, 200),
    ],
)
def test_the_choice_and_six_seeds_fit_into_what_is_left(
    script, left: float, start: float, pace: float, expected: int
) -> None:
    steps = script.parts.steps_that_fit(left, start, pace)
    assert steps == expected
    if 200 < steps < 6000:
        taken = 6 * (start + pace * steps / 4) + 5 * (start + pace * steps)
        assert taken <= 0.85 * left < taken + 6.5 * pace * 100


def test_the_length_is_decided_once(script, monkeypatch: pytest.MonkeyPatch) -> None:
    place = script.at()
    place.state.decided["steps"] = 700
    monkeypatch.setattr(script.parts.sweep, "run", lambda *_, **__: pytest.fail("measured again"))
    assert script.parts.decided_steps(place, script.place.Clock(10)) == 700


def test_the_length_is_decided_by_two_pilots(script, monkeypatch: pytest.MonkeyPatch) -> None:
    place, planned = script.at(), []

    def run(jobs, **_):
        planned.append([(job.out, job.experiment.config.train.steps, job.experiment.config.train.seed) for job in jobs])
        return script.parts.sweep.Outcome([replace(job, state="finished") for job in jobs])

    monkeypatch.setattr(script.parts.sweep, "run", run)
    assert script.parts.decided_steps(place, script.place.Clock(10)) == 8
    assert planned == [[(Path("pace/1-0"), 1, 102)], [(Path("pace/2-0"), 2, 102)]]
    assert place.state.decided["steps"] == 8


def test_the_best_rate_is_chosen_and_one_at_the_edge_is_followed_further(script, monkeypatch) -> None:
    """Losses that grow with the distance from the best rate."""
    place = script.at(smoke=False)
    Path("data").mkdir()
    best = {"deepnorm": 1e-3, "branchnorm": 4e-3, "branchnorm T=1": 1.2e-4}
    planned: list[str] = []

    def made(place, clock, out, runs, workers):
        planned.extend(run.name for run in runs)
        return script.place.Progress("complete", "")

    def loss(path: Path) -> float:
        arm = next(arm for arm in sorted(best, key=len, reverse=True) if path.name.startswith(arm.replace(" T=", "-T")))
        rate = float(path.name.split("-lr")[1].rsplit("-s", 1)[0])
        return 3 + abs(math.log(rate / best[arm])) + 0.01 * int(path.name[-1])

    monkeypatch.setattr(script.parts, "_made", made)
    monkeypatch.setattr(script.parts, "last_loss", loss)
    rates = script.parts.decided_rates(place, script.place.Clock(60), 400)
    assert rates == {"deepnorm": 1e-3, "branchnorm": 4e-3, "branchnorm T=1": 1.25e-4}
    choice = place.state.decided["choice"]
    assert [*choice["deepnorm"]] == ["0.00025", "0.0005", "0.001", "0.002"]
    assert [*choice["branchnorm"]][4:] == ["0.004", "0.008"]  # and the one beyond it is worse
    assert [*choice["branchnorm T=1"]][4:] == ["0.000125", "6.25e-05"]
    assert {*choice["branchnorm"]["0.004"]} == {"100", "101"}
    assert len(planned) == len({*planned}) == 2 * (4 + 6 + 6)  # none twice
    monkeypatch.setattr(script.parts, "_made", lambda *_: pytest.fail("chosen again"))
    assert script.parts.decided_rates(place, script.place.Clock(60), 400) == rates


def test_the_comparison_follows_the_protocol(script) -> None:
    place = script.at(smoke=False)
    Path("data").mkdir()
    place.state.decided["graphs"] = "on"
    rates = {"deepnorm": 2e-3, "branchnorm": 1e-3, "branchnorm T=1": 5e-4}
    runs = script.parts.wanted(place, "branchnorm:8", 1000, rates)
    assert [(run.config.train.seed, run.config.model.arch, run.config.train.lr) for run in runs[:3]] == [
        (3, "deepnorm", 2e-3), (3, "branchnorm", 1e-3), (3, "branchnorm", 5e-4)
    ]  # fmt: skip
    assert [run.config.train.seed for run in runs[:18:3]] == [3, 4, 5, 6, 7, 8]
    assert [run.config.model.T for run in runs[:3]] == [40, 40, 1]
    assert [(run.config.model.T, run.config.train.lr) for run in runs[18:]] == [(200, 1e-3)] * 6  # a ramp of 20 %
    for run in runs:
        model, train = run.config.model, run.config.train
        assert (model.d_model, model.encoder_layers, model.decoder_layers, model.dropout) == (512, 18, 18, 0.3)
        assert (train.steps, train.warmup, train.schedule, train.precision) == (1000, 40, "linear", "bf16")
        assert (train.device, train.cuda_graphs) == ("cuda", "on")
    early = script.parts.wanted(place, "branchnorm:3")
    assert {(run.config.model.encoder_layers, run.config.train.steps) for run in early} == {(50, 100)}
    assert len(early) == 4 * 2 * 3
    assert len({run.name for run in (*runs, *early)}) == len(runs) + len(early)


def test_what_failed_or_had_its_time_comes_after_the_rest_and_is_tried_again(script) -> None:
    place, names = script.at(), ["checks", "benchmarks", "figure5", "figures89", "figure3"]
    assert [name for name, _ in script.parts.due(place, names)] == names
    assert {*names} < {*script.parts.MAKING}
    place.state.parts = {
        "checks": {"state": "failed", "seconds": 5.0, "sentence": ""},
        "benchmarks": {"state": "partial", "seconds": 539.0, "sentence": ""},
        "figure5": {"state": "complete", "seconds": 330.0, "sentence": ""},
        "figure3": {"state": "failed", "seconds": 9.0, "sentence": ""},
    }
    inf = float("inf")
    assert [*script.parts.due(place, names)] == [
        ("benchmarks", 1.0), ("figures89", inf), ("checks", inf), ("figure3", inf)
    ]  # fmt: skip
    place.state.parts["benchmarks"]["seconds"] = 600.0
    assert [name for name, _ in script.parts.due(place, names)] == ["figures89", "checks", "benchmarks", "figure3"]


@pytest.mark.slow
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


def test_a_damaged_state_is_one_sentence(script) -> None:
    script.at()
    Path("state.json").write_text("{")
    with pytest.raises(InputError, match=r"state\.json is damaged"):
        script.place.State.read(Path("state.json"))


@pytest.mark.slow
@pytest.mark.skipif(not EVERY, reason="as a trial that is cut, in test_h200_script.py; EVERY=1 tries both")
@pytest.mark.timeout(1800)
def test_a_part_that_is_stopped_goes_on_from_its_checkpoint(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM in the middle of its runs: the next call ends with the tables of a call that nobody stopped."""
    longer = {"steps": 120, "final_checkpoint": False}
    tiny = script.parts._tiny
    monkeypatch.setattr(script.parts, "_tiny", lambda run: script.parts._changed(tiny(run), **longer))
    folder = script.parts.RUNS / script.parts.FOLDERS["branchnorm:3"]

    def names(place) -> list[Path]:
        return [folder / run.name for run in script.parts.wanted(place, "branchnorm:3")]

    def stop_one_under_way(paths: list[Path]) -> None:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and not any([*path.glob("journal-*")] for path in paths):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    place = script.at(tmp_path / "stopped")
    paths = [place.work / path for path in names(place)]
    caller = threading.Thread(target=stop_one_under_way, args=(paths,))
    caller.start()
    with pytest.raises(SystemExit) as end:
        script.parts.figure3(place, script.place.Clock(900))
    caller.join()
    assert end.value.code == 128 + signal.SIGTERM
    assert any((path / "checkpoints").is_dir() for path in paths)
    assert script.parts.figure3(place, script.place.Clock(900)).state == "complete"
    found = [Run.open(path) for path in paths]
    assert max(len(run.manifest["attempts"]) for run in found) == 2

    whole = script.at(place.work.parent / "whole")
    assert script.parts.figure3(whole, script.place.Clock(900)).state == "complete"
    for run, path in zip(found, names(whole), strict=True):
        other = Run.open(path)
        pd.testing.assert_frame_equal(
            run.metrics.drop(columns=CLOCKS), other.metrics.drop(columns=CLOCKS), check_like=True
        )
        pd.testing.assert_frame_equal(run.frame("grad_norm"), other.frame("grad_norm"))
        assert len(run.metrics) == 121
