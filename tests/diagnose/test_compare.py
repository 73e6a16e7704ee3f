"""Where two runs part: the step, the place and the number, by what numbers depend on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from diagnose_cases import Copier, Made, falling, layer_rows, made, train

from stabilitylab.diagnose import Comparison, compare
from stabilitylab.errors import InputError
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import Run, RunWriter

ROWS = layer_rows(4)
STEPS = range(20)


def compared(a: Path, b: Path, **options: float) -> Comparison:
    return compare(Run.open(a), Run.open(b), **options)


def pair(tmp_path: Path, change, table: str = "ln_input", steps=STEPS) -> tuple[Path, Path]:
    """Two runs that differ where ``change(step, row)`` is not 1, by that factor."""

    def values(t: int) -> list[list[float]]:
        return [[row.layer * change(t, row)] for row in ROWS]

    plain = made(
        tmp_path / "a",
        {"loss": falling(20)},
        {table: Made(ROWS, ("value",), lambda t: [[r.layer] for r in ROWS], steps)},
    )
    return plain, made(tmp_path / "b", {"loss": falling(20)}, {table: Made(ROWS, ("value",), values, steps)})


def test_equal_runs_are_identical_through_their_last_common_step(tmp_path: Path) -> None:
    found = compared(*pair(tmp_path, lambda t, row: 1.0))
    assert found.first is None
    assert found.identical_through == found.last_common == 19
    assert "identical bit for bit through step 19" in str(found)
    assert set(found.growth.values()) == {None}


@pytest.mark.parametrize(("table", "layer", "phase"), [("ln_input", 2, "forward"), ("grad_norm", 4, "backward")])
def test_the_first_place_is_the_lowest_on_the_way_up_and_the_highest_on_the_way_down(
    tmp_path: Path, table: str, layer: int, phase: str
) -> None:
    found = compared(*pair(tmp_path, lambda t, row: 1.25 if t >= 7 and row.layer >= 2 else 1.0, table))
    assert found.first is not None
    assert (found.first.step, found.first.place.layer, found.first.phase) == (7, layer, phase)
    assert found.first.relative == pytest.approx(0.2)
    assert found.identical_through == 6


def test_one_bit_is_a_difference_and_a_tolerance_forgives_it(tmp_path: Path) -> None:
    paths = pair(tmp_path, lambda t, row: 1 + 2**-52 if t == 3 else 1.0)
    first = compared(*paths).first
    assert first is not None
    assert first.step == 3
    assert compared(*paths, rtol=1e-15).first is None
    assert compared(*paths, atol=1e-14).first is None


def test_the_growth_table_names_the_first_step_over_each_level(tmp_path: Path) -> None:
    """b = a (1 + 2^t 1e-4): the relative difference, 1 - 1 / (1 + x), passes each level at a known step."""
    found = compared(*pair(tmp_path, lambda t, row: 1 + 2.0**t * 1e-4))
    for level, one in found.growth.items():
        expected = next((t for t in STEPS if 1 - 1 / (1 + 2.0**t * 1e-4) > level), None)
        assert (one and one.step) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rtol", [0.0, 0.1])
def test_a_number_that_is_not_finite_equals_itself_alone(tmp_path: Path, value: float, rtol: float) -> None:
    rows = {"x": [1.0, value, value]}
    found = compared(made(tmp_path / "a", rows), made(tmp_path / "b", {"x": [1.0, value, 2.0]}), rtol=rtol)
    assert found.first is not None
    assert (found.first.step, found.first.relative) == (2, math.inf)


def test_no_gradient_differs_from_a_gradient_of_zero(tmp_path: Path) -> None:
    def table(absent: bool) -> Made:
        return Made(ROWS[:1], ("value",), lambda t: [[0.0]], STEPS, absent=lambda t, row: absent and t >= 5)

    tables = [{"grad_norm": table(absent)} for absent in (True, False)]
    found = compared(made(tmp_path / "a", {}, tables[0]), made(tmp_path / "b", {}, tables[1]))
    assert found.first is not None
    assert (found.first.step, found.first.a, found.first.b) == (5, None, 0.0)
    assert "is absent and 0" in found.paragraph


def test_within_a_step_a_forward_table_comes_before_the_loss_and_the_loss_before_gradients(tmp_path: Path) -> None:
    def run(name: str, *, forward: float = 1, loss: float = 1, backward: float = 1) -> Path:
        tables = {
            "grad_norm": Made(ROWS[:1], ("value",), lambda t: [[backward if t == 4 else 1]], STEPS),
            "ln_input": Made(ROWS[:1], ("value",), lambda t: [[forward if t == 4 else 1]], STEPS),
        }
        return made(tmp_path / name, {"loss": [loss if t == 4 else 1.0 for t in STEPS]}, tables)

    plain = run("plain")
    for name, other in (
        ("ln_input.value", run("all", forward=2, loss=2, backward=2)),
        ("loss", run("loss", loss=2, backward=2)),
        ("grad_norm.value", run("grad", backward=2)),
    ):
        first = compared(plain, other).first
        assert first is not None
        assert first.probe == name


def test_sparse_tables_say_where_after_the_loss_has_said_when(tmp_path: Path) -> None:
    def run(name: str, factor: float) -> Path:
        table = Made(
            ROWS, ("value",), lambda t: [[factor if t > 6 and r.layer > 2 else 1.0] for r in ROWS], range(0, 20, 4)
        )
        return made(tmp_path / name, {"loss": [factor if t > 6 else 1.0 for t in STEPS]}, {"ln_input": table})

    found = compared(run("a", 1.0), run("b", 2.0))
    assert found.first is not None
    assert found.first_in_table is not None
    assert (found.first.step, found.first.probe) == (7, "loss")
    assert (found.first_in_table.step, found.first_in_table.place.layer) == (8, 3)
    assert "The first table to differ: step 8" in found.paragraph


def test_only_common_steps_tables_and_places_are_compared_and_the_rest_is_listed(tmp_path: Path) -> None:
    deep, other = layer_rows(6), layer_rows(4)
    one = Made(deep, ("value",), lambda t: [[1.0]] * 6, range(0, 20, 2))
    two = Made(other, ("value",), lambda t: [[1.0]] * 4, range(0, 12, 3))
    a = made(tmp_path / "a", {"loss": [1.0] * 20}, {"ln_input": one}, config={"train": {"lr": 1, "seed": 0}})
    b = made(
        tmp_path / "b",
        {"loss": [1.0] * 12, "mine": [2.0] * 12},
        {"ln_input": two},
        config={"train": {"lr": 2, "seed": 0}},
    )
    found = compared(a, b)
    assert found.first is None
    assert found.compared["ln_input.value"] == 2  # steps 0 and 6
    assert found.settings == {"train.lr": (1, 2)}
    assert found.only["a"]["steps"] == 8
    assert found.only["a"]["first_step"] == 12
    assert found.only["b"]["metrics"] == ["mine"]


def test_runs_without_a_common_step_are_refused(tmp_path: Path) -> None:
    a = made(tmp_path / "a", {"loss": [1.0]}, steps=[0])
    b = made(tmp_path / "b", {"loss": [1.0]}, steps=[5])
    with pytest.raises(InputError, match="no recorded step in common"):
        compared(a, b)


def test_a_run_that_is_still_going_is_compared_as_far_as_it_is(tmp_path: Path) -> None:
    a = made(tmp_path / "a", {"loss": [1.0, 2.0, 3.0]})
    table = Table("ln_input", ("value",), (Row("x"),))
    with RunWriter.create(tmp_path / "b", {"config": {}}) as run:
        run.open([table])
        for step, loss in enumerate([1.0, 2.5]):
            run.append(step, {"loss": loss}, {"ln_input": Cells(np.ones((1, 1)), np.zeros(1, bool))})
            found = compared(a, tmp_path / "b")
            assert (found.first is None) == (step == 0)


def test_one_weight_that_differs_is_found_at_its_layer_in_watched_runs(tmp_path: Path) -> None:
    import torch

    def nudged(t: int, model: Copier, optimizer: torch.optim.Optimizer) -> None:
        if t == 6:
            with torch.no_grad():
                model.layers[2].linear1.weight[0, 0] += 1e-3

    found = compared(train(tmp_path / "a", steps=10), train(tmp_path / "b", steps=10, fault=nudged))
    assert found.first is not None
    # the weights differ, not the batch: the reference pass, which depends on theta_t alone, shows it first
    assert (found.first.step, found.first.phase, found.first.place.layer) == (6, "reference", 3)
    assert found.identical_through == 5


def test_the_command(run, tmp_path: Path) -> None:
    pair(tmp_path, lambda t, row: 1.25 if t >= 7 and row.layer >= 2 else 1.0)
    code, out, err = run("compare", "a", "b")
    assert (code, err) == (0, "")
    assert "part at step 7, forward: ln_input.value of layer 2 of encoder (ffn) is 2 and 2.5" in out
    assert "Identical bit for bit through step 6" in out
    facts = json.loads(run("compare", "a", "b", "--rtol", "0.3", "--json")[1])
    assert facts["first"] is None
    assert run("compare", "a")[0] == 2
    assert run("compare", "a", "nowhere")[0] == 4
