"""The watcher in a loop: which rows reach the sink, what a checkpoint carries, and that it leaves nothing behind."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from probe_toys import WITHOUT_TAPS, ListSink, Toy, batch, loss_of, masks, train
from rest_slow import rest_slow
from torch import nn

from stabilitylab.errors import UsageError
from stabilitylab.probes import PROBES, Watcher
from stabilitylab.probes.instruments.instrument import Instrument

FIXED = batch(99)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


def step(watcher: Watcher, model: Toy, optimizer: torch.optim.Optimizer, t: int, **metrics: Any) -> None:
    loss = loss_of(model, batch(t))
    loss.backward()
    watcher.step(loss=loss, **metrics)
    optimizer.step()
    optimizer.zero_grad()


def test_rows_and_tables_stand_at_their_steps() -> None:
    model, sink = Toy(), ListSink()
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"optimizer": optimizer, "reference": lambda: {"nll": loss_of(model, FIXED)}}
    with Watcher(model, sink, probes="all", every=2, update_every=3, **options) as watcher:
        assert watcher.t == 0
        for t in range(5):
            assert (watcher.due(t), watcher.due_reference(t)) == (t % 2 == 0, t % 3 == 0)
            step(watcher, model, optimizer, t, lr=0.1 * t, note=None)
            assert watcher.t == t + 1
            assert len(sink.rows) == t  # a row waits for what the optimizer does
    training = {name for name in WITHOUT_TAPS if PROBES[name].on != "reference"}
    reference = WITHOUT_TAPS - training
    expected = {0: training | reference, 1: set(), 2: training, 3: reference, 4: training, 5: reference}
    assert {row: set(tables) for row, _, tables in sink.rows} == expected
    assert [metrics.get("lr") for _, metrics, _ in sink.rows] == [0.0, 0.1, 0.2, pytest.approx(0.3), 0.4, None]
    assert all(metrics["note"] is None for _, metrics, _ in sink.rows[:5])
    assert ["nll" in metrics for _, metrics, _ in sink.rows] == [True, False, False, True, False, True]
    assert sink.closed == 1
    assert hooks(model) == 0


def test_probed_rows_carry_the_gradient_metrics_and_every_row_the_total() -> None:
    model, sink = Toy(), ListSink()
    train(model, 3, lambda o: Watcher(model, sink, probes="grad_norm", every=2, optimizer=o))
    assert set(sink.row(0)[0]) == {"loss", "grad_norm_total", "grad_under_eps"}
    assert set(sink.row(1)[0]) == {"loss", "grad_norm_total"}


def test_step_returns_the_rows_own_numbers_and_note_adds_to_them() -> None:
    model, sink = Toy(), ListSink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = Watcher(model, sink, probes="update_ratio", optimizer=optimizer)
    with pytest.raises(UsageError, match="call note"):
        watcher.note(late=1.0)
    loss = loss_of(model, batch())
    loss.backward()
    metrics = watcher.step(loss=loss, lr=0.5)
    assert metrics["loss"] == loss.item()  # even before the update
    optimizer.step()
    watcher.note(tokens_per_second=7.0, memory=torch.tensor(3.0))
    assert dict(metrics) == {
        "loss": loss.item(),
        "lr": 0.5,
        "grad_norm_total": metrics["grad_norm_total"],
        "tokens_per_second": 7.0,
        "memory": 3.0,
    }
    assert len(metrics) == 5
    with pytest.raises(UsageError, match="metric 'lr' stands twice in row 0"):
        watcher.note(lr=1.0)
    watcher.finish()
    assert sink.row(0)[0] == dict(metrics)
    assert min(sink.column(0, "update_ratio", "value").values()) > 0
    assert watcher.last is not None
    assert watcher.last[0] == 0


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones(3, 1)])
def test_a_metric_is_one_number(value: torch.Tensor) -> None:
    watcher = Watcher(Toy(), ListSink(), probes="none")
    with pytest.raises(UsageError, match="a metric is one number"):
        watcher.step(loss=value)


def test_metrics_are_taken_when_they_are_given() -> None:
    model, sink, value = Toy(), ListSink(), torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watcher(model, sink, probes="update_ratio", optimizer=optimizer) as watcher:
        watcher.step(value=value, whole=torch.tensor(3), truth=True)
        with torch.no_grad():
            value.fill_(5)  # before the row is complete
        optimizer.step()
    assert sink.row(0)[0] == {"value": 2.0, "whole": 3.0, "truth": 1.0, "grad_norm_total": None}


def interrupted(at: int | None, flush: bool) -> ListSink:
    """Five updates, or ``at`` of them, a checkpoint, and the rest by new objects."""
    sink = ListSink()

    def make(state: dict[str, Any] | None) -> tuple[Toy, torch.optim.Optimizer, Watcher]:
        model = Toy(seed=0 if state is None else 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options: dict[str, Any] = {
            "mask": lambda: masks(current),
            "schedule": model.alpha,
            "every": 2,
            "update_every": 2,
        }

        def reference() -> dict[str, torch.Tensor]:
            nonlocal current
            current = FIXED
            return {"nll": loss_of(model, FIXED)}

        watcher = Watcher(model, sink, probes="all", optimizer=optimizer, reference=reference, **options)
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            watcher.load_state_dict(state["watcher"])
        return model, optimizer, watcher

    current = FIXED
    model, optimizer, watcher = make(None)
    for t in range(5):
        if t == at:
            if flush:
                watcher.flush()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "watcher": watcher.state_dict()}
            file = io.BytesIO()
            torch.save(state, file)
            watcher.close()
            file.seek(0)
            model, optimizer, watcher = make(torch.load(file, weights_only=True))
        model.alpha.set((t + 1) / 5)
        current = batch(t)
        step(watcher, model, optimizer, t)
    model.alpha.set(1.0)
    watcher.finish()
    return sink


@pytest.mark.parametrize("flush", rest_slow([False, True], [False]))
@pytest.mark.parametrize("at", rest_slow([1, 2, 3, 4], [2]))
def test_a_resumed_run_writes_the_rows_of_an_uninterrupted_one(at: int, flush: bool) -> None:
    whole, resumed = interrupted(None, False), interrupted(at, flush)
    assert len(whole.rows) == len(resumed.rows) == 6
    for (step_a, metrics_a, tables_a), (step_b, metrics_b, tables_b) in zip(whole.rows, resumed.rows, strict=True):
        assert (step_a, metrics_a) == (step_b, metrics_b)
        assert set(tables_a) == set(tables_b)
        for name, cells in tables_a.items():
            assert np.array_equal(cells.values, tables_b[name].values, equal_nan=True), (step_a, name)
            assert np.array_equal(cells.absent, tables_b[name].absent)
    assert {name for *_, tables in whole.rows for name in tables} == WITHOUT_TAPS


def test_hooks_are_there_only_while_a_row_is_probed() -> None:
    model, sink = Toy(), ListSink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = Watcher(model, sink, every=2, optimizer=optimizer)
    counts = []
    for t in range(4):
        counts.append(hooks(model))
        step(watcher, model, optimizer, t)
    assert counts[0] == counts[2] > 0
    assert counts[1] == counts[3] == 0
    watcher.close()
    watcher.close()
    assert hooks(model) == 0
    assert not optimizer._optimizer_step_post_hooks
    assert sink.closed == 1
    with pytest.raises(UsageError, match="this watcher is closed"):
        watcher.step()


def test_an_exception_leaves_no_hook_and_loses_no_row() -> None:
    model, sink = Toy(), ListSink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(KeyboardInterrupt), Watcher(model, sink, optimizer=optimizer) as watcher:  # noqa: PT012
        for t in range(3):
            step(watcher, model, optimizer, t)
        loss_of(model, batch(3))
        raise KeyboardInterrupt
    assert [row for row, *_ in sink.rows] == [0, 1, 2]
    assert hooks(model) == 0
    assert sink.closed == 1


def test_a_reference_that_fails_does_not_move_numbers_to_another_row() -> None:
    model, sink, failing = Toy(), ListSink(), True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def reference() -> None:
        if failing:
            raise ArithmeticError

    watcher = Watcher(
        model, sink, probes="update_ratio", every=2, update_every=2, optimizer=optimizer, reference=reference
    )
    with pytest.raises(ArithmeticError):
        watcher.step()
    watcher.t = 1  # the caller goes on with a row that is not probed
    failing = False
    step(watcher, model, optimizer, 1)
    watcher.flush()
    assert [(row, set(tables)) for row, _, tables in sink.rows] == [(1, set())]


@pytest.mark.parametrize(("metrics", "rows"), [({}, [0]), ({"valid_loss": 1.5}, [0, 1])])
def test_finish_keeps_metrics_without_a_reference_pass(metrics: dict[str, float], rows: list[int]) -> None:
    sink = ListSink()
    with Watcher(Toy(), sink, probes="none") as watcher:
        watcher.step(loss=1.0)
        assert watcher.finish(**metrics).get("valid_loss") == metrics.get("valid_loss")
    assert [row for row, *_ in sink.rows] == rows


def test_finishing_twice_is_an_error_and_leaving_after_finish_is_not() -> None:
    sink = ListSink()
    with Watcher(Toy(), sink, probes="none") as watcher:
        watcher.step(loss=1.0)
        watcher.finish()
        with pytest.raises(UsageError, match="this watcher is finished"):
            watcher.finish()
    assert [row for row, *_ in sink.rows] == [0]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("none", []),
        ("grad_norm", ["grad_norm"]),
        ("ln-input, GradNorm", ["ln_input", "grad_norm"]),
        (["default", "-grad_norm"], ["ln_input", "activation_grad_norm"]),
        ("-grad_norm,-ln_input", ["activation_grad_norm"]),
        ("all", ["ln_input", "grad_norm", "activation_grad_norm", "ln_gain", "residual_norm", "attention_heads"]),
        (["none", "ln_input"], ["ln_input"]),
    ],
)
def test_names_of_probes(names: Any, expected: list[str]) -> None:
    sink = ListSink()
    Watcher(Toy(), sink, probes=names)
    assert set(sink.tables) == set(expected)


def test_unknown_names_are_refused_with_the_choices() -> None:
    with pytest.raises(UsageError, match=r"unknown probe 'grad_nrm'; choose one of .*Did you mean 'grad_norm'"):
        Watcher(Toy(), ListSink(), probes="default,grad_nrm")


def test_default_probes_without_a_site_are_dropped_and_named_ones_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Softplus())
    sink = ListSink()
    watcher = Watcher(model, sink, reference=lambda: None)
    assert set(sink.tables) == {"grad_norm"}
    reasons = dict(watcher.dropped)
    assert set(reasons) == {name for name in WITHOUT_TAPS if PROBES[name].default} - {"grad_norm"}
    assert reasons["ln_input"] == "finds no norms in this model; nearest are 1 (BatchNorm2d)"
    with pytest.raises(
        UsageError, match=r"probe 'ln_input' finds no norms in this model; nearest are 1 \(BatchNorm2d\)"
    ):
        Watcher(model, sink, probes="ln_input")
    with pytest.raises(UsageError, match="probe 'model_update' needs reference=, a function that runs the model"):
        Watcher(Toy(), sink, probes="model_update")
    assert hooks(model) == 0
    empty = Watcher(nn.ReLU(), sink)
    assert dict(empty.dropped)["grad_norm"] == "finds no parameters in this model"


def test_sites_are_narrowed_by_a_pattern_for_all_probes_or_by_probe() -> None:
    sink = ListSink()
    Watcher(Toy(), sink, probes="ln_input,activation_grad_norm", sites=r"^decoder")
    for table in sink.tables.values():
        assert {row.stack for row in table.rows} == {"decoder"}
    Watcher(Toy(), sink, probes="ln_input,activation_grad_norm", sites={"ln_input": r"norm3$"})
    assert {row.sublayer for row in sink.tables["ln_input"].rows} == {"norm3"}
    assert {row.stack for row in sink.tables["activation_grad_norm"].rows} == {"encoder", "decoder"}
    with pytest.raises(UsageError, match="finds no layers in this model whose name matches 'nowhere'"):
        Watcher(Toy(), sink, probes="activation_grad_norm", sites="nowhere")
    with pytest.raises(UsageError, match="finds no norms in this model whose name matches 'nowhere'"):
        Watcher(Toy(), sink, probes="ln_input", sites="nowhere")


def test_tables_say_what_they_hold() -> None:
    sink = ListSink()
    watcher = Watcher(Toy(), sink, reference=lambda: None)
    assert sink.tables == watcher.tables
    for name, table in sink.tables.items():
        assert table.name == name
        assert table.unit
        assert len(table.definition) > 40
        assert table.total in ("", "norm", "mean")
        assert len(set(table.rows)) == len(table.rows) > 0


def test_cost_counts_hooks_steps_and_reference_passes_apart() -> None:
    model, sink = Toy(), ListSink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = Watcher(model, sink, optimizer=optimizer)
    step(watcher, model, optimizer, 0)
    cost = watcher.cost
    assert cost.hooks > 0
    assert cost.step > 0
    assert cost.reference == 0
    watcher = Watcher(model, sink, probes="cosine_similarity", reference=lambda: model(**FIXED))
    watcher.step()
    cost = watcher.cost
    assert cost.hooks == 0
    assert cost.reference > 0
    assert cost.step > 0


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


OURS = {each.__name__: each for each in subclasses(Instrument) if each.__module__.startswith("stabilitylab.probes.")}
BROKEN = sorted(name for name, each in OURS.items() if "open" in vars(each) and each is not Instrument)


@pytest.mark.parametrize("broken", [*BROKEN, "sink"])
def test_a_watcher_that_cannot_begin_leaves_no_hooks(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("cannot begin")

    model, sink = Toy(), ListSink()
    optimizer = torch.optim.AdamW(model.parameters())
    if broken == "sink":
        monkeypatch.setattr(sink, "open", fail)
    else:
        monkeypatch.setattr(OURS[broken], "open", fail)
    with pytest.raises(KeyError, match="cannot begin"):
        Watcher(model, sink, probes="all", optimizer=optimizer, reference=lambda: None, record="ledger")
    assert hooks(model) == 0
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
