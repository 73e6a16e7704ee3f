"""What a stranger wrote into a run reaches neither the terminal nor TeX as a control character."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from rich.table import Table as RichTable
from rich.text import Text

from stabilitylab.export.latex import escape
from stabilitylab.printable import HIDDEN, Stream, printable, printable_output, screen
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import RunWriter
from stabilitylab.terminal.tables import Field, print_table

ROOT = Path(__file__).resolve().parents[1]
TITLE, CLIPBOARD, WIPE = "\x1b]0;owned\x07", "\x1b]52;c;b3duZWQ=\x1b\\", "\x1b[2K\x1b[1A\r"
HOSTILE = f"good{TITLE}{CLIPBOARD}{WIPE}\x9b31m\u202egniht\u2066\u2028\u0000end"
ON_DISK = HOSTILE.replace("\0", "").replace("/", "")


def hidden(text: str) -> list[str]:
    return [sign for sign in text if unicodedata.category(sign) in HIDDEN and sign not in "\n\t"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, très bien, 深い\tcell\n", "plain, très bien, 深い\tcell\n"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\rb\x00\x7f\x9b", "a\\rb\\x00\\x7f\\x9b"),
        ("\u202eabc\u2069\u2028", "\\u202eabc\\u2069\\u2028"),
        ("\U000e0041", "\\U000e0041"),  # a tag, which no font shows
        ("👩\u200d💻", "👩\u200d💻"),
        ("\ud800", "\\ud800"),
    ],
)
def test_control_and_format_characters_are_shown_as_their_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert not set(hidden(printable(text))) - {"\u200d"}


def test_a_stream_shows_what_is_written_and_passes_the_rest_on() -> None:
    below = io.StringIO()
    stream = Stream(below)
    assert stream.write(f"a{TITLE}\n") == len(f"a{TITLE}\n")
    stream.writelines(["\x1b", "b"])
    assert below.getvalue() == "a\\x1b]0;owned\\x07\n\\x1bb"
    assert not stream.isatty()


def test_the_console_colours_and_the_text_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    below = io.StringIO()
    monkeypatch.setattr(sys, "stdout", below)
    with printable_output():
        console = screen(piped=60)
        console._force_terminal = True  # as on a terminal
        console._color_system = 1  # pyright: ignore[reportAttributeAccessIssue]
        table = RichTable()
        table.add_column(f"head{WIPE}")
        table.add_row(Text(HOSTILE, style="red"))
        console.print(table)
        console.print(HOSTILE, soft_wrap=True)
        print(HOSTILE)
    left = re.sub(r"\x1b\[[0-9;]*m", "", below.getvalue())  # rich's own colours
    assert left != below.getvalue()
    assert hidden(left) == []


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder of two runs whose label, settings, reason and directory are hostile."""
    for name in ("one", "two"):
        config = {"model": {"arch": HOSTILE}, "data": {"source": HOSTILE}}
        facts = {"label": HOSTILE, "config": config, "loop_warnings": [HOSTILE]}
        with RunWriter.create(tmp_path / "runs" / name, facts) as run:
            run.open([Table("grad_norm", ("value",), (Row("encoder.1", "encoder", 1),), total="norm")])
            for step in range(30):
                run.append(step, {"loss": 3.0}, {"grad_norm": Cells(np.array([[1.0]]), np.array([False]))})
            run.set_status("failed", 29, HOSTILE)
        shutil.move(tmp_path / "runs" / name, tmp_path / "runs" / f"{ON_DISK}{name}")
    (tmp_path / "runs" / f"{ON_DISK}broken").mkdir()
    (tmp_path / "runs" / f"{ON_DISK}broken" / "run.json").write_text(json.dumps({"label": HOSTILE}))
    return tmp_path / "runs"


@pytest.mark.parametrize(
    "words",
    [
        ["runs", "ALL"],
        ["runs", "ALL", "--json"],
        ["diagnose", "ONE"],
        ["diagnose", "ONE", "--json"],
        ["compare", "ONE", "TWO"],
        ["compare", "ONE", "TWO", "--json"],
        ["verify", "ONE"],
        ["verify", "BROKEN"],
        ["alarm", "ONE"],
        ["export", "ONE", "--to", "csv"],
        ["claims", "ALL"],
        ["report", "ALL", "--only", "branchnorm:3"],
        ["evaluate", "ONE"],
        ["probe", "--resume", "ONE"],
        [HOSTILE.replace("\0", "")],
        ["probe", "--arch", HOSTILE.replace("\0", "")],
    ],
    ids=lambda words: " ".join(words)[:20],
)
def test_no_command_prints_a_control_character(run, hostile: Path, words: list[str]) -> None:
    places = {"ALL": hostile, **{name.upper(): hostile / f"{ON_DISK}{name}" for name in ("one", "two", "broken")}}
    code, out, err = run(*(str(places.get(word, word)) for word in words))
    assert hidden(out + err) == []
    assert "internal error" not in err
    assert code in (0, 1, 2, 4)
    assert out or err


def test_tex_has_none_either(run, hostile: Path, tmp_path: Path) -> None:
    assert run("export", str(hostile / f"{ON_DISK}one"), "--to", "latex", "--out", str(tmp_path / "tex"))[0] == 0
    assert hidden((tmp_path / "tex" / "layers.tex").read_text()) == []
    assert escape("a\x1b_b\nc") == r"a\textbackslash{}x1b\_b c"


def test_a_name_between_colons_is_no_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    screen(piped=60).print("diagnosis:a: and :fire:")
    assert capsys.readouterr().out == "diagnosis:a: and :fire:\n"


def test_text_in_brackets_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    console = screen(piped=60)
    console.print("[bold]run[/bold] 3")
    print_table(console, [Field("[red]", prose=True)], [["[/red]"]])
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == ["[bold]run[/bold] 3", "[red]", "[/red]"]


def test_all_consoles_are_made_in_one_place() -> None:
    made = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "stabilitylab").rglob("*.py"))
        if re.search(r"\bConsole\(", path.read_text(encoding="utf-8"))
    ]
    assert made == ["stabilitylab/printable.py"]


def test_a_forced_colour_moves_no_progress_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stdout", out := io.StringIO())
    monkeypatch.setattr("sys.stderr", err := io.StringIO())
    with screen(stderr=True).status("comparing"):
        screen().print("done", style="bold")
    assert "\x1b[1mdone" in out.getvalue(), "FORCE_COLOR asks for it"
    assert "\x1b" not in err.getvalue()
