"""A run drawn by ``Run.plot`` and as a notebook shows it: its tables' numbers, and words for what is not there."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from making import Made, layer_rows, make_run

from stabilitylab.errors import InputError, UsageError
from stabilitylab.reports.heatmaps import SPECIAL
from stabilitylab.schema import Row
from stabilitylab.store import Run

mpl.use("Agg")
STEPS = (0, 5, 9)
LAYERS = 2


def gradient(step: int, row: Row) -> float:
    lost = step == 9 and (row.stack, row.layer) == ("decoder", 1)
    return math.nan if lost else (10.0 if row.stack == "decoder" else 1.0) * row.layer * (step + 1)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    tables = {
        "grad_norm": Made(layer_rows(LAYERS), ("value",), gradient, STEPS, "norm", "L2 norm"),
        "attention": Made(layer_rows(LAYERS), ("entropy",), lambda step, row: 2.0, STEPS, "", "nats"),
    }
    loss = [7.0 - t / 10 for t in range(9)] + [math.inf]
    make_run(tmp_path, "one", layers=LAYERS, tables=tables, metrics={"loss": loss, "nll": loss})
    return Run.open(tmp_path / "one")


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


def test_lines_are_the_layers_of_the_table(run: Run) -> None:
    axes = run.plot("grad_norm")
    drawn = {line.get_label(): line for line in axes.lines}
    frame = run.frame("grad_norm", by="layer")
    for (stack, layer), own in frame.groupby(["stack_name", "layer"], observed=True):
        line = drawn[f"layer {layer} of {stack}"]
        assert np.asarray(line.get_xdata()).tolist() == own["step"].tolist()
        assert np.asarray(line.get_ydata()).tolist() == pytest.approx(own["value"].tolist(), nan_ok=True)
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_yscale()) == ("step", "L2 norm", "log")
    mark = drawn["not finite"]
    assert mark.get_color() == SPECIAL[3]
    assert (mark.get_xdata(), mark.get_ydata()) == ([9], [60.0])  # at the height of the number before it
    assert {text.get_text() for text in axes.texts} == {*drawn} - {"not finite"} | {"not finite, step 9"}


def test_a_stack_a_column_and_axes_of_ones_own(run: Run) -> None:
    import matplotlib.pyplot as plt

    own = plt.subplots()[1]
    axes = run.plot("grad-norm", stack="encoder", axes=own)
    assert axes is own
    assert [line.get_label() for line in axes.lines] == ["layer 1 of encoder", "layer 2 of encoder"]
    assert axes.get_legend() is not None
    with pytest.raises(UsageError, match="'grad_norm' has no stack 'head'; it has encoder, decoder"):
        run.plot("grad_norm", stack="head")
    with pytest.raises(UsageError, match="has no column 'nothing'; it has value"):
        run.plot("grad_norm", column="nothing")


@pytest.mark.parametrize("stack", ["", "decoder"])
def test_a_map_has_the_numbers_of_the_table_and_marks_what_is_not_finite(run: Run, stack: str) -> None:
    axes = run.plot("grad_norm", kind="map", stack=stack)
    frame = run.frame("grad_norm", by="layer")
    frame = frame[frame["stack_name"] == stack] if stack else frame
    cells, lost = (mesh.get_array() for mesh in axes.collections[:2])
    expected = frame["value"].to_numpy().reshape(len(STEPS), -1).T
    assert np.ma.filled(cells, np.nan).ravel().tolist() == pytest.approx(expected.ravel().tolist(), nan_ok=True)
    assert np.argwhere(~np.ma.getmaskarray(lost).reshape(expected.shape)).tolist() == [[0 if stack else 2, 2]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["not finite"]
    ticks = [label.get_text() for label in axes.get_yticklabels()]
    assert (axes.get_ylabel(), "layer 1 of encoder" in ticks) == (("layer", False) if stack else ("", True))


def test_many_layers_are_told_by_colour_and_rows_that_do_not_combine_have_a_line_each(tmp_path: Path) -> None:
    made = Made(layer_rows(12), ("value",), lambda step, row: row.layer, STEPS)
    make_run(tmp_path, "deep", layers=12, tables={"grad_norm": made})
    axes = Run.open(tmp_path / "deep").plot("grad_norm")
    assert len(axes.lines) == 24
    assert len({line.get_color() for line in axes.lines}) == 12
    assert {line.get_linestyle() for line in axes.lines} == {"-", "--"}
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["encoder", "decoder"]
    assert axes.figure.axes[1].get_ylabel() == "layer"


def test_a_table_says_its_own_scale(run: Run) -> None:
    axes = run.plot("attention")
    assert (axes.get_yscale(), axes.get_ylabel()) == ("linear", "entropy [nats]")
    assert len(axes.lines) == 2 * LAYERS


def test_a_metric_is_its_column(run: Run) -> None:
    axes = run.plot("loss")
    line, mark = axes.lines
    metrics = run.metrics.dropna(subset="loss")
    assert np.asarray(line.get_xdata()).tolist() == metrics["step"].tolist()
    assert np.asarray(line.get_ydata())[:-1].tolist() == metrics["loss"].tolist()[:-1]
    assert (mark.get_xdata(), mark.get_ydata()) == ([9], [pytest.approx(6.2)])
    with pytest.raises(UsageError, match="'loss' is a metric"):
        run.plot("loss", kind="map")


def test_what_is_not_there_is_said_with_what_is(run: Run) -> None:
    with pytest.raises(InputError) as told:
        run.plot("hessian")
    assert "no table or metric 'hessian'; it has the tables grad_norm, attention, and the metrics loss, nll" in str(
        told.value
    )
    with pytest.raises(UsageError, match="kind='bars'"):
        run.plot("loss", kind="bars")  # type: ignore[arg-type]


def test_a_notebook_shows_status_model_loss_and_first_sign(run: Run) -> None:
    shown = run._repr_html_()
    assert "<b>one</b>" in shown
    for words in ("finished at step", "branchnorm, 2L-2L, 64 wide", "inf", "at step 9: "):
        assert words in shown, words
    assert shown.count("<svg") == 1
    assert "#d7191c" in shown  # the cross where the loss was lost
    assert "lower <code>lr</code>" in shown
    assert "http" not in shown
    assert "<script" not in shown


def test_a_name_is_text_and_a_run_without_a_loss_has_no_picture(tmp_path: Path) -> None:
    made = Made(layer_rows(1), ("value",), lambda step, row: 1.0, (0,))
    make_run(tmp_path, "a<b>", layers=1, tables={"grad_norm": made}, state="running", verdict="")
    shown = Run.open(tmp_path / "a<b>")._repr_html_()
    assert "a&lt;b&gt;" in shown
    assert "not recorded" in shown
    assert "<svg" not in shown


@pytest.mark.slow
def test_a_picture_needs_no_torch_and_the_package_no_matplotlib(run: Run) -> None:
    code = (
        "import sys, stabilitylab as sl; run = sl.Run.open(sys.argv[1]); light = 'matplotlib' in sys.modules; "
        "run._repr_html_(); run.plot('grad_norm'); print(light, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(run.path)]
    told = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**_environment(), "MPLBACKEND": "Agg"}
    )
    assert told.stdout.split() == ["False", "False"]


def _environment() -> dict[str, str]:
    import os

    return dict(os.environ)
