"""What the tutorials show runs as it stands, and prints what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def shape(line: str) -> list[str]:
    """The words of a line, with # for each number that is the machine's: all but whole numbers below 1000."""
    return re.sub(r"\d+\.\d+(e[-+]\d+)?|\d{4,}", "#", line).split()


def told(console: str) -> dict[str, list[str]]:
    """Command -> the lines that stand below it."""
    found: dict[str, list[str]] = {}
    for line in console.splitlines():
        if line.startswith("$ "):
            found[line[2:].partition("#")[0].strip()] = lines = []
        else:
            lines.append(line)
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", sorted(TUTORIALS.glob("*.md")), ids=lambda path: path.stem)
def test_the_page_shows_what_its_commands_print(tmp_path: Path, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(blocks(text, "python")[0], encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1", "COLUMNS": "140"}
    commands = [(command, lines) for block in blocks(text, "console") for command, lines in told(block).items()]
    assert commands, f"{page.name} shows no command"
    for command, lines in commands:
        program, *arguments = command.split()
        start = {"python": [], "stabilitylab": ["-m", "stabilitylab"]}[program]
        ended = subprocess.run(
            [sys.executable, *start, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert ended.returncode in (0, 1), f"{command}: {ended.stderr}"
        printed = [shape(line) for line in ended.stdout.splitlines()]
        missing = [line for line in lines if line not in ("", "...") and shape(line) not in printed]
        assert missing == [], f"{page.name}: {command} does not print these lines, but {ended.stdout}"
