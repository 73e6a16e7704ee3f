"""An optimizer that ``watch`` was given and that does not step while its parameters move: named once, by its number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of

from stabilitylab.probes import Watcher
from stabilitylab.probes.instruments.loop_checks import OTHERS

SGD = torch.optim.SGD
STEPS = 12


class Facts(ListSink):
    """Keeps the facts of the ledger too."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: list[dict[str, Any]] = []

    def ledger(self, facts: Any) -> None:
        self.facts += facts

    def of(self, kind: str, end: str = "") -> list[tuple[int, str, Any, Any]]:
        own = [f for f in self.facts if f["kind"] == kind and f["name"].endswith(end)]
        return [(f["step"], f["name"], f["before"], f["after"]) for f in own]


Update = Callable[[int, Toy], object]
Given = Callable[[Toy], tuple[list[torch.optim.Optimizer], Update]]


def watched(make: Given, each: int = 1, to_none: bool = True, **options: Any) -> tuple[list[str], Facts]:
    """Train with what ``make`` returns: the optimizers that watch is given, and what updates at row t."""
    torch.manual_seed(0)
    model, sink = options.pop("model", None) or Toy(), Facts()
    optimizers, update = make(model)
    options = {"probes": "grad_norm", "reference": None, "every": 1, "strict": True} | options
    with Watcher(model, sink, optimizer=optimizers, **options) as watcher:
        for t in range(STEPS):
            for part in range(each):
                (loss_of(model, batch(each * t + part)) / each).backward()
            watcher.step()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update(t, model)
            model.zero_grad(set_to_none=to_none)
        watcher.finish()
    return list(watcher.loop_warnings), sink


def anew(at: int) -> Given:
    """One optimizer, in whose place another one steps from a row on."""

    def make(model: Toy) -> Any:
        first, then = SGD(model.parameters(), 0.01), SGD(model.parameters(), 0.02)
        return [first], lambda t, model: (first if t < at else then).step()

    return make


def one_of_two_anew(model: Toy) -> Any:
    encoder, decoder, other = (SGD(part.parameters(), 0.01) for part in (model.encoder, model.decoder, model.decoder))

    def update(t: int, model: Toy) -> None:
        encoder.step()
        (decoder if t < 5 else other).step()

    return [encoder, decoder], update


def of_another_model(model: Toy) -> Any:
    given, steps = SGD(copy.deepcopy(model).parameters(), 0.01), SGD(model.parameters(), 0.01)
    return [given], lambda t, model: steps.step()


def by_hand(model: Toy) -> Any:
    def update(t: int, model: Toy) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.01 * parameter.grad)

    return [SGD(model.parameters(), 0.01)], update


def said(row: int, since: int, which: str = "", what: str = "") -> str:
    which = which or "the optimizer that watch was given"
    what = what or "(optimizer=...) the optimizer that steps"
    return f"row {row}: {which} has not stepped since row {since}, while its parameters move: give watch{what}"


MANY = "optimizer 1 (counted from 0) of the 2 that watch was given", "(optimizer=[...]) all optimizers that step"


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize(
    ("make", "warning"),
    [
        (anew(0), said(3, 0)),
        (anew(5), said(8, 5)),
        (one_of_two_anew, said(8, 5, *MANY)),
        (of_another_model, OTHERS),
        (by_hand, said(3, 0)),
    ],
    ids=["never steps", "made anew", "one of two", "of another model", "by hand"],
)
def test_an_optimizer_that_does_not_step_is_named_once(make: Given, warning: str, every: int) -> None:
    assert watched(make, every=every)[0] == [warning]


@pytest.mark.parametrize("how", [{"each": 3}, {"to_none": False}, {"each": 3, "to_none": False}], ids=str)
def test_it_is_named_in_loops_that_accumulate_or_zero_in_place(how: dict[str, Any]) -> None:
    assert watched(anew(5), **how)[0] == [said(8, 5)]


def test_both_of_two_that_do_not_step_are_named() -> None:
    def make(model: Toy) -> Any:
        parts = [SGD(part.parameters(), 0.01) for part in (model.encoder, model.decoder)]
        steps = SGD(model.parameters(), 0.01)
        return parts, lambda t, model: steps.step()

    warnings, _ = watched(make)
    assert warnings == [said(3, 0, MANY[0].replace("1 ", "0 ", 1), MANY[1]), said(3, 0, *MANY)]


# Loops that are meant.


def steps_at(*rows: int) -> Given:
    """Leaves updates out, as a loop does whose gradient is not finite."""

    def make(model: Toy) -> Any:
        own = SGD(model.parameters(), 0.01)
        return [own], lambda t, model: own.step() if t in rows else None

    return make


def in_turn(turns: int, shared: bool) -> Given:
    """Two known optimizers, each of which steps ``turns`` times on end, of the same parameters or not."""

    def make(model: Toy) -> Any:
        parts = (model, model) if shared else (model.encoder, model.decoder)
        both = [SGD(part.parameters(), 0.01) for part in parts]
        return both, lambda t, model: both[t // turns % 2].step()

    return make


def another_at(*rows: int, own_at: Sequence[int] | None = None) -> Given:
    """Another optimizer steps in these rows alone, and the given one in all others, or in ``own_at``."""

    def make(model: Toy) -> Any:
        own, other = SGD(model.parameters(), 0.01), SGD(model.parameters(), 0.01)

        def update(t: int, model: Toy) -> None:
            if t in rows:
                other.step()
            elif own_at is None or t in own_at:
                own.step()

        return [own], update

    return make


def inside_backward(model: Toy) -> Any:
    own = {p: SGD([p], 0.01) for p in model.parameters()}
    for p in own:
        p.register_post_accumulate_grad_hook(lambda p: own[p].step())  # pyright: ignore
    return [SGD(model.parameters(), 0.01)], lambda t, model: None


@pytest.mark.parametrize(
    "make",
    [
        steps_at(*range(STEPS)),
        steps_at(0, 5, 10),
        steps_at(),
        in_turn(1, shared=True),
        in_turn(4, shared=True),
        in_turn(4, shared=False),
        another_at(3),
        another_at(3, 4, 9, 10),
        another_at(3, 5, 7, 9, own_at=(0, 1, 2)),
    ],
    ids=[
        "steps", "leaves updates out", "nothing moves", "in turn", "in turn, many", "in turn, apart",
        "one update", "two updates", "each second update",
    ],
)  # fmt: skip
def test_a_loop_that_is_meant_is_not_named(make: Given) -> None:
    warnings, sink = watched(make)
    assert warnings == []
    assert sink.of("loop", "steps") == []


def test_an_optimizer_that_steps_inside_backward_is_not_looked_for() -> None:
    (warning,), sink = watched(inside_backward)
    assert "parameters moved between the first forward pass of an update and step()" in warning
    assert sink.of("loop", "steps") == []


def test_a_loop_that_is_recorded_for_replays_is_not_looked_at() -> None:
    assert watched(anew(0), recorder=object())[0] == []


class Renormalising(Toy):
    """Writes to a parameter, or to all, in its forward pass, as nn.Embedding(max_norm=) and nGPT do."""

    every = False

    def forward(self, **given: Any) -> Any:
        with torch.no_grad():
            for parameter in list(self.parameters())[: None if self.every else 1]:
                parameter.mul_(1.0)
        return super().forward(**given)


def test_a_parameter_that_a_forward_writes_to_is_no_update() -> None:
    assert watched(steps_at(0, 6), model=Renormalising())[0] == []


def test_gradients_that_are_added_up_are_no_update() -> None:
    """step() in each micro-batch of a model that writes to all its parameters in forward."""
    torch.manual_seed(0)
    model = Renormalising()
    model.every = True
    optimizer = SGD(model.parameters(), 0.01)
    options = {"probes": "grad_norm", "reference": None, "every": 100}
    with Watcher(model, ListSink(), optimizer=optimizer, **options) as watcher:
        for t in range(2):
            for part in range(6):
                (loss_of(model, batch(6 * t + part)) / 6).backward()
                watcher.step()
            optimizer.step()
            optimizer.zero_grad()
    (warning,) = watcher.loop_warnings
    assert "before the optimizer stepped" in warning


@pytest.mark.parametrize("replaced", [False, True])
def test_a_scaler_that_leaves_updates_out_is_not_named(replaced: bool) -> None:
    torch.manual_seed(0)
    model, scaler = Toy(), torch.amp.GradScaler("cpu", init_scale=4.0)
    given, other = SGD(model.parameters(), 0.01), SGD(model.parameters(), 0.01)
    options = {"probes": "grad_norm", "reference": None, "every": 1}
    with Watcher(model, ListSink(), optimizer=given, scaler=scaler, **options) as watcher:
        for t in range(STEPS):
            loss = loss_of(model, batch(t))
            scaler.scale(loss * (torch.inf if t >= 4 else 1.0)).backward()  # pyright: ignore
            scaler.unscale_(given)
            watcher.step()
            if replaced:
                other.step()
            else:
                scaler.step(given)
            scaler.update()
            model.zero_grad()
    assert list(watcher.loop_warnings) == ([said(3, 0)] if replaced else [])


def test_it_is_named_from_the_first_row_in_which_something_else_moves_the_parameters() -> None:
    assert watched(another_at(*range(6, STEPS), own_at=(0, 1, 2)))[0] == [said(8, 6)]


def test_rows_before_a_state_is_loaded_do_not_count() -> None:
    torch.manual_seed(0)
    model = Toy()
    given, other = SGD(model.parameters(), 0.01), SGD(model.parameters(), 0.01)
    options = {"probes": "grad_norm", "reference": None, "every": 1, "optimizer": given}
    with Watcher(model, ListSink(), **options) as watcher:
        for t in range(STEPS):
            loss_of(model, batch(t)).backward()
            watcher.step()
            (other if t else given).step()
            model.zero_grad()
            if t % 2 == 0:
                watcher.load_state_dict(watcher.state_dict())
    assert not watcher.loop_warnings


# The ledger.


def test_the_ledger_knows_since_when_and_until_when_it_does_not_step() -> None:
    warnings, sink = watched(another_at(3, 4, 5, 6))
    assert warnings == [said(6, 3)]
    assert sink.of("loop", "steps") == [
        (3, "optimizer 0 steps", True, False),
        (7, "optimizer 0 steps", False, True),
    ]
    assert sink.of("write") == [], "what the other optimizer wrote was no write of something else"


def test_an_optimizer_that_never_stepped_has_no_value_before() -> None:
    assert watched(anew(0))[1].of("loop", "steps") == [(0, "optimizer 0 steps", None, False)]


def test_a_resumed_run_tells_it_once() -> None:
    """The parameters are loaded between, which is no update; the ledger goes on with what it knew."""
    torch.manual_seed(0)
    model, sink = Toy(), Facts()
    given, other = SGD(model.parameters(), 0.01), SGD(model.parameters(), 0.01)
    options = {"probes": "grad_norm", "reference": None, "every": 1, "optimizer": given}
    kept: Any = None
    for attempt in range(2):
        with Watcher(model, sink, **options) as watcher:
            if kept is not None:
                watcher.load_state_dict(kept)
            for t in range(6 * attempt, 6 * attempt + 6):
                loss_of(model, batch(t)).backward()
                watcher.step()
                (given if t < 2 else other).step()
                model.zero_grad()
            kept = watcher.state_dict()
        assert list(watcher.loop_warnings) == [said(5, 2) if attempt == 0 else said(9, 6)]
    assert sink.of("loop", "steps") == [(2, "optimizer 0 steps", True, False)]
