"""Layers and models that take or return objects of classes of their own: read where they can be, and never raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field
from typing import Any

import pytest
import torch
from probe_toys import ListSink
from torch import Tensor, nn

from stabilitylab.probes import Watcher
from stabilitylab.probes.places import tensor_of

PROBES = "residual_norm,activation_grad_norm,cosine_similarity"


@dataclass(slots=True)
class Slotted:
    hidden: Tensor
    other: Tensor


@dataclass
class Unset:
    logits: Tensor
    cache: Tensor = field(init=False)


@dataclass
class Scaled:
    logits: Tensor
    scale: InitVar[float]

    def __post_init__(self, scale: float) -> None:
        self.logits = self.logits * scale


@dataclass
class Around:
    itself: Any = None


class Hostile(dict[str, Any]):
    def values(self) -> Any:
        raise RuntimeError("no values")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("no names")


class Plain(nn.Module):
    """A layer; ``wrap`` is what it returns its stream in, ``context`` what it takes beside it."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(6, 6), wrap

    def forward(self, context: Any, x: Tensor) -> Any:
        return self.wrap(x + torch.tanh(self.linear(x)))


class Model(nn.Module):
    def __init__(
        self,
        wrap: Callable[[Tensor], Any] = lambda x: x,
        unwrap: Callable[[Any], Tensor] = lambda y: y,
        context: Callable[[], Any] = lambda: None,
        returned: Callable[[Tensor], Any] = lambda y: y,
    ) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Plain(wrap) for _ in range(3)), nn.Linear(6, 3)
        self.unwrap, self.context, self.returned = unwrap, context, returned
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.kept.clear()
        for layer in self.layers:
            x = self.unwrap(layer(self.context(), x))
            if x.requires_grad:  # not in the held-out pass
                x.retain_grad()
            self.kept.append(x)
        return self.returned(self.head(x))


def circular() -> Around:
    made = Around()
    made.itself = made
    return made


def trained(model: Model, read: Callable[[Any], Tensor], **options: Any) -> tuple[ListSink, Watcher, list[Any]]:
    sink, wanted = ListSink(), []
    with Watcher(model, sink, probes=PROBES, reference="first batch", every=1, **options) as watcher:
        for t in range(2):
            model.zero_grad()
            given = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
            loss = read(model(given)).square().mean()
            loss.backward()
            norms = [float(x.detach().norm(dim=-1).mean()) for x in model.kept]
            gradients = [float(x.grad.norm()) for x in model.kept if x.grad is not None]
            wanted.append((norms, gradients))
            watcher.step(loss=loss)
    return sink, watcher, wanted


@pytest.mark.parametrize(
    ("options", "read"),
    [
        pytest.param(
            {"wrap": lambda x: Slotted(x, x.mean()), "unwrap": lambda y: y.hidden}, lambda y: y, id="slots of a layer"
        ),
        pytest.param({"returned": Unset}, lambda y: y.logits, id="a field that is not set"),
        pytest.param({"returned": lambda y: Scaled(y, 2.0)}, lambda y: y.logits, id="a field of __init__ alone"),
        pytest.param({"context": circular}, lambda y: y, id="an object that holds itself"),
        pytest.param({"returned": lambda y: Hostile(logits=y)}, lambda y: y["logits"], id="a hostile output"),
    ],
)
def test_values_in_objects_are_read(options: dict[str, Any], read: Callable[[Any], Tensor]) -> None:
    torch.manual_seed(0)
    sink, watcher, wanted = trained(Model(**options).double(), read, strict=True)
    assert not watcher.ended
    for t, (norms, gradients) in enumerate(wanted):
        for table, values in (("residual_norm", norms), ("activation_grad_norm", gradients)):
            found = sink.column(t, table, "value")
            assert [found[f"layers.{n}"] for n in range(3)] == pytest.approx(values, rel=1e-12), table


def test_an_object_that_cannot_be_read_ends_its_tables_and_not_training() -> None:
    torch.manual_seed(0)
    model = Model(context=lambda: Hostile(a=1)).double()
    _, watcher, _ = trained(model, lambda y: y)
    assert dict(watcher.ended)["residual_norm"] == "its probe raised RuntimeError (no values)"


def test_strict_raises_what_reading_raises() -> None:
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="no values"):
        trained(Model(context=lambda: Hostile(a=1)).double(), lambda y: y, strict=True)


def test_a_tensor_is_found_behind_an_object_that_holds_itself() -> None:
    x = torch.ones(2)
    inner: list[Any] = []
    inner += [inner, circular(), (inner, x)]
    assert tensor_of((circular(), inner)) is x
    assert tensor_of([circular(), [None]]) is None
