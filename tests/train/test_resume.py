"""An interrupted and resumed run equals an uninterrupted one, bit for bit, tables included."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from edited_runs import edit
from rest_slow import rest_slow, slow

from stabilitylab.config import parse_set, resolve
from stabilitylab.errors import InputError, UsageError
from stabilitylab.store import Run, RunWriter
from stabilitylab.train import checkpoint, load_model, plan, resume, start
from stabilitylab.train.loop import Report
from stabilitylab.train.ranks import Team
from stabilitylab.train.run import Plan
from stabilitylab.verdict import STATES

pytestmark = pytest.mark.two_runs

CLOCKS = ["tokens_per_second", "memory_bytes"]  # what no two runs share


class Silent:
    def opened(self, path: Path, manifest: object) -> None: ...

    def show(self, report: Report) -> None: ...


class AuditAt(Silent):
    """Keeps what run.json's audit is while the given row is shown."""

    def __init__(self, row: int) -> None:
        self.row, self.found = row, {}

    def opened(self, path: Path, manifest: object) -> None:
        self.path = path

    def show(self, report: Report) -> None:
        if report.row == self.row:
            self.found = Run.open(self.path).manifest["audit"]


class InterruptAt(Silent):
    """Sends itself SIGTERM while the given row is shown."""

    def __init__(self, row: int) -> None:
        self.row = row

    def show(self, report: Report) -> None:
        if report.row == self.row:
            os.kill(os.getpid(), signal.SIGTERM)


def prepared(arch: str = "branchnorm", *settings: str, steps: int = 9, depth: int = 4) -> Plan:
    common = (
        "model.T=6 model.dropout=0.1 train.warmup=3 train.lr=1e-3 probes.every=2 probes.update_every=3 "
        "data.sentences=4 data.held_out=6"
    )
    sets = [*common.split(), f"model.arch={arch}", f"train.steps={steps}", *settings]
    return plan(resolve(parse_set(sets), depth=depth))


def same(first: Path, second: Path) -> None:
    one, two = Run.open(first), Run.open(second)
    assert one.tables == two.tables
    assert len(one.tables) == 7
    for name in one.tables:
        pd.testing.assert_frame_equal(one.frame(name), two.frame(name), check_exact=True)
        assert len(one.frame(name))
    pd.testing.assert_frame_equal(
        one.metrics.drop(columns=CLOCKS), two.metrics.drop(columns=CLOCKS), check_exact=True, check_like=True
    )
    last = sorted((first / "checkpoints").iterdir())[-1].name
    a, b = (torch.load(path / "checkpoints" / last, weights_only=True)["model"] for path in (first, second))
    assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("arch", rest_slow(["branchnorm", "admin", "preln"], ["branchnorm"]))
def test_resume_equals_an_uninterrupted_run(arch: str, tmp_path: Path) -> None:
    whole = start(prepared(arch, depth=2), tmp_path, "whole", Silent())
    assert whole.state == "finished"
    broken = start(prepared(arch, depth=2), tmp_path, "broken", InterruptAt(4))
    assert (broken.state, broken.row, broken.verdict) == ("interrupted", 5, None)
    assert Run.open(broken.path).status.state == "interrupted"
    again = resume(broken.path, None, InterruptAt(6))
    assert (again.state, again.row) == ("interrupted", 7)
    done = resume(broken.path, None, Silent())
    assert done.verdict == whole.verdict
    same(whole.path, broken.path)
    assert list(Run.open(broken.path).metrics["step"]) == list(range(10))
    assert len(Run.open(broken.path).manifest["attempts"]) == 3
    whole_audit, audit = (Run.open(one.path).manifest["audit"] for one in (whole, broken))
    assert audit == whole_audit
    assert (audit["row"], audit["forwards"], audit["parameters_without_gradient"]) == (0, 1, 0)


@pytest.mark.slow
def test_the_audit_of_the_first_row_is_there_while_the_run_goes_on(tmp_path: Path) -> None:
    seen = AuditAt(1)
    start(prepared(), tmp_path, "run", seen)
    assert (seen.found["row"], seen.found["backwards"]) == (0, 1)


@pytest.mark.slow
def test_resume_with_accumulation_and_periodic_checkpoints(tmp_path: Path) -> None:
    settings = ("train.accumulate=2", "train.checkpoint_every=2", "probes.every=1")
    whole = start(prepared("deepnorm", *settings), tmp_path, "whole", Silent())
    broken = start(prepared("deepnorm", *settings), tmp_path, "broken", InterruptAt(2))
    newest = sorted((broken.path / "checkpoints").iterdir())[-1]
    newest.unlink()  # as after kill -9: rows beyond the checkpoint at hand are recorded once more, not twice
    resume(broken.path, None, Silent())
    same(whole.path, broken.path)
    assert (broken.path / "aside").is_dir()


class Clock:
    """Wall time that passes by ``step`` seconds whenever it is asked for."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def saved_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    rows: list[int] = []
    write = checkpoint.save

    def save(folder: Path, row: int, state: dict[str, Any], run_id: str) -> Path:
        rows.append(row)
        return write(folder, row, state, run_id)

    monkeypatch.setattr(checkpoint, "save", save)
    return rows


@pytest.mark.parametrize(
    ("minutes", "every", "seconds", "rows"),
    [
        # a run of less than ten minutes writes its last one alone
        slow(10.0, 0, 0.0, [9]),
        (10.0, 4, 250.0, [3, 4, 7, 8, 9]),  # one by updates starts the minutes anew
        slow(10.0, 0, 600.0, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        slow(10.0, 0, 250.0, [3, 6, 9]),
        slow(0.0, 0, 1e9, [9]),
        slow(0.0, 4, 1e9, [4, 8, 9]),
    ],
)
def test_checkpoints_by_wall_time_change_nothing(
    minutes: float, every: int, seconds: float, rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (f"train.checkpoint_minutes={minutes}", f"train.checkpoint_every={every}")
    whole = start(prepared("branchnorm", "train.checkpoint_minutes=0", depth=2), tmp_path, "whole", Silent())
    monkeypatch.setattr(checkpoint, "clock", Clock(seconds))
    written = saved_rows(monkeypatch)
    timed = start(prepared("branchnorm", *settings, depth=2), tmp_path, "timed", Silent())
    assert written == rows
    assert timed.verdict == whole.verdict
    same(whole.path, timed.path)


@pytest.mark.slow
def test_after_kill_9_a_run_goes_on_from_its_last_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = start(prepared(), tmp_path, "whole", Silent())
    monkeypatch.setattr(checkpoint, "clock", Clock(250.0))
    broken = start(prepared(), tmp_path, "broken", InterruptAt(6))
    newest = checkpoint.found(broken.path / "checkpoints")[-1]
    newest.unlink()  # which kill -9 would not have written
    assert [path.name for path in checkpoint.found(broken.path / "checkpoints")] == ["step-00000006.pt"]
    resume(broken.path, None, Silent())
    same(whole.path, broken.path)


def test_the_first_ranks_clock_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    heard: list[int] = []

    class Ranks(Team):
        def largest(self, number: int) -> int:
            asked.append(number)
            return max(number, heard[-1])

    monkeypatch.setattr(checkpoint, "clock", Clock(601.0))
    train = prepared().config.train
    for rank, from_others, due in ((0, 0, True), (1, 0, False), (1, 1, True)):
        heard.append(from_others)
        assert checkpoint.Cadence(train, Ranks("ddp", rank, 2)).due(3) is due
    assert asked == [1, 0, 0]  # every rank asks, and only the first one's watch counts


@pytest.mark.slow
def test_a_finished_run_can_be_continued_further(tmp_path: Path) -> None:
    whole = start(prepared(steps=9), tmp_path, "whole", Silent())
    short = start(prepared(steps=6), tmp_path, "short", Silent())
    with pytest.raises(UsageError, match="has all its 6 steps; --steps N with a larger N continues it"):
        resume(short.path, None, Silent())
    longer = resume(short.path, 9, Silent())
    assert longer.verdict == whole.verdict
    same(whole.path, short.path)
    assert Run.open(short.path).config["train"]["steps"] == 9


class Dies(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("when", rest_slow(["checkpoint", "row"], ["row"]))
def test_a_run_killed_after_its_last_update_is_ended_by_a_resume(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed behind the last checkpoint, and between the row after training and the status that says so."""
    whole = start(prepared(), tmp_path, "whole", Silent())
    lost = start(prepared(), tmp_path, "lost", Silent())
    status = json.loads((lost.path / "status.json").read_text())
    running = {**status, "state": "running", "reason": "", "step": 0, "facts": {}}
    edit(lost.path / "status.json", running)
    if when == "checkpoint":
        RunWriter.resume(lost.path, checkpoint.load(lost.path / "checkpoints", torch.device("cpu"))["part"]).close()
    done = resume(lost.path, None, Silent())
    assert (done.state, done.verdict) == ("finished", whole.verdict)
    same(whole.path, lost.path)
    with pytest.raises(UsageError, match="has all its 9 steps"):
        resume(lost.path, None, Silent())


def test_after_any_error_the_last_row_is_there(tmp_path: Path) -> None:
    class Fails(Silent):
        def show(self, report: Report) -> None:
            if report.row == 3:
                raise Dies("the disk of the display")

    with pytest.raises(Dies):
        start(prepared("branchnorm", "probes.every=1"), tmp_path, "run", Fails())
    run = Run.open(tmp_path / "run")
    assert run.status.state == "failed"
    assert run.metrics["step"].tolist() == [0, 1, 2, 3]
    assert run.frame("update_ratio")["step"].max() == 3


class Twice(Silent):
    """Signals itself again and again within one update, as a scheduler does that signals process and group."""

    def __init__(self, number: int) -> None:
        self.number = number

    def show(self, report: Report) -> None:
        if report.row == 2:
            for _ in range(3):
                os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", rest_slow([signal.SIGTERM, signal.SIGHUP, signal.SIGINT], [signal.SIGTERM]))
def test_signals_in_a_row_are_one_request(number: signal.Signals, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        result = start(prepared(), tmp_path, "run", Twice(number))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (result.state, result.signal, result.row) == ("interrupted", number, 3)
    assert Run.open(result.path).status.reason.startswith(number.name)
    assert [path.name for path in checkpoint.found(result.path / "checkpoints")] == ["step-00000003.pt"]


@pytest.mark.slow
def test_a_second_ctrl_c_a_second_later_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stabilitylab.stopping.APART", -1.0)
    with pytest.raises(KeyboardInterrupt):
        start(prepared(), tmp_path, "run", Twice(signal.SIGINT))
    run = Run.open(tmp_path / "run")
    assert (run.status.state, run.status.reason) == ("interrupted", "a second Ctrl-C")
    assert run.metrics["step"].tolist() == [0, 1, 2]


def test_a_corrupt_checkpoint_loses_nothing(tmp_path: Path) -> None:
    run = start(prepared(steps=4), tmp_path, "run", InterruptAt(1))
    before = Run.open(run.path).metrics
    path = sorted((run.path / "checkpoints").iterdir())[-1]
    path.write_bytes(b"nonsense")
    with pytest.raises(InputError, match="cannot be read"):
        resume(run.path, None, Silent())
    pd.testing.assert_frame_equal(Run.open(run.path).metrics, before)


@pytest.mark.slow
def test_without_a_final_checkpoint_a_run_is_the_same_and_keeps_no_weights(tmp_path: Path) -> None:
    start(prepared(steps=4), tmp_path, "kept", Silent())
    start(prepared("branchnorm", "train.final_checkpoint=false", steps=4), tmp_path, "light", Silent())
    kept, light = Run.open(tmp_path / "kept"), Run.open(tmp_path / "light")
    for name in kept.tables:
        pd.testing.assert_frame_equal(kept.frame(name), light.frame(name), check_exact=True)
    pd.testing.assert_frame_equal(kept.metrics.drop(columns=CLOCKS), light.metrics.drop(columns=CLOCKS))
    assert light.status.state == "finished"
    assert list(tmp_path.glob("light/checkpoints/*")) == []
    assert [path.name for path in tmp_path.glob("kept/checkpoints/*")] == ["step-00000004.pt"]
    with pytest.raises(InputError, match="no checkpoint in"):
        resume(tmp_path / "light", 6, Silent())
    settings = ("train.final_checkpoint=false", "train.checkpoint_every=1")
    start(prepared("branchnorm", *settings, steps=4), tmp_path, "lighter", Silent())
    assert list(tmp_path.glob("lighter/checkpoints/*")) == []  # nor those from on the way


@pytest.mark.slow
def test_an_interruption_leaves_a_checkpoint_all_the_same(tmp_path: Path) -> None:
    plan_of_it = prepared("branchnorm", "train.final_checkpoint=false", steps=6)
    assert start(plan_of_it, tmp_path, "light", InterruptAt(2)).state == "interrupted"
    assert [path.name for path in tmp_path.glob("light/checkpoints/*")] == ["step-00000003.pt"]
    assert resume(tmp_path / "light", None, Silent()).state == "finished"


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_on_a_gpu_ends_resumes_and_records_finite_tables(precision: str, tmp_path: Path) -> None:
    settings = ("train.device=cuda", f"train.precision={precision}")
    broken = start(prepared("branchnorm", *settings), tmp_path, "run", InterruptAt(4))
    assert (broken.state, broken.row) == ("interrupted", 6)  # row 4 is shown while the GPU computes row 5
    assert resume(broken.path, None, Silent()).row == 9
    run = Run.open(broken.path)
    assert len(run.tables) == 7
    for name in run.tables:
        frame = run.frame(name, columns=[run.table(name).columns[0]])
        assert np.isfinite(frame[run.table(name).columns[0]]).all(), name


@pytest.mark.slow
def test_bf16_runs_on_the_cpu_too(tmp_path: Path) -> None:
    assert start(prepared("deepnorm", "train.precision=bf16", steps=3), tmp_path, "run", Silent()).row == 3


def test_changed_data_are_refused(tmp_path: Path) -> None:
    source, target = tmp_path / "a.src", tmp_path / "a.tgt"
    lines = [f"w{i} w{i * 7 % 11} w{i * 5 % 13} w{i % 3}" for i in range(200)]
    source.write_text("\n".join(lines) + "\n")
    target.write_text("\n".join(" ".join(reversed(line.split())) for line in lines) + "\n")
    data = f"data.source=text:{source},{target}"
    run = start(prepared("postln", data, "data.vocab_size=320"), tmp_path, "run", InterruptAt(2))
    target.write_text(target.read_text().replace("w1 ", "w9 "))
    with pytest.raises(InputError, match="have changed since it started"):
        resume(run.path, None, Silent())


@pytest.mark.parametrize("recorded", [True, False])
def test_a_changed_validation_text_is_refused_if_its_digest_was_recorded(recorded: bool, tmp_path: Path) -> None:
    """The held-out batch, its first sentences, stays as it is."""
    lines = [f"w{i} w{i * 7 % 11} w{i * 5 % 13} w{i % 3}" for i in range(300)]
    for name, part in (("train", lines[:200]), ("valid", lines[200:])):
        for side in ("src", "tgt"):
            (tmp_path / f"{name}.{side}").write_text("\n".join(part) + "\n")
    source, valid = (f"{tmp_path}/{name}.src,{tmp_path}/{name}.tgt" for name in ("train", "valid"))
    settings = (f"data.source=text:{source}", f"data.valid='{valid}'", "data.vocab_size=320")
    run = start(prepared("postln", *settings, depth=2), tmp_path, "run", InterruptAt(2))
    before = (run.path / "run.json").read_text()
    if not recorded:
        document = json.loads(before)
        del document["data"]["validation_sha256"]
        edit(run.path / "run.json", document)
    changed = "\n".join([*lines[200:250], *(line.replace("w1 ", "w9 ") for line in lines[250:])]) + "\n"
    (tmp_path / "valid.tgt").write_text(changed)
    if recorded:
        with pytest.raises(InputError, match="have changed since it started"):
            resume(run.path, None, Silent())
        assert (run.path / "run.json").read_text() == before
        with pytest.raises(InputError, match="have changed since it was trained"):
            load_model(Run.open(run.path))
    else:
        assert load_model(Run.open(run.path)).row == 3
        assert resume(run.path, None, Silent()).state == "finished"
        assert Run.open(run.path).manifest["data"]["validation_sha256"]


@pytest.mark.slow
def test_a_run_records_what_made_it_and_how_it_ended(tmp_path: Path) -> None:
    result = start(prepared(), tmp_path, None, Silent())
    assert result.path.name == "branchnorm-4-s0"
    assert start(prepared(steps=1), tmp_path, None, Silent()).path.name == "branchnorm-4-s0-2"
    run = Run.open(result.path)
    assert run.status.facts["verdict"]["state"] in STATES
    assert {
        "torch",
        "git_revision",
        "flush_denormal",
        "argv",
        "unigram",
        "best_nll",
        "parameters",
    } <= run.manifest.keys()
    metrics = run.metrics
    assert {"loss", "nll", "lr", "alpha", "grad_norm_total", "held_out_nll", "held_out_accuracy", *CLOCKS} <= {*metrics}
    assert np.allclose(metrics["alpha"][:9], [min(1, (t + 1) / 6) for t in range(9)])
    with pytest.raises(UsageError, match="exists already"):
        start(prepared(), tmp_path, "branchnorm-4-s0", Silent())
