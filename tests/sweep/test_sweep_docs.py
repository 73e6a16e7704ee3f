"""What docs/sweeps.md says is so: numbers, configurations of Parsl, the Python example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stabilitylab.experiments import SWEEPS
from stabilitylab.sweep import grid, runner

PAGE = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_has_the_table_of_all_sweeps_and_names_none_that_there_is_not() -> None:
    assert "```{sweeps}" in PAGE  # written from the registry: tests/test_docs.py
    named = re.findall(r"`((?:branchnorm|deepnet|admin|claims|table):\w+)`", PAGE)
    assert named, "docs/sweeps.md names no sweep"
    assert {*named} - {*SWEEPS} == set(), "docs/sweeps.md names sweeps that do not exist"


def test_the_grid_on_the_page() -> None:
    line = re.search(r"sweep --grid (.*?) --out", PAGE)
    assert line is not None
    assert "deepnorm-12-lr0.001-s3" in {run.name for run in grid(line[1].split())}
    assert "  deepnorm-12-lr0.001-s3/" in PAGE


CHECK = """
import sys
from pathlib import Path
from stabilitylab.sweep.launchers import _parsl_config
print(len(_parsl_config(Path(sys.argv[1]), 1).executors[0].available_accelerators))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpus.py", "slurm.py"])
def test_the_configurations_of_parsl_are_accepted(name: str, tmp_path: Path) -> None:
    pytest.importorskip("parsl", reason="the extra 'sweep' is not installed")
    (block,) = (block for block in BLOCKS if block.startswith(f"# {name}"))
    (tmp_path / name).write_text(block)
    # in a process of its own, since Parsl leaves sockets open
    command = [sys.executable, "-c", CHECK, str(tmp_path / name)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout == "4\n", result.stderr


@pytest.mark.slow
def test_the_python_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sweep_cases import FakeLauncher

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "Local", lambda workers, gpus: FakeLauncher(workers=workers))
    (block,) = (block for block in BLOCKS if "sweep.plan" in block)
    exec(compile(block, "docs/sweeps.md", "exec"), {})
    assert capsys.readouterr().out == "6 runs: 6 finished\n"
