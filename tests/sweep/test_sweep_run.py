"""Running a sweep: skip, start, retry, stop; on made-up processes, so that every turn of events can be had."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_verdict import made_verdict
from rich.console import Console
from sweep_cases import FakeLauncher, Heard, experiment, finishes, leave, left, planned, says

from stabilitylab.errors import InputError, UsageError
from stabilitylab.store import Run
from stabilitylab.sweep import Display, Job, plan, run, runner


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POLL", 0.0)


def killed(checkpoint: int = 0) -> Callable[[Job], int]:
    """Recorded two rows, then kill -9; with its last checkpoint after ``checkpoint`` updates."""

    def act(job: Job) -> int:
        writer = leave(job, "running", step=2, checkpoint=checkpoint)
        writer.close()
        return -signal.SIGKILL

    return act


def fails(job: Job) -> int:
    left(job, "failed", reason="out of memory")
    return says("stabilitylab: out of memory on cpu.", 5)(job)


def test_what_is_finished_is_skipped_and_the_rest_is_run_once(tmp_path: Path) -> None:
    jobs = planned(tmp_path, "a", "b", "c")
    left(jobs[0], "finished")
    left(jobs[2], "diverged")
    crew, heard = FakeLauncher(), Heard()
    outcome = run([job.now() for job in jobs], launcher=crew, audience=heard)
    assert [job.name for job in crew.started] == ["b"]
    assert [job.state for job in outcome.jobs] == ["finished"] * 3
    assert (outcome.exit_code, outcome.signal, crew.closed) == (0, None, True)
    assert heard.ends == [("b", "finished", False)]
    again = FakeLauncher()
    assert run([job.now() for job in jobs], launcher=again).exit_code == 0
    assert again.started == []


def test_no_more_than_workers_run_at_a_time_and_in_the_order_given(tmp_path: Path) -> None:
    crew = FakeLauncher(workers=3, polls=3)
    outcome = run(planned(tmp_path, *"abcdefgh"), launcher=crew)
    assert crew.most == 3
    assert [job.name for job in crew.started] == [*"abcdefgh"]
    assert outcome.count("finished") == 8


def test_what_failed_is_tried_again_and_reported(tmp_path: Path) -> None:
    crew, heard = FakeLauncher({"a": [fails, finishes], "b": [fails, fails, finishes]}), Heard()
    outcome = run(planned(tmp_path, "a", "b"), launcher=crew, retries=1, audience=heard)
    assert heard.ends == [
        ("a", "failed", True),
        ("b", "failed", True),
        ("a", "finished", False),
        ("b", "failed", False),
    ]
    a, b = outcome.jobs
    assert (a.state, b.state, b.reason) == ("finished", "failed", "out of memory on cpu.")
    assert (outcome.exit_code, outcome.sentence()) == (1, "2 runs: 1 finished, 1 failed")
    assert sorted(path.name for path in (tmp_path / "sweep/aside").iterdir()) == ["a-1", "b-1"]
    assert "[exit 5]" in b.log_path.read_text()
    assert run(plan([job.experiment for job in outcome.jobs], tmp_path), launcher=FakeLauncher()).exit_code == 0


@pytest.mark.parametrize("retries", [0, 2])
def test_retries_are_counted_per_run(retries: int, tmp_path: Path) -> None:
    crew = FakeLauncher({"a": [fails] * 9})
    assert run(planned(tmp_path, "a"), launcher=crew, retries=retries).exit_code == 1
    assert len(crew.started) == retries + 1


def test_a_wrong_setting_is_not_tried_again(tmp_path: Path) -> None:
    crew = FakeLauncher({"a": [says("stabilitylab: unknown architecture 'x'.", 2)]})
    outcome = run(planned(tmp_path, "a"), launcher=crew, retries=5)
    assert len(crew.started) == 1
    assert (outcome.jobs[0].state, outcome.jobs[0].reason) == ("failed", "unknown architecture 'x'.")
    assert outcome.jobs[0].now().reason == "unknown architecture 'x'."  # and --status says so later


@pytest.mark.parametrize("checkpoint", [0, 2])
def test_a_killed_run_goes_on_from_its_checkpoint_or_starts_anew(checkpoint: int, tmp_path: Path) -> None:
    crew, heard = FakeLauncher({"a": [killed(checkpoint), finishes]}), Heard()
    outcome = run(planned(tmp_path, "a"), launcher=crew, audience=heard)
    assert heard.ends == [("a", "failed", True), ("a", "finished", False)]
    first, second = crew.started
    assert not first.resumable
    assert second.resumable is bool(checkpoint)
    assert first.argv == second.argv
    assert (tmp_path / "sweep/aside/a-1").exists() is not bool(checkpoint)
    assert (outcome.jobs[0].state, outcome.jobs[0].verdict) == ("finished", "trained")


@pytest.mark.parametrize(("code", "name"), [(-9, "SIGKILL"), (137, "SIGKILL"), (139, "SIGSEGV"), (-64, "SIGRTMAX")])
def test_a_kill_is_named(code: int, name: str, tmp_path: Path) -> None:
    outcome = run(planned(tmp_path, "a"), launcher=FakeLauncher({"a": [says("Epoch 3", code)]}), retries=0)
    assert (outcome.jobs[0].state, outcome.jobs[0].reason) == ("failed", f"killed by {name}")


@pytest.mark.parametrize("code", [130, 143, -signal.SIGINT])
def test_what_was_stopped_before_it_had_a_run_is_new(code: int, tmp_path: Path) -> None:
    outcome = run(planned(tmp_path, "a"), launcher=FakeLauncher({"a": [says("Traceback", code)]}), retries=0)
    assert (outcome.jobs[0].state, outcome.jobs[0].reason, outcome.exit_code) == ("new", "", 1)
    assert outcome.jobs[0].now().state == "new"


def test_a_run_that_somebody_else_interrupted_goes_on(tmp_path: Path) -> None:
    def preempted(job: Job) -> int:
        left(job, "interrupted", step=2, reason="SIGTERM", checkpoint=2)
        return 143

    crew, heard = FakeLauncher({"a": [preempted, finishes]}), Heard()
    assert run(planned(tmp_path, "a"), launcher=crew, audience=heard).exit_code == 0
    assert heard.ends == [("a", "interrupted", True), ("a", "finished", False)]
    assert crew.started[1].resumable


def test_an_exit_code_of_0_without_a_finished_run_is_a_failure(tmp_path: Path) -> None:
    outcome = run(planned(tmp_path, "a"), launcher=FakeLauncher({"a": [says("done", 0)] * 2}))
    assert (outcome.jobs[0].state, outcome.jobs[0].reason, outcome.exit_code) == ("failed", "done", 1)


def test_a_run_that_another_process_writes_is_left_alone(tmp_path: Path) -> None:
    jobs = planned(tmp_path, "a", "b")
    writer = leave(jobs[0], "running")
    crew = FakeLauncher()
    outcome = run(jobs, launcher=crew)  # planned before the other process took it
    writer.close()
    assert [job.name for job in crew.started] == ["b"]
    assert [job.state for job in outcome.jobs] == ["running", "finished"]
    assert outcome.exit_code == 1  # something remains


def test_a_run_that_another_sweep_took_at_the_last_moment_is_left_alone(tmp_path: Path) -> None:
    writers = []

    def taken(job: Job) -> int:
        writers.append(leave(job, "running"))
        return says("stabilitylab: a exists already and is never overwritten.", 2)(job)

    outcome = run(planned(tmp_path, "a"), launcher=FakeLauncher({"a": [taken]}))
    assert (outcome.jobs[0].state, outcome.exit_code) == ("running", 1)
    writers[0].close()


def test_a_folder_that_became_something_else_fails_alone(tmp_path: Path) -> None:
    jobs = planned(tmp_path, "a", "b")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    outcome = run(jobs, launcher=FakeLauncher())
    assert [job.state for job in outcome.jobs] == ["failed", "finished"]
    assert "holds files but no run" in outcome.jobs[0].reason
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_the_processes_and_starts_no_more(number: int, code: int, tmp_path: Path) -> None:
    def interrupted(job: Job) -> int:
        left(job, "interrupted", step=2, reason="SIGINT", checkpoint=2)
        return 130

    class Interrupting(Heard):
        def started(self, job: Job) -> None:
            super().started(job)
            if len(self.starts) == 2:
                os.kill(os.getpid(), number)

    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)  # under nohup a hangup is ignored
    crew = FakeLauncher(dict.fromkeys("abc", (interrupted,)), workers=2, polls=10**9)
    try:
        outcome = run(planned(tmp_path, *"abc"), launcher=crew, retries=3, audience=Interrupting())
        assert signal.getsignal(number) is usual
    finally:
        signal.signal(number, before)
    assert [process.stops for process in crew.processes] == [[1], [1]]
    assert [job.state for job in outcome.jobs] == ["interrupted", "interrupted", "new"]
    assert (outcome.signal, outcome.exit_code) == (number, code)
    rest = FakeLauncher(workers=2)
    assert run([job.now() for job in outcome.jobs], launcher=rest).exit_code == 0
    assert [job.resumable for job in rest.started] == [True, True, False]


def test_under_nohup_a_hangup_stays_ignored(tmp_path: Path) -> None:
    class HangingUp(Heard):
        def started(self, job: Job) -> None:
            os.kill(os.getpid(), signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(planned(tmp_path, "a"), launcher=FakeLauncher(), audience=HangingUp()).exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_another_thread_signals_are_left_to_the_main_one(tmp_path: Path) -> None:
    codes: list[int] = []
    worker = threading.Thread(
        target=lambda: codes.append(run(planned(tmp_path, "a"), launcher=FakeLauncher()).exit_code)
    )
    worker.start()
    worker.join()
    assert codes == [0]


def test_each_further_ctrl_c_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stabilitylab.stopping.APART", -1.0)

    class Stubborn(FakeLauncher):
        def start(self, job: Job):
            process = super().start(job)

            def stop(asked: int) -> None:
                process.stops.append(asked)
                if asked < 3:
                    os.kill(os.getpid(), signal.SIGINT)
                else:
                    process.polls = 0

            process.stop = stop  # type: ignore[method-assign]
            os.kill(os.getpid(), signal.SIGINT)
            return process

    crew = Stubborn({"a": [killed()]}, polls=10**9)
    assert run(planned(tmp_path, "a"), launcher=crew).exit_code == 130
    assert crew.processes[0].stops == [1, 2, 3]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_arrives_several_times_asks_once(tmp_path: Path, number: int) -> None:
    class Scheduler(FakeLauncher):
        def start(self, job: Job):
            process = super().start(job)
            for _ in range(3):
                os.kill(os.getpid(), number)
            return process

    crew = Scheduler({"a": [killed()]}, polls=10**9)
    assert run(planned(tmp_path, "a"), launcher=crew).exit_code == 128 + number
    assert crew.processes[0].stops == [1]


def test_what_another_process_writes_still_remains(tmp_path: Path) -> None:
    job = planned(tmp_path, "a")[0]
    writer = leave(job, "running")
    outcome = run(planned(tmp_path, "a", "b"), launcher=FakeLauncher())
    assert [one.state for one in outcome.jobs] == ["running", "finished"]
    assert outcome.exit_code == 1
    writer.close()


def test_a_run_killed_before_it_said_that_it_ended_is_finished_not_made_anew(tmp_path: Path) -> None:
    job = planned(tmp_path, "a")[0]
    leave(job, "running", step=4, checkpoint=4)._lock.release()
    (again,) = planned(tmp_path, "a")
    assert (again.state, again.resumable) == ("interrupted", True)
    outcome = run([again], launcher=FakeLauncher())
    assert outcome.exit_code == 0
    assert not (tmp_path / "sweep/aside").exists()


def test_an_error_of_the_sweep_itself_leaves_no_process_behind(tmp_path: Path) -> None:
    class Breaking(Heard):
        def started(self, job: Job) -> None:
            raise RuntimeError("no terminal")

    crew = FakeLauncher(polls=10**9)
    with pytest.raises(RuntimeError, match="no terminal"):
        run(planned(tmp_path, "a"), launcher=crew, audience=Breaking())
    assert crew.processes[0].stops == [1]
    assert crew.running() == 0
    assert crew.closed


def test_wrong_arguments(tmp_path: Path) -> None:
    jobs = planned(tmp_path, "a")
    with pytest.raises(UsageError, match="--jobs 0"):
        run(jobs, workers=0)
    with pytest.raises(UsageError, match="--retries -1"):
        run(jobs, retries=-1)
    with pytest.raises(UsageError, match="unknown launcher 'slurm'; choose one of local, parsl"):
        run(jobs, launcher="slurm")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--parsl-config goes with --launcher parsl"):
        run(jobs, parsl_config=tmp_path / "x.py")
    with pytest.raises(UsageError, match="--gpus goes with --launcher local"):
        run(jobs, launcher="parsl", gpus=["0"])
    with pytest.raises(UsageError, match="a asks for 'cpu'"):
        run(planned(tmp_path, "a", device="cpu"), gpus=["0"])
    assert run([]).exit_code == 0
    assert not (tmp_path / "sweep").exists()


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    text = io.StringIO()
    jobs = planned(tmp_path, "done", "good", "bad", "broken")
    left(jobs[0], "finished")
    script = {"bad": [fails, finishes], "broken": [fails, fails]}
    with Display(Console(file=text)) as display:
        run([job.now() for job in jobs], launcher=FakeLauncher(script), audience=display)
    lines = text.getvalue().splitlines()
    assert lines[0] == "4 runs, 3 to be made"
    assert lines[1:] == [
        "2/4  good: finished: trained (0:00)",
        "2/4  bad: failed: out of memory on cpu. (0:00); trying again",
        "2/4  broken: failed: out of memory on cpu. (0:00); trying again",
        "3/4  bad: finished: trained (0:00)",
        f"3/4  broken: failed: out of memory on cpu. (0:00); see {tmp_path}/sweep/broken.log",
    ]
    quiet = io.StringIO()
    with Display(Console(file=quiet), quiet=True) as display:
        run(planned(tmp_path, "more"), launcher=FakeLauncher(), audience=display)
    assert quiet.getvalue() == ""


def test_a_live_table_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("stabilitylab.sweep.show.time", SimpleNamespace(monotonic=lambda: clock[0]))
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100, height=40)
    jobs = planned(tmp_path, "a", "b", steps=4)
    with Display(console) as display:
        display.planned(jobs)
        display.started(jobs[0])
        assert display.time_left() is None
        writer = leave(jobs[0], "running", step=2)
        display.progress([jobs[0].now()])
        shown = Console(width=100, file=io.StringIO())
        shown.print(display.panel())
        panel = shown.file.getvalue()  # type: ignore[attr-defined]
        assert "0/2 runs" in panel
        assert "2/4" in panel
        assert "about" in panel
        clock[0] += 50.0
        assert display.time_left() == 150.0  # 2 of 8 updates of equal models took 50 s
        writer.set_status("finished", 4, verdict=made_verdict("stuck"))
        writer.close()
        display.ended(jobs[0].now(), 3.0, False)
    assert "1/2" in text.getvalue()
    assert "a: finished: stuck (0:03)" in text.getvalue()


def test_more_runs_than_the_table_shows_are_counted(tmp_path: Path) -> None:
    jobs = planned(tmp_path, *(f"r{i}" for i in range(30)))
    display = Display(Console(file=io.StringIO()), quiet=True)
    display.planned(jobs)
    for job in jobs:
        display.started(job)
    shown = Console(width=100, file=io.StringIO())
    shown.print(display.panel())
    assert "and 6 more" in shown.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_that_cannot_be_read_stops_the_plan_with_its_reason(tmp_path: Path) -> None:
    job = planned(tmp_path, "a")[0]
    left(job, "finished")
    (job.path / "run.json").write_text("{")
    with pytest.raises(InputError, match="damaged"):
        plan([experiment("a")], tmp_path)
    with pytest.raises(InputError):
        Run.open(job.path)


def test_when_the_time_is_up_all_stop_as_at_a_sigterm(tmp_path: Path) -> None:
    def stopped(job: Job) -> int:
        left(job, "interrupted", step=2, checkpoint=2)
        return 143

    crew = FakeLauncher({"a": [stopped], "b": [stopped]}, workers=2, polls=10**9)
    outcome = run(planned(tmp_path, *"abcd"), launcher=crew, until=time.monotonic() + 0.2)
    assert [job.name for job in crew.started] == ["a", "b"]
    assert [process.stops for process in crew.processes] == [[1], [1]]
    assert (outcome.signal, outcome.exit_code) == (signal.SIGTERM, 143)
    assert outcome.sentence() == "4 runs: 2 interrupted, 2 new"
    late = FakeLauncher()
    assert run(planned(tmp_path, *"cd"), launcher=late, until=time.monotonic()).exit_code == 143
    assert late.started == []
    in_time = FakeLauncher()
    assert run(planned(tmp_path, *"cd"), launcher=in_time, until=time.monotonic() + 600).exit_code == 0


def test_looking_at_long_runs_takes_little_of_a_core() -> None:
    assert runner.after_look(10.0, 10.001) == pytest.approx(10.001 + runner.REFRESH)
    assert runner.after_look(10.0, 10.5) == pytest.approx(10.5 + 25.0)
