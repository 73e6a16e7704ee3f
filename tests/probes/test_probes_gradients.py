"""grad_norm and activation_grad_norm against float64 gradients taken apart from the hooks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of
from torch import nn

from stabilitylab.errors import UsageError
from stabilitylab.probes import Watcher


def watch(model: nn.Module, probes: str = "grad_norm,activation_grad_norm", **options: Any) -> tuple[ListSink, Watcher]:
    sink = ListSink()
    return sink, Watcher(model, sink, probes=probes, every=1, **options)


def exact_rows(model: Toy, parts: list[int]) -> dict[str, float]:
    """Norm of the gradients of the loss over all batches together, by child of a layer or module, float64."""
    double = copy.deepcopy(model).double()
    tokens = sum(int(batch(seed)["target_mask"].sum()) for seed in parts)
    for seed in parts:
        loss_of(double, batch(seed), tokens).backward()
    squares: dict[str, float] = {}
    for name, parameter in double.named_parameters():
        pieces = name.split(".")
        row = ".".join(pieces[:4]) if "layers" in pieces else ".".join(pieces[:-1])
        squares[row] = squares.get(row, 0.0) + parameter.grad.pow(2).sum().item()
    return {row: math.sqrt(value) for row, value in squares.items()}


@pytest.mark.parametrize("parts", [[3], [3, 4, 5]])
def test_grad_norm_equals_float64_gradients(parts: list[int]) -> None:
    model = Toy()
    sink, watcher = watch(model)
    tokens = sum(int(batch(seed)["target_mask"].sum()) for seed in parts)
    for seed in parts:
        loss_of(model, batch(seed), tokens).backward()
    watcher.step()
    watcher.flush()
    found, exact = sink.column(0, "grad_norm", "value"), exact_rows(model, parts)
    # a key bias has a true gradient of 0, so its rounding noise stays within the row of its attention
    assert found == pytest.approx(exact, rel=2e-5)
    assert sink.row(0)[0]["grad_norm_total"] == pytest.approx(math.hypot(*exact.values()), rel=2e-5)
    assert sink.tables["grad_norm"].columns == ("value", "qk", "bias", "ln")
    layer = next(row for row in sink.tables["grad_norm"].rows if row.site == "encoder.layers.1.linear1")
    assert (layer.stack, layer.layer, layer.sublayer) == ("encoder", 2, "linear1")


def test_groups_are_the_rows_own_parameters() -> None:
    model = Toy()
    sink, watcher = watch(model)
    loss_of(model, batch()).backward()
    watcher.step()
    watcher.flush()
    layer = model.decoder.layers[0]
    norm, linear = "decoder.layers.0.norm2", "decoder.layers.0.linear2"
    assert sink.column(0, "grad_norm", "bias")[linear] == pytest.approx(layer.linear2.bias.grad.norm().item(), rel=1e-6)
    assert sink.column(0, "grad_norm", "ln")[norm] == sink.column(0, "grad_norm", "value")[norm]
    assert math.isnan(sink.column(0, "grad_norm", "ln")[linear])  # no such parameters in this row
    assert math.isnan(sink.column(0, "grad_norm", "bias")[norm])


class Scales(nn.Module):
    """Layers whose gradients are what the test says: E = sum of g * theta."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Sequential(), Weights(shape)) for shape in shapes)

    def weights(self) -> list[torch.Tensor]:
        return [layer[1].w for layer in self.layers]


class Weights(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(shape))


def norms_of(*gradients: torch.Tensor | None) -> tuple[list[float], ListSink]:
    model = Scales(*[(3,) if g is None else tuple(g.shape) for g in gradients])
    for weight, gradient in zip(model.weights(), gradients, strict=True):
        weight.grad = gradient
    sink, watcher = watch(model, "grad_norm")
    watcher.step()
    watcher.flush()
    return list(sink.column(0, "grad_norm", "value").values()), sink


@pytest.mark.parametrize("shape", [(5,), (64, 40)])  # stacked with its like, and alone
@pytest.mark.parametrize("size", [1.2e-38, 1e-30, 1e-12, 1e38])
def test_no_size_of_gradient_vanishes_or_overflows(size: float, shape: tuple[int, ...]) -> None:
    gradients = [torch.full(shape, size), torch.full(shape, 3 * size)]
    root = math.sqrt(math.prod(shape))
    norms, sink = norms_of(*gradients)
    exact = [float(np.float32(size)) * root, float(np.float32(3 * size)) * root]
    assert norms == pytest.approx(exact, rel=1e-12)
    assert sink.row(0)[0]["grad_norm_total"] == pytest.approx(math.hypot(*exact), rel=1e-12)


def test_none_zero_nan_and_inf_are_four_findings() -> None:
    norms, sink = norms_of(
        None, torch.zeros(3), torch.tensor([1.0, torch.nan, 0.0]), torch.tensor([1.0, torch.inf, 0.0])
    )
    assert sink.absent(0, "grad_norm") == {"layers.0.1"}
    assert norms[1] == 0.0
    assert math.isnan(norms[2])
    assert norms[3] == math.inf
    assert np.isnan(norms[0])


def test_without_any_gradient_every_row_is_absent_and_there_is_no_total() -> None:
    norms, sink = norms_of(None, None)
    assert len(sink.absent(0, "grad_norm")) == len(norms) == 2
    assert sink.row(0)[0]["grad_norm_total"] is None


def test_which_gradients_are_absent_may_change_from_row_to_row() -> None:
    model = Scales((4,), (4,), (40, 40))
    sink, watcher = watch(model, "grad_norm")
    for present in ({0, 1, 2}, {0, 2}, {1}):
        for i, weight in enumerate(model.weights()):
            weight.grad = torch.full_like(weight, 2.0) if i in present else None
        watcher.step()
    watcher.flush()
    for step, present in enumerate(({0, 1, 2}, {0, 2}, {1})):
        values = list(sink.column(step, "grad_norm", "value").values())
        assert {i for i, value in enumerate(values) if not math.isnan(value)} == present
        assert all(values[i] == [4.0, 4.0, 80.0][i] for i in present)


def test_sparse_half_and_double_gradients_count() -> None:
    places, numbers = torch.tensor([[1, 1, 4]]), torch.tensor([[1.0], [2.0], [4.0]])
    sparse = torch.sparse_coo_tensor(places, numbers, (50, 1), check_invariants=True)
    model = Scales((50, 1), (3,), (2,))
    model.layers[1][1].w.data = torch.zeros(3, dtype=torch.bfloat16)
    model.layers[2][1].w.data = torch.zeros(2, dtype=torch.float64)
    gradients = [sparse, torch.tensor([3.0, 0, 4.0], dtype=torch.bfloat16), torch.tensor([1e-100, 0.0]).double()]
    for weight, gradient in zip(model.weights(), gradients, strict=True):
        weight.grad = gradient
    sink, watcher = watch(model, "grad_norm", optimizer=torch.optim.AdamW(model.parameters(), eps=1e-3))
    watcher.step()
    watcher.flush()
    values = list(sink.column(0, "grad_norm", "value").values())
    assert values == pytest.approx([5.0, 5.0, 1e-100], rel=1e-6)  # (1 + 2)^2 + 4^2: what stands twice is one entry


def test_share_under_eps_counts_entries_by_their_own_group() -> None:
    model = Scales((4,), (2, 3))
    first, second = model.weights()
    first.grad = torch.tensor([0.0, 1e-9, -1e-9, 1.0])
    second.grad = torch.tensor([[2.0**-13, 1e-5, -1e-5], [torch.nan, torch.inf, 0.5]])
    groups = [{"params": [first], "eps": 1e-8}, {"params": [second], "eps": 2.0**-13}]
    sink, watcher = watch(model, "grad_norm", optimizer=torch.optim.AdamW(groups))
    watcher.step()
    watcher.flush()
    assert sink.row(0)[0]["grad_under_eps"] == 5 / 10
    sink, watcher = watch(model, "grad_norm", optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    watcher.step()
    watcher.flush()
    assert "grad_under_eps" not in sink.row(0)[0]  # SGD has no eps


def test_share_under_eps_leaves_out_other_models_of_the_optimizer() -> None:
    model, other = Scales((4,)), Scales((100,))
    (own,), (foreign,) = model.weights(), other.weights()
    own.grad, foreign.grad = torch.tensor([0.0, 1e-9, 1.0, 2.0]), torch.zeros(100)
    sink, watcher = watch(model, "grad_norm", optimizer=torch.optim.AdamW([own, foreign], eps=1e-8))
    watcher.step()
    watcher.flush()
    assert sink.row(0)[0]["grad_under_eps"] == 2 / 4


@pytest.mark.parametrize("eps", [1e-3, 0.0])
def test_share_under_eps_counts_the_zeros_that_a_sparse_gradient_does_not_store(eps: float) -> None:
    """The share is that of the dense gradient. What stands twice is one entry."""
    places, numbers = torch.tensor([[1, 1, 4, 7]]), torch.tensor([[6e-4, 0.0], [6e-4, 5e-4], [4.0, -1e-9], [1.0, -1.0]])
    sparse = torch.sparse_coo_tensor(places, numbers, (50, 2), check_invariants=True)
    model = Scales((50, 2), (3,))
    table, other = model.weights()
    table.grad, other.grad = sparse, torch.tensor([0.0, 1e-4, 1.0])
    sink, watcher = watch(model, "grad_norm", optimizer=torch.optim.AdamW(model.parameters(), eps=eps))
    watcher.step()
    watcher.flush()
    entries = torch.cat([sparse.to_dense().flatten(), other.grad])
    wanted = (entries.abs() < eps).double().mean().item()
    assert wanted == (0.0 if eps == 0 else 98 / 103)
    assert sink.row(0)[0]["grad_under_eps"] == pytest.approx(wanted, rel=1e-12)


def test_total_stands_in_every_row_unless_it_is_switched_off() -> None:
    for every_step, rows in ((True, [0, 1, 2]), (False, [0, 2])):
        model, sink = Toy(), ListSink()
        watcher = Watcher(model, sink, probes="grad_norm", every=2, total_every_step=every_step)
        for seed in range(3):
            model.zero_grad()
            loss_of(model, batch(seed)).backward()
            watcher.step()
        watcher.flush()
        assert [step for step, metrics, _ in sink.rows if "grad_norm_total" in metrics] == rows


def exact_stream(model: Toy, inputs: dict[str, torch.Tensor], scale: float = 1.0) -> dict[str, torch.Tensor]:
    """dE/dx of each layer's output and of each stack's input, float64, from autograd.grad."""
    double = copy.deepcopy(model).double()
    values: dict[str, torch.Tensor] = {}

    def keep(name: str, take_input: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            values[name] = args[0] if take_input else output

        return hook

    for name in ("encoder", "decoder"):
        layers = getattr(double, name).layers
        layers[0].register_forward_hook(keep(f"{name}.input", True))
        for number, layer in enumerate(layers):
            layer.register_forward_hook(keep(f"{name}.layers.{number}", False))
    loss = loss_of(double, inputs) * scale
    return dict(zip(values, torch.autograd.grad(loss, list(values.values())), strict=True))


@pytest.mark.parametrize("parts", [[3], [3, 4]])
def test_activation_grad_norm_equals_float64_autograd(parts: list[int]) -> None:
    model = Toy()
    sink, watcher = watch(model)
    for seed in parts:
        (loss_of(model, batch(seed)) / len(parts)).backward()
    watcher.step()
    watcher.flush()
    squares: dict[str, float] = {}
    for seed in parts:
        for name, gradient in exact_stream(model, batch(seed), 1 / len(parts)).items():
            squares[name] = squares.get(name, 0.0) + gradient.pow(2).sum().item()
    assert sink.column(0, "activation_grad_norm", "value") == pytest.approx(
        {name: math.sqrt(value) for name, value in squares.items()}, rel=1e-5
    )
    assert [row.layer for row in sink.tables["activation_grad_norm"].rows] == [0, 1, 2, 0, 1, 2]


def test_tiny_activation_gradients_are_not_zero() -> None:
    model = Toy()
    sink, watcher = watch(model)
    (loss_of(model, batch()) * 1e-30).backward()
    watcher.step()
    watcher.flush()
    exact = exact_stream(model, batch(), 1e-30)
    found = sink.column(0, "activation_grad_norm", "value")
    assert found == pytest.approx({name: g.norm().item() for name, g in exact.items()}, rel=1e-4)
    assert max(found.values()) < 1e-29


def test_an_activation_without_a_gradient_is_absent_and_one_with_zero_is_zero() -> None:
    model = Toy()
    sink, watcher = watch(model)
    with torch.no_grad():
        model.decoder.layers[0].cross_attn.o.weight.zero_()  # nothing of the encoder reaches the loss ...
        model.decoder.layers[1].cross_attn.o.weight.zero_()
    loss_of(model, batch()).backward()
    watcher.step()
    model.zero_grad()
    inputs = batch()
    model.encoder.eval()
    memory = model.embed_source(inputs["source"]).detach()  # ... or it is not there at all
    hidden = model.decoder(model.embed_target(inputs["target"]), inputs["target_mask"], memory, inputs["source_mask"])
    hidden.sum().backward()
    watcher.step()
    watcher.flush()
    encoder = {f"encoder.{name}" for name in ("input", "layers.0", "layers.1")}
    first = sink.column(0, "activation_grad_norm", "value")
    assert {name for name, value in first.items() if value == 0.0} == encoder
    assert sink.absent(0, "activation_grad_norm") == set()
    assert sink.absent(1, "activation_grad_norm") == encoder
    rows = sink.absent(1, "grad_norm")
    assert {"embed_source", "encoder.layers.0.self_attn", "encoder.norm", "head"} <= rows
    assert "decoder.layers.0.self_attn" not in rows


def scaled_step(factor: float) -> tuple[ListSink, torch.amp.GradScaler, Toy]:
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    sink, watcher = watch(model, "default", optimizer=optimizer, scaler=scaler)
    scaler.scale(loss_of(model, batch()) * factor).backward()
    scaler.unscale_(optimizer)
    watcher.step()
    scaler.step(optimizer)
    scaler.update()
    watcher.flush()
    return sink, scaler, model


def test_a_loss_scale_is_divided_out() -> None:
    plain, watcher = watch(model := Toy())
    loss_of(model, batch()).backward()
    watcher.step()
    watcher.flush()
    scaled, _, _ = scaled_step(1.0)
    for table in ("grad_norm", "activation_grad_norm"):  # a power of two: nothing is rounded
        assert scaled.column(0, table, "value") == plain.column(0, table, "value")


def test_a_skipped_update_is_an_update_of_zero() -> None:
    sink, scaler, _ = scaled_step(math.inf)
    assert scaler.get_scale() == 512.0
    assert set(sink.column(0, "update_ratio", "rms").values()) == {0.0}
    assert math.isnan(sink.row(0)[0]["grad_norm_total"] or 0.0)


def test_gradients_that_are_still_scaled_are_refused() -> None:
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    _, watcher = watch(model, optimizer=optimizer, scaler=scaler)
    scaler.scale(loss_of(model, batch())).backward()
    with pytest.raises(UsageError, match=r"call scaler\.unscale_"):
        watcher.step()


class Latents(nn.Module):
    """A parameter enters the first layer as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, 4))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, factor: float) -> torch.Tensor:
        x: torch.Tensor = self.latents
        for layer in self.layers:
            x = layer(x)
        return factor * x


@pytest.mark.parametrize("every", [1, 2])
def test_a_parameter_that_enters_the_first_layer_counts_once_in_each_row(every: int) -> None:
    torch.manual_seed(0)
    model, sink = Latents().double(), ListSink()
    wanted = []
    with Watcher(model, sink, probes="activation_grad_norm", every=every) as watcher:
        for row in range(4):
            squares = 0.0
            for part in (1.0, 2.0):
                before = torch.zeros(()) if model.latents.grad is None else model.latents.grad.clone()
                model(part + row).square().sum().backward()
                assert model.latents.grad is not None
                squares += float((model.latents.grad - before).square().sum())
            wanted.append(squares**0.5)
            watcher.step()
            model.zero_grad()
    for row in range(0, 4, every):
        norms = sink.column(row, "activation_grad_norm", "value")
        assert norms["layers.input"] == pytest.approx(wanted[row], rel=1e-9)
    assert not model.latents._backward_hooks
