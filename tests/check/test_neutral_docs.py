"""The program of docs/neutral.md does what the page says that it does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stabilitylab.check.neutrality import EXIT_CODES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "neutral.md").read_text(encoding="utf-8")


def test_its_program_is_neutral_as_it_prints(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = re.findall(r"```python\n(# myloop\.py\n.*?)```", PAGE, re.DOTALL)
    (tmp_path / "myloop.py").write_text(program[0], encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    command, said = re.findall(r"```console\n\$ stabilitylab (.*?)\n(.*?)```", PAGE, re.DOTALL)[0]
    code, out, err = run(*command.split())
    assert (code, err) == (0, "")
    assert re.sub(r"\d+", "N", out) == re.sub(r"\d+", "N", said)  # torch's versions differ in plain attributes


def test_its_table_has_the_exit_codes() -> None:
    rows = dict(re.findall(r"^\| ([a-z ]+) \| (\d) \|", PAGE, re.MULTILINE))
    assert {verdict: int(code) for verdict, code in rows.items()} == dict(EXIT_CODES)
