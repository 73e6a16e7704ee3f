from __future__ import annotations

import io
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import Run, RunWriter
from stabilitylab.terminal import LiveDisplay, duration, number, sparkline, summary, worst_ln_input
from stabilitylab.train.loop import Report

TABLE = Table("ln_input", ("value", "shortcut"), (Row("a", "encoder", 1, "ffn"), Row("b", "decoder", 7, "ffn")))


def watcher(values: list[list[float]]) -> SimpleNamespace:
    cells = Cells(np.array(values), np.zeros(len(values), bool))
    cost = SimpleNamespace(hooks=0.1, step=0.1, reference=0.2, curvature=0.0)
    return SimpleNamespace(last=(0, {}, {"ln_input": cells}), tables={"ln_input": TABLE}, cost=cost)


def report(row: int, **metrics: float) -> Report:
    return Report(row, metrics, 0.5, watcher([[9.0, 8.0], [8.5, 2.0]]))  # type: ignore[arg-type]


def display(console: Console, **train: int) -> LiveDisplay:
    shown = LiveDisplay(console)
    model = {"encoder_layers": 1, "decoder_layers": 7, "d_model": 64, "d_ffn": 128, "heads": 2}
    config = {"model": model, "data": {"source": "text:a,b"}, "train": {"steps": 100, "seed": 3, **train}}
    manifest = {"config": config, "unigram": {"cross_entropy": 5.0}, "label": "deepnorm", "parameters": 1234}
    shown.opened(Path("runs/x"), manifest)
    return shown


def test_sparkline_spans_its_values_and_marks_what_is_not_finite() -> None:
    assert sparkline([0.0, 7.0]) == "▁█"
    assert sparkline([1.0, math.nan, 1.0, math.inf]) == "▁x▁x"
    assert sparkline([math.nan]) == "x"
    assert sparkline([]) == ""
    assert len(sparkline([float(i) for i in range(100)], width=32)) == 32


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0.0, "0"), (1e-30, "1.00e-30"), (0.5, "0.500"), (123.456, "123.456"), (12345.6, "12,346"),
        (1e9, "1.00e+09"), (math.nan, "nan"), (math.inf, "inf"), (-0.0004, "-4.00e-04"),
    ],
)  # fmt: skip
def test_numbers_keep_zero_tiny_and_missing_apart(value: float | None, text: str) -> None:
    assert number(value) == text


def test_duration() -> None:
    assert [duration(s) for s in (0, 59.6, 3661)] == ["0:00", "1:00", "1:01:01"]


def test_the_worst_input_is_relative_to_the_shortcut() -> None:
    assert worst_ln_input(watcher([[9.0, 8.0], [8.5, 2.0]])) == "decoder 7 ffn: 8.500"  # type: ignore[arg-type]
    assert worst_ln_input(watcher([[9.0, 8.0], [math.nan, 8.0]])) == "decoder 7 ffn: nan"  # type: ignore[arg-type]
    assert worst_ln_input(watcher([[9.0, math.nan], [8.5, math.nan]])) == "encoder 1 ffn: 9.000"  # type: ignore[arg-type]
    assert worst_ln_input(SimpleNamespace(last=None)) is None  # type: ignore[arg-type]
    final = watcher([[9.0, math.nan]])
    final.tables["ln_input"] = Table("ln_input", ("value", "shortcut"), (Row("decoder.norm", "decoder", 0, "norm"),))
    assert worst_ln_input(final) == "decoder.norm: 9.000"  # type: ignore[arg-type]


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with display(Console(file=stream, force_terminal=False, width=80)) as shown:
        for row in range(100):
            shown.show(report(row, loss=6.0, nll=5.5, grad_norm_total=1.0, held_out_nll=5.25))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "deepnorm 1L-7L, 64-128-2, 1,234 parameters, text data, seed 3: runs/x"
    assert len(lines) == 1 + 17 + 1  # the header, every sixth step, and the last
    assert lines[-1].startswith("step 100/100  loss 6.000  nll 5.500  held-out 5.250 (+0.250 unigram)")
    assert lines[-1].endswith("worst LN input decoder 7 ffn: 8.500  left 0:00")


def test_the_live_panel_shows_the_run_and_leaves_the_terminal_clean() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    with display(console) as shown:
        for row in range(3):
            shown.show(
                report(row, loss=6.0 - row, nll=5.5, grad_norm_total=math.nan, lr=1e-4, alpha=0.25, tokens=200.0)
            )
        console.print(shown.panel(report(3, loss=3.0, nll=5.5, grad_norm_total=1.0, lr=1e-4, alpha=0.25, tokens=200.0)))
    text = stream.getvalue()
    for part in (
        "step 4/100",
        "alpha 0.250",
        "400 tokens/s",
        "decoder 7 ffn: 8.500",
        "held-out pass",
        "grad norm total is nan at step 0",
    ):
        assert part in text, part
    assert shown._live is not None
    assert not shown._live.is_started


def test_quiet_prints_nothing() -> None:
    stream = io.StringIO()
    shown = LiveDisplay(Console(file=stream, force_terminal=True), quiet=True)
    with shown:
        shown.steps = 10
        shown.show(report(0, loss=1.0))
    assert stream.getvalue() == ""


def test_the_panel_shows_a_probe_without_layers_in_words() -> None:
    table = Table("critical_sharpness", ("headroom", "low", "high"), (Row("model"),), "learning rates")
    cells = Cells(np.array([[12.34, 11.9, math.nan]]), np.zeros(1, bool))
    own = watcher([[9.0, 8.0], [8.5, 2.0]])
    own.last, own.tables["critical_sharpness"] = (200, {}, {"critical_sharpness": cells}), table
    stream = io.StringIO()
    console = Console(file=stream, width=100, color_system=None)
    shown = display(console)
    shown.shown = "critical_sharpness"
    shown.show(Report(200, {"loss": 1.0}, 0.5, own))  # type: ignore[arg-type]
    console.print(shown.panel(Report(200, {"loss": 1.0}, 0.5, own)))  # type: ignore[arg-type]
    text = stream.getvalue()
    assert "critical sharpness [learning rates], step 200" in text
    assert "headroom 12.340, low 11.900\n" in text


def test_the_table_by_depth_shows_the_last_row_of_a_run_that_broke(tmp_path: Path) -> None:
    rows = tuple(Row(f"decoder.layers.{n}", "decoder", n + 1) for n in range(2))
    config = {"model": {"encoder_layers": 0, "decoder_layers": 2}}
    one = np.array([[1.0], [2.0]])
    with RunWriter.create(tmp_path / "run", {"kind": "train", "label": "postln", "config": config}) as writer:
        writer.open([Table(name, ("value",), rows, total="norm") for name in ("lost", "partly", "missing", "absent")])
        for step in range(3):
            cells = {"lost": one, "partly": one, "missing": one, "absent": one}
            gone = np.zeros(2, bool)
            if step == 2:
                cells |= {"lost": one * math.nan, "partly": np.array([[1.0], [math.nan]])}
                gone = np.array([False, True])
            tables = {name: Cells(values, np.zeros(2, bool)) for name, values in cells.items()}
            tables["missing"] = Cells(one, np.zeros(2, bool), gone[:, None])
            tables["absent"] = Cells(one, np.full(2, step == 2))
            writer.append(step, {"loss": 1.0}, tables)
        writer.set_status("finished", 3)
    head, body = summary(Run.open(tmp_path / "run"))
    assert head == ["probe", "step", "dec 1", "dec 2"]
    assert body[1::2] == [
        ["lost", "2", "nan", "nan"],
        ["partly", "2", "1.000", "nan"],
        ["missing", "2", "1.000", "-"],
        ["absent", "1", "1.000", "2.000"],  # no gradient at step 2: nothing was measured
    ]
