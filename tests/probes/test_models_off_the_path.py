"""Models that few tests have: parametrized weights, noise in eval mode, fused norms, lazy and meta weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from probe_toys import ListSink
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import stabilitylab as sl
from stabilitylab.errors import UsageError
from stabilitylab.probes import Watcher

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.relu(self.fc1(self.norm(x))))


class Stack(nn.Module):
    noise = 0.0

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Block() for _ in range(depth)), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.noise * torch.randn_like(x) if self.noise else x
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class DropConnect(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return F.dropout(weight, 0.1, True)


def spectral(model: Stack) -> None:
    for layer in model.layers:
        parametrizations.spectral_norm(layer.fc1)


def drawing(model: Stack) -> None:
    for layer in model.layers:
        parametrize.register_parametrization(layer.fc2, "weight", DropConnect())


def trained(model: nn.Module, watch: Callable[[Any], Watcher] | None, rate: float = 1e-2, steps: int = 4) -> list[Any]:
    """The losses, the state and the random state after a training with a watcher or without."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    watcher, losses = watch(optimizer) if watch else None, []
    for _ in range(steps):
        loss = model(torch.randn(2, 5, WIDTH)).pow(3).mean()
        loss.backward()
        if watcher is not None:
            watcher.step(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if watcher is not None:
        watcher.finish()
    return [*losses, *model.state_dict().values(), torch.get_rng_state()]


@pytest.mark.parametrize("parametrized", [spectral, drawing])
def test_a_parametrization_that_changes_buffers_or_draws_is_not_run_to_find_places(
    parametrized: Callable[[Stack], None],
) -> None:
    torch.manual_seed(0)
    model = Stack()
    parametrized(model)
    twin, asked, sink = copy.deepcopy(model), copy.deepcopy(model), ListSink()
    plain = trained(twin, None)
    watched = trained(model, lambda optimizer: Watcher(model, sink, every=1, optimizer=optimizer, reference=None))
    assert all(map(torch.equal, plain, watched))
    before = {name: value.clone() for name, value in asked.state_dict().items()}
    state = torch.get_rng_state()
    sl.sites(asked)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in asked.state_dict().items())


class Unready(nn.Module):
    """A module whose weight cannot be computed yet."""

    @property
    def weight(self) -> Tensor:
        raise RuntimeError("quantized weights are not unpacked")

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_weight_that_is_a_property_is_not_asked_for() -> None:
    model = Stack()
    model.extra = Unready()
    assert "layers.0" in {site.name for site in sl.sites(model).layers}


def test_a_model_that_draws_in_eval_mode_draws_the_same_in_each_reference_pass() -> None:
    """At a rate of 0 nothing moves, whatever is drawn; a rate moves the output, and training draws as it would."""
    for rate in (0.0, 1e-2):
        torch.manual_seed(0)
        model, sink = Stack(), ListSink()
        model.noise = 0.5
        plain = trained(copy.deepcopy(model), None, rate)
        options: dict[str, Any] = {"every": 1, "probes": "model_update", "reference": "first batch"}
        watched = trained(model, lambda o, m=model, s=sink, k=options: Watcher(m, s, optimizer=o, **k), rate)
        assert all(map(torch.equal, plain, watched))
        moved = [[*sink.column(row, "model_update", "cumulative").values()] for row in (1, 2, 3)]
        assert all((value > 0) == (rate > 0) for row in moved for value in row)


class AddNorm(nn.Module):
    """A fused norm: it adds the residual itself, as those of flash-attn and Mamba do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return F.rms_norm(total, (WIDTH,), self.weight), total


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(AddNorm() for _ in range(3))
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))
        self.entered: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        residual = None
        for norm, branch in zip(self.norms, self.branches, strict=True):
            self.entered.append((x if residual is None else x + residual).detach())
            x, residual = norm(x, residual)
            x = branch(x)
        return x + residual


def test_a_norm_that_adds_the_residual_itself_is_entered_by_the_sum() -> None:
    torch.manual_seed(0)
    model, sink = Fused(), ListSink()
    with Watcher(model, sink, every=1, probes="ln_input", reference=None) as watcher:
        model(torch.randn(2, 5, WIDTH, dtype=torch.float64)).square().mean().backward()
        watcher.step()
    wanted = [float(torch.linalg.vector_norm(x, dim=-1).mean()) for x in model.entered]
    assert list(sink.column(0, "ln_input", "value").values()) == pytest.approx(wanted, rel=1e-12)


def test_the_share_below_eps_is_compared_in_float32() -> None:
    """1e-8 is 0 in float16, and even a zero is not below 0."""
    model, sink = nn.Linear(4, 1, bias=False).half(), ListSink()
    model.weight.grad = torch.tensor([[0.0, 6e-8, 1.0, 2.0]], dtype=torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-7)
    with Watcher(model, sink, every=1, probes="grad_norm", optimizer=optimizer, reference=None) as watcher:
        watcher.step()
    assert sink.row(0)[0]["grad_under_eps"] == 2 / 4


def test_gradients_on_parameters_in_no_optimizer_are_told_as_sums() -> None:
    torch.manual_seed(0)
    model, sink = Stack(), ListSink()
    optimizer = torch.optim.SGD(model.norm.parameters(), lr=0.0)
    with Watcher(model, sink, every=1, probes="ln_input", optimizer=optimizer, reference=None) as watcher:
        for _ in range(4):
            model(torch.ones(2, 5, WIDTH).cumsum(-1)).pow(3).mean().backward()
            watcher.step()
            optimizer.step()
            optimizer.zero_grad()
    (warning,) = watcher.loop_warnings
    assert warning.endswith("call model.zero_grad() in each update, since parameters are in no optimizer")


def test_frozen_parameters_in_no_optimizer_are_told_nothing() -> None:
    model, sink = Stack(), ListSink()
    for layer in model.layers:
        layer.requires_grad_(False)
    optimizer = torch.optim.SGD(model.norm.parameters(), lr=0.1)
    with Watcher(model, sink, every=1, probes="ln_input", optimizer=optimizer, reference=None) as watcher:
        for _ in range(4):
            model(torch.randn(2, 5, WIDTH)).pow(3).mean().backward()
            watcher.step()
            optimizer.step()
            optimizer.zero_grad()
    assert watcher.loop_warnings == []


def test_a_metric_cannot_take_the_name_of_the_row() -> None:
    model = Stack()
    with Watcher(model, ListSink(), every=1, reference=None) as watcher:
        model(torch.randn(2, 5, WIDTH)).sum().backward()
        with pytest.raises(UsageError, match="a metric called 'step' would hide the number of its row"):
            watcher.step(step=7)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.LayerNorm(4))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Stack()


@pytest.mark.parametrize(("make", "said"), [(lazy, "run one batch"), (on_meta, "create them \\(to_empty\\)")])
def test_weights_without_values_are_refused(make: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Watcher(make(), ListSink(), every=1)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_module_inside_is_named() -> None:
    model = Stack()
    model.norm = torch.jit.script(model.norm)
    with pytest.raises(UsageError, match="norm is a ScriptModule, which runs without hooks: watch the model as it is"):
        Watcher(model, ListSink(), every=1)


class Carrier:
    """What some layers pass on: an object in which nobody can see a tensor."""

    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Opaque(Block):
    def forward(self, carried: Carrier) -> Carrier:
        return Carrier(super().forward(carried.x))


class Wrapped(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Opaque() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        carried = Carrier(x)
        for layer in self.layers:
            carried = layer(carried)
        return self.norm(carried.x)


def test_layers_that_pass_no_tensor_are_said_to_be_unseen(caplog: pytest.LogCaptureFixture) -> None:
    model, sink = Wrapped(), ListSink()
    with Watcher(model, sink, every=1, probes="residual_norm", reference=None) as watcher:
        for _ in range(2):
            model(torch.randn(2, 5, WIDTH)).sum().backward()
            watcher.step()
    assert "layers.1" in sink.absent(0, "residual_norm")
    told = [record.message for record in caplog.records if "passes no floating-point tensor there" in record.message]
    assert len(told) == 1, "said once"
