"""README.md is short, its links lead somewhere, and its program compiles."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from default_runs import assert_nothing_is_wrong, assert_nothing_is_wrong_so_far
from rest_slow import EVERY

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROBE, SWEEP = "stabilitylab probe --arch branchnorm --depth 200", "stabilitylab sweep deepnet:5 --jobs 2"
# Each detector judges a run of 40 rows.
PART = ("train.steps=40", "data.sentences=4", "data.held_out=6", "data.validation=40")


def test_it_is_read_in_minutes() -> None:
    assert len(README.splitlines()) <= 140, "README.md has too many lines"
    assert len(README.split()) <= 1500, "README.md has too many words"


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_links_lead_somewhere(link: str) -> None:
    assert link.startswith("http") or (ROOT / link).exists(), f"README.md links to {link}, which does not exist"


def test_its_program_compiles() -> None:
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        compile(block, "README.md", "exec")


def test_its_pictures_are_small_and_fetch_nothing() -> None:
    for name in re.findall(r"!\[[^\]]*\]\((docs/[^)]+)\)", README):
        assert (ROOT / name).stat().st_size < 300_000, f"README.md shows {name}, which has 300 kB or more"
    drawn = (ROOT / "docs/pictures/panel.svg").read_text(encoding="utf-8")
    assert "url(http" not in drawn
    assert "href" not in drawn


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder in which the program of the README ran, copied, in a fresh process."""
    folder = tmp_path_factory.mktemp("readme")
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    made = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.slow
def test_its_program_runs_as_it_stands_and_its_mistake_is_named(folder: Path) -> None:
    """What diagnose prints is what the README shows, numbers aside."""
    told = ran("stabilitylab diagnose runs/mine", cwd=folder)
    (shown,) = re.findall(r"\$ stabilitylab diagnose runs/mine\n(.*)\n", README)
    sign = "First sign: learning-rate jump. The learning rate rose to 0.1 at step 60, 100 times its maximum before."
    for text in (told, shown):
        assert text.startswith("runs/mine has failed: plateau at step ")
        assert sign in text
        assert "What to do: Set `lr` back to 0.001, its largest value before step 60: check the schedule" in text


def commands() -> list[str]:
    """The commands of README.md that are shown after a prompt, without their comments."""
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [line.partition("#")[0].strip() for line in lines]


def ran(command: str, *more: str, cwd: Path) -> str:
    """What a command of README.md prints, with these further options."""
    name, *arguments = shlex.split(command)
    assert name == "stabilitylab"
    asked = [sys.executable, "-m", name, *arguments, *more]
    ended = subprocess.run(asked, cwd=cwd, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{command}: {ended.stderr}"
    return ended.stdout


def test_every_command_is_one_that_this_file_runs() -> None:
    known = {"pip install .", "make demo", "stabilitylab report", PROBE, SWEEP, "stabilitylab diagnose runs/mine"}
    assert {*commands()} == known, "a command of README.md has no test"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_probe_of_200_layers_runs_and_nothing_is_wrong_with_it(tmp_path: Path) -> None:
    """As it stands with EVERY=1. Else 40 of its 240 updates on fewer sentences, which every detector can judge.

    A run of all 240 updates has its verdict tested at 12 layers, in tests/diagnose/test_diagnose_command.py.
    """
    part = () if EVERY else tuple(word for setting in PART for word in ("--set", setting))
    shown = ran(PROBE, *part, "--quiet", cwd=tmp_path)
    assert shown == "runs/branchnorm-200-s0\n"
    facts = json.loads(ran("stabilitylab diagnose runs/branchnorm-200-s0", "--json", cwd=tmp_path))
    assert facts["step"] == (240 if EVERY else 40)
    if EVERY:
        assert_nothing_is_wrong(facts)
    else:
        assert_nothing_is_wrong_so_far(facts)


def test_the_probe_of_200_layers_has_the_recipe_that_the_pages_name(run: Callable[..., tuple[int, str, str]]) -> None:
    """results/default has what became of it, in 240 updates at a rate of 3e-4."""
    _, *arguments = shlex.split(PROBE)
    code, out, err = run(*arguments, "--dry-run")
    assert code == 0, err
    recipe = dict(line.split(maxsplit=1) for line in map(str.strip, out.splitlines()) if " " in line)
    own = {
        "model.arch": "branchnorm",
        "train.steps": "240",
        "train.lr": "0.0003",
        "train.warmup": "120",
        "train.seed": "0",
    }
    assert {key: recipe[key] for key in own} == own
    assert (recipe["model.encoder_layers"], recipe["model.decoder_layers"]) == ("100", "100")
    page = (ROOT / "results/default/README.md").read_text(encoding="utf-8")
    assert "trains 240 updates on the synthetic task at `train.lr` = 3e-4 with a warm-up of 120" in page


@pytest.mark.slow
def test_the_sweep_makes_as_many_runs_as_it_says_and_the_report_reads_them(folder: Path) -> None:
    """The first of its runs, and the run of the program beside it."""
    listed = ran(SWEEP, "--print", cwd=folder).splitlines()
    assert f"the {len(listed)} one-step runs of DeepNet's Figure 5" in README
    subprocess.run(listed[0], shell=True, cwd=folder, check=True)  # for a scheduler: a line of a shell
    assert ran("stabilitylab report", "--quiet", cwd=folder) == "report/index.html\n"
    page = (folder / "report" / "index.html").read_text(encoding="utf-8")
    name = listed[0].partition("--name ")[2].split()[0]
    for run in ("mine", name):
        assert run in page, f"the page lacks the run {run}"
