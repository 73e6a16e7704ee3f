"""Tests that are told an instruction set run with it, or do not run (`make test-sets`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


@pytest.mark.parametrize(("wanted", "code", "said"), [("default", 0, "test_registry.py"), ("sse9", 4, "not followed")])
def test_an_instruction_set_that_torch_does_not_follow_ends_the_session(wanted: str, code: int, said: str) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "tests/test_registry.py"]
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    settings["ATEN_CPU_CAPABILITY"] = wanted
    ended = subprocess.run(command, cwd=TESTS.parent, env=settings, capture_output=True, text=True, check=False)
    assert (ended.returncode, said in ended.stdout) == (code, True), ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr
