"""benchmarks/shared_gpu.py: what its table says of given rates, and that it runs, fails and ends."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loose_scripts import scripts_of

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPT = BENCHMARKS / "shared_gpu.py"


@pytest.fixture
def shared_gpu() -> Iterator[Any]:
    with scripts_of("benchmarks") as load:
        yield load("shared_gpu")


def test_ratios_are_of_the_median_of_one_run_alone(shared_gpu: Any) -> None:
    arguments = argparse.Namespace(device="cpu", counts="1,8", depth=200, seconds=8.0, rounds=2)
    rates = {1: [9.0, 10.0, 10.0, 12.0], 8: [50.0, 60.0, 40.0, 50.0]}
    text = shared_gpu.table(rates, {1: 0, 8: 0}, arguments)
    assert "| 8 | 50.00 | 5.00 [4.00, 6.00] | 0.62 | - |" in text
    assert "| 1 | 10.00 | 1.00 [0.90, 1.20] | 1.00 | - |" in text
    assert "over the last, the control: 0.750" in text


@pytest.mark.slow
def test_two_runs_at_a_time_on_the_cpu(shared_gpu: Any, capfd: pytest.CaptureFixture[str]) -> None:
    rate, used = shared_gpu.together(2, "cpu", 2, 0.2)
    assert rate > 0, capfd.readouterr().err
    assert used == 0


def test_counts_go_up_and_down_again_in_each_round(
    shared_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[Any, ...]] = []

    def together(*own: Any) -> tuple[float, int]:
        measured.append(own)
        return 10.0 * own[0], 0

    monkeypatch.setattr(shared_gpu, "together", together)
    flags = ["--device", "cpu", "--counts", "2", "--depth", "2", "--seconds", "0.2", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags, "--out", str(tmp_path / "t")])
    shared_gpu.main()
    assert measured == [(count, "cpu", 2, 0.2) for count in (1, 2, 2, 1, 1, 2, 2, 1)]
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \|", (tmp_path / "t.md").read_text(), re.MULTILINE)
    assert rows == [("1", "10.00"), ("2", "20.00")]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_leaves_no_process(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 1
    assert "1 at a time: ResourceError: --device cuda: torch" in ended.stderr
    assert "Traceback" not in ended.stderr
