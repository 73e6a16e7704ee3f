"""Critical sharpness: the first crossing of the batch of the update, noise, bounds and what follows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from curvature_toys import numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_toys import ListSink
from torch import Tensor, nn

import stabilitylab as sl
from stabilitylab.decisive import BOUND, FOUND, NOISE
from stabilitylab.diagnose import diagnose
from stabilitylab.errors import UsageError
from stabilitylab.probes import Watcher
from stabilitylab.probes.curvature import critical_rate
from stabilitylab.store import Run

TABLE = "critical_sharpness"


# The search ----------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(edge=st.floats(1e-4, 1e4), second=st.floats(2.2, 3.5), third=st.floats(1.3, 1.9), near=st.floats(0.8, 1.2))
def test_the_first_of_three_crossings_is_found_from_the_third(
    edge: float, second: float, third: float, near: float
) -> None:
    """The loss rises from ``edge`` on, falls again, and rises for good: (r - a)(r - b)(r - c), c the guess."""
    a, b, c = edge, edge * second, edge * second * third

    def rise(rate: float) -> float:
        return (rate / a - 1) * (rate / b - 1) * (rate / c - 1) * rate

    guess = c * near
    assert critical_rate(rise, 0.0, guess).rate >= b * 0.94 or guess < b
    found = critical_rate(rise, 0.0, guess, first=True)
    assert found.state == "found"
    assert found.rate == pytest.approx(a, rel=0.035)
    assert found.low <= a <= found.high


@pytest.mark.parametrize("guess", [1e-7, 1e-5, 1e-3, 1e4])
def test_a_loss_that_falls_again_far_above_its_crossing_does_not_hide_it(guess: float) -> None:
    """In float32 all logits become equal at huge rates: the loss is that of a guess, which may lie below the start."""

    def rise(rate: float) -> float:
        return -0.01 if rate > 1e5 else 17 * (rate - 0.13) if rate > 0.13 else -1e-6 * math.sqrt(rate)

    found = critical_rate(rise, 0.0, guess, passes=15)
    assert found.state == "found"
    assert found.low <= 0.13 <= found.high
    assert found.high <= 3 * found.low


def test_a_search_for_the_first_crossing_costs_three_evaluations_where_there_is_one() -> None:
    plain = critical_rate(lambda rate: rate - 1, 0.0, 1.1, passes=6)
    first = critical_rate(lambda rate: rate - 1, 0.0, 1.1, passes=6, first=True)
    assert (first.rate, first.low, first.high) == (plain.rate, plain.low, plain.high)
    assert first.passes == plain.passes + 3


def quadratic(rate: float) -> float:
    """Falls by 1/4 at most, at half its crossing, which is 1."""
    return rate * (rate - 1)


@pytest.mark.parametrize("guess", [0.3, 0.97, 1.0, 5.0])
@pytest.mark.parametrize("passes", [4, 16])
def test_a_crossing_counts_where_the_loss_moves_by_more_than_its_noise(guess: float, passes: int) -> None:
    """The most that the quadratic falls by is .25; at 1 / sqrt(2) of its crossing it has fallen by .207."""
    clear = critical_rate(quadratic, 0.0, guess, passes=passes, floor=0.05)
    assert clear.state == "found"
    assert quadratic(clear.low) < -0.05
    assert quadratic(clear.high) > 0.05
    assert clear.low < 1 < clear.high <= 2.3 * clear.low
    assert clear.passes <= passes + 2
    lost = critical_rate(quadratic, 0.0, guess, passes=passes, floor=0.26)
    assert lost.state == "noise"
    assert lost.passes <= passes + 2


def test_bounds_inside_the_noise_are_noise() -> None:
    assert critical_rate(lambda rate: -1e-3, 0.0, 1.0, passes=5, floor=1e-2).state == "noise"
    assert critical_rate(lambda rate: 1e-3, 0.0, 1.0, passes=5, floor=1e-2).state == "noise"
    assert critical_rate(lambda rate: -1.0, 0.0, 1.0, passes=5, floor=1e-2).state == "beyond"
    assert critical_rate(lambda rate: 1.0, 0.0, 1.0, passes=5, floor=1e-2).state == "below"
    assert critical_rate(lambda rate: math.nan, 0.0, 1.0, passes=5, floor=1e-2).state == "below"


# In a loop -----------------------------------------------------------------------------------------------------------


class Regression(nn.Module):
    """Least squares, in float64; returns its loss, which is a quadratic of its parameters."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(width, 1).double()
        self.seen = 0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.seen += 1
        return {"loss": 0.5 * (self.linear(x) - y).square().mean()}


def batches(count: int, rows: int = 12) -> list[tuple[Tensor, Tensor]]:
    """Each of another scale, and so of another curvature."""
    draw = torch.Generator().manual_seed(1)
    return [
        (
            3.0 ** (t % 3) * torch.randn(rows, 5, generator=draw, dtype=torch.float64),
            torch.randn(rows, 1, generator=draw, dtype=torch.float64),
        )
        for t in range(count)
    ]


Given = Sequence[tuple[Tensor, Tensor]]


def derivatives(model: Regression, given: Given) -> tuple[Tensor, Tensor]:
    """Gradient and Hessian of the mean of these losses, in closed form."""
    theta = torch.cat([model.linear.weight.detach().flatten(), model.linear.bias.detach()])
    gradient, hessian = torch.zeros_like(theta), torch.zeros(len(theta), len(theta), dtype=theta.dtype)
    for x, y in given:
        wide = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
        hessian += wide.T @ wide / len(x) / len(given)
        gradient += wide.T @ (wide @ theta - y[:, 0]) / len(x) / len(given)
    return gradient, hessian


def sharpness_along(model: Regression, update: Given, looked_at: Given) -> float:
    """2 over the rate at which the loss of ``looked_at`` is back where it was along minus the gradient d of ``update``:
    d'Hd / g'd, of one and the same batch g'Hg / g'g."""
    (d, _), (g, hessian) = derivatives(model, update), derivatives(model, looked_at)
    return float(d @ hessian @ d / (g @ d))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("own", [False, True])
def test_of_the_batch_of_the_update_it_is_the_curvature_along_its_gradient(accumulate: int, own: bool) -> None:
    """Of gradient descent on a quadratic: 2 / eta_c = g'Hg / g'g, batch by batch; a fixed batch has another."""
    model, sink = Regression(), ListSink()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    exact, current = [], []
    options: dict[str, Any] = {"curvature_every": 1, "curvature_batch": "update", "strict": True}
    if own:
        options["curvature_loss"] = lambda: torch.stack([model(*one)["loss"] for one in current])
    with Watcher(model, sink, probes=TABLE, optimizer=optimizer, **options) as watcher:
        for t in range(6):
            current[:] = batches(6 * accumulate)[t * accumulate : (t + 1) * accumulate]
            exact.append(sharpness_along(model, current, current))
            for x, y in current:
                (model(x, y)["loss"] / accumulate).backward()
            watcher.step()
            optimizer.step()
            optimizer.zero_grad()
    for t in range(6):
        found = numbers(sink, t, TABLE)
        if found["state"] == FOUND:
            assert found["value"] == pytest.approx(exact[t], rel=0.13)  # a bracket of few forwards may be wide
            assert 2 / (found["high"] * 1e-3) <= exact[t] <= 2 / (found["low"] * 1e-3)
        else:
            assert (found["state"], t % 3 > 0 or accumulate > 1) == (BOUND, True)
    assert numbers(sink, 0, TABLE)["state"] == FOUND
    assert len({round(value, 6) for value in exact}) == 6


def test_a_fixed_batch_is_another_question() -> None:
    """The update of batch t is looked at with the loss of the first one."""
    model, sink, exact = Regression(), ListSink(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {"curvature_every": 1, "reference": "first batch", "strict": True}
    with Watcher(model, sink, probes=TABLE, optimizer=optimizer, **options) as watcher:
        first = batches(1)
        for x, y in batches(3):
            own = [(x, y)]
            exact.append((sharpness_along(model, own, first), sharpness_along(model, own, own)))
            model(x, y)["loss"].backward()
            watcher.step()
            optimizer.step()
            optimizer.zero_grad()
    assert [numbers(sink, t, TABLE)["value"] for t in range(3)] == pytest.approx([one for one, _ in exact], rel=0.13)
    assert abs(math.log(exact[1][0] / exact[1][1])) > 0.5


def test_the_batch_of_the_update_leaves_training_bit_for_bit_as_it_was() -> None:
    def trained(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Regression()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        watcher = None
        if watched:
            options: dict[str, Any] = {"curvature_every": 2, "curvature_batch": "update", "strict": True}
            watcher = Watcher(model, ListSink(), probes=f"{TABLE},sharpness", optimizer=optimizer, **options)
        for x, y in batches(5):
            loss = model(x, y)["loss"]
            loss.backward()
            if watcher is not None:
                watcher.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
        if watcher is not None:
            watcher.finish()
            watcher.close()
        assert not model._forward_pre_hooks
        return [*model.parameters(), torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(trained(False), trained(True), strict=True))


def test_what_cannot_serve_is_said() -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(UsageError, match="curvature_batch = 'mine' must be 'fixed' or 'update'"):
        Watcher(model, ListSink(), optimizer=optimizer, curvature_batch="mine")  # type: ignore[arg-type]
    options: dict[str, Any] = {"curvature_every": 1, "curvature_batch": "update"}
    watcher = Watcher(model, ListSink(), probes=TABLE, optimizer=optimizer, **options)
    (model.linear(batches(1)[0][0])).mean().backward()  # a part of the model, not the model
    with pytest.raises(UsageError, match="saw no training forward of the whole model"):
        watcher.step()
    watcher.close()


# Noise, bounds -------------------------------------------------------------------------------------------------------


class Slope(nn.Module):
    """curvature / 2 x^2, x = 1: of gradient descent the critical rate is 2 / curvature."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.curvature = 1.0


def looked_at(loss: Callable[[Slope], Tensor], curvatures: Sequence[float], lr: float = 1e-9) -> list[dict[str, float]]:
    """A row for each curvature; the rate is so small that x stays 1."""
    model, sink = Slope(), ListSink()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    options: dict[str, Any] = {"curvature_every": 1, "curvature_loss": lambda: loss(model), "strict": True}
    with Watcher(model, sink, probes=TABLE, optimizer=optimizer, **options) as watcher:
        for model.curvature in curvatures:
            (model.curvature / 2 * model.x.square().sum()).backward()
            watcher.step()
            optimizer.step()
            optimizer.zero_grad()
    return [numbers(sink, row, TABLE) for row in range(len(curvatures))]


def smooth(model: Slope) -> Tensor:
    return model.curvature / 2 * model.x.square()


@pytest.mark.parametrize("grown", [1e12, 1e-6])
def test_a_rate_far_from_that_of_the_last_row_is_found_by_more_forwards(grown: float) -> None:
    rows = looked_at(smooth, [1.0, 1.0, grown, grown, grown])
    assert [row["state"] for row in rows] == [FOUND] * 5
    assert [row["critical_rate"] for row in rows] == pytest.approx([2.0, 2.0, *[2 / grown] * 3], rel=0.035)
    assert [row["forwards"] <= 5 for row in rows] == [False, True, False, True, True]
    assert max(row["forwards"] for row in rows) <= 17


def test_after_a_bound_the_search_begins_anew() -> None:
    """The loss of one row rises at no rate; the next row is found as the first one was, with as many forwards."""
    rows = looked_at(smooth, [1.0, 1.0, -1.0, 1.0, 1.0])
    assert [row["state"] for row in rows] == [FOUND, FOUND, BOUND, FOUND, FOUND]
    found = [row["critical_rate"] for row in rows if row["state"] == FOUND]
    assert found == pytest.approx([2.0] * 4, rel=0.035)
    assert math.isnan(rows[2]["high"])
    assert [row["forwards"] <= 5 for row in rows] == [False, True, False, False, True]
    assert rows[3]["forwards"] == rows[0]["forwards"]


@pytest.mark.parametrize("entries", [1, 64])
@pytest.mark.parametrize(("sigma", "state"), [(0.0, FOUND), (1e-4, FOUND), (30.0, NOISE)])
def test_the_noise_is_that_of_a_second_evaluation(entries: int, sigma: float, state: float) -> None:
    """Each entry has noise of its own each time; the loss falls by 1/2 at most along the update."""
    draw = np.random.default_rng(0)

    def noisy(model: Slope) -> Tensor:
        return smooth(model) + sigma * torch.from_numpy(draw.normal(size=entries))

    rows = looked_at(noisy, [1.0] * 4)
    assert [row["state"] for row in rows] == [state] * 4
    if state == FOUND:
        for row in rows:
            assert row["low"] <= 2e9 <= row["high"]
            assert row["high"] <= 2.01 * row["low"]
    expected = 3 * sigma * math.sqrt(2 / entries)
    if sigma == 0:
        assert all(row["noise"] < 1e-14 for row in rows)  # float64's rounding
        assert [row["forwards"] <= 5 for row in rows] == [False, True, True, True]
    elif entries == 64:
        assert all(0.5 * expected < row["noise"] < 3 * expected for row in rows)  # one in 20 differs by 2 of its errors


def test_float32_has_the_noise_of_its_rounding() -> None:
    (row,) = looked_at(lambda model: (100.0 + smooth(model)).float(), [1.0])
    assert row["noise"] == pytest.approx(3 * 100.5 * torch.finfo(torch.float32).eps, rel=1e-3)
    assert row["state"] == FOUND


def test_rounding_hides_a_small_crossing() -> None:
    """Of 1e6 + x^2 / 2, float32 tells steps of 1/16."""
    (row,) = looked_at(lambda model: (1e7 + smooth(model)).float(), [1.0])
    assert row["state"] == NOISE


# What is said of them ------------------------------------------------------------------------------------------------


def watched(folder: Path, sigma: float, batch: str = "fixed") -> Run:
    torch.manual_seed(0)
    model, draw = Regression(), np.random.default_rng(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    fixed = batches(1)[0]
    loss = None if batch == "update" else lambda: model(*fixed)["loss"] + sigma * float(draw.normal())
    options: dict[str, Any] = {"curvature_every": 5, "curvature_loss": loss, "curvature_batch": batch}
    with sl.watch(model, out=folder, optimizer=optimizer, probes=TABLE, reference=None, **options) as w:
        for _ in range(30):
            loss_value = model(*fixed)["loss"]
            loss_value.backward()
            w.step(loss=loss_value)
            optimizer.step()
            optimizer.zero_grad()
    return Run.open(folder)


def test_diagnose_names_the_batch_and_says_nothing_where_there_is_noise_alone(tmp_path: Path) -> None:
    clear = diagnose(watched(tmp_path / "clear", 0.0)).headroom
    assert clear.startswith("on the fixed batch the loss would rise at ")
    assert clear.endswith("at step 0)")
    of_update = diagnose(watched(tmp_path / "update", 0.0, "update")).headroom
    assert of_update.startswith("on the batch of each update the loss would rise at ")
    noise = diagnose(watched(tmp_path / "noise", 1e6)).headroom
    assert noise == (
        "on the fixed batch nothing can be said of headroom, since in all of 6 rows its loss changes less than its "
        "noise"
    )
