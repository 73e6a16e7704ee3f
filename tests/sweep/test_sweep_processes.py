"""Sweeps of real processes: environment, logs, interruption, resumption; here and under Parsl."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from rest_slow import rest_slow, slow
from sweep_cases import Heard, experiment, leave, planned

from stabilitylab.errors import InputError, ResourceError, UsageError
from stabilitylab.store import Run
from stabilitylab.sweep import Job, launchers, plan, run
from stabilitylab.sweep.jobs import prepare
from stabilitylab.sweep.launchers import Local, script
from stabilitylab.verdict import STATES

TELL = """
import os
print(os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES"), os.getsid(0) == os.getpid())
"""
DEADLINE = 120.0


def python(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Jobs run ``program`` instead of training."""
    monkeypatch.setattr(Job, "argv", property(lambda self: [sys.executable, "-c", program, self.name]))


def until(holds, what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_process_has_its_threads_its_gpu_a_session_and_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = tmp_path / "go"
    python(monkeypatch, f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n{TELL}")
    jobs = [prepare(job) for job in planned(tmp_path, "a", "b", "c", threads=3)]
    crew = Local(workers=2, gpus=["5", "7"])
    first, second = crew.start(jobs[0]), crew.start(jobs[1])
    go.touch()  # so that both run at one time
    until(lambda: first.poll() is not None and second.poll() is not None, "the processes end")
    third = crew.start(jobs[2])
    until(lambda: third.poll() is not None, "the process ends")
    told = [job.log_path.read_text().splitlines()[-1] for job in jobs]
    assert told == ["3 5 True", "3 7 True", "3 5 True"]
    assert jobs[0].log_path.read_text().startswith(f"$ {sys.executable} -c ")


@pytest.mark.parametrize(
    ("workers", "gpus", "runs", "sharing"), [(1, (), 1, "1"), (8, (), 3, "3"), (2, (), 3, "2"), (3, ("5", "7"), 3, "2")]
)
def test_a_process_is_told_how_many_share_its_device(
    workers: int, gpus: tuple[str, ...], runs: int, sharing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python(monkeypatch, f"import os; print(os.environ[{launchers.RUNS_PER_DEVICE!r}])")
    outcome = run(planned(tmp_path, *"abc"[:runs]), workers=workers, gpus=gpus, retries=0)
    assert [job.log_path.read_text().splitlines()[-2] for job in outcome.jobs] == [sharing] * runs


def test_without_gpus_the_choice_of_devices_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python(monkeypatch, TELL)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    outcome = run(planned(tmp_path, "a"), retries=0)
    assert outcome.jobs[0].log_path.read_text().splitlines()[-2:] == ["1 3 True", "[exit 0]"]


@pytest.mark.slow
def test_a_sweep_trains_and_a_second_one_has_nothing_to_do(tmp_path: Path) -> None:
    jobs = planned(tmp_path, "a", steps=2)
    outcome = run(jobs)
    assert outcome.exit_code == 0, [job.log_path.read_text() for job in jobs]
    assert {job.verdict for job in outcome.jobs} <= {*STATES}
    for job in outcome.jobs:
        found = Run.open(job.path)
        assert found.config == job.experiment.config.model_dump(mode="json")
        assert list(found.metrics["step"]) == [0, 1, 2]
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert run(plan([job.experiment for job in jobs], tmp_path)).exit_code == 0
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}


@pytest.mark.slow
def test_a_failing_process_is_reported_by_its_last_words(tmp_path: Path) -> None:
    job = plan([experiment("a", device="cuda:77")], tmp_path)
    outcome = run(job, retries=0)
    assert outcome.exit_code == 1
    assert outcome.jobs[0].reason.startswith("--device cuda:77: torch")
    assert outcome.jobs[0].now().reason == outcome.jobs[0].reason


SWEEP = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from sweep_cases import planned
from stabilitylab.sweep import run
sys.exit(run(planned(Path(sys.argv[2]), "a", "b", steps=int(sys.argv[3])), workers=1).exit_code)
"""


@pytest.mark.slow
def test_ctrl_c_checkpoints_and_the_next_sweep_goes_on_there(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", SWEEP, str(Path(__file__).parent), str(tmp_path), "200"]
    path = os.pathsep.join(map(str, (Path(__file__).parents[2], Path(__file__).parents[1])))
    child = subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": path})
    until(lambda: (tmp_path / "a/journal-000001.records").exists(), "the first run begins")
    child.send_signal(signal.SIGINT)
    assert child.wait(DEADLINE) == 130
    first, second = planned(tmp_path, "a", "b", steps=200)
    assert (first.state, first.resumable, second.state) == ("interrupted", True, "new")
    assert 0 < first.step < 200
    assert run([first], retries=0).exit_code == 0
    done = Run.open(first.path)
    assert list(done.metrics["step"]) == list(range(201))
    assert [attempt["part"] for attempt in done.manifest["attempts"]] == [1, 2]


# Parsl and its script


def begun(line: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["bash", "-c", line], stdout=subprocess.DEVNULL)


def test_the_script_hands_on_folder_environment_output_and_exit_code(tmp_path: Path) -> None:
    log = tmp_path / "a log"
    program = "import os, sys; print(os.environ['X'], os.getcwd(), repr(sys.stdin.read())); sys.exit(7)"
    line = script([sys.executable, "-c", program], {"X": "1 2"}, log=log, stop=tmp_path / "stop", folder=tmp_path)
    assert begun(line).wait(DEADLINE) == 7
    assert log.read_text().splitlines() == [f"$ {shlex.join([sys.executable, '-c', program])}", f"1 2 {tmp_path} ''"]


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("print(1)", 0),
        ("import sys; sys.exit(7)", 7),
        slow("import time; time.sleep(1.0)", 0),
        ("import os; os.kill(os.getpid(), 9)", 137),
        slow("import os; os.kill(os.getpid(), 15)", 143),
        slow("import os, time; time.sleep(0.5); os.kill(os.getpid(), 9)", 137),
    ],
)
def test_the_script_says_nothing_of_its_own(program: str, code: int, tmp_path: Path) -> None:
    """Job control, which gives the run its process group, would announce each end on the sweep's terminal."""
    line = script([sys.executable, "-c", program], {}, log=tmp_path / "log", stop=tmp_path / "stop", folder=tmp_path)
    said = subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
    assert (said.returncode, said.stdout, said.stderr) == (code, "", "")
    assert ("Killed" in (tmp_path / "log").read_text()) is (code == 137)


ASKED = """
import signal, sys, time
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append("TERM"))
signal.signal(signal.SIGINT, lambda *_: got.append("INT"))
print("ready", flush=True)
end = time.monotonic() + float(sys.argv[1])
while not got and time.monotonic() < end:
    time.sleep(0.02)
time.sleep(1.0)
print(*got or ["nothing"], flush=True)
sys.exit(9)
"""


@pytest.mark.parametrize(("terminal", "file"), rest_slow([(True, False), (False, True), (True, True)], [(True, True)]))
def test_the_script_asks_once_and_only_by_the_file(terminal: bool, file: bool, tmp_path: Path) -> None:
    log, stop = tmp_path / "log", tmp_path / "stop"
    wait = "60" if file else "1"
    line = script([sys.executable, "-c", ASKED, wait], {}, log=log, stop=stop, folder=tmp_path)
    child = subprocess.Popen(["bash", "-c", line], start_new_session=True)
    until(lambda: log.exists() and "ready" in log.read_text().splitlines(), "the process begins")
    if terminal:
        os.killpg(child.pid, signal.SIGINT)  # Ctrl-C: the whole foreground group
    if file:
        stop.touch()
    assert child.wait(DEADLINE) == 9
    assert log.read_text().splitlines()[-1] == ("TERM" if file else "nothing")


@pytest.mark.slow
def test_a_scheduler_that_signals_everybody_is_heard_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = script([sys.executable, "-c", ASKED, "60"], {}, log=log, stop=tmp_path / "stop", folder=tmp_path)
    child = subprocess.Popen(["bash", "-c", line], start_new_session=True)
    until(lambda: log.exists() and "ready" in log.read_text().splitlines(), "the process begins")
    for process in psutil.Process(child.pid).children(recursive=True):
        process.terminate()
    child.terminate()
    assert child.wait(DEADLINE) == 9
    assert log.read_text().splitlines()[-1] == "TERM"


def test_the_script_does_not_begin_what_was_stopped_before(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    line = script(["touch", "made"], {}, log=tmp_path / "log", stop=tmp_path / "stop", folder=tmp_path)
    assert begun(line).wait(DEADLINE) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["stop"]


def test_without_parsl_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "parsl", None)
    with pytest.raises(ResourceError, match=r"pip install 'stabilitylab\[sweep\]'"):
        run(planned(tmp_path, "a"), launcher="parsl")


def test_parsl_runs_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("parsl", reason="the extra 'sweep' is not installed")
    python(monkeypatch, "import os, sys; print('stabilitylab: no ' + sys.argv[1]); sys.exit(4)")
    outcome = run(planned(tmp_path, "a", "b"), launcher="parsl", retries=1, workers=2)
    assert [(job.state, job.reason) for job in outcome.jobs] == [("failed", "no a"), ("failed", "no b")]
    for job in outcome.jobs:
        lines = [line for line in job.log_path.read_text().splitlines() if not line.startswith("$")]
        assert lines == [f"stabilitylab: no {job.name}", "[exit 4]"] * 2
    assert list(tmp_path.glob("sweep/.stop-*")) == []
    assert (tmp_path / "sweep" / "parsl").is_dir()
    assert not Path("runinfo").exists()


@pytest.mark.slow
def test_parsl_trains(tmp_path: Path) -> None:
    pytest.importorskip("parsl", reason="the extra 'sweep' is not installed")
    jobs = planned(tmp_path, "a", "b", steps=2)
    outcome = run(jobs, launcher="parsl", workers=2)
    assert [job.state for job in outcome.jobs] == ["finished"] * 2, jobs[0].log_path.read_text()


CONFIG = """
from parsl.config import Config
from parsl.executors import ThreadPoolExecutor
config = Config(executors=[ThreadPoolExecutor(label="mine", max_threads=1)], run_dir={folder!r},
                initialize_logging=False)  # Parsl does not close its log
"""


@pytest.mark.slow
def test_parsl_under_a_configuration_of_the_users_stops_in_good_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("parsl", reason="the extra 'sweep' is not installed")
    python(monkeypatch, f"import sys; sys.argv[1:] = ['60']\n{ASKED}")
    mine = tmp_path / "mine.py"
    mine.write_text(CONFIG.format(folder=str(tmp_path / "elsewhere")))
    jobs = planned(tmp_path, "a", "b")
    log = jobs[0].log_path
    caller = threading.Thread(
        target=lambda: (
            until(lambda: log.exists() and "ready" in log.read_text().splitlines(), "it begins"),
            os.kill(os.getpid(), signal.SIGINT),
        )
    )
    caller.start()
    heard = Heard()
    outcome = run(jobs, launcher="parsl", parsl_config=mine, audience=heard, retries=3)
    caller.join()
    assert outcome.exit_code == 130
    assert log.read_text().splitlines()[-2:] == ["TERM", "[exit 9]"]
    assert [name for name, *_ in heard.ends] == ["a", "b"] or [name for name, *_ in heard.ends] == ["b", "a"]
    assert jobs[1].log_path.read_text() == "[exit 130]\n"  # it waited for a's only thread, and was never begun
    assert (tmp_path / "elsewhere").is_dir()


class Future:
    """What Parsl hands out: not done, or done with an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def done(self) -> bool:
        return self.error is not None

    def exception(self) -> Exception | None:
        return self.error


def test_a_stopped_app_that_never_began_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = planned(tmp_path, "a")[0]
    (tmp_path / "sweep").mkdir()
    process = launchers._ParslProcess(Future(), job, tmp_path / "sweep" / "stop")
    assert process.poll() is None
    process.stop(1)
    assert (tmp_path / "sweep" / "stop").exists()
    assert process.poll() is None
    monkeypatch.setattr(launchers, "GRACE", -1.0)
    writer = leave(job, "running")
    assert process.poll() is None
    writer.close()
    assert process.poll() == 130


def test_a_run_that_parsl_lost_may_finish_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = prepare(planned(tmp_path, "a")[0])
    process = launchers._ParslProcess(Future(ConnectionError("no heartbeat")), job, tmp_path / "stop")
    writer = leave(job, "running")
    assert process.poll() is None
    monkeypatch.setattr(launchers, "LOST", -1.0)
    assert process.poll() == 1  # it hangs
    monkeypatch.undo()
    assert process.poll() is None
    writer.close()
    assert process.poll() == 1
    assert job.log_path.read_text() == "parsl: ConnectionError: no heartbeat\n"


def test_executors_that_cannot_start_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsl = pytest.importorskip("parsl", reason="the extra 'sweep' is not installed")

    def broken(config: object) -> None:
        raise FileNotFoundError("sbatch")

    monkeypatch.setattr(parsl, "DataFlowKernel", broken)
    with pytest.raises(ResourceError, match="Parsl cannot start its executors: FileNotFoundError: sbatch"):
        run(planned(tmp_path, "a"), launcher="parsl")


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (None, InputError, "cannot read the Parsl configuration"),
        ("1 / 0", InputError, "ZeroDivisionError"),
        ("x = 1", UsageError, "must define 'config'"),
        ("config = 'slurm'", UsageError, "must define 'config'"),
    ],
)
def test_a_wrong_configuration_of_parsl(text: str | None, error: type, words: str, tmp_path: Path) -> None:
    pytest.importorskip("parsl", reason="the extra 'sweep' is not installed")
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(error, match=words):
        run(planned(tmp_path, "a"), launcher="parsl", parsl_config=path)
