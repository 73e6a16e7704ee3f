"""The documentation builds without a warning, leaves no probe out, and its quickstart prints what it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from stabilitylab.cli import build
from stabilitylab.experiments import SWEEPS, experiments
from stabilitylab.models import ARCHS
from stabilitylab.probes import PROBES
from stabilitylab.reports.base import FIGURES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "110"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, cwd=cwd, env=environment
    )


def built(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return run("-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", str(source), str(out), cwd=source)


def plain(html: str) -> str:
    """Without what marks literals."""
    return re.sub(r"</?(code|span)[^>]*>", "", html)


@pytest.mark.slow
def test_the_pages_build_without_a_warning_and_hold_what_the_registries_know(tmp_path: Path) -> None:
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    pytest.importorskip("transformers")
    pytest.importorskip("lightning")
    made = built(DOCS, tmp_path)
    assert (made.returncode, made.stderr) == (0, ""), "sphinx warns: mend the page or the docstring that it names"
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (tmp_path / "probes").glob("*.html")}
    for name, probe in PROBES.items():
        if probe.__module__.startswith("stabilitylab."):
            assert f">{name}<" in pages["index"], f"docs/probes/index does not list the probe {name}"
            anchor = f'id="{name.replace("_", "-")}"'
            assert any(anchor in page for page in pages.values()), f"no page of docs/probes/ has a section {name}"
    archs = (tmp_path / "architectures.html").read_text(encoding="utf-8")
    missing = [name for name in ARCHS if f'id="arch-{name}"' not in archs]
    assert missing == [], "docs/architectures.md has no section of these architectures"
    drawn = (tmp_path / "figures.html").read_text(encoding="utf-8")
    missing = [name for name in FIGURES if f"{name}: " not in drawn]
    assert missing == [], "docs/figures.md does not name these figures"
    planned = (tmp_path / "sweeps.html").read_text(encoding="utf-8")
    for name, sweep in SWEEPS.items():
        (row,) = (row for row in re.findall(r"<tr.*?</tr>", planned, re.DOTALL) if f"<p>{name}</p>" in plain(row))
        numbers = [int(number) for number in re.findall(r"<p>(\d+)</p>", row)]
        assert numbers == [len(experiments(name)), sweep.minutes], f"docs/sweeps.md, {name}: number of runs, minutes"
    reference = (tmp_path / "reference" / "index.html").read_text(encoding="utf-8")
    public = ("watch", "sites", "Run", "preflight", "probe", "check_ranks", "verify_neutral")
    missing = [name for name in public if f'id="stabilitylab.{name}"' not in reference]
    assert missing == [], "docs/reference/index.md does not document these names"


@pytest.mark.slow
def test_a_probe_without_a_page_fails_the_build(tmp_path: Path) -> None:
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("_build", "reference"))
    page = tmp_path / "docs" / "probes" / "training.md"
    page.write_text(page.read_text(encoding="utf-8").replace("```{probe} ln_input", "```text"), encoding="utf-8")
    made = built(tmp_path / "docs", tmp_path / "out")
    assert made.returncode != 0
    assert "no page describes the probe 'ln_input'" in made.stderr


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def shape(text: str) -> list[str]:
    """The words, with # for each number, whose digits are the machine's."""
    return re.sub(r"[-+]?\d[\d.]*(e[-+]\d+)?", "#", text).split()


@pytest.mark.slow
def test_the_quickstart_prints_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    page = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    program, shown = blocks(page, "python")[0], blocks(page, "text")[0]
    ended = run("-c", program, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert shape(ended.stdout) == shape(shown), "the first program of docs/quickstart.md prints other words"
    last = ended.stdout.split()[-3:]
    assert float(last[0]) < 1e-6 * float(last[2])  # layer 1 against layer 12
    said = next(block for block in blocks(page, "console") if "diagnose" in block)
    diagnosed = run("-m", "stabilitylab", "diagnose", "runs/bert", cwd=tmp_path).stdout
    shown = said.partition("diagnose runs/bert\n")[2]
    assert "runs/bert has 1 warning (finished at step 60)." in shown
    # The largest shares stand first, and which are largest may be the machine's.
    words = [shape(re.sub(r"shares of the squared .*", "", text)) for text in (shown, diagnosed)]
    assert words[0] == words[1], "docs/quickstart.md shows what an older version of diagnose printed"


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_python_on_the_pages_compiles(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8"), "python"):
        compile(block, page.name, "exec")


def wrong_rows(page: str) -> list[str]:
    """Say of each row of the guide which command, option or probe does not exist, or that it lacks a cell."""
    group: Any = typer.main.get_command(build())
    commands = {name: {way for each in one.params for way in each.opts} for name, one in group.commands.items()}
    wrong = []
    for row in re.findall(r"^\| (.*) \|$", page, re.MULTILINE):
        cells = [cell.strip() for cell in row.split(" | ")]
        if len(cells) != 5:
            wrong.append(f"{row}: {len(cells)} cells")
            continue
        for name, rest in re.findall(r"`stabilitylab ([\w-]+)([^`]*)`", cells[2]):
            options = re.findall(r"--[\w-]+", rest)
            wrong += [f"{name} {option}" for option in options if option not in commands.get(name, ())]
            wrong += [name] * (name not in commands)
        for probes in re.findall(r"\bprobes? ((?:`\w+`(?:, | or )?)+)", cells[1]):
            wrong += [name for name in re.findall(r"`(\w+)`", probes) if name not in PROBES]
    return wrong


def test_the_guide_of_symptoms_names_what_exists() -> None:
    page = (DOCS / "symptoms.md").read_text(encoding="utf-8")
    assert page.count("`stabilitylab ") > 20
    assert wrong_rows(page) == [], "docs/symptoms.md names what does not exist"
    row = "| a | probe `grad_nrm` | `stabilitylab diagnos RUN`, `stabilitylab runs --fial` | b | c |"
    assert wrong_rows(row) == ["diagnos", "runs --fial", "grad_nrm"]
