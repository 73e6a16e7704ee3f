"""kill -9 at random moments of real processes: what was acknowledged is there, once, and the run goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rest_slow import rest_slow
from store_cases import steps_in

from stabilitylab.store import Run, RunWriter

HERE = Path(__file__).parent


class Writers:
    def __init__(self) -> None:
        paths = os.pathsep.join([str(HERE), str(HERE.parents[1])])
        self._server = subprocess.Popen(
            [sys.executable, str(HERE / "killed_writer.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )

    @contextmanager
    def writing(self, path: Path, acknowledgements: Path, part: int, step: int) -> Iterator[None]:
        """A process writes the run until the block ends; then it is killed."""
        self._server.stdin.write(f"{path} {acknowledgements} {part} {step}\n")
        self._server.stdin.flush()
        writer = int(self._answer())
        try:
            yield
        finally:
            os.kill(writer, signal.SIGKILL)
            assert self._answer() == "dead"

    def stop(self) -> None:
        self._server.communicate(timeout=30)

    def _answer(self) -> str:
        return self._server.stdout.readline().strip()


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    writers = Writers()
    yield writers
    writers.stop()


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists() or "step" not in file.read_text():
        assert time.monotonic() < deadline, "the writer never wrote"
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("chain", rest_slow(range(6), range(2)))
def test_killed_five_times_and_resumed(writers: Writers, tmp_path: Path, chain: int) -> None:
    chance, path, part, step = random.Random(chain), tmp_path / "run", 0, 0
    for attempt in range(5):
        acknowledgements = tmp_path / f"acknowledged-{attempt}"
        with writers.writing(path, acknowledgements, part, step):
            wait_for(acknowledgements)
            time.sleep(chance.uniform(0, 0.15))
            if attempt == 2:
                assert Run.open(path).status.state == "running"
                assert steps_in(path, live=True) > step

        lines = [line.split() for line in acknowledgements.read_text().splitlines()]
        last = max(int(line[1]) for line in lines if line[0] == "step")
        assert last + 1 <= steps_in(path) <= last + 2
        status = Run.open(path).status
        assert (status.state, status.reason) == ("interrupted", "the process was killed, or its machine was lost")
        assert status.step >= last
        part, step = max(
            ((int(line[1]), int(line[2])) for line in lines if line[0] == "checkpoint"), default=(part, step)
        )
        part = part or 1
    writer = RunWriter.resume(path, part)
    writer.close()
    assert steps_in(path) == step
    assert not [
        file for file in path.rglob("*") if file.name.endswith((".tmp", ".records")) and "aside" not in file.parts
    ]
