"""The order of ``step()`` and the optimizer's step: a wrong one is named, and one that is meant is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of

from stabilitylab.probes import Watcher

Loop = Callable[[Toy, Watcher, torch.optim.Optimizer], None]
AGAIN, UNSEEN = "before the optimizer stepped", "stepped twice with no step()"
UPDATES = 4


def warned(loop: Loop, **options: Any) -> list[str]:
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"optimizer": optimizer, "probes": "grad_norm", "reference": None, "every": 1} | options
    with Watcher(model, ListSink(), **options) as watcher:
        loop(model, watcher, optimizer)
    return list(watcher.loop_warnings)


def each_micro_batch(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer, parts: int = 2) -> None:
    for t in range(UPDATES):
        for part in range(parts):
            (loss_of(model, batch(t * parts + part)) / parts).backward()
            watcher.step()
        optimizer.step()
        optimizer.zero_grad()


def each_micro_batch_of_many(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
    each_micro_batch(model, watcher, optimizer, parts=12)


def twice_for_one_backward(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
    for t in range(UPDATES):
        loss_of(model, batch(t)).backward()
        watcher.step()
        watcher.step()
        optimizer.step()
        optimizer.zero_grad()


def every_second_update(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer, begin: int = 0) -> None:
    for t in range(2 * UPDATES + begin):
        loss_of(model, batch(t)).backward()
        if t < begin or t % 2 == 0:
            watcher.step()
        optimizer.step()
        optimizer.zero_grad()


def every_second_update_later(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
    every_second_update(model, watcher, optimizer, begin=20)


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize(
    ("loop", "said", "row", "first"),
    [
        (each_micro_batch, AGAIN, 3, 1),
        (each_micro_batch_of_many, AGAIN, 2, 1),
        (twice_for_one_backward, AGAIN, 3, 1),
        (every_second_update, UNSEEN, 1, 0),
        (every_second_update_later, UNSEEN, 21, 20),
    ],
)
def test_a_wrong_order_is_named_once(loop: Loop, said: str, row: int, first: int, every: int) -> None:
    (warning,) = warned(loop, every=every)
    assert said in warning
    assert warning.startswith(f"row {row}: ")
    assert f"as at row {first}:" in warning or f"as at row {first}," in warning


def accumulating(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer, to_none: bool = True) -> None:
    for t in range(UPDATES):
        for part in range(3):
            (loss_of(model, batch(3 * t + part)) / 3).backward()
        watcher.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)


def zeroing_in_place(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
    accumulating(model, watcher, optimizer, to_none=False)


def leaving_updates_out(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer, to_none: bool = True) -> None:
    """As a loop does whose gradient is not finite."""
    for t in range(3 * UPDATES):
        loss_of(model, batch(t)).backward()
        watcher.step()
        if t % 3 == 0:
            optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)


def leaving_updates_out_zeroing_in_place(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
    leaving_updates_out(model, watcher, optimizer, to_none=False)


def stepping_alone_once(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
    """Once in the middle of training, as a loop may that begins anew with another state of the optimizer."""
    accumulating(model, watcher, optimizer)
    optimizer.step()
    optimizer.step()
    accumulating(model, watcher, optimizer)


def stepping_beside(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
    accumulating(model, watcher, optimizer)
    for t in range(UPDATES):
        with watcher.off():
            loss_of(model, batch(90 + t)).backward()
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
        loss_of(model, batch(t)).backward()
        watcher.step()
        optimizer.step()
        optimizer.zero_grad()


def after_the_last_row(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
    accumulating(model, watcher, optimizer)
    watcher.finish()
    for _ in range(3):
        optimizer.step()


@pytest.mark.parametrize(
    "loop",
    [
        accumulating,
        zeroing_in_place,
        leaving_updates_out,
        leaving_updates_out_zeroing_in_place,
        stepping_alone_once,
        stepping_beside,
        after_the_last_row,
    ],
)
def test_an_order_that_is_meant_is_not_named(loop: Loop) -> None:
    assert warned(loop) == []


def test_optimizers_that_step_in_turn_are_not_named() -> None:
    model = Toy()
    encoder = torch.optim.SGD(model.encoder.parameters(), lr=0.01)
    decoder = torch.optim.SGD(model.decoder.parameters(), lr=0.01)

    def loop(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
        for t in range(3 * UPDATES):
            loss_of(model, batch(t)).backward()
            watcher.step()
            (encoder, decoder)[t % 2].step()
            model.zero_grad()

    with Watcher(model, ListSink(), optimizer=(encoder, decoder), probes="grad_norm", reference=None) as watcher:
        loop(model, watcher, encoder)
    assert not watcher.loop_warnings


def test_weights_that_are_loaded_before_the_first_forward_have_not_moved() -> None:
    model, other = Toy(), Toy(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watcher(model, ListSink(), probes="grad_norm", every=1, optimizer=optimizer) as watcher:
        model.load_state_dict(other.state_dict())
        for row in range(2):
            loss_of(model, batch(row)).backward()
            watcher.step()
            optimizer.step()
            optimizer.zero_grad()
    assert not watcher.loop_warnings


def test_parameters_that_move_in_a_later_update_are_told() -> None:
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watcher(model, ListSink(), probes="grad_norm", every=1, optimizer=optimizer) as watcher:
        for row in range(4):
            loss_of(model, batch(row)).backward()
            if row == 2:  # from here on as SAM, which many loops begin after a warm-up
                with torch.no_grad():
                    torch._foreach_add_(list(model.parameters()), 0.1)
            watcher.step()
            optimizer.step()
            optimizer.zero_grad()
    assert [warning.split(" between")[0] for warning in watcher.loop_warnings] == ["row 2: parameters moved"]
