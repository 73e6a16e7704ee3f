"""README.md is short, its links lead somewhere, and its program compiles."""

from __future__ import annotations

import re
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
