"""The list of instruments that a watcher calls: in order, each with its errors taken in one place."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of, train

from stabilitylab.errors import UsageError
from stabilitylab.explain import Recorder
from stabilitylab.probes import Watcher
from stabilitylab.probes._engine.guard import Guard
from stabilitylab.probes._engine.row import RowRecord
from stabilitylab.probes.instruments.instrument import Instrument, Instruments
from stabilitylab.probes.instruments.leftover import LeftoverGradients
from stabilitylab.probes.instruments.parameter_tables import ParameterTables
from stabilitylab.probes.instruments.training_pass import TrainingRows
from stabilitylab.probes.parameters.processes import ALONE


class Noted(Instrument):
    """Notes its calls, and raises at the moments that it is told."""

    def __init__(self, name: str, calls: list[str], error: Exception | None = None) -> None:
        self.name, self.calls, self.error = name, calls, error

    def before_forward(self, t: int) -> None:
        self.calls.append(f"{self.name} before {t}")
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.calls.append(f"{self.name} close")

    def state_dict(self) -> dict[str, Any]:
        return {self.name: len(self.calls)}


def listed(*instruments: Instrument, strict: bool = False, ranks: Any = ALONE) -> Instruments:
    watched: Any = SimpleNamespace(guard=Guard(strict), ranks=ranks)
    return Instruments(instruments, watched)


def test_instruments_are_called_in_order_and_closed_in_reverse() -> None:
    calls: list[str] = []
    own = listed(Noted("a", calls), Instrument(), Noted("b", calls))
    own.call("before_forward", 3)
    own.call("abort")
    assert own.state_dict() == {"a": 2, "b": 2}
    own.close()
    assert calls == ["a before 3", "b before 3", "b close", "a close"]


def test_one_that_cannot_be_closed_leaves_none_open() -> None:
    class Stuck(Noted):
        def close(self) -> None:
            raise RuntimeError("stuck")

    calls: list[str] = []
    own = listed(Noted("a", calls), Stuck("b", calls), Noted("c", calls))
    with pytest.raises(RuntimeError, match="stuck"):
        own.close()
    assert calls == ["c close", "a close"]


def test_the_page_about_the_house_lists_every_instrument() -> None:
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters())
    record = Recorder(loss_of)
    with Watcher(model, ListSink(), reference="first batch", optimizer=optimizer, record=record) as watcher:
        page = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
        text = page.read_text(encoding="utf-8").partition("## The watcher")[2].partition("\n## ")[0]
        listed_there = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
        assert listed_there == [type(each).__name__ for each in watcher._instruments._all]


def test_one_that_raises_is_called_no_more_and_the_others_are(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    own = listed(Noted("a", calls, RuntimeError("lost")), Noted("b", calls))
    with caplog.at_level(logging.WARNING, "stabilitylab"):
        own.call("before_forward", 0)
        own.call("before_forward", 1)
    assert calls == ["a before 0", "b before 0", "b before 1"]
    assert caplog.messages == ["no more of Noted, which raised RuntimeError (lost). Training goes on."]


def test_errors_that_must_be_heard_are_raised() -> None:
    calls: list[str] = []
    with pytest.raises(UsageError, match="say how"):
        listed(Noted("a", calls, UsageError("say how"))).call("before_forward", 0)
    with pytest.raises(RuntimeError, match="lost"):
        listed(Noted("a", calls, RuntimeError("lost")), strict=True).call("before_forward", 0)
    talking = Noted("a", calls, RuntimeError("lost"))
    talking.talks = True
    with pytest.raises(RuntimeError, match="lost"):
        listed(talking, ranks=SimpleNamespace(alone=False)).call("before_forward", 0)
    listed(talking).call("before_forward", 0)  # in one process nobody waits


def fail(*given: Any) -> None:
    raise ZeroDivisionError("broken")


@pytest.mark.parametrize(
    ("broken", "moment", "ended"),
    [
        (ParameterTables, "after_backward", {"grad_norm", "update_ratio"}),
        (ParameterTables, "after_update", {"grad_norm", "update_ratio"}),
        (TrainingRows, "after_backward", {"ln_input"}),
        (LeftoverGradients, "row_read", set()),
    ],
)
def test_a_broken_instrument_ends_its_tables_and_never_training(
    broken: type[Instrument], moment: str, ended: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = ListSink()

    def watch(optimizer: torch.optim.Optimizer) -> Watcher:
        names = "grad_norm,update_ratio,ln_input"
        watcher = Watcher(model, sink, probes=names, every=1, optimizer=optimizer)
        kept.append(watcher)
        return watcher

    kept: list[Watcher] = []
    plain = train(Toy())
    model = Toy()
    monkeypatch.setattr(broken, moment, fail)
    watched = train(model, watch=watch)
    for one, other in zip(plain["parameters"], watched["parameters"], strict=True):
        assert torch.equal(one, other)
    assert set(kept[0].ended) == ended
    assert [step for step, *_ in sink.rows] == [0, 1, 2]
    others = {"grad_norm", "update_ratio", "ln_input"} - ended
    for _, metrics, tables in sink.rows:
        assert others <= set(tables)
        assert metrics["loss"] is not None


def test_a_failed_instrument_still_ships_its_declared_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks wait for it: empty, and flagged as ended."""
    model = Toy()
    with Watcher(model, ListSink(), probes="grad_norm", every=1) as watcher:
        loss_of(model, batch()).backward()
        own = watcher._instruments
        monkeypatch.setattr(ParameterTables, "after_backward", fail)
        row = RowRecord(0, torch.device("cpu"), SimpleNamespace(alone=False))  # type: ignore[arg-type]
        own.call("after_backward", row)
        (entry,) = [each for each in row._entries if each.name == "grad_norm"]
        assert entry.ended  # type: ignore[union-attr]
        assert not entry.seen.any()  # type: ignore[union-attr]
        assert row.waits
        later = RowRecord(1, torch.device("cpu"), SimpleNamespace(alone=False))  # type: ignore[arg-type]
        own.call("after_backward", later)
        assert later.has(next(board for board in watcher._watched.boards if board.table.name == "grad_norm"))
