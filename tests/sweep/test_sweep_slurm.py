"""``--launcher slurm-array`` against a ``sbatch`` that runs the tasks here and kills some."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from sweep_cases import planned

from stabilitylab.errors import ResourceError, UsageError
from stabilitylab.store import Run
from stabilitylab.store.verify import verify
from stabilitylab.sweep import slurm, submit
from stabilitylab.sweep.jobs import Job, log_lines

FAKE = '''#!{python}
"""sbatch, as far as a sweep needs it: tasks one after the other; $FAKE names those that are killed or asked to stop."""
import os, re, signal, subprocess, sys, time
from pathlib import Path

*options, script = sys.argv[1:]
assert options[0] == "--parsable", options
text = Path(script).read_text()
with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(" ".join(options) + "\\n")
if "--refuse" in options:
    sys.exit("sbatch: error: Invalid account or account/partition combination specified")
first, last, most = re.search(r"^#SBATCH --array=(\\d+)-(\\d+)(%\\d+)?$", text, re.M).groups()
assert "#SBATCH --requeue" in text and "--signal=B:TERM@" in text
wanted = dict(pair.split(":") for pair in os.environ.get("FAKE", "").split())
for task in range(int(first), int(last) + 1):
    environment = {{**os.environ, "SLURM_ARRAY_TASK_ID": str(task)}}
    child = subprocess.Popen(["bash", script], env=environment, start_new_session=True, cwd="/")
    act = wanted.get(str(task))
    if act:
        run = Path(os.environ["FAKE_RUNS"]) / os.environ["FAKE_NAMES"].split()[task - 1]
        deadline = time.monotonic() + 120
        while not list(run.glob("checkpoints/step-*.pt")) and time.monotonic() < deadline and child.poll() is None:
            time.sleep(0.02)
        if act == "kill":
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.terminate()  # the batch shell alone, as --signal=B: has it
    child.wait()
print("4711;cluster")
'''


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH with the fake; what it was asked for goes to cluster/log."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    (folder / "sbatch").write_text(FAKE.format(python=sys.executable))
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LOG", str(folder / "log"))
    monkeypatch.setenv("FAKE_RUNS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return folder


def python(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(Job, "argv", property(lambda self: [sys.executable, "-c", program, self.name]))


def test_each_run_is_a_task_with_its_log(tmp_path: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python(monkeypatch, "import os, sys; print(os.environ['OMP_NUM_THREADS'], os.getcwd()); sys.exit(3)")
    jobs = planned(tmp_path, "a", "b", "c", threads=2)
    monkeypatch.chdir(tmp_path)
    (done,) = submit(jobs, ["--gpus=1"], at_once=2)
    assert (done.number, done.names) == ("4711", ("a", "b", "c"))
    assert done.script.read_text().splitlines()[1] == "#SBATCH --array=1-3%2"
    assert (cluster / "log").read_text() == "--parsable --gpus=1\n"
    for job in jobs:
        assert log_lines(job.log_path)[-2:] == [f"2 {tmp_path}", "[exit 3]"]
        assert job.now().state == "failed"
    assert done.sentence().startswith("submitted 3 runs as array job 4711 (")


def test_an_array_has_no_more_tasks_than_slurm_takes(
    tmp_path: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python(monkeypatch, "pass")
    monkeypatch.setattr(slurm, "LARGEST", 2)
    done = submit(planned(tmp_path, "a", "b", "c", "d", "e"))
    assert [one.names for one in done] == [("a", "b"), ("c", "d"), ("e",)]
    assert all(log_lines(job.log_path)[-1] == "[exit 0]" for job in planned(tmp_path, "a", "b", "c", "d", "e"))


def test_no_slurm_and_a_slurm_that_refuses(tmp_path: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = planned(tmp_path, "a")
    with pytest.raises(ResourceError, match=r"sbatch refuses .*Invalid account"):
        submit(jobs, ["--refuse"])
    with pytest.raises(UsageError, match="'--array=1-9' is set by the sweep itself"):
        submit(jobs, ["--array=1-9"])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ResourceError, match="needs Slurm; --print prints the commands"):
        submit(jobs)


def test_the_command_says_what_does_not_go_together(run) -> None:
    grid = ["sweep", "--grid", "arch=postln", "depth=2"]
    assert "do not go with a Slurm array" in run(*grid, "--launcher", "slurm-array", "--gpus", "0")[2]
    assert "--sbatch goes with --launcher slurm-array" in run(*grid, "--sbatch", "--gpus=1")[2]
    assert "close its quotes" in run(*grid, "--launcher", "slurm-array", "--sbatch", "'")[2]


@pytest.mark.slow
def test_a_sweep_is_submitted_killed_submitted_again_and_whole(
    run, tmp_path: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three runs one is killed behind a checkpoint, one is asked to stop; the same command finishes both."""
    grid = ["sweep", "--grid", "arch=postln,deepnorm,preln", "depth=2", "--out", ".", "--launcher", "slurm-array"]
    small = "train.steps=300 data.sentences=4 data.held_out=6 train.checkpoint_every=10 probes.names=['none']"
    for setting in small.split():
        grid += ["--set", setting]
    order = ["postln-2-s0", "deepnorm-2-s0", "preln-2-s0"]
    monkeypatch.setenv("FAKE_NAMES", " ".join(order))
    monkeypatch.setenv("FAKE", "2:kill 3:stop")
    code, out, err = run(*grid)
    assert code == 0, err
    assert "submitted 3 runs as array job 4711" in out
    states = {name: Run.open(tmp_path / name).status.state for name in order}
    assert states == {"postln-2-s0": "finished", "deepnorm-2-s0": "interrupted", "preln-2-s0": "interrupted"}
    assert log_lines(tmp_path / "sweep/preln-2-s0.log")[-1] == "[exit 143]"
    assert "[exit" not in (tmp_path / "sweep/deepnorm-2-s0.log").read_text()
    monkeypatch.setenv("FAKE", "")
    code, out, err = run(*grid)
    assert "submitted 2 runs" in out
    for name in order:
        found = Run.open(tmp_path / name)
        assert found.status.state == "finished"
        assert found.metrics["step"].tolist() == list(range(301))
        assert verify(tmp_path / name).findings == []
    assert len(Run.open(tmp_path / order[1]).manifest["attempts"]) == 2
    code, out, err = run(*grid)
    assert (code, "3 runs: 3 finished; nothing was submitted" in out) == (0, True)
