"""The probes of curvature in anybody's loop: against dense Hessians and line searches, and what they leave alone."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from curvature_toys import GPT, entries, numbers, recorded
from probe_toys import ListSink, Toy, batch, loss_of
from rest_slow import rest_slow
from test_curvature import MADE, dense, made
from torch import Tensor, nn

from stabilitylab.decisive import BOUND, CONVERGED, FOUND
from stabilitylab.errors import UsageError
from stabilitylab.probes import Watcher
from stabilitylab.probes._engine.cadence import is_curved
from stabilitylab.probes.library.preconditioned_sharpness import OfTheHessian

NAMES = ("critical_sharpness", "preconditioned_sharpness", "sharpness")


@pytest.fixture
def finely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanczos until the numbers are those of the dense matrix."""
    monkeypatch.setattr(OfTheHessian, "tolerance", 1e-9)
    monkeypatch.setattr(OfTheHessian, "cold", 80)


# Oracles ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("finely")
@pytest.mark.parametrize("name", rest_slow(MADE, {"attention", "linear"}))
def test_sharpness_of_each_row_is_that_of_dense_matrices(name: str) -> None:
    """In float64 to 1e-6: Adam's preconditioner by its formula, before and after the first updates."""
    model, loss = made(name)
    twin, its_loss = made(name)
    sink = recorded(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-4))
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-4)
    for row in range(3):
        hessian = dense(twin, its_loss)
        optimizer.zero_grad()
        its_loss().backward()
        gradient = np.concatenate([p.grad.flatten().numpy() for p in twin.parameters() if p.grad is not None])
        optimizer.step()
        second = np.concatenate([optimizer.state[p]["exp_avg_sq"].flatten().numpy() for p in twin.parameters()])
        P = (1 - 0.9 ** (row + 1)) * (np.sqrt(second / (1 - 0.95 ** (row + 1))) + 1e-4)
        for table, D in (("preconditioned_sharpness", P**-0.5), ("sharpness", np.ones_like(P))):
            matrix, own = D[:, None] * hessian * D[None, :], numbers(sink, row, table)
            largest = np.linalg.eigvalsh(matrix)[-1]
            # a warm row has 4 products: what it is off by, it says
            rel = 1e-6 if row == 0 else max(1e-6, own["residual"])
            assert own["value"] == pytest.approx(largest, rel=rel)
            g = D * gradient
            assert own["along_gradient"] == pytest.approx(g @ matrix @ g / (g @ g), rel=1e-6, abs=1e-9 * largest)
            assert own["exact"] == 1
        own = numbers(sink, row, "preconditioned_sharpness")
        assert own["to_edge"] == pytest.approx(own["value"] * 1e-2 / 38)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "rates": lambda p: torch.optim.SGD([{"params": [own], "lr": 0.01 * (n + 1)} for n, own in enumerate(p)]),
}


@pytest.mark.parametrize("accumulate", rest_slow([1, 2], [1]))
@pytest.mark.parametrize("name", rest_slow(OPTIMIZERS, ["adamw"]))
def test_critical_sharpness_is_that_of_a_dense_line_search(name: str, accumulate: int) -> None:
    """Along what the optimizer did after clipping, whatever it is, from both sides of the crossing."""
    model, twin, fixed = Toy(), Toy(), batch(99)
    sink, optimizer = ListSink(), OPTIMIZERS[name](list(model.parameters()))
    loss = entries(model, fixed)
    steps: list[list[Tensor]] = [[p.detach().clone() for p in model.parameters()]]
    with Watcher(
        model, sink, probes="critical_sharpness", optimizer=optimizer, curvature_every=1, curvature_loss=loss,
        strict=True,
    ) as watcher:  # fmt: skip
        for t in range(4):
            for part in range(accumulate):
                (loss_of(model, batch(99 if part == 0 else t)) / accumulate).backward()
            watcher.step()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps.append([p.detach().clone() for p in model.parameters()])
    lr = max(group["lr"] for group in optimizer.param_groups)
    its_loss = entries(twin, fixed)

    def at(row: int, share: float) -> float:
        with torch.no_grad():
            for own, old, new in zip(twin.parameters(), *steps[row : row + 2], strict=True):
                own.copy_(torch.lerp(old, new, share))
            return float(its_loss().double().mean())

    last = math.inf
    for row in range(4):
        own = numbers(sink, row, "critical_sharpness")
        start = at(row, 0)
        if own["low"] > 0:
            assert at(row, own["low"]) <= start
        if own["high"] > 0:
            assert at(row, own["high"]) > start
        assert own["headroom"] * lr == pytest.approx(own["critical_rate"])
        assert own["value"] == pytest.approx(2 / own["critical_rate"])
        assert own["forwards"] <= (5 if last / 1.2 < own["critical_rate"] < last * 1.2 else 17)
        assert own["state"] == (FOUND if own["low"] > 0 and own["high"] > 0 else BOUND)
        last = own["critical_rate"] if own["state"] == FOUND else math.inf
    first = numbers(sink, 0, "critical_sharpness")
    grid = np.geomspace(0.2, 20, 250) * first["headroom"]
    rises = np.array([at(0, share) > at(0, 0) for share in grid])
    crossings = grid[1:][rises[1:] & ~rises[:-1]]
    assert np.abs(np.log(crossings / first["headroom"])).min() < np.log(1.04)  # the tolerance is 6 % from side to side
    assert first["high"] / first["low"] <= 1.061


@pytest.mark.parametrize("name", rest_slow(["perceptron", "linear"], ["linear"]))
def test_the_three_parts_are_those_of_their_own_line_searches(name: str) -> None:
    """Of a quadratic loss exactly: the thirds' crossings come from the same forwards."""
    model, _ = made(name)
    torch.manual_seed(4)
    width = {"perceptron": (3, 2), "linear": (4, 1)}[name]
    x, y = (torch.randn(9, n, dtype=torch.float64) for n in width)

    def loss(rows: slice = slice(None)) -> Tensor:
        return (model(x[rows]) - y[rows]).square().mean(-1)

    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    own = numbers(recorded(model, loss, optimizer, steps=1, probes="critical_sharpness"), 0, "critical_sharpness")
    after = [p.detach().clone() for p in model.parameters()]
    shares = np.geomspace(1, 1e4, 4000)
    found = []
    for part in (slice(0, 3), slice(3, 6), slice(6, 9)):
        rises = []
        for share in (0.0, *shares):
            with torch.no_grad():
                for p, old, new in zip(model.parameters(), before, after, strict=True):
                    p.copy_(torch.lerp(old, new, share))
                rises.append(float(loss(part).mean()))
        risen = np.array(rises[1:]) > rises[0]
        found.append(0.0 if risen[0] else float(shares[risen.argmax()]))
    rel = 0.005 if name == "linear" else 0.25
    assert (own["least"], own["most"]) == (pytest.approx(min(found), rel=rel), pytest.approx(max(found), rel=rel))


# What a row costs, and what it leaves alone --------------------------------------------------------------------------


@pytest.mark.slow
def test_five_forwards_or_products_a_row_once_warm() -> None:
    model, calls = Toy(dropout=0.3), 0
    loss = entries(model, batch(99))

    def fixed() -> Tensor:
        nonlocal calls
        calls += 1
        return loss()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sink = recorded(model, loss, optimizer, fixed, steps=6, probes="critical_sharpness")
    told = [numbers(sink, row, "critical_sharpness")["forwards"] for row in range(6)]
    assert sum(told) == calls
    assert max(told[1:]) <= 5
    sink = recorded(model, loss, optimizer, steps=6, probes="preconditioned_sharpness,sharpness")
    for table in NAMES[1:]:
        rows = [numbers(sink, row, table) for row in range(6)]
        assert all(own["products"] <= (5 if last["converged"] else 21) for last, own in pairwise(rows))
        assert all(
            numbers(sink, row, table)["converged"] == (numbers(sink, row, table)["residual"] <= CONVERGED)
            for row in range(6)
        )


class Counting(nn.Module):
    """A buffer that changes with each forward, in eval mode too, and noise that dropout alone does not draw."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.linear, self.drop = nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.drop(self.linear(self.norm(x))) + 0.01 * torch.randn(x.shape[0], 3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_watched_model_is_bitwise_the_unwatched_one(name: str) -> None:
    x, labels = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])

    def trained(watched: bool) -> list[Tensor]:
        model = Counting()
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        torch.manual_seed(5)

        def loss() -> Tensor:
            return F.cross_entropy(model(x), labels)

        probes = "critical_sharpness,sharpness"
        options: dict[str, Any] = {"curvature_every": 1, "curvature_loss": loss, "strict": True}
        watcher = (
            Watcher(model, ListSink(), probes=probes, optimizer=optimizer, **options) if watched else nullcontext()
        )
        with watcher as w:
            for _ in range(3):
                value = loss()
                value.backward()
                if w is not None:
                    w.step(loss=value)
                optimizer.step()
                optimizer.zero_grad()
        state = [value for own in optimizer.state.values() for value in own.values() if isinstance(value, Tensor)]
        return [*model.parameters(), *model.buffers(), *state, torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(trained(False), trained(True), strict=True))


def test_what_raises_ends_a_table_and_not_training(caplog: pytest.LogCaptureFixture) -> None:
    model, twin = Toy(), Toy()
    sink, loss, asked = ListSink(), entries(model, batch(99)), 0

    def fragile() -> Tensor:
        nonlocal asked
        asked += 1
        if asked > 20:
            raise ValueError("nothing more\nof this")
        return loss()

    for own, watched in ((model, True), (twin, False)):
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        options: dict[str, Any] = {"curvature_every": 1, "curvature_loss": fragile}
        watcher = (
            Watcher(own, sink, probes="critical_sharpness,grad_norm", every=1, optimizer=optimizer, **options)
            if watched
            else None
        )
        for t in range(6):
            loss_of(own, batch(t)).backward()
            if watcher is not None:
                watcher.step()
            optimizer.step()
            optimizer.zero_grad()
        if watcher is not None:
            watcher.finish()
            watcher.close()
            assert list(watcher.ended) == ["critical_sharpness"]
            assert "ValueError (nothing more)" in watcher.ended["critical_sharpness"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert model.training
    with_rows = [row for row, _, tables in sink.rows if "critical_sharpness" in tables]
    assert 0 < len(with_rows) < 6
    assert [row for row, _, tables in sink.rows if "grad_norm" in tables] == list(range(6))
    assert "Training goes on" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("at", rest_slow([2, 3], [3]))
def test_a_resumed_run_writes_the_same_rows(at: int) -> None:
    def run(stop: int | None) -> ListSink:
        sink = ListSink()

        def make(state: dict[str, Any] | None) -> tuple[Toy, torch.optim.Optimizer, Watcher]:
            model = Toy()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            watcher = Watcher(
                model, sink, probes=",".join(NAMES), optimizer=optimizer, curvature_every=2, strict=True,
                curvature_loss=entries(model, batch(99)),
            )  # fmt: skip
            if state:
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                watcher.load_state_dict(state["watcher"])
            return model, optimizer, watcher

        model, optimizer, watcher = make(None)
        for t in range(5):
            if t == stop:
                states = {"model": model, "optimizer": optimizer, "watcher": watcher}
                file = io.BytesIO()
                torch.save({name: own.state_dict() for name, own in states.items()}, file)
                watcher.close()
                file.seek(0)
                model, optimizer, watcher = make(torch.load(file, weights_only=True))
            loss_of(model, batch(t)).backward()
            watcher.step()
            optimizer.step()
            optimizer.zero_grad()
        watcher.finish()
        return sink

    whole, resumed = run(None), run(at)
    for row in (0, 2, 4):
        for table in NAMES:
            assert numbers(whole, row, table) == pytest.approx(numbers(resumed, row, table), rel=0, abs=0, nan_ok=True)


# Where products come from -------------------------------------------------------------------------------------------


class Once(torch.autograd.Function):
    """x^3 / 3, as a fused kernel would write it: without a second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3 / 3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0] ** 2


@pytest.mark.usefixtures("finely")
def test_without_a_second_derivative_differences_give_the_same(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stabilitylab")
    rows = {}
    for twice in (True, False):
        torch.manual_seed(2)
        first, second = nn.Linear(4, 6).double(), nn.Linear(6, 2).double()
        model = nn.ModuleList([first, second])
        x, y = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)

        def loss(a=first, b=second, t=twice, x=x, y=y) -> Tensor:
            inner = a(x)
            return F.mse_loss(b(inner**3 / 3 if t else Once.apply(inner)), y)

        sink = recorded(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-3), steps=2, probes="sharpness")
        rows[twice] = [numbers(sink, row, "sharpness") for row in range(2)]
    assert [own["exact"] for own in rows[True]] == [1, 1]
    assert [own["exact"] for own in rows[False]] == [0, 0]
    for exact, by_differences in zip(rows[True], rows[False], strict=True):
        assert by_differences["value"] == pytest.approx(exact["value"], rel=1e-5)
        assert by_differences["along_gradient"] == pytest.approx(exact["along_gradient"], rel=1e-5)
    assert "the second derivative is not symmetric" in caplog.text


@pytest.mark.slow
def test_differences_in_float32_are_within_two_percent_of_exact_products() -> None:
    from stabilitylab.probes.curvature import HessianProducts, largest_eigenvalue

    model, fixed = GPT(), batch(99)["source"]
    found = {}
    for how in ("exact", "differences"):
        parameters = list(model.parameters())
        with HessianProducts(lambda: model(fixed).mean(), parameters, how) as product:  # type: ignore[arg-type]
            draw = torch.Generator().manual_seed(0)
            start = [torch.randn(p.shape, generator=draw) for p in parameters]
            found[how] = largest_eigenvalue(product, start, products=40, tolerance=1e-3).value
    assert found["differences"] == pytest.approx(found["exact"], rel=0.02)


@pytest.mark.slow
def test_bf16_has_the_critical_rate_of_float32_to_ten_percent() -> None:
    """Though at the present rate, 1e-7, its rounding is larger than what the loss changes by: the search begins where
    the parameters have moved by 1 %, and differences are taken token by token in float64."""
    found = {}
    for enabled in (False, True):
        model = Toy(layers=3)
        inner = entries(model, batch(99, rows=16))

        def loss(inner=inner, enabled=enabled) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                return inner().float()

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)
        sink = recorded(model, loss, optimizer, steps=2, probes="critical_sharpness")
        found[enabled] = [numbers(sink, row, "critical_sharpness")["critical_rate"] for row in range(2)]
    assert found[True] == pytest.approx(found[False], rel=0.1)


def test_autocast_around_the_whole_update_hides_no_parameters() -> None:
    """The context keeps casts of the parameters before the update, which are not those that are tried."""
    found = {}
    for around in (False, True):
        model, sink = Toy(layers=3), ListSink()
        inner = entries(model, batch(99, rows=16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def loss(inner=inner) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return inner().float()

        with Watcher(
            model, sink, probes="critical_sharpness", optimizer=optimizer, curvature_every=1, curvature_loss=loss
        ) as watcher:
            for _ in range(3):
                with torch.autocast("cpu", torch.bfloat16, enabled=around):
                    loss().mean().backward()
                    watcher.step()
                    optimizer.step()
                    optimizer.zero_grad()
        found[around] = [numbers(sink, row, "critical_sharpness")["critical_rate"] for row in range(3)]
    assert found[True] == pytest.approx(found[False], rel=1e-6)


# Where the loss comes from -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", rest_slow(["number", "attribute", "dict"], ["number"]))
def test_a_reference_may_return_the_loss(kind: str) -> None:
    model, fixed = Toy(), batch(99)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    class Output:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

    wrap = {"number": lambda loss: loss, "attribute": Output, "dict": lambda loss: {"loss": loss}}[kind]
    sink = ListSink()
    options: dict[str, Any] = {"reference": lambda: wrap(loss_of(model, fixed)), "strict": True}
    with Watcher(model, sink, probes="critical_sharpness,sharpness", optimizer=optimizer, **options) as watcher:
        loss = loss_of(model, batch(1))
        loss.backward()
        watcher.step(train=loss)
        optimizer.step()
    own = numbers(sink, 0, "critical_sharpness")
    assert own["headroom"] > 0
    assert np.isnan(own["least"])  # one number has no thirds
    assert numbers(sink, 0, "sharpness")["value"] > 0


def test_who_gives_no_loss_is_told_so() -> None:
    model = Toy()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UsageError, match=r"'critical_sharpness' needs the loss of a fixed batch: give curvature_loss="):
        Watcher(model, ListSink(), probes="critical_sharpness", optimizer=optimizer)
    with pytest.raises(UsageError, match="'critical_sharpness' needs optimizer="):
        Watcher(model, ListSink(), probes="critical_sharpness", curvature_loss=lambda: torch.zeros(()))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        UsageError, match="needs an Adam or AdamW as optimizer=, not SGD: the probe sharpness is for any"
    ):
        Watcher(model, ListSink(), probes="preconditioned_sharpness", optimizer=sgd, curvature_loss=torch.zeros)
    dropped = dict(Watcher(model, ListSink(), probes="all", optimizer=sgd, reference=lambda: None).dropped)
    assert dropped["critical_sharpness"].startswith("needs the loss of a fixed batch")
    with Watcher(model, ListSink(), probes="sharpness", optimizer=sgd, reference=lambda: model(**batch(1))) as watcher:
        loss_of(model, batch(1)).backward()
        watcher.step()
        with pytest.raises(UsageError, match=r"let reference= return it, as a number or as \.loss"):
            sgd.step()


def test_the_first_batch_in_three_parts() -> None:
    """Of a model that returns its loss, without a word about it."""

    seen: list[int] = []  # outside the model, whose own list would be put back after each pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 1)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            seen.append(len(x))
            return {"loss": (self.linear(x) - labels).square().mean(), "count": torch.zeros(())}

    model, sink = Model(), ListSink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, labels = torch.randn(7, 4), torch.randn(7, 1)
    with Watcher(
        model, sink, probes="critical_sharpness", optimizer=optimizer, reference="first batch", strict=True
    ) as watcher:
        for _ in range(2):
            model(x, labels=labels)["loss"].backward()
            watcher.step()
            optimizer.step()
            optimizer.zero_grad()
    own = numbers(sink, 0, "critical_sharpness")
    assert seen[2:5] == [2, 2, 3]  # after a training pass and the reference pass
    assert own["least"] <= own["headroom"] <= own["most"]
    assert all("count" not in metrics for _, metrics, _ in sink.rows)


def test_a_scaler_that_skips_an_update_leaves_its_row_empty() -> None:
    model, sink = Toy(), ListSink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = entries(model, batch(99))
    watcher = Watcher(
        model, sink, probes="critical_sharpness", optimizer=optimizer, curvature_every=1, curvature_loss=loss
    )
    for step in range(3):
        loss_of(model, batch(step)).backward()
        watcher.step()
        if step != 1:
            optimizer.step()
        optimizer.zero_grad()
    watcher.finish()
    assert [sink.row(row)[1]["critical_sharpness"].absent.tolist() for row in range(3)] == [[False], [True], [False]]


@pytest.mark.slow
def test_a_compiled_model_is_looked_at_as_it_was_written() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        torch.compiler.reset()
        model, fixed = GPT(), batch(99)["source"]
        called: Any = torch.compile(model, backend="aot_eager") if compiled else model

        def loss(called=called, fixed=fixed) -> Tensor:
            return called(fixed)

        sink = recorded(called, loss, torch.optim.AdamW(model.parameters(), lr=1e-3), steps=2)
        found.append([numbers(sink, row, table) for row in range(2) for table in NAMES])
    for plain, other in zip(*found, strict=True):
        assert other == pytest.approx(plain, rel=0.02, nan_ok=True)
        assert other.get("exact", 1) == 1


# Rows ----------------------------------------------------------------------------------------------------------------


def test_the_cadence() -> None:
    assert [row for row in range(1001) if is_curved(row, "auto")] == [0, 200, 400, 600, 800, 1000]
    late = [row for row in range(20_000, 60_000) if is_curved(row, "auto")]
    gaps = np.diff(late)
    assert late[:3] == [20_000, 20_200, 20_402]
    assert all(gap == max(200, -(-row // 100)) for row, gap in zip(late, gaps.tolist(), strict=False))
    assert [row for row in range(11) if is_curved(row, 5)] == [0, 5, 10]
    assert [row for row in range(11) if is_curved(row, "log")] == [0, 1, 2, 3, 4, 5, 6, 8, 10]
    with pytest.raises(UsageError, match="curvature_every = 0"):
        Watcher(Toy(), ListSink(), curvature_every=0)


class Quadratic(nn.Module):
    """A loss whose Hessian is diagonal: 1, 2, 3 for ``first`` and 10, 20 for ``second``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

    def forward(self) -> Tensor:
        squares = torch.cat((self.first, self.second)).square()
        return torch.tensor([1.0, 2.0, 3.0, 10.0, 20.0], dtype=torch.float64) @ squares / 2


@pytest.mark.parametrize("later", ["trained", "frozen"])
def test_parameters_that_are_trained_or_frozen_later_begin_the_search_anew(later: str) -> None:
    model, sink = Quadratic().double(), ListSink()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.second.requires_grad_(later == "frozen")
    settings = {"curvature_every": 1, "curvature_loss": model, "strict": True}
    with Watcher(model, sink, probes="sharpness,preconditioned_sharpness", optimizer=optimizer, **settings) as watcher:
        for row in range(4):
            if row == 2:
                model.second.requires_grad_(later == "trained")
            model().backward()
            watcher.step()
            optimizer.step()
            optimizer.zero_grad()
    largest = [3.0, 3.0, 20.0, 20.0] if later == "trained" else [20.0, 20.0, 3.0, 3.0]
    assert [numbers(sink, row, "sharpness")["value"] for row in range(4)] == pytest.approx(largest, rel=0.02)
    assert all(numbers(sink, row, "preconditioned_sharpness")["converged"] for row in range(4))


class Rotated(nn.Module):
    """A smooth loss of complex numbers, or of the same numbers as pairs of real ones."""

    def __init__(self, is_complex: bool) -> None:
        super().__init__()
        pairs = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        self.is_complex = is_complex
        self.weight = nn.Parameter(torch.view_as_complex(pairs) if is_complex else pairs)
        self.mixed = torch.randn(9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def forward(self) -> Tensor:
        pairs = torch.view_as_real(self.weight) if self.is_complex else self.weight
        return (self.mixed @ pairs.flatten()).pow(4).mean()


@pytest.mark.parametrize("how", ["exact", "differences"])
def test_complex_parameters_have_the_curvature_of_pairs_of_real_ones(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OfTheHessian, "tolerance", 1e-9)
    if how == "differences":
        monkeypatch.setattr("stabilitylab.probes.curvature.landscape.Landscape._found", lambda self: "differences")
    found = []
    for is_complex in (False, True):
        model = Rotated(is_complex)
        sink = recorded(model, model, torch.optim.Adam(model.parameters(), lr=1e-2), steps=2)
        rows = {name: numbers(sink, 1, name) for name in ("sharpness", "preconditioned_sharpness")}
        found.append({(name, c): own[c] for name, own in rows.items() for c in ("value", "along_gradient")})
    assert found[1] == pytest.approx(found[0], rel=1e-4)
