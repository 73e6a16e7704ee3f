"""Many one-step runs: bits that do not depend on the number of processes, resumption, failures, interruption."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onestep_cases import config_of

from stabilitylab.config import Config, merge, resolve
from stabilitylab.onestep import measure, measure_all
from stabilitylab.onestep.workers import DIED, is_finished
from stabilitylab.store import Run, RunWriter
from stabilitylab.store.documents import reseal


def with_settings(config: Config, **sections: Any) -> Config:
    return resolve(merge(config.model_dump(), sections))


def numbers(path: Path) -> dict[str, np.ndarray]:
    run = Run.open(path)
    return {name: run.frame(name).select_dtypes("float64").to_numpy() for name in (*run.tables, "metrics")}


def unfinished(path: Path, kind: str = "onestep") -> None:
    """What a writer leaves that was killed."""
    RunWriter.create(path, {"kind": kind, "config": config_of("postln").model_dump(mode="json")}).close()


def same(one: Path, other: Path) -> bool:
    a, b = numbers(one), numbers(other)
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name], equal_nan=True) for name in a)


@pytest.mark.slow
def test_two_processes_give_the_bits_of_this_one_and_finished_runs_are_kept(tmp_path: Path) -> None:
    todo = [("postln", config_of("postln")), ("deepnorm", config_of("deepnorm")), ("preln", config_of("Pre-LN"))]
    nowhere = with_settings(config_of("postln"), data={"source": f"text:{tmp_path}/a,{tmp_path}/b"})
    out, told = tmp_path / "out", []
    unfinished(out / "deepnorm")
    measure(config_of("admin"), out, "admin")
    kept = (out / "admin" / "run.json").stat().st_mtime_ns
    everything = [("nowhere", nowhere), *todo, ("admin", config_of("admin"))]
    failed = measure_all(everything, out, 2, told.append)
    assert list(failed) == ["nowhere"]
    assert f"{tmp_path}/a" in failed["nowhere"]
    assert not (out / "nowhere").exists()
    assert sorted(told) == ["admin", "deepnorm", "postln", "preln"]
    assert (out / "admin" / "run.json").stat().st_mtime_ns == kept
    for name, config in todo:
        assert same(out / name, measure(config, tmp_path, name))

    again: list[str] = []
    assert measure_all(todo, out, 2, again.append) == {}
    assert again == [name for name, _ in todo]


@pytest.mark.slow
def test_the_number_of_processes_changes_no_bit(tmp_path: Path) -> None:
    todo = [(f"{arch}-{seed}", config_of(arch, seed=seed)) for arch in ("admin", "branchnorm") for seed in (3, 4)]
    for jobs in (1, 3):
        assert measure_all(todo, tmp_path / str(jobs), jobs, lambda name: None) == {}
    assert all(same(tmp_path / "1" / name, tmp_path / "3" / name) for name, _ in todo)
    assert not same(tmp_path / "1" / "admin-3", tmp_path / "1" / "admin-4")


@pytest.mark.slow
def test_a_process_that_is_killed_fails_its_own_run_only(tmp_path: Path) -> None:
    finished: list[str] = []

    def done(name: str) -> None:
        finished.append(name)
        if name == "3":  # the process that has just finished it is given the next one, gets nowhere, and dies
            (child,) = multiprocessing.active_children()
            assert child.pid is not None
            os.kill(child.pid, signal.SIGSTOP)
            threading.Timer(0.3, os.kill, (child.pid, signal.SIGKILL)).start()

    failed = measure_all([(str(seed), config_of("postln", seed=seed)) for seed in (3, 4, 5)], tmp_path, 1, done)
    assert failed == {"4": DIED}
    assert finished == ["3", "5"]
    assert not (tmp_path / "4").exists()


@pytest.mark.slow
def test_after_ctrl_c_finished_runs_stay_and_no_process_does(tmp_path: Path) -> None:
    todo = [(str(seed), config_of("postln", seed=seed)) for seed in (3, 4)]

    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_all(todo, tmp_path, 1, interrupt)
    assert not multiprocessing.active_children()
    assert Run.open(tmp_path / "3").status.state == "finished"
    assert not (tmp_path / "4").exists()


@pytest.mark.slow
def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    config = config_of("postln")
    measure(config, tmp_path, "mine")
    unfinished(tmp_path / "train", kind="train")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{")
    writing = RunWriter.create(tmp_path / "writing", {"kind": "onestep", "config": {}})
    todo = [
        ("mine", with_settings(config, train={"seed": 4})),
        *((name, config) for name in ("train", "damaged", "writing")),
        ("nonsense", config.model_copy(update={"model": config.model.model_copy(update={"arch": "nonsense"})})),
    ]
    measure(config, tmp_path, "nonsense")
    failed = measure_all(todo, tmp_path, 2, pytest.fail)
    assert "of another configuration" in failed["mine"]
    assert "holds a run of another kind" in failed["train"]
    assert "is damaged" in failed["damaged"]
    assert "is being written by another process" in failed["writing"]
    assert "unknown architecture 'nonsense'" in failed["nonsense"]
    writing.close()
    assert Run.open(tmp_path / "mine").config == config.model_dump(mode="json")
    assert (tmp_path / "train" / "run.json").exists()


def test_an_unfinished_run_is_removed_and_a_newer_versions_is_another_configuration(tmp_path: Path) -> None:
    config = config_of("postln")
    unfinished(tmp_path / "one")
    assert not is_finished(tmp_path / "one", config)
    assert not (tmp_path / "one").exists()
    assert not is_finished(tmp_path / "one", config)  # nothing there
    measure(config, tmp_path, "two")
    assert is_finished(tmp_path / "two", config)
    document = (tmp_path / "two" / "run.json").read_text()
    (tmp_path / "two" / "run.json").write_text(document.replace('"arch":', '"brand_new": 1, "arch":', 1))
    reseal(tmp_path / "two" / "run.json")
    with pytest.raises(Exception, match="of another configuration"):
        is_finished(tmp_path / "two", config)


def test_nothing_to_do_starts_nothing(tmp_path: Path) -> None:
    assert measure_all([], tmp_path / "none", 2, pytest.fail) == {}
    assert not (tmp_path / "none").exists()


def test_a_measurement_is_known_again_that_left_out_what_it_cannot_measure(tmp_path: Path) -> None:
    config = config_of("gpas").changed(probes={"names": ("all",)})
    path = measure(config, tmp_path, "one")
    assert Run.open(path).config["probes"]["names"] == ["all"]
    assert is_finished(path, config)
