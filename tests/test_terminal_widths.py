"""What a terminal of 80 and of 140 columns shows: whole names, whole words, layers, the latest values, flags."""

from __future__ import annotations

import io
import math
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from stabilitylab.commands import COMMANDS
from stabilitylab.commands.listing import shortened
from stabilitylab.probes.watcher import Cost
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import RunWriter
from stabilitylab.terminal import Field, LiveDisplay, print_table, sparkline, strips
from stabilitylab.train.loop import Report

WIDTHS = (80, 140)
LAYERS = 100
ROWS = tuple(Row(f"{s}.{n}.{p}", s, n, p) for s in ("encoder", "decoder") for n in range(1, LAYERS + 1) for p in "ab")
TABLE = Table("grad_norm", ("value",), ROWS, "L2 norm", "", "norm", log=True)
NAME = "branchnorm-200-with-a-name-that-a-sweep-gave-it-s3"  # 50 letters


def test_a_narrow_table_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """Short words of a column that may wrap take no more than they have."""
    columns = [Field("run"), *(Field(name, prose=True) for name in ("one", "two", "three"))]
    rows = [
        ["state", "cannot tell", "trained", "stuck"],
        ["first trouble", "vanishing gradient at step 5", "none", "none"],
    ]
    console = Console(width=80, file=io.StringIO())
    print_table(console, columns, rows)
    told = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    for word in ("cannot tell", "vanishing", "gradient", "step 5"):
        assert word in told


def report(row: int, broken: bool = False, **metrics: float) -> Report:
    values = np.array([10.0 ** (-8 + 8 * one.layer / LAYERS) if one.stack == "decoder" else 1.0 for one in ROWS])
    if broken:
        values[[one.stack == "decoder" and one.layer == 37 for one in ROWS]] = math.nan
    cells = Cells(values[:, None], np.zeros(len(ROWS), bool))
    cost = Cost(hooks=0.1, step=0.1, reference=0.2)
    watcher = SimpleNamespace(last=(row, {}, {"grad_norm": cells}), tables={"grad_norm": TABLE}, cost=cost)
    return Report(row, {"loss": 6.0, "nll": 6.0, "tokens": 900.0, "lr": 1e-4, **metrics}, 0.5, watcher)  # type: ignore[arg-type]


def panel(
    width: int, shown: str = "grad_norm", broken: bool = False, held_out: float = 4.0, styles: bool = False
) -> str:
    colours = {"force_terminal": True, "color_system": "truecolor"} if styles else {}
    console = Console(file=io.StringIO(), width=width, **colours)  # type: ignore[arg-type]
    display = LiveDisplay(console, quiet=True, shown=shown)
    model = {"encoder_layers": LAYERS, "decoder_layers": LAYERS, "d_model": 64, "d_ffn": 128, "heads": 2}
    config = {"model": model, "data": {"source": "text:a,b"}, "train": {"steps": 1000, "seed": 3}}
    facts = {"config": config, "unigram": {"cross_entropy": 5.0}, "label": "postln", "parameters": 12_345_678}
    display.opened(Path("runs") / NAME, facts)
    for row in range(200):
        display.show(report(row, grad_norm_total=float(row), held_out_nll=6.0 - row / 100 if row < 199 else held_out))
    if broken:
        display.show(report(200, loss=math.nan))
    last = report(200, broken)
    display.show(last)
    last.watcher.last = (200, {}, {})  # type: ignore[misc]  (a row that is not probed)
    console.print(display.panel(last))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_panel_shows_layers_and_the_latest_values_in_its_width(width: int) -> None:
    text = panel(width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert NAME in text
    (encoder,) = [line for line in lines if line.startswith("encoder")]
    (decoder,) = [line for line in lines if line.startswith("decoder")]
    cells = decoder.split()[1]
    assert len(cells) == len(encoder.split()[1]) == min(LAYERS, width - 16)
    assert (cells[0], cells[-1]) == ("▁", "█")
    assert list(cells) == sorted(cells)
    assert "layer 1 1.20e-08 to layer 100 1.000" in text
    (course,) = [line for line in lines if line.startswith("gradient norm")]
    assert course.rstrip().endswith("█")  # it rises: the last cell is of the latest value
    assert len(course.split()[-1]) >= 50
    assert any(line.startswith("held-out nll") for line in lines)
    assert "held-out loss 1.000 nats below the unigram baseline" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_what_breaks_is_red_and_its_layer_is_named(width: int) -> None:
    text = panel(width, broken=True, styles=True)
    assert "layer 37: not finite" in text
    assert "loss is nan at step 200" in text
    red = [line for line in text.splitlines() if "not finite" in line or "is nan" in line]
    assert all("\x1b[1;31m" in line for line in red)
    assert "\x1b[1;37;41mx" in text  # the bin of layer 37
    assert "\x1b[32m" in panel(width, styles=True)  # learning is green
    assert "2.50 above its lowest" in panel(width, held_out=6.52).replace("2.51", "2.50").replace("2.49", "2.50")


def test_another_probe_may_be_shown_and_one_that_is_not_recorded_is_left_out() -> None:
    assert "by layer" not in panel(80, shown="ln_input")


def test_a_strip_takes_the_largest_row_of_a_layer_and_knows_its_ends() -> None:
    rows = (Row("a", "", 1, "x"), Row("b", "", 1, "y"), Row("c", "", 2, "x"), Row("out", "", 0, "output"))
    (strip,) = strips(Table("t", ("v",), rows), Cells(np.array([[1.0], [3.0], [0.5], [9.0]]), np.zeros(4, bool)))
    assert (strip.layers, strip.values.tolist(), strip.named()) == (
        (1, 2),
        [3.0, 0.5],
        "layer 2 0.500 to layer 1 3.000",
    )


def test_sparklines_keep_the_latest() -> None:
    assert sparkline([0.0] * 50 + [1.0], 8) == "▁▁▁▁▁▁▁█"
    assert sparkline([1.0], 0) == ""


COLUMNS = [
    Field("run"),
    Field("state", need=2, state=True),
    Field("number", right=True, need=1),
    Field("why", need=3, prose=True),
]
CELLS = [[NAME, "diverged", "12345", "the held-out loss is nan at step 31"], ["b", "trained", "7", ""]]


def printed(width: int, columns=COLUMNS, cells=CELLS) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    print_table(console, columns, cells)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_table_drops_columns_before_it_cuts_a_name() -> None:
    whole = printed(140)
    assert whole[0].split() == ["run", "state", "number", "why"]
    assert whole[1].index("12345") + 5 == whole[2].index("7") + 1  # numbers stand to the right
    less = printed(80)
    assert NAME in "".join(less)
    assert less[-1] == "not shown at this width: state, number (--json has all)"
    assert max(map(len, less)) <= 80


def test_where_a_name_alone_is_too_long_rows_become_blocks() -> None:
    lines = printed(40)
    assert lines[0] == NAME
    assert [line.split() for line in lines[1:3]] == [["state", "diverged"], ["number", "12345"]]
    assert " ".join(" ".join(lines[3:5]).split()) == "why the held-out loss is nan at step 31"


@pytest.fixture
def shown(run, monkeypatch: pytest.MonkeyPatch):
    """Calls a command as on a terminal of some width; returns its lines."""

    def call(width: int, *arguments: str) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        code, out, _ = run(*arguments)
        assert code == 0
        lines = [line.rstrip() for line in out.splitlines()]
        assert max(map(len, lines)) <= width, lines
        return lines

    return call


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_cuts_no_option(run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "…" not in out


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """Two runs with long names; the decoder's gradient vanishes in both, as two tables see it."""
    rows = tuple(Row(f"decoder.{n}", "decoder", n) for n in range(1, 7))
    tables = [
        Table(name, ("value",), rows, "L2 norm", "backward", "norm", log=True)
        for name in ("grad_norm", "activation_grad_norm")
    ]
    for place in (1, 2):
        with RunWriter.create(tmp_path / "runs" / f"{NAME}-{place}", {"label": "mine", "config": {}}) as run:
            run.open(tables)
            for step in range(30):
                cells = {t.name: Cells(10.0 ** np.arange(-6, 0.0)[:, None], np.zeros(6, bool)) for t in tables}
                run.append(step, {"loss": math.nan if step == 29 else 7.0 + place / 1000}, cells)
            run.set_status("finished", 30)
    return [f"runs/{NAME}-{place}" for place in (1, 2)]


@pytest.mark.parametrize("width", WIDTHS)
def test_runs_compare_and_diagnose_fit(shown, two: list[str], width: int) -> None:
    words = " ".join(shown(width, "runs"))
    assert all(f"{NAME}-{place}" in words for place in (1, 2))
    compared = shown(width, "compare", *two)
    assert any(line.startswith(f"{NAME}-1") or f"  {NAME}-1" in line for line in compared)
    assert not any(line.rstrip().endswith(("...", "…")) for line in compared)
    told = shown(width, "diagnose", two[0])
    heads = [line for line in told if re.match(r"step \d+  ", line)]  # and no wrapped line of the paragraph above
    assert len([line for line in heads if "vanishing gradient" in line]) == 1  # both tables see the same
    assert "x its threshold)" in " ".join(told)
    assert "also seen: grad_norm from step 0 on" in " ".join(" ".join(told).split())


@pytest.mark.parametrize("width", WIDTHS)
def test_lists_have_a_line_each_and_flags_no_type(shown, width: int) -> None:
    lines = shown(width, "list", "archs")
    assert len(lines) == len({line.split()[0] for line in lines})
    helped = "\n".join(shown(width, "report", "--help"))
    assert "<bool>" not in helped
    assert "<path>" in helped or "PATH" in helped
    assert "<bool>" not in "\n".join(shown(width, "--help"))


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_a_long_description_ends_with_a_sentence_where_one_fits(shown, width: int) -> None:
    lines = shown(width, "list", "probes")
    assert all(line.endswith((".", " …")) for line in lines)
    [adam] = [line for line in lines if line.split()[0] == "adam"]
    assert adam.endswith(("  The state of Adam in each row.", " over the entries of a row."))


@pytest.mark.parametrize(
    ("width", "told"),
    [(12, "One. Two."), (8, "One."), (3, "…"), (60, "One. Two. Three by Ba et al. 2016, Eq. 3, and four.")],
)
def test_a_sentence_ends_before_a_capital(width: int, told: str) -> None:
    text = "One. Two. Three by Ba et al. 2016, Eq. 3, and four."
    assert shortened(text, width).strip() == told


@pytest.mark.parametrize("name", ["alarm", "check", "diagnose"])
def test_help_fills_its_lines(shown, name: str) -> None:
    """A line ends where the next word has no room, not where the docstring's did."""
    text = "\n".join(shown(80, name, "--help"))
    told = text[text.index("[OPTIONS]") : text.index("╭")]
    for paragraph in told.split("\n\n")[1:]:
        lines = [line.strip() for line in paragraph.splitlines() if line.strip()]
        for line, after in pairwise(lines):
            assert 1 + len(line) + 1 + len(after.split()[0]) > 78
