"""The script of results/h200 as modules, in an empty folder; and a machine on which packages are missing."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loose_scripts import scripts_of

SCRIPT = Path(__file__).resolve().parents[2] / "results" / "h200"
# What is blocked is found in the folder into which wheels are unpacked, and nowhere else.
BLOCKER = """
import sys
from importlib.machinery import PathFinder

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {names}:
            return None
        if path is None:
            path = [each for each in sys.path if each.endswith("/site")]
        if (found := PathFinder.find_spec(name, path, target)) is None:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return found

sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Its modules and ``at(...)``, a Place in a folder that is the current one, whose archives go to ``out`` in it."""
    path = os.pathsep.join((str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")))
    monkeypatch.setenv("PYTHONPATH", path)
    with scripts_of("results/h200") as load:
        bare, place, checks, parts, collect = map(load, ("bare", "place", "checks", "parts", "collect"))

        def at(work: Path = tmp_path, smoke: bool = True, total: float = 1080.0) -> Any:
            (work / "runs").mkdir(parents=True, exist_ok=True)
            monkeypatch.chdir(work)
            state = place.State.read(Path("state.json"))
            archives = collect.Archives(work / "out", state)
            return place.Place(Path.cwd(), place.Log(Path("log.txt")), state, total, smoke, keep=archives.keep)

        yield SimpleNamespace(bare=bare, place=place, checks=checks, parts=parts, collect=collect, at=at)


class Bare:
    """A machine without pydantic and plotly, and the folder of what is carried to it."""

    blocked = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "plotly")

    def __init__(self, folder: Path) -> None:
        self.folder, self.carried = folder, folder / "carried"
        self.path = folder / "blocker"
        self.path.mkdir()
        (self.path / "sitecustomize.py").write_text(BLOCKER.format(names=repr(self.blocked)))
        (self.carried / "wheels").mkdir(parents=True)

    def carry(self, *names: str) -> None:
        """Wheels of what is installed here."""
        machine = f"linux_{os.uname().machine}"
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        for name in names:
            found = distribution(name)
            files = [file for file in found.files or () if not file.parts[0].startswith("..") and file.suffix != ".pyc"]
            compiled = any(file.suffix == ".so" for file in files)
            tags = f"{tag}-{tag}-{machine}" if compiled else "py3-none-any"
            wheel = self.carried / "wheels" / f"{name.replace('-', '_')}-{found.version}-{tags}.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                for file in files:
                    archive.write(str(found.locate_file(file)), str(file))

    def start(self, *arguments: str, **how: Any) -> subprocess.Popen[str]:
        """The script, in a process group of its own."""
        command = [sys.executable, str(SCRIPT / "make.py"), "--carried", str(self.carried), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(self.path)}
        how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **how}
        return subprocess.Popen(command, text=True, cwd=self.folder, env=environment, start_new_session=True, **how)

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def bare_machine(tmp_path: Path) -> Bare:
    assert sysconfig.get_platform().startswith("linux")
    return Bare(tmp_path)
