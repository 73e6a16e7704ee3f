"""Loops that run a model beside its update, or more than once for it: loop x probes x oracle.

The oracle of a table is a plain loop of what leads to the update alone, whose tables have oracles of their own; that of
gradients that add up is ``retain_grad``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from probe_toys import WITHOUT_TAPS, ListSink, Toy, batch, loss_of
from rest_slow import slow
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import stabilitylab as sl
from stabilitylab.diagnose import diagnose
from stabilitylab.diagnose.audited import audited
from stabilitylab.probes import Watcher
from stabilitylab.probes._engine import passes
from stabilitylab.probes._engine.update_batch import UpdateBatch
from stabilitylab.schema import Cells
from stabilitylab.store import Run

Loop = Callable[[Toy, Watcher, torch.optim.Optimizer], None]
UPDATES = 3
PROBES = sorted(WITHOUT_TAPS)


def recorded(loop: Loop, make: Any = None, **options: Any) -> tuple[ListSink, Watcher, Toy]:
    """What a loop leaves in a sink."""
    torch.manual_seed(0)
    model, sink = Toy().double(), ListSink()
    optimizer = (make or torch.optim.AdamW)(model.parameters(), lr=0.01)
    options = {"probes": PROBES, "reference": "first batch", **options}
    with Watcher(model, sink, optimizer=optimizer, **options) as watcher:
        loop(model, watcher, optimizer)
    return sink, watcher, model


def same(cells: Cells, wanted: Cells, message: str) -> None:
    np.testing.assert_array_equal(cells.absent, wanted.absent, message)
    np.testing.assert_allclose(cells.values, wanted.values, 1e-9, 1e-14, err_msg=message)


def alone(model: Toy, t: int) -> ListSink:
    """The row of a copy of the model that does nothing but the pass of update t."""
    watched, sink = Toy().double(), ListSink()
    watched.load_state_dict(model.state_dict())
    with Watcher(watched, sink, probes="standard", reference=None) as watcher:
        loss = loss_of(watched, batch(t))
        loss.backward()
        watcher.step(loss=loss)
    return sink


def alike_alone(found: ListSink, wanted: list[ListSink]) -> None:
    """Each row's tables against a row 0 of its own."""
    for t, sink in enumerate(wanted):
        tables, own = found.row(t)[1], sink.row(0)[1]
        assert tables.keys() == own.keys() != set()
        for name, cells in tables.items():
            same(cells, own[name], f"{name}, row {t}")


def alike(found: ListSink, wanted: ListSink, rows: range = range(UPDATES)) -> None:
    """All tables of these rows, absent cells and numbers, to the order of sums."""
    for row in rows:
        (metrics, tables), (metrics_wanted, tables_wanted) = found.row(row), wanted.row(row)
        assert tables.keys() == tables_wanted.keys()
        for name, cells in tables.items():
            same(cells, tables_wanted[name], f"{name}, row {row}")
        assert metrics["grad_norm_total"] == pytest.approx(metrics_wanted["grad_norm_total"], rel=1e-12)


Moment = Callable[[Toy, Watcher, int], object]


def nothing(model: Toy, watcher: Watcher, t: int) -> None:
    """The loop of what leads to the update alone."""


def loop_with(first: Moment = nothing, between: Moment = nothing, last: Moment = nothing) -> Loop:
    """Updates with something ``first``, ``between`` backward and ``step``, and ``last``."""

    def loop(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
        for t in range(UPDATES):
            optimizer.zero_grad()
            first(model, watcher, t)
            loss = loss_of(model, batch(t))
            loss.backward()
            between(model, watcher, t)
            watcher.step(loss=loss)
            optimizer.step()
            last(model, watcher, t)

    return loop


plain = loop_with()


def for_its_generator(model: Toy, watcher: Watcher, t: int) -> None:
    """A discriminator is run for its generator, whose gradients zero_grad drops."""
    loss_of(model, batch(100 + t)).neg().backward()


def in_a_block(model: Toy, watcher: Watcher, t: int) -> None:
    """Passes that nothing tells from training."""
    with watcher.off():
        outside = loss_of(model, batch(100 + t))
        with watcher.off():
            torch.autograd.grad(outside, list(model.parameters()))
        loss_of(model, batch(200 + t))


def raises(model: Toy, watcher: Watcher, t: int) -> None:
    """A forward that raises in the middle, as one does that lacks memory."""
    broken = model.decoder.layers[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, batch(100 + t))
    broken.remove()


def raises_and_evaluates(model: Toy, watcher: Watcher, t: int) -> None:
    """A forward that raises in the middle, and then one of another batch without gradients."""
    raises(model, watcher, t)
    with torch.no_grad():
        model(**batch(200 + t))


def cached(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
    """Gradient caching: representations without a graph first, then part by part with one."""
    for t in range(UPDATES):
        optimizer.zero_grad()
        with torch.no_grad():
            kept = model(**batch(t))
        leaf = kept.clone().requires_grad_()
        real = batch(t)["target_mask"]
        loss = torch.nn.functional.cross_entropy(leaf[real], batch(t)["target"][real])
        loss.backward()
        (model(**batch(t)) * leaf.grad).sum().backward()
        watcher.step(loss=loss)
        optimizer.step()


def closures(zero_first: bool = True) -> Loop:
    """A closure that is evaluated again at other parameters: the row is of the first evaluation."""

    def first_evaluation(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
        for t in range(UPDATES):
            seen: list[Tensor] = []

            def closure(t: int = t, seen: list[Tensor] = seen) -> Tensor:
                if zero_first:
                    optimizer.zero_grad()
                loss = loss_of(model, batch(t))
                if not zero_first:
                    optimizer.zero_grad()
                loss.backward()
                if not seen:
                    watcher.step(loss=loss)
                seen.append(loss)
                return loss

            optimizer.step(closure)  # pyright: ignore (a loss is returned)
            assert len(seen) > 1

    return first_evaluation


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(loop_with(last=for_its_generator), id="a discriminator"),
        slow(loop_with(first=in_a_block), id="watcher.off first"),
        slow(loop_with(between=in_a_block), id="watcher.off between"),
        slow(loop_with(first=raises), id="a forward that is retried"),
        pytest.param(loop_with(between=raises), id="a micro-batch that is left out"),
        pytest.param(loop_with(between=raises_and_evaluates), id="a micro-batch that is left out before a validation"),
        cached,
    ],
)
def test_a_row_is_of_the_passes_that_lead_to_its_update(loop: Loop) -> None:
    found, watcher, model = recorded(loop)
    wanted, _, of_it = recorded(plain)
    assert all(map(torch.equal, model.parameters(), of_it.parameters())) or loop is cached
    alike(found, wanted)
    assert not watcher.loop_warnings
    assert not watcher.ended


LossOf = Callable[[Toy, dict[str, Tensor]], Tensor]


def by_parts(model: Toy, inputs: dict[str, Tensor]) -> Tensor:
    """The loss of :func:`loss_of`, by the parts of the model instead of the model."""

    class Parts(torch.nn.Module):
        forward = Toy.forward

    parts: Any = Parts()
    parts.__dict__.update(dict(model.named_children()))
    return loss_of(parts, inputs)


class Opaque:
    """An object into which nothing can look."""

    __slots__ = ("get",)

    def __init__(self, logits: Tensor) -> None:
        self.get = lambda: logits


class Open:
    def __init__(self, logits: Tensor) -> None:
        self.logits, self.get = logits, lambda: logits


def returning(kind: Any) -> LossOf:
    """The loss by a model that returns an object of this class."""

    def of_object(model: Toy, inputs: dict[str, Tensor]) -> Tensor:
        vars(model)["forward"] = lambda **given: kind(Toy.forward(model, **given))
        loss = loss_of(lambda **given: model(**given).get(), inputs)  # pyright: ignore
        del vars(model)["forward"]
        return loss

    return of_object


def zeroed_before(backward_of: int, loss: LossOf = loss_of, generator: bool = True) -> Loop:
    """A discriminator and its generator: forwards, ``zero_grad``, backward."""

    def loop(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
        for t in range(UPDATES):
            losses = torch.stack([loss(model, batch(10 * t + part)) for part in range(backward_of)])
            optimizer.zero_grad()
            losses.sum().backward()
            watcher.step(loss=losses.detach().sum())
            optimizer.step()
            if generator:
                wrong = loss(model, batch(100 + t)).neg()
                optimizer.zero_grad()
                (100 * wrong).backward()

    return loop


def zeroed_first(loss: LossOf, generator: bool) -> Loop:
    def loop(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
        for t in range(UPDATES):
            optimizer.zero_grad()
            own = loss(model, batch(t))
            own.backward()
            watcher.step(loss=own)
            optimizer.step()
            if generator:
                (100 * loss(model, batch(100 + t))).neg().backward()

    return loop


class Raises(torch.autograd.Function):
    """A backward that raises, as one does that lacks memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError


def retried(loss_first: bool, fails: bool) -> Loop:
    """A backward that raises in the middle is retried with another batch, after ``zero_grad``."""

    def loop(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
        for t in range(UPDATES):
            optimizer.zero_grad()
            if fails:
                hook = model.encoder.layers[1].register_forward_hook(lambda _m, _a, y: Raises.apply(y))
                loss = loss_of(model, batch(50 + t))
                hook.remove()
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
            if not loss_first:
                optimizer.zero_grad()
            loss = loss_of(model, batch(t))
            if loss_first:
                optimizer.zero_grad()
            loss.backward()
            watcher.step(loss=loss)
            optimizer.step()

    return loop


@pytest.mark.parametrize(
    ("loop", "wanted"),
    [
        pytest.param(zeroed_before(1), zeroed_before(1, generator=False), id="zero_grad after the forward"),
        pytest.param(zeroed_before(3), zeroed_before(3, generator=False), id="zero_grad after three forwards"),
        pytest.param(zeroed_first(by_parts, True), zeroed_first(loss_of, False), id="by parts"),
        pytest.param(zeroed_before(1, by_parts), zeroed_before(1, generator=False), id="by parts, zero_grad after"),
        pytest.param(zeroed_first(returning(Open), True), zeroed_first(loss_of, False), id="an object"),
        pytest.param(zeroed_first(returning(Opaque), True), zeroed_first(loss_of, False), id="a closed object"),
        pytest.param(retried(False, True), retried(False, False), id="a backward that raises"),
        pytest.param(retried(True, True), retried(True, False), id="a backward that raises, zero_grad after"),
    ],
)
def test_passes_whose_gradients_were_thrown_away_are_no_part_of_a_row(loop: Loop, wanted: Loop) -> None:
    probes = "ln_input,residual_norm,activation_grad_norm,attention_heads"

    def still(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    found, watcher, _ = recorded(loop, still, probes=probes, reference=None)
    oracle, _, _ = recorded(wanted, still, probes=probes, reference=None)
    alike(found, oracle)
    assert not watcher.loop_warnings
    assert not watcher.ended


def test_gradients_that_no_optimizer_holds_do_not_hide_those_that_were_thrown_away() -> None:
    """The optimizer holds a part of the parameters, and ``zero_grad`` leaves the others' gradients."""

    def part(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(parameters)[4:], lr=0.0)

    options: dict[str, Any] = {"probes": "ln_input,activation_grad_norm", "reference": None}
    found, _, _ = recorded(zeroed_first(loss_of, True), part, **options)
    oracle, _, _ = recorded(zeroed_first(loss_of, False), part, **options)
    for row in range(UPDATES):
        for name, cells in found.row(row)[1].items():
            same(cells, oracle.row(row)[1][name], f"{name}, row {row}")


def test_a_closure_may_zero_gradients_between_forward_and_backward() -> None:
    def lbfgs(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=lr, max_iter=3, tolerance_grad=0, tolerance_change=0)

    found, watcher, _ = recorded(closures(False), lbfgs, probes="standard", reference=None)
    oracle, _, _ = recorded(closures(True), lbfgs, probes="standard", reference=None)
    alike(found, oracle)
    assert not watcher.loop_warnings


def test_micro_batches_of_several_forwards_add_up_as_before() -> None:
    """Each forward counts once, whichever backward it has."""

    def accumulated(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
        for t in range(UPDATES):
            optimizer.zero_grad()
            for part in range(3):
                losses = [loss_of(model, batch(30 * t + 3 * part + each)) for each in range(3)]
                torch.stack(losses).sum().backward()
            watcher.step(loss=1.0)
            optimizer.step()

    options: dict[str, Any] = {"probes": "standard,attention_heads", "reference": None}
    found, watcher, _ = recorded(accumulated, **options)
    assert watcher.audit["forwards"] == 9
    entered: list[Tensor] = []
    torch.manual_seed(0)
    model = Toy().double()
    model.encoder.norm.register_forward_pre_hook(lambda _, given: entered.append(given[0].detach()))
    for number in range(9):
        loss_of(model, batch(number))
    sizes = torch.cat([x.norm(dim=-1).flatten() for x in entered])
    assert found.column(0, "ln_input", "value")["encoder.norm"] == pytest.approx(float(sizes.mean()), rel=1e-12)


def test_a_row_of_a_closure_is_of_its_first_evaluation() -> None:
    def lbfgs(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=lr, max_iter=3, tolerance_grad=0, tolerance_change=0)

    found, watcher, _ = recorded(closures(), lbfgs, probes="standard", reference=None)
    losses = [found.row(t)[0]["loss"] for t in range(UPDATES)]
    assert len({*losses}) == UPDATES
    once, _, _ = recorded(plain, probes="standard", reference=None)
    alike(found, once, range(1))
    assert not watcher.ended

    def again(model: Toy, watching: Watcher, optimizer: torch.optim.Optimizer) -> None:
        """The same optimizer without a watcher, whose parameters before each update are watched once."""
        for t in range(UPDATES):
            wanted.append(alone(model, t))

            def closure(t: int = t) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch(t))
                loss.backward()
                return loss

            with watching.off():
                optimizer.step(closure)  # pyright: ignore (a loss is returned)

    wanted: list[ListSink] = []
    recorded(again, lbfgs, probes="none", reference=None)
    alike_alone(found, wanted)


def test_of_sharpness_aware_updates_the_second_half_is_recorded() -> None:
    """Gradients at theta move the parameters uphill; those of there, of which the row tells, make the update."""
    wanted: list[ListSink] = []

    def sam(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
        for t in range(UPDATES):
            loss_of(model, batch(t)).backward()
            before = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.05 * p.grad / p.grad.norm().clamp_min(1e-12) if p.grad is not None else 0)
            optimizer.zero_grad()
            wanted.append(alone(model, t))
            loss = loss_of(model, batch(t))
            loss.backward()
            with torch.no_grad():
                for p, kept in zip(model.parameters(), before, strict=True):
                    p.copy_(kept)
            watcher.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()

    found, watcher, _ = recorded(sam, probes="standard", reference=None)
    alike_alone(found, wanted)
    assert not watcher.loop_warnings


@pytest.mark.parametrize("early", [True, False])
def test_a_step_after_the_first_half_of_sam_is_right_and_one_after_its_second_is_told(early: bool) -> None:
    moved: list[float] = []

    def sam(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
        for t in range(UPDATES):
            loss = loss_of(model, batch(t))
            loss.backward()
            if early:
                watcher.step(loss=loss)
            before = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.05 * p.grad / p.grad.norm().clamp_min(1e-12) if p.grad is not None else 0)
            optimizer.zero_grad()
            loss = loss_of(model, batch(t))
            loss.backward()
            if not early:
                watcher.step(loss=loss)
            with torch.no_grad():
                for p, kept in zip(model.parameters(), before, strict=True):
                    p.copy_(kept)
            optimizer.step()
            optimizer.zero_grad()
            now = zip(model.parameters(), before, strict=True)
            moved.append(sum(float((p.detach() - was).square().sum()) for p, was in now))

    found, watcher, _ = recorded(sam, probes="parameter_norm", update_every=1, reference=None)
    if early:
        assert not watcher.loop_warnings
        at = list(found.tables["parameter_norm"].columns).index("moved")
        squares = [np.nansum(found.row(t)[1]["parameter_norm"].values[:, at] ** 2) for t in range(UPDATES)]
        assert squares == pytest.approx(moved, rel=1e-6)
    else:
        (told,) = watcher.loop_warnings
        assert told.startswith("row 0: parameters moved between the first forward pass of an update and step()")


def outputs_of(model: Toy) -> dict[str, list[Tensor]]:
    """What each layer returns, by name, with its gradient kept."""
    kept: dict[str, list[Tensor]] = {}

    def keep(name: str, value: Tensor) -> None:
        value.retain_grad()
        kept.setdefault(name, []).append(value)

    for stack in ("encoder", "decoder"):
        for number, layer in enumerate(getattr(model, stack).layers):
            layer.register_forward_hook(lambda _m, _a, y, name=f"{stack}.layers.{number}": keep(name, y))
    return kept


def norms(kept: dict[str, list[Tensor]]) -> dict[str, float]:
    gradients = {
        name: torch.cat([g.detach().flatten() for value in kept[name] if (g := value.grad) is not None])
        for name in kept
    }
    return {name: float(gradient.norm()) for name, gradient in gradients.items()}


def gradients_through(loop: Callable[[Toy, int, dict[str, list[Tensor]]], Tensor]) -> Any:
    """Column of ``activation_grad_norm`` against ``retain_grad``, each row."""
    rows: list[dict[str, float]] = []

    def whole(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
        kept = outputs_of(model)
        for t in range(UPDATES):
            kept.clear()
            optimizer.zero_grad()
            loss = loop(model, t, kept)
            watcher.step(loss=loss)
            rows.append(norms(kept))
            optimizer.step()

    sink, watcher, _ = recorded(whole, probes="activation_grad_norm", reference=None, mask=None)
    return sink, rows, watcher


def column(sink: ListSink, row: int) -> dict[str, float]:
    return {
        site: value for site, value in sink.column(row, "activation_grad_norm", "value").items() if ".layers." in site
    }


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_the_gradient_of_a_penalty_is_no_gradient_of_the_update() -> None:
    def penalised(model: Toy, t: int, kept: dict[str, list[Tensor]]) -> Tensor:
        loss = loss_of(model, batch(t))
        (inner,) = torch.autograd.grad(loss, kept["encoder.layers.0"][0], create_graph=True)
        for values in kept.values():
            values[0].grad = None
        loss = loss + 100 * inner.square().sum()
        loss.backward()
        return loss

    sink, rows, watcher = gradients_through(penalised)
    for t, wanted in enumerate(rows):
        assert column(sink, t) == pytest.approx(wanted, rel=1e-9)
    assert not watcher.loop_warnings


def forget(kept: dict[str, list[Tensor]]) -> None:
    """Drop what other passes have left on the outputs of layers."""
    for values in kept.values():
        for value in values:
            value.grad = None


def saliency(model: Toy, t: int, kept: dict[str, list[Tensor]]) -> Tensor:
    loss = loss_of(model, batch(t))
    torch.autograd.grad(loss, kept["encoder.layers.0"][0], retain_graph=True)
    forget(kept)
    loss.backward()
    return loss


def saliency_of_the_logits(model: Toy, t: int, kept: dict[str, list[Tensor]]) -> Tensor:
    """The gradient stops at what the model returned, and goes on from there by a backward of its own."""
    logits = model(**batch(t))
    loss = logits.square().mean()
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    logits.backward(gradient)
    return loss


def weights_of_tasks(model: Toy, t: int, kept: dict[str, list[Tensor]]) -> Tensor:
    """Gradients of each task at a shared weight, as GradNorm takes them."""
    logits = model(**batch(t))
    tasks = logits[..., :9].square().mean(), logits[..., 9:].square().mean()
    shared: Any = model.get_parameter("encoder.layers.0.linear1.weight")
    sizes = [torch.autograd.grad(each, shared, retain_graph=True)[0].norm() for each in tasks]
    forget(kept)
    loss = torch.stack([each * size for each, size in zip(tasks, sizes, strict=True)]).sum()
    loss.backward()
    return loss


def adversarial(model: Toy, t: int, kept: dict[str, list[Tensor]]) -> Tensor:
    """Gradients of an input, in a forward of its own."""
    found: list[Any] = []
    hook = model.embed_source.register_forward_hook(lambda _m, _a, y: found.append(y))
    loss = loss_of(model, batch(50 + t))
    hook.remove()
    torch.autograd.grad(loss, found[0])
    kept.clear()
    loss = loss_of(model, batch(t))
    loss.backward()
    return loss


def by_hand(model: Toy, t: int, kept: dict[str, list[Tensor]]) -> Tensor:
    """The gradients of the update are returned, and no backward leaves any."""
    loss = loss_of(model, batch(t))
    own = list(model.parameters())
    for parameter, gradient in zip(own, torch.autograd.grad(loss, own), strict=True):
        parameter.grad = gradient
    return loss


def into_some(model: Toy, t: int, kept: dict[str, list[Tensor]]) -> Tensor:
    """A backward that leaves gradients on some parameters alone, after one that leaves them on none."""
    embedded: list[Any] = []
    hook = model.embed_target.register_forward_hook(lambda _m, _a, y: embedded.append(y))
    loss = loss_of(model, batch(t))
    hook.remove()
    embedded[0].retain_grad()
    (2 * loss).backward(inputs=embedded, retain_graph=True)
    forget(kept)
    loss.backward(inputs=list(model.parameters()))
    return loss


@pytest.mark.parametrize("loop", [saliency, saliency_of_the_logits, weights_of_tasks, adversarial, by_hand, into_some])
def test_gradients_that_autograd_returns_count_where_no_backward_leaves_any(
    loop: Callable[[Toy, int, dict[str, list[Tensor]]], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        sink, rows, watcher = gradients_through(loop)
    for t, wanted in enumerate(rows):
        assert column(sink, t) == pytest.approx(wanted, rel=1e-9)
    assert not watcher.loop_warnings
    assert "more than one backward" not in caplog.text


def test_a_backward_into_reentrant_checkpoints_alone_counts() -> None:
    """No parameter is in its own graph: each is in that of a recomputation."""

    class Inside(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2)
            )
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.kept.clear()
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
                x.retain_grad()
                self.kept.append(x)
            return x

    torch.manual_seed(0)
    model, sink = Inside().double(), ListSink()
    with Watcher(model, sink, probes="activation_grad_norm", reference=None) as watcher:
        loss = model(torch.randn(5, 4, dtype=torch.float64, requires_grad=True)).square().mean()
        loss.backward()
        watcher.step(loss=loss)
    wanted = [float(x.grad.norm()) for x in model.kept if x.grad is not None]
    found = sink.column(0, "activation_grad_norm", "value")
    assert [found[f"layers.{n}"] for n in range(2)] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_a_graph_of_the_update_s_own_backward_changes_nothing() -> None:
    def kept_graph(model: Toy, t: int, kept: dict[str, list[Tensor]]) -> Tensor:
        loss = loss_of(model, batch(t))
        loss.backward(create_graph=True)
        return loss

    sink, rows, _ = gradients_through(kept_graph)
    for t, wanted in enumerate(rows):
        assert column(sink, t) == pytest.approx(wanted, rel=1e-9)


def test_two_backwards_through_one_forward_add_up_before_the_norm(caplog: pytest.LogCaptureFixture) -> None:
    """The first row, where that is not known yet, has no number rather than a wrong one."""

    def in_two(model: Toy, t: int, kept: dict[str, list[Tensor]]) -> Tensor:
        logits = model(**batch(t))
        one, other = logits.square().mean(), -logits.sum(-1).square().mean() / 3
        one.backward(retain_graph=True)
        other.backward()
        return one + other

    with caplog.at_level(logging.WARNING):
        sink, rows, _ = gradients_through(in_two)
    assert set(column(sink, 0)) <= sink.absent(0, "activation_grad_norm")
    for t in range(1, UPDATES):
        assert column(sink, t) == pytest.approx(rows[t], rel=1e-9)
    assert caplog.text.count("row 0: more than one backward went through a forward") == 1


def half_of_sam(set_to_none: bool) -> Loop:
    def loop(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
        for t in range(UPDATES):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, batch(t)).backward()
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = loss_of(model, batch(10 + t))
            loss.backward()
            watcher.step(loss=loss)
            optimizer.step()

    return loop


def set_to_zero_for_its_generator(after: bool) -> Loop:
    """The loop of a discriminator that sets its gradients to zero, ``after`` its forward or before, and is then run for
    its generator."""

    def loop(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
        for t in range(UPDATES):
            if not after:
                optimizer.zero_grad(set_to_none=False)
            loss = loss_of(model, batch(t))
            if after:
                optimizer.zero_grad(set_to_none=False)
            loss.backward()
            watcher.step(loss=loss)
            optimizer.step()
            for_its_generator(model, watcher, t)

    return loop


@pytest.mark.parametrize(
    ("loop", "wanted"),
    [
        pytest.param(half_of_sam(False), half_of_sam(True), id="half of SAM"),
        pytest.param(set_to_zero_for_its_generator(False), plain, id="a discriminator"),
        pytest.param(set_to_zero_for_its_generator(True), plain, id="a discriminator, zero_grad after the forward"),
    ],
)
def test_gradients_that_are_set_to_zero_are_thrown_away(loop: Loop, wanted: Loop) -> None:
    found, watcher, _ = recorded(loop, probes="standard", reference=None)
    oracle, _, _ = recorded(wanted, probes="standard", reference=None)
    alike(found, oracle)
    assert not watcher.loop_warnings
    assert not watcher.ended


def clipped_in_between(clips: bool) -> Loop:
    """Two micro-batches; the gradients of the first are written to, but not set to zero."""

    def loop(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
        for t in range(UPDATES):
            optimizer.zero_grad()
            for part in range(2):
                loss = loss_of(model, batch(2 * t + part))
                loss.backward()
                if clips and not part:
                    for p in model.parameters():
                        if p.grad is not None:
                            p.grad.mul_(1.0)
            watcher.step(loss=loss)
            optimizer.step()

    return loop


def test_gradients_that_are_written_to_between_micro_batches_are_kept() -> None:
    found, watcher, _ = recorded(clipped_in_between(True), probes="standard", reference=None)
    oracle, _, _ = recorded(clipped_in_between(False), probes="standard", reference=None)
    alike(found, oracle)
    assert not watcher.loop_warnings


def infinite(module: Any, given: Any, returned: Tensor) -> Tensor:
    return returned * torch.inf


def left_out(model: Toy, watcher: Watcher, t: int) -> None:
    """A batch that the loop leaves out once it knows the loss, which is not finite."""
    broken = model.encoder.layers[0].register_forward_hook(infinite)
    loss = loss_of(model, batch(100 + t))
    broken.remove()
    assert not loss.isfinite()
    model.zero_grad()


def of_both(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
    """Two forwards, whose losses have one backward; a third one has none."""
    for t in range(UPDATES):
        optimizer.zero_grad()
        losses = [loss_of(model, batch(3 * t + part)) for part in range(3)]
        loss = losses[0] + losses[2]
        loss.backward()
        watcher.step(loss=loss)
        optimizer.step()


def of_two(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
    for t in range(UPDATES):
        optimizer.zero_grad()
        loss = loss_of(model, batch(3 * t)) + loss_of(model, batch(3 * t + 2))
        loss.backward()
        watcher.step(loss=loss)
        optimizer.step()


@pytest.mark.parametrize(
    ("loop", "wanted", "count"),
    [
        pytest.param(loop_with(first=left_out), plain, 1, id="before the others"),
        pytest.param(loop_with(between=lambda model, _w, t: loss_of(model, batch(7 + t))), plain, 1, id="after them"),
        pytest.param(loop_with(first=lambda model, _w, t: by_parts(model, batch(7 + t))), plain, 0, id="by parts"),
        pytest.param(of_both, of_two, 1, id="one of three"),
    ],
)
def test_a_forward_without_a_backward_is_no_part_of_a_row(loop: Loop, wanted: Loop, count: int) -> None:
    found, watcher, _ = recorded(loop, probes="standard,attention_heads", reference=None)
    oracle, plainly, _ = recorded(wanted, probes="standard,attention_heads", reference=None)
    alike(found, oracle)
    assert not watcher.loop_warnings
    assert not watcher.ended
    assert not watcher.incident
    assert watcher.audit["forwards"] == plainly.audit["forwards"]
    assert watcher.audit["forwards_without_backward"] == count  # of the model itself


@pytest.mark.parametrize("first", [left_out, raises, nothing])
def test_a_pass_that_is_added_up_in_pieces_is_whole_or_left_out(first: Moment, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward with more numbers than may wait at once."""
    oracle, _, _ = recorded(plain, probes="standard,attention_heads", reference=None)
    monkeypatch.setattr(passes, "HELD", 0)
    found, watcher, _ = recorded(loop_with(first=first), probes="standard,attention_heads", reference=None)
    alike(found, oracle)
    assert not watcher.incident


def test_forwards_all_stay_where_no_backward_is_seen() -> None:
    """The loss is of a value that the model does not return."""

    class Aside(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.norm(x)
            return 2 * x

    torch.manual_seed(0)
    model, sink = Aside().double(), ListSink()
    given = [torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    with Watcher(model, sink, probes="ln_input", reference=None) as watcher:
        loss = torch.zeros((), dtype=torch.float64)
        for each in given:
            model(each)
            loss = loss + model.kept.square().mean()
        loss.backward()
        watcher.step(loss=loss)
    wanted = float(torch.cat([each.detach().norm(dim=-1) for each in given]).mean())
    assert sink.column(0, "ln_input", "value")["norm"] == pytest.approx(wanted, rel=1e-12)


def test_the_forward_of_a_penalty_belongs_to_the_update() -> None:
    """A gradient penalty at a batch of its own: the update's backward reaches no output of that forward."""

    class Critic(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = torch.nn.LayerNorm(4), torch.nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(x).tanh())

    torch.manual_seed(0)
    model, sink = Critic().double(), ListSink()
    first, second = torch.randn(5, 4, dtype=torch.float64), 3 * torch.randn(5, 4, dtype=torch.float64)
    with Watcher(model, sink, probes="ln_input", reference=None) as watcher:
        second.requires_grad_()
        (gradient,) = torch.autograd.grad(model(second).sum(), second, create_graph=True)
        loss = model(first).mean() + gradient.square().mean()
        loss.backward()
        watcher.step(loss=loss)
    wanted = float(torch.cat([each.detach().norm(dim=-1) for each in (first, second)]).mean())
    assert sink.column(0, "ln_input", "value")["norm"] == pytest.approx(wanted, rel=1e-12)


def test_a_gradient_that_comes_in_two_rows_is_in_both() -> None:
    """The second backward goes through the forward of the update before, whose graph was kept."""

    def kept_graphs(model: Toy, watcher: Watcher, optimizer: torch.optim.Optimizer) -> None:
        inputs = batch(0)
        logits = model(**inputs)
        for t in range(2):
            optimizer.zero_grad()
            loss = logits.square().mean() * (t + 1)
            loss.backward(retain_graph=True)
            watcher.step(loss=loss)

    sink, _, _ = recorded(kept_graphs, probes="activation_grad_norm", reference=None)
    first, second = (column(sink, row) for row in range(2))
    assert second == pytest.approx({site: 2 * value for site, value in first.items()}, rel=1e-9)


def test_a_backward_that_reaches_two_outputs_is_one() -> None:
    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            logits = self.norm(x)
            return {"loss": logits.square().mean(), "logits": logits}

    model = Pair()
    with Watcher(model, ListSink(), probes="ln_input", reference=None) as watcher:
        for _ in range(2):
            loss = model(torch.randn(5, 4))["loss"]
            loss.backward()
        watcher.step(loss=loss)
    assert (watcher.audit["forwards"], watcher.audit["backwards"]) == (2, 2)


class Twice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.LayerNorm(4) for _ in range(2))

    def forward(self, x: Tensor, inner: bool = True) -> Tensor:
        x = self.first(x)
        return self.second(self(x, False) if inner else x)


def test_a_model_that_calls_itself_keeps_what_the_outer_call_has_shown() -> None:
    torch.manual_seed(0)
    model, sink = Twice().double(), ListSink()
    entered: list[Tensor] = []
    model.first.register_forward_pre_hook(lambda _, given: entered.append(given[0]))
    with Watcher(model, sink, probes="ln_input", reference=None) as watcher:
        loss = model(torch.randn(5, 4, dtype=torch.float64)).square().sum()
        loss.backward()
        watcher.step(loss=loss)
    wanted = float(torch.stack([each.detach().norm(dim=-1).mean() for each in entered]).mean())
    assert sink.column(0, "ln_input", "value")["first"] == pytest.approx(wanted, rel=1e-9)


def test_the_batch_of_an_update_is_of_the_forwards_that_ended() -> None:
    """Not of one that raised, nor of the model's call of itself."""
    model = Twice().double()
    batches = UpdateBatch(model, lambda: torch.is_grad_enabled() and model.training)
    batches.begin(True)
    given = torch.randn(5, 4, dtype=torch.float64)
    model(given)
    model(2 * given)
    with pytest.raises(TypeError):
        model("what a forward that raises is given")
    with torch.no_grad():
        model(given)
    batches.keep([True, False])
    batches.hand_over()
    kept = batches._given
    batches.close()
    assert [(args[0].tolist(), kwargs) for args, kwargs in kept] == [(given.tolist(), {})]


def test_the_first_row_is_audited_and_the_diagnosis_tells_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Toy()
    unused = torch.nn.Parameter(torch.zeros(3))
    model.register_parameter("unused", unused)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with sl.watch(model, optimizer=optimizer, out=tmp_path / "run", probes="standard") as watcher:
        for t in range(8):
            optimizer.zero_grad()
            raises(model, watcher, t)
            for part in range(2):
                loss = loss_of(model, batch(2 * t + part)) / 2
                loss.backward()
            watcher.step(loss=loss)
            optimizer.step()
    facts = Run.open(tmp_path / "run").manifest["audit"]
    count = len(list(model.parameters()))
    wanted = {"row": 0, "parameters": count, "parameters_without_gradient": 1, "forwards": 2, "backwards": 2}
    wanted |= {"forwards_broken": 1, "passes_discarded": 0, "places_not_called": 0, "feature_axes": {}}
    assert {key: facts[key] for key in wanted} == wanted
    norms = sum(isinstance(module, torch.nn.LayerNorm) for module in model.modules())
    assert facts["norms"] == norms
    told = diagnose(Run.open(tmp_path / "run")).audit
    assert told[:3] == (
        f"{count} trainable tensors, 1 without a gradient",
        "2 forwards and 2 backwards made the update",
        "1 forward that raised is left out",
    )
    assert f"{norms} norms, none over another dimension than the last" in told
    assert audited({"audit": {"parameters": "many", "feature_axes": 3, "norms": 2}}) == audited({"audit": 7}) == ()


class Sharing(torch.nn.Module):
    """Another model, which shares the encoder."""

    def __init__(self, model: Toy) -> None:
        super().__init__()
        self.embed, self.encoder = model.embed_source, model.encoder

    def forward(self, source: Tensor, source_mask: Tensor) -> Tensor:
        return self.encoder(self.embed(source) * 50, source_mask)


def by_another(model: Toy, watcher: Watcher, t: int) -> None:
    inputs = batch(100 + t)
    Sharing(model)(inputs["source"], inputs["source_mask"])


def test_a_model_that_shares_modules_is_no_part_of_a_row() -> None:
    found, watcher, _ = recorded(loop_with(between=by_another))
    oracle, _, _ = recorded(plain)
    alike(found, oracle)
    (told,) = watcher.loop_warnings
    assert told.startswith("row 0: modules that the model had called were called outside of its own forward too")


def test_modules_that_the_model_does_not_call_are_recorded_beside_it() -> None:
    """As those of a model whose forward is its generator alone, and whose discriminator is called by the loop."""

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.LayerNorm(4), torch.nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x)

    model, sink = Both().double(), ListSink()
    given = torch.randn(5, 4, dtype=torch.float64)
    with Watcher(model, sink, probes="ln_input", reference=None) as watcher:
        loss = model.second(3 * model(given)).square().mean()
        loss.backward()
        watcher.step(loss=loss)
    inner = torch.nn.functional.layer_norm(given, (4,))
    wanted = {"first": float(given.norm(dim=-1).mean()), "second": 3 * float(inner.norm(dim=-1).mean())}
    assert sink.column(0, "ln_input", "value") == pytest.approx(wanted, rel=1e-12)
    assert not watcher.loop_warnings


def test_a_model_that_calls_itself_without_gradients_is_recorded_in_each_micro_batch() -> None:
    class Conditioned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(4)

        def forward(self, x: Tensor, inner: bool = True) -> Tensor:
            if inner:
                with torch.no_grad():
                    x = x + self(x, False)
            return self.norm(x)

    model, sink = Conditioned().double(), ListSink()
    parts = [torch.randn(5, 4, dtype=torch.float64) for _ in range(3)]
    with Watcher(model, sink, probes="ln_input", reference=None) as watcher:
        for part in parts:
            loss = model(part).square().sum()
            loss.backward()
        watcher.step(loss=loss)
    entered = [part + torch.nn.functional.layer_norm(part, (4,)) for part in parts]
    wanted = float(torch.stack([each.norm(dim=-1).mean() for each in entered]).mean())
    assert sink.column(0, "ln_input", "value")["norm"] == pytest.approx(wanted, rel=1e-12)
    assert not watcher.loop_warnings
