"""The allocator keeps what an update frees, where it can be told to."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys

import pytest

from stabilitylab.train import environment

FAULTS = """
import resource, torch
from stabilitylab.train.environment import keep_freed_memory
kept = keep_freed_memory()
def update():
    held = [torch.ones(100_000) for _ in range(100)]  # 40 MB, as activations are
for _ in range(3):
    update()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
update()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**variables: str) -> tuple[str, int]:
    run = [sys.executable, "-W", "ignore", "-c", FAULTS]
    output = subprocess.run(run, check=True, capture_output=True, text=True, env={**os.environ, **variables}).stdout
    kept, count = output.split()
    return kept, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_an_update_faults_no_pages_in_again_unless_the_user_set_the_allocator() -> None:
    kept, count = faults()
    assert kept == "True"
    assert count < 100
    left, many = faults(MALLOC_MMAP_THRESHOLD_="131072")  # what glibc begins with
    assert left == "False"
    assert many > 5000


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert environment.keep_freed_memory() is False
