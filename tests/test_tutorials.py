"""What the tutorials show runs as it stands, and prints what they say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rest_slow import EVERY

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def programs(page: str) -> dict[str, str]:
    """File name -> program: the first line of a program is a comment with its name."""
    found = {}
    for block in blocks(page, "python"):
        named = re.match(r"# (\w+\.py)\n", block)
        assert named, f"the program that begins with {block.splitlines()[0]!r} does not begin with its name: # NAME.py"
        found[named[1]] = block
    return found


def shape(line: str) -> list[str]:
    """The words of a line, with # for each number that is the machine's: all but whole numbers below 1000."""
    return re.sub(r"\d+(\.\d+)?e[-+]\d+|\d+\.\d+|\d{4,}", "#", line).split()


def told(console: str) -> list[tuple[str, list[str]]]:
    """Each command, with the lines that stand below it."""
    found: list[tuple[str, list[str]]] = []
    for line in re.sub(r"\\\n +", "", console).splitlines():
        if line.startswith("$ "):
            found.append((line[2:].partition("  #")[0].strip(), []))
        else:
            found[-1][1].append(line)
    return found


STARTS = {"python": [], "stabilitylab": ["-m", "stabilitylab"], "torchrun": ["-m", "torch.distributed.run"]}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", sorted(TUTORIALS.glob("*.md")), ids=lambda path: path.stem)
def test_the_page_shows_what_its_commands_print(tmp_path: Path, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name, program in programs(text).items():
        (tmp_path / name).write_text(program, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1", "COLUMNS": "140"}
    if not EVERY:
        text = re.sub(r"^<!-- long -->\n```console\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    commands = [found for block in blocks(text, "console") for found in told(block)]
    assert commands, f"{page.name} shows no command"
    code = 0
    for command, lines in commands:
        if command == "echo $?":
            assert lines == [str(code)], f"{page.name}: the command before ended with {code}, not with {lines}"
            continue
        program, *arguments = shlex.split(command)
        ended = subprocess.run(
            [sys.executable, *STARTS[program], *arguments],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        code = ended.returncode
        assert code in (0, 1), f"{page.name}: {command}: {ended.stdout}"
        printed = [shape(line) for line in ended.stdout.splitlines()]
        missing = [line for line in lines if line not in ("", "...") and shape(line) not in printed]
        assert missing == [], f"{page.name}: {command} does not print these lines, but {ended.stdout}"
