"""Each recipe of CONTRIBUTING.md is a file that works as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stabilitylab.registry import PLUGINS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
RECIPES = dict(zip(("arch", "probe", "figure", "detector", "source", "command"), BLOCKS, strict=True))
SMALL = ("data.sentences=4", "data.held_out=6", "data.validation=40")
FAST = ("--depth", "2", "--steps", "3", "--quiet", *(word for setting in SMALL for word in ("--set", setting)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipes as modules of a folder."""
    folder = tmp_path_factory.mktemp("recipes")
    for name, source in RECIPES.items():
        (folder / f"my_{name}.py").write_text(source, encoding="utf-8")
    return folder


def stabilitylab(folder: Path, *arguments: str) -> str:
    named = ",".join(f"my_{name}" for name in RECIPES)
    env = {**os.environ, "PYTHONPATH": str(ROOT), PLUGINS: named}
    command = [sys.executable, "-m", "stabilitylab", *arguments]
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_registries_find_each(folder: Path) -> None:
    listed = json.loads(stabilitylab(folder, "list", "--json"))
    assert listed["left_out"] == {}
    origins = listed["from"].items()
    found = {kind: [name for name, home in own.items() if home != "stabilitylab"] for kind, own in origins}
    assert found == {
        "archs": ["shrunk"],
        "probes": ["spread"],
        "figures": ["mine:1"],
        "detectors": ["high_loss"],
        "sources": ["copied"],
        "sweeps": ["mine:1"],
        "commands": ["count"],
    }


def test_the_figures_runs_are_planned(folder: Path) -> None:
    lines = stabilitylab(folder, "sweep", "mine:1", "--print").splitlines()
    assert len(lines) == 2 * 2 * 3
    assert all("--out runs/tiny/mine-1" in line for line in lines)
    assert "runs/tiny/mine-1/sweep/postln-6-s3.toml" in lines[0]


@pytest.mark.slow
def test_they_work_together(folder: Path) -> None:
    chosen = ("--arch", "shrunk", "--set", "arch.kappa=0.3", "--probes", "default,spread", "--seed", "3")
    run = stabilitylab(folder, "probe", "--data", "copied:30", *chosen, *FAST).strip()
    assert (folder / run / "probes" / "spread").is_dir()
    assert stabilitylab(folder, "count") == "1\n"
    assert "high_loss" in json.loads(stabilitylab(folder, "diagnose", run, "--json"))["checked"]
    stabilitylab(folder, "report", "--figure", "mine:1", "--quiet")
    page = (folder / "report" / "index.html").read_text(encoding="utf-8")
    assert "Loss of every run" in page
    assert "Every run ends below 8 nats" in page
