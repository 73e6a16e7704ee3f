"""What the parts share: where things lie, how long there is, what was done so far, and the log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stabilitylab.errors import InputError, ResourceError

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("de", "en")
SPLITS = ("train", "val", "test_2016_flickr")
STOPPING = 15.0  # seconds in which runs write a checkpoint and end
RESERVE = 25.0  # seconds of a call that are left for the tables and the archive
CACHE = Path("cache")  # vocabularies and encoded text, which a call elsewhere need not make again


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A refusal of the operating system as one sentence about ``path`` (ResourceError)."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ResourceError(f"cannot write {path} ({reason}): free some space or name another folder.") from error


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that a reader, and a call that is cut, finds the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


class Clock:
    """The end of this call; a part may have an earlier one."""

    def __init__(self, seconds: float) -> None:
        self.began = time.monotonic()
        self.end = self.began + seconds

    def left(self) -> float:
        return self.end - time.monotonic()

    def passed(self) -> float:
        return time.monotonic() - self.began

    def within(self, seconds: float) -> Clock:
        """The same, but no longer than ``seconds`` from now."""
        part = Clock(0)
        part.end = min(self.end, part.began + seconds)
        return part


class Log:
    """Lines to the terminal and to log.txt; a file to whoever prints."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, text: str) -> int:
        sys.stdout.write(text)
        with self.path.open("a", encoding="utf-8") as file:
            return file.write(text)

    def flush(self) -> None:
        sys.stdout.flush()

    def line(self, text: str) -> None:
        self.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        self.flush()


@dataclass(frozen=True)
class Progress:
    """How a part stands. complete; partial: call again; failed: something was wrong, and the next call tries again."""

    state: str
    sentence: str


@dataclass
class State:
    """state.json: how each part stands, what was decided on the way, how long each call took, and which runs are in the
    archives, in that order."""

    path: Path
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    decided: dict[str, Any] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> State:
        if not path.exists():
            return cls(path)
        try:
            return cls(path, **json.loads(path.read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError) as error:
            raise InputError(f"{path} is damaged ({error}): remove it; finished runs are found without it.") from error

    def save(self) -> None:
        entry = {"parts": self.parts, "decided": self.decided, "calls": self.calls, "kept": self.kept}
        replace_file(self.path, (json.dumps(entry, indent=1) + "\n").encode())

    def spent(self) -> float:
        """Seconds of all calls."""
        return sum(call["seconds"] for call in self.calls)

    def seconds(self, part: str) -> float:
        return float(self.parts.get(part, {}).get("seconds", 0.0))

    def stands(self, part: str) -> str:
        """complete, failed, partial, or new."""
        return str(self.parts.get(part, {}).get("state", "new"))


@dataclass(frozen=True)
class Place:
    """Where this call works: the folder ``work`` is the current one, so that no path in a run is absolute. What is to
    come back goes to ``out``, by ``keep``, as often as something was finished."""

    work: Path
    log: Log
    state: State
    total: float  # seconds of the second occasion, all calls together
    smoke: bool = False
    python: str = sys.executable
    keep: Callable[[], object] = lambda: None

    @property
    def graphs(self) -> str:
        """``train.cuda_graphs`` of every run: "on" only where the checks found a recorded run equal to a direct one."""
        return "off" if self.smoke else str(self.state.decided.get("graphs", "off"))

    @property
    def device(self) -> str:
        return "cpu" if self.smoke else "cuda"

    @property
    def text(self) -> dict[str, str]:
        """The data settings of every run; the synthetic task in a smoke test."""
        if self.smoke:
            return {}
        train, valid = pair("train"), pair("val")
        return {"source": f"text:{train}", "valid": valid}

    def call(
        self,
        command: Sequence[str],
        clock: Clock,
        output: Path,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> int | None:
        """Runs a command into a file, with ``environment`` besides ours; its exit code, or None where its time was up.

        A command whose time is up is asked to end, and is killed ``STOPPING`` seconds later.
        """
        shown = " ".join("python" if word == self.python else word for word in command).replace(f"{ROOT}/", "")
        self.log.line(f"$ {shown}")
        began = time.monotonic()
        with writing(output):
            output.parent.mkdir(parents=True, exist_ok=True)
        with writing(output), output.open("w") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=cwd,
                env={**os.environ, **(environment or {})},
            )
            try:
                code = process.wait(max(0.1, clock.left()))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    process.terminate()
                    try:
                        process.wait(STOPPING)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()
        said = "its time was up" if code is None else f"exit {code}"
        self.log.line(f"{said} after {time.monotonic() - began:.0f} s; {output}")
        return code


def pair(split: str) -> str:
    """``SRC,TGT`` of a split, relative to the folder ``out``."""
    return ",".join(str(_file(Path("data"), split, side)) for side in SIDES)


def _file(folder: Path, split: str, side: str) -> Path:
    plain = folder / f"{split}.{side}"
    return plain if plain.exists() else plain.with_name(f"{plain.name}.gz")


def settle(work: Path, out: Path, data: Path | None) -> None:
    """Makes both folders, and ``work`` the current one, with the corpus as ``data`` in it; InputError where a file is
    missing."""
    if data is not None:
        data = data.expanduser().resolve()
        missing = [path for split in SPLITS for side in SIDES if not (path := _file(data, split, side)).exists()]
        if missing:
            raise InputError(
                f"--data {data} has no {missing[0].name}: name a folder with {', '.join(SPLITS)}, each as .de and .en, "
                "plain or .gz."
            )
    for folder in (out, work, work / "runs"):
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    os.chdir(work)
    os.environ["STABILITYLAB_CACHE"] = str(CACHE.resolve())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    if data is not None:
        link = Path("data")
        with writing(link):
            link.unlink(missing_ok=True)
            link.symlink_to(data)


def check_device(smoke: bool) -> dict[str, str]:
    """What measures, in words. Raises ResourceError without a GPU, since nothing else is to be measured here."""
    import torch

    from stabilitylab.config import TrainConfig
    from stabilitylab.train import provenance

    if not smoke and not torch.cuda.is_available():
        raise ResourceError(f"torch {torch.__version__} sees no CUDA device: run this on one, or try --smoke on a CPU.")
    facts = provenance(TrainConfig(), torch.device("cpu" if smoke else "cuda"))
    kept = ("stabilitylab", "python", "torch", "cuda", "device", "git_revision")
    return {key: str(facts[key]) for key in kept} | {"cores": str(os.cpu_count())}
