"""Each recipe of CONTRIBUTING.md is a file that works as it stands there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stabilitylab.registry import PLUGINS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
RECIPES = dict(zip(("arch", "probe", "figure", "detector", "signal", "source", "command"), BLOCKS, strict=True))
SMALL = ("data.sentences=4", "data.held_out=6", "data.validation=40")
IN_THE_TREE = {
    "arch": "models/archs/shrunk.py",
    "probe": "probes/library/peak_to_peak.py",
    "figure": "reports/figures/mine/figure_1.py",
    "detector": "diagnose/detectors/high_loss.py",
    "signal": "alarm/library/calm_head.py",
    "source": "data/sources/copied.py",
    "command": "commands/count.py",
}
OVER_ARCHS = (  # the others of their file name the architectures that they plan
    "test_all_is_every_registered_architecture",
    "test_an_architecture_of_ones_own_is_of_all",
    "test_a_single_stack_leaves_out_what_no_paper_defines_for_it",
    "test_the_command_prints_plans_and_shows_the_table",
)
OF_RUNS = (  # tests of the command line that a new file cannot fail: they stop, refuse or break a run
    *("stopping_flushes", "divergence_is_a_result", "existing_run", "bad_input", "internal_error", "dry_run"),
    *("text_files_that", "toml_file", "json_and_quiet"),
)
GUARDS = (  # of a new file of each kind: places, names, words, tables of the pages, what runs over every entry
    *("test_layers.py", "test_names.py", "test_words.py", "test_private_attributes.py", "test_registry.py"),
    *("test_tables.py", "test_readme.py", "test_papers.py", "test_labels.py", "test_experiments.py", "test_cli.py"),
    *("diagnose/test_diagnose_docs.py", "models/test_arch_facts.py", "models/test_arch_options.py"),
    *("data/test_data_sources.py", "reports/test_deepnet_6.py", "alarm/test_signals.py"),
    *(f"sweep/test_sweep_table.py::{name}" for name in OVER_ARCHS),
)
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


@pytest.mark.slow
def test_the_registries_find_each(folder: Path) -> None:
    listed = json.loads(stabilitylab(folder, "list", "--json"))
    assert listed["left_out"] == {}
    origins = listed["from"].items()
    found = {kind: [name for name, home in own.items() if home != "stabilitylab"] for kind, own in origins}
    assert found == {
        "archs": ["shrunk"],
        "probes": ["peak_to_peak"],
        "figures": ["mine:1"],
        "detectors": ["high_loss"],
        "signals": ["calm_head"],
        "sources": ["copied"],
        "sweeps": ["mine:1"],
        "commands": ["count"],
    }


@pytest.mark.slow
def test_the_figures_runs_are_planned(folder: Path) -> None:
    lines = stabilitylab(folder, "sweep", "mine:1", "--print").splitlines()
    assert len(lines) == 2 * 2 * 3
    assert all("--out runs/tiny/mine-1" in line for line in lines)
    assert "runs/tiny/mine-1/sweep/postln-6-s3.toml" in lines[0]


@pytest.mark.slow
def test_they_work_together(folder: Path) -> None:
    chosen = ("--arch", "shrunk", "--set", "arch.kappa=0.3", "--probes", "default,peak_to_peak", "--seed", "3")
    run = stabilitylab(folder, "probe", "--data", "copied:30", *chosen, *FAST).strip()
    assert (folder / run / "probes" / "peak_to_peak").is_dir()
    assert stabilitylab(folder, "count") == "1\n"
    assert "high_loss" in json.loads(stabilitylab(folder, "diagnose", run, "--json"))["checked"]
    stabilitylab(folder, "report", "--figure", "mine:1", "--quiet")
    page = (folder / "report" / "index.html").read_text(encoding="utf-8")
    assert "Loss of every run" in page
    assert "Every run ends below 8 nats" in page


def test_the_readme_has_room_for_them() -> None:
    """Its tables grow by their names and the sentence of a command, and it may have 1,500 words."""
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    assert len(words) <= 1500 - 2 * len(RECIPES), "README.md leaves no room for the rows of new files"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_they_stand_in_the_package_too(tmp_path: Path) -> None:
    """The same files, in the folders that the table names, pass what guards the package."""
    for name in ("stabilitylab", "docs", "tests", "results", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    for recipe, place in IN_THE_TREE.items():
        path = tmp_path / "stabilitylab" / place
        path.parent.mkdir(exist_ok=True)
        path.write_text(RECIPES[recipe], encoding="utf-8")
    (tmp_path / "stabilitylab/reports/figures/mine/__init__.py").write_text('"""Figures of mine."""\n')
    page = tmp_path / "docs" / "probes" / "training.md"  # what the recipe of a probe asks for besides its file
    page.write_text(page.read_text(encoding="utf-8") + "\n```{probe} peak_to_peak\n```\n", encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    assert python("-m", "stabilitylab", "new", "probe", "begun").returncode == 0
    guards = [*(f"tests/{name}" for name in GUARDS), "tests/probes/test_probes_begun.py"]
    stale = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_tables.py")
    assert "the page differs from its tables; --write makes it anew" in stale.stdout
    written = python("docs/tables.py", "--write")
    assert written.returncode == 0, written.stderr
    alone = f"not ({' or '.join(OF_RUNS)})"
    ended = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", alone, *guards)
    assert ended.returncode == 0, ended.stdout[-4000:]
