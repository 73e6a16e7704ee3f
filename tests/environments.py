"""Environments of their own for what is built here: the dependencies of this one, and of ours what is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def built(source: Path, out: Path, *targets: str) -> list[Path]:
    """The distributions of a source tree ("wheel", "sdist"), made by hatchling without a network."""
    chosen = [word for target in targets for word in ("-t", target)]
    command = [sys.executable, "-m", "hatchling", "build", *chosen, "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return sorted(out.iterdir())


class Environment:
    """A virtual environment in ``folder``, with the dependencies of this one but not with this source tree."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "env", with_pip=False)
        self.python = folder / "env" / "bin" / "python"
        self.site = next((folder / "env" / "lib").glob("python*/site-packages"))
        # a folder named in a .pth file is searched, and .pth files in it are not: no editable install is seen
        paths = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        (self.site / "dependencies.pth").write_text("\n".join(paths), encoding="utf-8")
        self.work = folder / "work"
        self.work.mkdir()

    def install(self, *wheels: Path) -> None:
        options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", *options, *map(str, wheels)]
        subprocess.run(command, check=True, capture_output=True)

    def run(self, *arguments: str, program: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """The command ``stabilitylab`` of the environment, or another program, in a folder of its own."""
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "STABILITYLAB_PLUGINS")}
        command = [*(program or [str(self.python.with_name("stabilitylab"))]), *arguments]
        return subprocess.run(command, cwd=self.work, env=kept, capture_output=True, text=True, check=False)
