"""The page of one run: what is drawn, what breaks first, and models that are not ours."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edited_runs import edit
from making import Made, layer_rows, load, make_run, sublayer_rows

from stabilitylab.reports import MissingRuns, Panel, Picture, paper
from stabilitylab.reports.base import ABSENT, NONFINITE, ZERO, Map, Series
from stabilitylab.reports.collection import Record
from stabilitylab.reports.diagnosis import diagnose
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import RunWriter

STEPS = tuple(range(5))
Place = Callable[[int, Row], float]
METRICS = {"nll": [6.0, 5.0, 4.0, 3.0, 2.0], "held_out_nll": [6.5, None, None, None, 3.0],
           "grad_norm_total": [1.0, 2.0, 3.0, 2.0, 1.0]}  # fmt: skip


def run(
    folder: Path, *, layers: int = 3, arch: str = "postln", tables: Mapping[str, Made] | None = None, **how: Any
) -> Record:
    made = make_run(folder, "run", arch=arch, layers=layers, tables=tables, **{"metrics": METRICS, **how})
    return Record(load(folder)[0].run, made.name)


def gradients(value: Place, layers: int = 3, steps: Sequence[int] = STEPS) -> Made:
    return Made(sublayer_rows(layers), ("value", "bias"), lambda step, row: (value(step, row), 7.0), steps)


def inputs(value: Place, layers: int = 3) -> Made:
    return Made(sublayer_rows(layers), ("value",), value, STEPS, total="mean")


def panel(picture: Picture, title: str) -> Panel:
    (found,) = (panel for panel in picture.panels if panel.title == title)
    return found


def heat(picture: Picture, title: str) -> Map:
    found = panel(picture, title).map
    assert found is not None
    return found


def watched(folder: Path, tables: Sequence[Table], cells: Callable[[int, Table], Cells], **metrics: float) -> Record:
    """A run of ``stabilitylab.watch`` on a model that we know nothing of: no configuration, names of its own."""
    with RunWriter.create(folder / "mine", {"label": "Sequential", "config": {}}) as writer:
        writer.open(tables)
        for step in STEPS:
            writer.append(step, metrics, {table.name: cells(step, table) for table in tables})
        writer.set_status("finished", len(STEPS))
    return load(folder)[0]


def test_loss_and_gradient_are_lines_over_steps(tmp_path: Path) -> None:
    picture = diagnose(run(tmp_path, unigram={"cross_entropy": 5.5}))
    loss, gradient = picture.panels
    training, held_out = loss.series
    assert (list(training.x), list(training.y)) == ([0, 1, 2, 3, 4], METRICS["nll"])
    assert (list(held_out.x), list(held_out.y)) == ([0, 4], [6.5, 3])
    assert [(line.value, line.label) for line in loss.references] == [(5.5, "unigram baseline")]
    assert list(gradient.series[0].y) == METRICS["grad_norm_total"]
    assert gradient.log_y
    assert picture.finding.startswith("trained since step 0: made up")
    assert picture.notes == ["postln, 3L-3L."]


def test_a_map_has_a_row_a_layer_and_a_panel_a_stack(tmp_path: Path) -> None:
    def value(step: int, row: Row) -> float:
        return {"self_attn": 3.0, "ffn": 4.0}.get(row.sublayer, 0.0) * row.layer * 10**step

    picture = diagnose(run(tmp_path, tables={"grad_norm": gradients(value)}))
    for stack in ("encoder", "decoder"):
        found = heat(picture, f"grad norm, {stack}")
        assert (list(found.x), list(found.y)) == ([0, 1, 2, 3, 4], [1, 2, 3])
        np.testing.assert_allclose(found.z, [[5 * layer * 10**step for step in STEPS] for layer in (1, 2, 3)])
        assert found.log
        assert not found.finding.any()
    assert panel(picture, "grad norm, decoder").y == "layer"


def test_places_that_do_not_combine_have_rows_of_their_own(tmp_path: Path) -> None:
    rows = [Row("encoder.input", "encoder", 0, "input"), *sublayer_rows(2, ("encoder",))]
    table = Made(rows, ("value",), lambda step, row: rows.index(row) + 1.0, STEPS, total="")
    found = diagnose(run(tmp_path, tables={"activation_grad_norm": table}))
    assert panel(found, "activation grad norm, encoder").y == "sub-layer"
    assert heat(found, "activation grad norm, encoder").z[:, 0].tolist() == [2, 3, 4, 5]  # without what enters


def test_a_note_says_which_row_is_which_sublayer_or_parameter(tmp_path: Path) -> None:
    even = [Row(f"h.{n}.{part}", "h", n + 1, part) for n in range(2) for part in ("attn", "mlp")]
    of_parameters = [Row(f"h.{n}.attn.{name}", "h", n + 1, "attn") for n in range(2) for name in ("q.weight", "q.bias")]
    uneven = [even[0], *even[2:]]
    tables = {"update_ratio": even, "adam": even, "parameter_norm": of_parameters, "attention_heads": uneven}
    made = {name: Made(rows, ("value",), lambda step, row: 1.0, STEPS, total="") for name, rows in tables.items()}
    notes = diagnose(run(tmp_path, tables=made)).notes
    assert "Rows of update ratio (h), adam (h): 2 of each layer, from the lowest layer up: attn, mlp." in notes
    assert "Rows of parameter norm (h): 2 of each layer, from the lowest layer up: attn.q.weight, attn.q.bias." in notes
    assert "Rows of attention heads (h): 1 in layer 1, 2 to 3 in layer 2." in notes


def test_an_axis_names_what_its_rows_are(tmp_path: Path) -> None:
    heads = [Row(f"h.{n}.attn{end}", "h", n + 1, f"attn{end}") for end in ("", ".head_0") for n in range(2)]
    modules = [Row(f"h.{n}{end}", "h", n + 1, end[1:]) for end in ("", ".mlp") for n in range(2)]
    parameters = [Row(f"h.{n}.mlp.{name}", "h", n + 1, "mlp") for n in range(2) for name in ("weight", "bias")]
    tables = {"attention_heads": heads, "outliers": modules, "parameter_norm": parameters}
    columns = {"attention_heads": "max_logit", "outliers": "pearson_kurtosis", "parameter_norm": "weight"}
    made = {name: Made(rows, (columns[name],), lambda step, row: 1.0, STEPS, total="") for name, rows in tables.items()}
    found = diagnose(run(tmp_path, tables=made))
    named = {panel.title: panel.y for panel in found.panels if panel.map is not None}
    assert named == {"attention heads, h": "module or head", "outliers, h": "module", "parameter norm, h": "parameter"}


def test_one_measured_row_has_one_tick_on_each_axis_and_on_its_colour_bar(tmp_path: Path) -> None:
    table = Made([Row("model", "", 0, "")], ("value",), lambda step, row: 1.9836e6, (3,), total="")
    picture = diagnose(run(tmp_path, tables={"sharpness": table}))
    (found,) = [panel for panel in picture.panels if panel.map is not None]
    axes, bar = paper.draw(replace(picture, panels=[found]), 6.75).axes
    assert [*axes.get_xticks()] == [3]
    assert [*axes.get_yticks()] == [1]
    assert [label.get_text() for label in bar.get_yticklabels()] == [r"$1.98{\times}10^{6}$"]
    assert not len(bar.get_yticks(minor=True))


def test_steps_of_a_map_are_whole(tmp_path: Path) -> None:
    table = Made(sublayer_rows(1, ("encoder",)), ("value",), lambda step, row: step + 1.0, (0, 1, 2), total="")
    picture = diagnose(run(tmp_path, tables={"activation_grad_norm": table}))
    (found,) = [panel for panel in picture.panels if panel.map is not None]
    axes = paper.draw(replace(picture, panels=[found]), 6.75).axes[0]
    assert all(tick == round(tick) for tick in axes.get_xticks())


def test_letters_are_smaller_on_a_page_of_many_small_panels() -> None:
    panel = Panel("Loss", "step", "loss", [Series("held out", [0, 1], [1.0, 2.0], colour="#222222", marker="none")])
    few, many = (paper.draw(Picture([panel] * count, ""), 6.75).axes[0] for count in (2, 25))
    for words in (lambda axes: axes.xaxis.label, lambda axes: axes.yaxis.label, lambda axes: axes.get_xticklabels()[0]):
        assert words(many).get_fontsize() == pytest.approx(0.75 * words(few).get_fontsize())


def test_a_table_with_one_row_of_each_layer_is_a_map_of_layers(tmp_path: Path) -> None:
    rows = [Row("h.input", "h", 0, "input"), *(Row(f"h.{n}", "h", n + 1, "") for n in range(3))]
    table = Made(rows, ("value",), lambda step, row: 1.0, STEPS, total="")
    found = panel(diagnose(run(tmp_path, tables={"activation_grad_norm": table})), "activation grad norm, h")
    assert found.y == "layer"
    assert found.map is not None
    assert [*found.map.y] == [1, 2, 3]


def test_each_name_of_the_legend_has_one_colour_and_each_colour_one_name(tmp_path: Path) -> None:
    groups = tuple(Row(name, "h", n, name) for n, name in enumerate(["wte", "ln_f", "attn", "mlp"]))
    outputs = tuple(Row(name, name, 0, "output") for name in ("ln_f", "lm_head"))
    tables = [
        Table("model_update", ("cumulative",), outputs[:1], "L2 norm", "", ""),
        Table("grad_norm", ("value",), groups, "L2 norm", "", "norm"),
        Table("logits", ("log_z",), outputs, "nats", "", ""),
    ]

    def cells(step: int, table: Table) -> Cells:
        return Cells(np.arange(1.0, len(table.rows) + 1)[:, None], np.zeros(len(table.rows), bool))

    picture = diagnose(watched(tmp_path, tables, cells, loss=0.5, held_out_nll=0.5))
    looks = {(one.label, one.colour) for panel in picture.panels for one in panel.series}
    assert len(looks) == len({label for label, _ in looks}) == len({colour for _, colour in looks}) >= 6


def test_each_probe_shows_its_main_column(tmp_path: Path) -> None:
    tables = {
        "cosine_similarity": Made(layer_rows(2), ("centred", "raw"), lambda s, r: (0.1, 0.9), STEPS, "mean", "cosine"),
        "branch_variance": Made(sublayer_rows(2), ("total", "branch"), lambda s, r: (9.0, 2.0), STEPS, "mean"),
        "of_my_own": Made(layer_rows(2), ("first", "second"), lambda s, r: (10.0 ** (3 * r.layer), 0.0), STEPS, "mean"),
        "narrow": Made(layer_rows(2), ("first",), lambda s, r: float(r.layer), STEPS, "mean"),
        "signed": Made(layer_rows(2), ("first",), lambda s, r: (-100.0) ** r.layer, STEPS, "mean"),
    }
    picture = diagnose(run(tmp_path, tables=tables))
    shown = {key: heat(picture, f"{key}, encoder") for key in ("cosine similarity", "branch variance", "of my own")}
    assert [found.z[0, 0] for found in shown.values()] == [0.9, 2.0, 1000.0]
    assert [found.log for found in shown.values()] == [False, True, True]
    assert [heat(picture, f"{key}, encoder").log for key in ("narrow", "signed")] == [False, False]
    assert shown["cosine similarity"].unit == "raw [cosine]"


def test_zero_absent_and_not_finite_are_told_apart_from_small(tmp_path: Path) -> None:
    rows = tuple(layer_rows(5, ("encoder",)))
    values = np.array([[1e-300], [0.0], [np.nan], [np.nan], [np.inf]])
    absent = np.array([False, False, True, False, False])
    table = Table("grad_norm", ("value",), rows, "L2 norm", "", "norm", log=True)
    found = heat(diagnose(watched(tmp_path, [table], lambda step, _: Cells(values, absent))), "grad norm, encoder")
    assert found.finding[:, 0].tolist() == [0, ZERO, ABSENT, NONFINITE, NONFINITE]
    assert found.z[0, 0] == 1e-300
    assert found.log


def test_a_long_run_is_pooled_and_its_spike_survives(tmp_path: Path) -> None:
    steps = tuple(range(0, 300, 3))

    def value(step: int, row: Row) -> float:
        spike = (step, row.stack, row.layer, row.sublayer) == (141, "decoder", 2, "ffn")
        return math.nan if (step, row.layer) == (243, 1) else 1e5 if spike else 1.0

    losses = {"nll": [9.0 if step == 150 else 1.0 for step in range(300)]}
    record = run(tmp_path, tables={"grad_norm": gradients(value, steps=steps)}, metrics=losses)
    picture = diagnose(record, columns=10)
    found = heat(picture, "grad norm, decoder")
    assert found.z.shape == (3, 10)
    assert list(found.x) == list(range(0, 300, 30))
    assert np.argwhere(found.z > 1e4).tolist() == [[1, 4]]
    assert np.argwhere(found.finding == NONFINITE).tolist() == [[0, 8]]
    line = picture.panels[0].series[0]
    assert len(line.x) < 40
    assert (max(line.y), list(line.x)[int(np.argmax(line.y))]) == (9, 150)
    assert picture.notes[-1] == "A column of a map shows the largest number of up to 10 probed steps."
    assert heat(diagnose(record), "grad norm, decoder").z.shape == (3, 100)


def test_the_accumulated_update_is_a_line_a_stack(tmp_path: Path) -> None:
    rows = [Row(stack, stack, 0, "output") for stack in ("encoder", "decoder")]
    table = Made(rows, ("cumulative", "one_update"), lambda step, row: (step * len(row.stack), 0.0), STEPS, "")
    found = panel(diagnose(run(tmp_path, tables={"model_update": table})), "Model update")
    assert [(line.label, list(line.y)) for line in found.series] == [
        ("encoder", [0, 7, 14, 21, 28]),
        ("decoder", [0, 7, 14, 21, 28]),
    ]
    assert found.references[0].value == pytest.approx(math.sqrt(2 * 64))


def test_a_gradient_that_is_lost_is_traced_to_the_highest_place(tmp_path: Path) -> None:
    """Backpropagation carries a NaN from decoder layer 2 to all that lies below it."""

    def value(step: int, row: Row) -> float:
        below = row.stack == "encoder" or row.layer <= 2
        return math.nan if step >= 3 and below else 1.0

    picture = diagnose(run(tmp_path, tables={"grad_norm": gradients(value)}))
    sentence = "the gradient of layer 2 of decoder breaks first: not finite at step 3, nor below it (5 places)"
    assert sentence in picture.finding
    assert heat(picture, "grad norm, decoder").finding[:, 3].tolist() == [NONFINITE, NONFINITE, 0]


def test_where_every_gradient_is_lost_it_is_the_forward_pass_or_the_loss_that_breaks(tmp_path: Path) -> None:
    lost = gradients(lambda step, row: math.inf if step >= 2 else 1.0)
    sound = inputs(lambda step, row: 9.0)
    finding = diagnose(run(tmp_path / "loss", tables={"grad_norm": lost, "ln_input": sound})).finding
    assert "no layer's gradient is finite from step 2 on: it is the loss that breaks, not a layer" in finding
    norms = inputs(lambda step, row: math.inf if step >= 2 and (row.stack, row.layer) >= ("encoder", 2) else 9.0)
    finding = diagnose(run(tmp_path / "forward", tables={"grad_norm": lost, "ln_input": norms})).finding
    assert "the loss that breaks" not in finding
    assert "no layer's gradient is finite from step 2 on" in finding
    assert "the first norm whose input is not finite is that of layer 2 of encoder (self_attn), at step 2" in finding


def test_a_vanishing_gradient_is_named_with_its_size_and_step(tmp_path: Path) -> None:
    def value(step: int, row: Row) -> float:
        if row.stack == "encoder":
            return 1e-9  # weak, but its whole stack is
        return {1: 1e-6 if step >= 2 else 0.5, 2: 1e-2, 3: 1.0}[row.layer] if row.sublayer == "ffn" else 0.0

    finding = diagnose(run(tmp_path, tables={"grad_norm": gradients(value)})).finding
    assert (
        "the gradient of layer 1 of decoder vanishes first: it is 1e-06 of that of layer 3 of decoder at step 2, "
        "and 1 of 6 are that weak at step 4" in finding
    )


def test_a_gradient_that_comes_back_is_said(tmp_path: Path) -> None:
    value = gradients(lambda step, row: 0.0 if (step, row.stack, row.layer) == (0, "decoder", 1) else 1.0)
    finding = diagnose(run(tmp_path, tables={"grad_norm": value})).finding
    assert "it is 0 of that of layer 2 of decoder at step 0, but none is that weak at step 4" in finding


def test_a_stack_without_any_gradient_is_named(tmp_path: Path) -> None:
    """As the encoder of a BranchNorm whose alpha is 0."""
    value = gradients(lambda step, row: 0.0 if row.stack == "encoder" else 1.0)
    finding = diagnose(run(tmp_path, tables={"grad_norm": value})).finding
    assert finding.endswith("; every gradient of encoder is exactly 0 at step 4.")
    assert "no layer's gradient vanishes beside others" in finding


def test_a_healthy_run_is_called_healthy(tmp_path: Path) -> None:
    value = gradients(lambda step, row: 1.0 / row.layer)
    norms = inputs(lambda step, row: 80.0 if (step, row.layer, row.sublayer) == (1, 3, "cross_attn") else 8.0)
    finding = diagnose(run(tmp_path, tables={"grad_norm": value, "ln_input": norms})).finding
    assert (
        "no layer's gradient vanishes beside others (the weakest, of layer 3 of encoder, is 0.33 of that of layer 1"
        in finding
    )
    assert "stands at layer 3 of decoder (cross_attn), step 1: 10 √d, where the median norm has 1 √d." in finding


@pytest.mark.parametrize(("lost", "marks"), [(3, ["not finite", "diverged"]), (2, ["not finite"])])
def test_a_divergence_is_marked(tmp_path: Path, lost: int, marks: list[str]) -> None:
    losses = [9.0, 8.0, *[math.nan if step >= lost else 7.0 for step in (2, 3, 4)]]
    run(tmp_path, metrics={"nll": losses, "grad_norm_total": [1.0, *[None] * 4]}, state="diverged")
    path = tmp_path / "run" / "status.json"
    status = json.loads(path.read_text())
    status["facts"]["verdict"] |= {"state": "diverged", "step": 2, "reason": "the loss is nan"}
    edit(path, status)
    picture = diagnose(load(tmp_path)[0])
    assert [mark.label for mark in picture.panels[0].references] == marks
    assert picture.panels[0].references[0].value == lost
    assert np.isnan(picture.panels[0].series[0].y[-1])
    assert [mark.label for mark in picture.panels[1].references] == ["diverged"]
    assert picture.finding == "diverged since step 2: the loss is nan."


def test_a_watched_model_without_configuration(tmp_path: Path) -> None:
    rows = tuple(Row(f"h.{n}.{part}", "", n + 1, part) for n in range(3) for part in ("attn", "mlp"))
    tables = [
        Table("grad_norm", ("value",), rows, "L2 norm", "", "norm"),
        Table("ln_input", ("value",), rows, "L2 norm", "", "mean"),
    ]

    def cells(step: int, table: Table) -> Cells:
        sizes = 100.0 ** -np.arange(6) if table.name == "grad_norm" else np.arange(6.0)
        return Cells(sizes[:, None], np.zeros(6, bool))

    picture = diagnose(watched(tmp_path, tables, cells, loss=0.5))
    assert [panel.title for panel in picture.panels] == [
        "Loss",
        "Shares of the squared gradient norm",
        "grad norm",
        "ln input",
    ]
    assert (picture.panels[0].y, picture.panels[0].references) == ("loss", [])
    assert picture.notes == ["Sequential, a model of your own."]
    assert picture.finding == (
        "finished at step 5; first sign: exploding gradient at step 0; the gradient of layer 3 vanishes first: it is "
        "1e-08 of that of layer 1 at step 0, and 1 of 3 are that weak at step 4; the largest norm input stands at "
        "layer 3 (mlp), step 0: 5, where the median norm has 2.5."
    )


def test_a_model_without_layers_has_places(tmp_path: Path) -> None:
    rows = (Row("0", "", 0, "0"), Row("2", "", 0, "2"))
    table = Table("grad_norm", ("value",), rows, "L2 norm", "", "norm", log=True)
    cells = Cells(np.array([[1.0], [2.0]]), np.zeros(2, bool))
    picture = diagnose(watched(tmp_path, [table], lambda step, _: cells, loss=math.nan))
    found = heat(picture, "grad norm")
    assert (panel(picture, "grad norm").y, found.z[:, 0].tolist()) == ("place", [1, 2])
    assert picture.notes[-1] == "Places of grad norm: 1 0, 2 2."
    assert "loss not finite from step 0 on" in picture.finding


@pytest.mark.parametrize("absent", [True, False])
def test_without_any_gradient_nothing_is_called_vanishing(tmp_path: Path, absent: bool) -> None:
    table = Table("grad_norm", ("value",), tuple(layer_rows(2)), "L2 norm", "", "norm")
    cells = Cells(np.full((4, 1), np.nan if absent else 0.0), np.full(4, absent))
    finding = diagnose(watched(tmp_path, [table], lambda step, _: cells)).finding
    assert finding == "finished at step 5; every gradient is 0 or absent."


def test_a_run_that_recorded_nothing_is_not_drawn(tmp_path: Path) -> None:
    make_run(tmp_path, "empty", state="running", tables={"grad_norm": gradients(lambda step, row: 1.0, steps=())})
    with pytest.raises(MissingRuns, match="nothing yet"):
        diagnose(load(tmp_path)[0])


def test_the_first_alarms_are_marked_where_they_were_raised(tmp_path: Path) -> None:
    record = watched(tmp_path, [], lambda step, table: Cells(np.zeros((0, 0)), np.zeros(0, bool)), loss=1.0)
    record.run.manifest["alarms"] = [*({"step": step, "title": "x"} for step in (1, 2, 3, 4)), {"step": None}]
    marked = panel(diagnose(record), "Loss").references
    assert [(mark.value, mark.label, mark.vertical) for mark in marked] == [(s, "alarm", True) for s in (1, 2, 3)]


def test_what_was_checked_at_the_first_row_stands_below_the_maps(tmp_path: Path) -> None:
    made = run(tmp_path)
    assert not any("first row" in note for note in diagnose(made).notes)
    facts = {"parameters": 12, "parameters_without_gradient": 1, "forwards": 2, "norms": "many"}
    edit(made.run.path / "run.json", audit=facts)
    note = diagnose(Record(load(tmp_path)[0].run, made.name)).notes[-1]
    assert note == ("Checked at the first row: 12 trainable tensors, 1 without a gradient; 2 forwards made the update.")
