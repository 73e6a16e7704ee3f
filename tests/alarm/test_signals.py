"""Signals: each says what its definition says, of the place where it is largest, and nothing of what is not there."""

from __future__ import annotations

import math

import numpy as np
import pytest
from made import GRADIENTS, TABLES, UPDATES, cells, run

from stabilitylab.alarm import SIGNALS, AlarmRule, Reading, names, signal
from stabilitylab.alarm.past import Past
from stabilitylab.alarm.row_signals import KEPT, Signals
from stabilitylab.alarm.signal import Places, signal_of, tables_read
from stabilitylab.decisive import BOUND, FOUND, NOISE
from stabilitylab.errors import UsageError
from stabilitylab.schema import Cells, Row, Table


def read_all(signals: Signals, rows: list) -> list[dict]:
    return [signals.read(metrics, tables) for _, metrics, tables in rows]


def opened(*tables: Table) -> Signals:
    signals = Signals()
    signals.open(tables or TABLES)
    return signals


def test_the_largest_z_is_that_of_its_place() -> None:
    rows = list(run(60, jump=40))
    told = read_all(opened(), rows)
    past = Past(2)  # the two layers, without the embedding
    for step, (_, _, tables) in enumerate(rows):
        z, drift = past.compare(np.log(tables["grad_norm"].values[1:, 0]))
        if step < 20:
            assert "grad_norm.z" not in told[step]
            continue
        assert told[step]["grad_norm.z"].value == pytest.approx(z.max())
        assert told[step]["grad_norm.drift"].value == pytest.approx(drift.max())
        assert told[step]["grad_norm.all"].value == pytest.approx(drift.mean())
    assert told[40]["grad_norm.z"].place == Row("two", "decoder", 2, "ffn")
    assert told[40]["grad_norm.z"].value > 20


def test_the_embedding_stands_apart() -> None:
    told = read_all(opened(), list(run(30)))[-1]
    assert told["embedding_gradient.z"].place == Row("embedding", "decoder", 0, "embedding")


def test_unevenness_is_the_spread_of_log_gradients_inside_layers() -> None:
    _, metrics, tables = next(run(1))
    told = opened().read(metrics, tables)
    logs = np.log(tables["grad_norm"].values[1:, 0])
    assert told["uniformity.level"].value == pytest.approx(logs.std())
    assert told["uniformity.level"].place == Row("", "decoder")


def test_a_level_is_the_largest_and_headroom_the_smallest() -> None:
    headroom = Table("critical_sharpness", ("headroom",), (Row("a"), Row("b")), phase="update")
    signals = opened(*TABLES, headroom)
    told = signals.read(
        {}, {"update_ratio": cells(np.array([[0.1, 1], [0.3, 1]])), "critical_sharpness": cells(np.array([3.0, 2.0]))}
    )
    assert told["update.level"] == (0.3, Row("two", "decoder", 2, "ffn"))
    assert told["headroom.level"] == (2.0, Row("b"))


@pytest.mark.parametrize(
    ("table", "column", "signal", "trust", "good", "bad"),
    [
        ("preconditioned_sharpness", "to_edge", "to_edge.level", "residual", 0.02, 0.3),
        ("preconditioned_sharpness", "to_edge", "to_edge.level", "converged", 1.0, 0.0),
        ("critical_sharpness", "headroom", "headroom.level", "state", FOUND, BOUND),
        ("critical_sharpness", "headroom", "headroom.level", "state", FOUND, NOISE),
    ],
)
def test_a_level_that_was_not_found_is_not_read(
    table: str, column: str, signal: str, trust: str, good: float, bad: float
) -> None:
    own = Table(table, (column, trust), (Row("model"),), phase="update")
    signals = opened(*TABLES, own)
    assert signal not in signals.read({}, {table: cells(np.array([[1e-3, bad]]))})
    assert signals.read({}, {table: cells(np.array([[2.0, good]]))})[signal].value == 2.0
    assert signals.read({}, {table: cells(np.array([[1e9, bad]]))})[signal].value == 2.0  # the last that was found


def test_what_is_absent_or_zero_is_no_number() -> None:
    signals = opened()
    for _, metrics, tables in run(30):
        signals.read(metrics, tables)
    before = signals.read({}, {})
    values = Cells(np.array([[1.0], [math.nan], [0.0]]), np.array([False, True, False]))
    told = signals.read({"loss": None}, {"grad_norm": values})
    assert told["embedding_gradient.z"] != before["embedding_gradient.z"]
    left = {name for name in told if not name.startswith("embedding")}  # one is absent, one has no logarithm
    assert {name: told[name] for name in left} == {name: before[name] for name in left}


def test_a_reading_stays_for_a_while() -> None:
    signals = opened()
    for _, metrics, tables in run(30):
        last = signals.read(metrics, tables)
    for _ in range(KEPT - 1):
        assert signals.read({}, {}) == last
    assert signals.read({}, {}) == {}


def test_a_row_in_two_parts_is_one_row() -> None:
    whole, parts = opened(), opened()
    for _, metrics, tables in run(60, jump=40):
        told = whole.read(metrics, tables)
        parts.read(metrics, {"grad_norm": tables["grad_norm"]})
        assert parts.read({}, {"update_ratio": tables["update_ratio"]}, more=True) == told
    assert parts.state_dict() == whole.state_dict()


def test_a_place_more_begins_its_past_anew() -> None:
    signals = opened()
    before = {}
    for _, metrics, tables in run(30):
        before = signals.read(metrics, tables)
    more = Table("grad_norm", ("value",), (*GRADIENTS.rows, Row("three", "decoder", 3, "ffn")), phase="backward")
    signals.open([more, UPDATES])
    told = signals.read({"loss": 1.0}, {"grad_norm": cells(np.ones(4))})
    assert told["grad_norm.z"] == before["grad_norm.z"]  # the last that was known
    assert told["loss.z"] != before["loss.z"]


def test_scale_is_nothing() -> None:
    """Numbers in other units give the same signals: they are logarithms against their past."""
    rows = list(run(60, jump=40))
    other = [
        (
            step,
            {name: 1e-6 * value for name, value in metrics.items()},
            {name: Cells(1e4 * own.values, own.absent) for name, own in tables.items()},
        )
        for step, metrics, tables in rows
    ]
    for a, b in zip(read_all(opened(), rows), read_all(opened(), other), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            if not name.endswith("level") or name == "uniformity.level":
                assert a[name].value == pytest.approx(b[name].value, rel=1e-6, abs=1e-9)


def test_names_are_what_a_row_of_all_tables_gives() -> None:
    """Every name can be told, and nothing else is."""
    columns: dict[str, list[str]] = {}
    for each in SIGNALS.values():
        columns.setdefault(each.table, []).append(each.column)
    metrics = columns.pop("")
    places = (Row("e", "s", 0, "embedding"), Row("a", "s", 1), Row("b", "s", 2))
    tables = [Table(name, tuple(dict.fromkeys(own)), places) for name, own in columns.items()]
    signals = opened(*tables)
    random = np.random.default_rng(0)
    told = {}
    for _ in range(25):
        told = signals.read(
            {name: float(random.uniform(1, 2)) for name in metrics},
            {table.name: cells(random.uniform(1, 2, (3, len(table.columns)))) for table in tables},
        )
    assert set(told) == set(names())
    assert {signal_of(name).table for name in names()} == tables_read() | {""}


def test_a_signal_of_ones_own_is_read_beside_the_others() -> None:
    with SIGNALS.restored():

        @signal("gap", column="loss", kinds=("level", "drift"), scale=np.arcsinh, smallest=True)
        def gap(values: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
            """a loss less 2"""
            return values - 2, places

        assert {"gap.level", "gap.drift"} <= {*names()}
        assert signal_of("gap.level").title == "a loss less 2"
        told = opened().read({"loss": 5.0}, {})
        assert told["gap.level"] == Reading(3.0, None)
        assert AlarmRule("mine", {"gap.level": 1.0}, 0.0).score(told)[0] == pytest.approx(-math.log(3))
    assert not {"gap.level", "gap.drift"} & {*names()}


def test_a_signal_needs_words_and_kinds_that_there_are() -> None:
    with pytest.raises(UsageError, match="'mine': kind 'slope' is none of z, drift, all, level"):
        signal("mine", column="loss", kinds=("slope",))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="its function needs a docstring"):
        signal("mine", column="loss")(lambda values, places: (values, places))
    assert "mine" not in SIGNALS
