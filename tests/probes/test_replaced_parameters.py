"""Parameters that are replaced, added or removed while a model is watched: each row is of those that the model has."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import pytest
import torch
from probe_toys import ListSink
from torch import Tensor, nn
from torch.nn.utils import prune

from stabilitylab.probes import Watcher
from stabilitylab.probes.places.naming import ParameterPlaces, parameters_of

WIDTH, UPDATES, CHANGED, RATE = 8, 5, 2, 0.1
PROBES = "grad_norm,update_ratio,parameter_norm"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LedgerSink(ListSink):
    def __init__(self) -> None:
        super().__init__()
        self.facts: list[dict[str, object]] = []

    def ledger(self, facts: list[dict[str, object]]) -> None:
        self.facts += facts


Change = Callable[[Net, int], object]


def train(change: Change) -> tuple[LedgerSink, Watcher, list[dict[str, tuple[float, float, float]]]]:
    """Train with SGD; return what was recorded, and by name the true norms of gradient, parameter and update."""
    torch.manual_seed(0)
    model, sink = Net().double(), LedgerSink()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    true: list[dict[str, tuple[float, float, float]]] = []
    with Watcher(model, sink, optimizer=optimizer, probes=PROBES, every=1, reference=None) as watcher:
        for t in range(UPDATES):
            change(model, t)
            known = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if new := [p for p in model.parameters() if id(p) not in known]:
                optimizer.add_param_group({"params": new})
            loss = model(torch.randn(4, WIDTH, dtype=torch.float64)).square().mean()
            loss.backward()
            held = {name: (p.detach(), p.grad) for name, p in model.named_parameters() if p.grad is not None}
            true.append({n: (float(g.norm()), float(p.norm()), RATE * float(g.norm())) for n, (p, g) in held.items()})
            watcher.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    return sink, watcher, true


def length(*norms: float) -> float:
    return math.hypot(*norms)


def total(norms: dict[str, tuple[float, float, float]]) -> float:
    return length(*(gradient for gradient, *_ in norms.values()))


def new_head(model: Net, t: int) -> None:
    if t == CHANGED:
        model.head = nn.Linear(WIDTH, WIDTH).double()


def new_tensor(model: Net, t: int) -> None:
    if t == CHANGED:
        model.head.weight = nn.Parameter(3 * torch.randn(WIDTH, WIDTH, dtype=torch.float64))


def heads_in_turn() -> Change:
    heads: list[nn.Module] = []

    def change(model: Net, t: int) -> None:
        if not heads:
            heads.extend((model.head, nn.Linear(WIDTH, WIDTH).double()))
        model.head = heads[t % 2]  # pyright: ignore[reportAttributeAccessIssue]

    return change


@pytest.mark.parametrize("change", [new_head, new_tensor, heads_in_turn()])
def test_a_parameter_in_place_of_another_is_read_in_its_row(change: Change) -> None:
    sink, watcher, true = train(change)
    assert not watcher.loop_warnings
    assert not watcher.ended
    for t, norms in enumerate(true):
        assert sink.row(t)[0]["grad_norm_total"] == pytest.approx(total(norms), rel=1e-12)
        head = norms["head.weight"], norms["head.bias"]
        gradient, theta, update = (length(*each) for each in zip(*head, strict=True))
        assert sink.column(t, "grad_norm", "value")["head"] == pytest.approx(gradient, rel=1e-12)
        assert sink.column(t, "update_ratio", "value")["head"] == pytest.approx(update / theta, rel=1e-9)
        for name, (gradient, theta, update) in norms.items():
            found = [sink.column(t, "parameter_norm", column)[name] for column in ("gradient", "weight", "moved")]
            assert found == pytest.approx([gradient, theta, update], rel=1e-9), name


def appended(model: Net, t: int) -> None:
    if t == CHANGED:
        model.layers.append(Block().double())


def registered(model: Net, t: int) -> None:
    if t == CHANGED:
        model.head.register_parameter("scale", nn.Parameter(torch.ones(1, dtype=torch.float64)))


def another_shape(model: Net, t: int) -> None:
    if t == CHANGED:
        model.head = nn.Linear(WIDTH, 2 * WIDTH).double()


def removed(model: Net, t: int) -> None:
    if t == CHANGED:
        model.layers = model.layers[:1]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (appended, "layers.2.norm.weight and 3 more"),
        (registered, "head.scale"),
        (another_shape, "head.weight and 1 more"),
        (removed, "layers.1.norm.weight and 3 more"),
    ],
)
def test_other_parameters_end_what_would_miss_them(
    change: Change, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "stabilitylab"):
        sink, watcher, true = train(change)
    (warning,) = watcher.loop_warnings
    assert warning.startswith(f"row {CHANGED}: ")
    assert f"({named})" in warning
    assert set(watcher.ended) == set(PROBES.split(","))
    assert sum(named in record.getMessage() for record in caplog.records) == 1
    for t, norms in enumerate(true):
        metrics, tables = sink.row(t)
        assert metrics["grad_norm_total"] == (pytest.approx(total(norms), rel=1e-12) if t < CHANGED else None)
        assert metrics["loss"] is not None
        assert set(tables) == (set(PROBES.split(",")) if t < CHANGED else set())


def test_a_parameter_under_another_name_changes_nothing() -> None:
    def pruned(model: Net, t: int) -> None:
        if t == CHANGED:
            prune.identity(model.head, "weight")

    (sink, watcher, true), (plain, _, _) = train(pruned), train(lambda model, t: None)
    assert not watcher.loop_warnings
    assert not watcher.ended
    for t in range(UPDATES):
        assert sink.row(t)[0] == plain.row(t)[0]
        assert sink.column(t, "grad_norm", "value") == plain.column(t, "grad_norm", "value")
        assert len(true[t]) == len(true[0])


def test_the_ledger_looks_at_the_new_parameter() -> None:
    def frozen_head(model: Net, t: int) -> None:
        if t == CHANGED:
            model.head = nn.Linear(WIDTH, WIDTH).double()
            model.head.bias.requires_grad_(False)

    sink, _, _ = train(frozen_head)
    facts = {(fact["step"], fact["kind"], fact["name"], fact["after"]) for fact in sink.facts}
    assert (CHANGED, "flag", "requires_grad of head.bias", False) in facts


def test_places_of_parameters_follow_every_change() -> None:
    model = Net()
    places = ParameterPlaces(model)
    assert places() is places()  # nothing changed, nothing is walked
    changes: list[Callable[[], object]] = [
        lambda: new_head(model, CHANGED),
        lambda: new_tensor(model, CHANGED),
        lambda: appended(model, CHANGED),
        lambda: registered(model, CHANGED),
        lambda: removed(model, CHANGED),
        lambda: setattr(model.layers[0].fc, "bias", None),
        lambda: setattr(model.head, "weight", model.layers[0].fc.weight),
    ]
    for change in changes:
        change()
        found = places()
        assert list(found) == list(parameters_of(model)) == [name for name, _ in model.named_parameters()]
        assert all(one is other for one, other in zip(found.values(), model.parameters(), strict=True))
