"""README.md is short, its links lead somewhere, and its program compiles."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


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


@pytest.mark.slow
def test_its_program_runs_as_it_stands_and_its_mistake_is_named(tmp_path: Path) -> None:
    """Copied into an empty folder, in a fresh process; what diagnose prints is what the README shows, numbers aside."""
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    made = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    diagnose = [sys.executable, "-m", "stabilitylab", "diagnose", "runs/mine"]
    told = subprocess.run(diagnose, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    (shown,) = re.findall(r"\$ stabilitylab diagnose runs/mine\n(.*)\n", README)
    sign = "First sign: learning-rate jump. The learning rate rose to 0.1 at step 60, 100 times its maximum before."
    for text in (told, shown):
        assert text.startswith("runs/mine has failed: plateau at step ")
        assert sign in text
        assert "What to do: Set `lr` back to 0.001, its largest value before step 60: check the schedule" in text
