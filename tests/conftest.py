"""Shared set-up: one thread a worker, GPU tests skipped with a reason where there is no GPU."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from forked import Forked

from stabilitylab import cli
from stabilitylab.commands import COMMANDS

torch.set_num_threads(1)
# Of the processes that tests start, too: more threads than cores wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LONG = 600.0  # seconds
SYNC = os.fsync
MULTI30K = Path(__file__).resolve().parents[2] / "shared" / "data" / "multi30k"


def pytest_sessionstart() -> None:
    """Under ATEN_CPU_CAPABILITY the tests run with that instruction set or not at all: torch ignores what it lacks."""
    wanted = os.environ.get("ATEN_CPU_CAPABILITY")
    with warnings.catch_warnings(action="ignore"):  # its own word on the matter, of which pytest would make a traceback
        taken = torch.backends.cpu.get_cpu_capability()
    if wanted and wanted.upper() != taken:
        pytest.exit(f"ATEN_CPU_CAPABILITY={wanted} is not followed: torch runs with {taken}", returncode=4)


def patience(item: pytest.Item) -> float:
    """The seconds that a test asks for itself, where these are ten minutes or more; else 0."""
    asked = item.get_closest_marker("timeout")
    seconds = float(asked.args[0]) if asked is not None and asked.args else 0.0
    return seconds if seconds >= LONG else 0.0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=patience, reverse=True)  # the longest begin first, so that no worker waits for the last of them
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of the store alone wait for the disk: elsewhere nobody pulls the plug, and a made-up run syncs 28 times."""
    os.fsync = SYNC if "store" in item.path.parts else lambda descriptor: None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def denormal_numbers() -> Iterator[None]:
    """A command flushes denormal numbers in its process, which here is that of the tests after it, too."""
    yield
    torch.set_flush_denormal(False)


BUILD = cli.build
BUILT: dict[tuple[Any, ...], Any] = {}


def _built_once() -> Any:
    """The command line of the registered commands, which typer otherwise makes anew for each call, in 0.08 s."""
    commands = tuple((entry.name, entry.function) for entry in COMMANDS.values())
    if commands not in BUILT:
        BUILT[commands] = typer.main.get_command(BUILD())
    return BUILT[commands]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Calls the command line in an empty folder; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "build", _built_once)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["stabilitylab", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call


@pytest.fixture
def multi30k() -> Path:
    """The folder of the Multi30k corpus (research use only, never copied); skips where it is absent."""
    if not MULTI30K.is_dir():
        pytest.skip(f"the Multi30k corpus is not at {MULTI30K}; the synthetic twin of this test covers the code")
    return MULTI30K


@pytest.fixture(autouse=True)
def log_as_it_begins() -> None:
    """Undoes what tests before did to the package's loggers: a rank that is silent, a library that disables loggers."""
    own = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "stabilitylab"]
    for log in map(logging.getLogger, own):
        log.setLevel(logging.NOTSET)
        log.disabled, log.propagate = False, True
    logging.disable(logging.NOTSET)


@pytest.fixture
def forked_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of a sweep are forks of this process."""
    monkeypatch.setattr("stabilitylab.sweep.launchers._LocalProcess", Forked)
