"""Loops in which gradients of one update are added to those of the next, and loops that look like them and are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of
from rest_slow import rest_slow, slow

import stabilitylab as sl
from stabilitylab.diagnose import diagnose
from stabilitylab.probes import Watcher

WARNING = (
    "row 2: gradients of the update before were still there when backward began, as at row 1, so that the new ones "
    "were added to them: if that is not meant, call optimizer.zero_grad() in each update"
)
NEVER, AFTER, BEFORE_FORWARD, BEFORE_BACKWARD = "never", "after", "before forward", "before backward"


def through(model: Toy, watcher: Any, optimizer: torch.optim.Optimizer, zero: str = NEVER, **how: Any) -> None:
    """Updates of a loop that zeroes gradients at a place, ``by`` a function, with ``parts`` micro-batches."""
    by = how.get("by", optimizer.zero_grad)
    parts = how.get("parts", 1)
    for t in range(how.get("steps", 5)):
        if zero == BEFORE_FORWARD:
            by()
        if how.get("partly"):  # a backward that the watcher does not see begin
            sum(p.sum() for p in model.parameters()).backward()  # pyright: ignore
        for part in range(parts):
            loss = loss_of(model, batch(10 * t + part)) / parts
            if zero == BEFORE_BACKWARD and not part:
                by()
            loss.backward()
        watcher.step(loss=loss)  # pyright: ignore
        if how.get("clip"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if zero == AFTER:
            by()


def warned(given: bool = True, every: Any = 1, **how: Any) -> list[str]:
    torch.manual_seed(0)
    model = Toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Watcher(model, ListSink(), every=every, optimizer=optimizer if given else None, probes="ln_input") as watcher:
        through(model, watcher, optimizer, **how)
    return list(watcher.loop_warnings)


@pytest.mark.parametrize("given", [True, False], ids=["optimizer given", "not given"])
@pytest.mark.parametrize("how", [{}, {"parts": 3}, {"clip": True}, {"partly": True}], ids=str)
def test_gradients_that_are_never_zeroed_are_told_once(given: bool, how: dict[str, Any]) -> None:
    assert warned(given, **how) == [WARNING]


def test_they_are_told_at_probed_rows() -> None:
    (said,) = warned(every=2)
    assert said.startswith("row 4: ")
    assert "as at row 2," in said


@pytest.mark.parametrize("given", rest_slow([True, False], [True]), ids=["optimizer given", "not given"])
@pytest.mark.parametrize("zero", [AFTER, BEFORE_FORWARD, BEFORE_BACKWARD])
@pytest.mark.parametrize("how", [{}, {"parts": 3}, slow({"clip": True})], ids=str)
@pytest.mark.parametrize("kind", ["to none", "to zero", "by data"])
def test_a_loop_that_zeroes_is_not_accused(kind: str, how: dict[str, Any], zero: str, given: bool) -> None:
    torch.manual_seed(0)
    model = Toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def by() -> None:
        if kind == "by data":  # as older loops do, which no version tells
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.data.zero_()
        else:
            optimizer.zero_grad(set_to_none=kind == "to none")

    with Watcher(model, ListSink(), every=1, optimizer=optimizer if given else None, probes="ln_input") as watcher:
        through(model, watcher, optimizer, zero, by=by, steps=4, **how)
    assert watcher.loop_warnings == []


@pytest.mark.parametrize("zero", [AFTER, BEFORE_FORWARD])
def test_a_backward_before_that_of_the_model_is_not_taken_for_an_update_before(zero: str) -> None:
    for to_none in (True, False):
        torch.manual_seed(0)
        model = Toy()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with Watcher(model, ListSink(), every=1, probes="ln_input") as watcher:
            through(model, watcher, optimizer, zero, by=lambda: optimizer.zero_grad(to_none), partly=True)  # noqa: B023
        assert watcher.loop_warnings == []


def test_an_optimizer_that_gathers_over_two_updates_is_looked_at_after_its_steps() -> None:
    torch.manual_seed(0)
    model = Toy()
    stacks = [*model.encoder.parameters(), *model.decoder.parameters()]
    rest = [*model.embed_source.parameters(), *model.embed_target.parameters(), *model.head.parameters()]
    often, seldom = torch.optim.AdamW(stacks, lr=1e-3), torch.optim.SGD(rest, lr=1e-3)
    with Watcher(model, ListSink(), every=1, optimizer=[often, seldom], probes="ln_input") as watcher:
        for t in range(8):
            loss_of(model, batch(t)).backward()
            watcher.step(loss=1.0)
            often.step()
            often.zero_grad(set_to_none=False)
            if t % 2:
                seldom.step()
                seldom.zero_grad(set_to_none=False)
    assert watcher.loop_warnings == []


def test_one_of_two_optimizers_is_enough() -> None:
    torch.manual_seed(0)
    model = Toy()
    stacks = [*model.encoder.parameters(), *model.decoder.parameters()]
    rest = [*model.embed_source.parameters(), *model.embed_target.parameters(), *model.head.parameters()]
    zeroed, forgotten = torch.optim.AdamW(stacks, lr=1e-3), torch.optim.SGD(rest, lr=1e-3)
    with Watcher(model, ListSink(), every=1, optimizer=[zeroed, forgotten], probes="ln_input") as watcher:
        for t in range(4):
            loss_of(model, batch(t)).backward()
            watcher.step(loss=1.0)
            zeroed.step()
            forgotten.step()
            zeroed.zero_grad()
    assert watcher.loop_warnings == [WARNING]


def test_step_at_each_micro_batch_is_no_update() -> None:
    torch.manual_seed(0)
    model = Toy()
    with Watcher(model, ListSink(), every=1, probes="ln_input") as watcher:
        for part in range(4):  # gathered, and the parameters stay
            loss_of(model, batch(part)).backward()
            watcher.step(loss=1.0)
    assert watcher.loop_warnings == []


def test_the_run_says_so_and_trains_as_unwatched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    models = [Toy(), Toy()]
    for model, watched in zip(models, (True, False), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if watched:
            with sl.watch(model, out=tmp_path / "run", every=1, optimizer=optimizer) as watcher:
                through(model, watcher, optimizer)
        else:
            through(model, Silent(), optimizer)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    assert [record.message for record in caplog.records].count(f"{WARNING}.") == 1
    run = sl.Run.open(tmp_path / "run")
    assert run.manifest["loop_warnings"] == [WARNING]
    assert f"Warned as it ran: {WARNING}." in diagnose(run).paragraph


class Silent:
    def step(self, **metrics: Any) -> None: ...
