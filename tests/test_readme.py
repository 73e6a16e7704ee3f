"""README.md is short, its links lead somewhere, and its tables name what the registries have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stabilitylab.commands import COMMANDS
from stabilitylab.models import ARCHS
from stabilitylab.probes import PROBES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
VARIANTS = {"dsinit-code", "dlcl-post"}  # of their paper's entry


def table(head: str) -> list[str]:
    """What stands in code in a table under that head."""
    return re.findall(r"`([a-z-]+(?:_[a-z_]+)?)`", README.split(f"\n| {head} |")[1].split("\n\n")[0])


def test_it_is_read_in_minutes() -> None:
    assert len(README.splitlines()) <= 125, "README.md has too many lines"
    assert len(README.split()) <= 1500, "README.md has too many words"


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_links_lead_somewhere(link: str) -> None:
    assert link.startswith("http") or (ROOT / link).exists(), f"README.md links to {link}, which does not exist"


def test_its_tables_are_those_of_the_registries() -> None:
    assert set(table("command")) == set(COMMANDS), "README.md, table of commands, differs from the registry"
    assert set(table("probes")) == set(PROBES), "README.md, table of probes, differs from the registry"
    archs = set(table("architectures")) - {"--arch"}
    assert archs == set(ARCHS) - VARIANTS, "README.md, table of architectures, differs from the registry"


def test_its_program_compiles() -> None:
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        compile(block, "README.md", "exec")


def test_its_pictures_are_small_and_fetch_nothing() -> None:
    for name in re.findall(r"!\[[^\]]*\]\((docs/[^)]+)\)", README):
        assert (ROOT / name).stat().st_size < 300_000, f"README.md shows {name}, which has 300 kB or more"
    drawn = (ROOT / "docs/pictures/panel.svg").read_text(encoding="utf-8")
    assert "url(http" not in drawn
    assert "href" not in drawn
