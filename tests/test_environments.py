"""What the tests may be run under: an instruction set (`make test-sets`), another torch (`make test-torch`)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(("wanted", "code", "said"), [("default", 0, "test_registry.py"), ("sse9", 4, "not followed")])
def test_an_instruction_set_that_torch_does_not_follow_ends_the_session(wanted: str, code: int, said: str) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "tests/test_registry.py"]
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    settings["ATEN_CPU_CAPABILITY"] = wanted
    ended = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False)
    assert (ended.returncode, said in ended.stdout) == (code, True), ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr


def test_the_oldest_torch_is_the_same_wherever_it_stands() -> None:
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for page in ("README.md", "docs/quickstart.md"):
        assert re.findall(r"torch ([\d.]+) or newer", (ROOT / page).read_text(encoding="utf-8")) == [oldest], page
    if make := shutil.which("make"):
        command = [make, "--dry-run", "--always-make", "test-torch"]
        settings = {"PATH": os.environ["PATH"]}  # not those of a `make` around this test
        said = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=True).stdout
        assert f"'torch=={oldest}'" in said
