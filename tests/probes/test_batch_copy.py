"""A first batch in whatever it is wrapped: copied whole, so that nothing later reaches the copy, or refused by name."""

from __future__ import annotations

import random
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from probe_toys import ListSink
from state_toys import WIDTH, Plain, alike, inputs, train, watching
from torch import Tensor

from stabilitylab.probes import Watcher
from stabilitylab.probes._engine.batch_copy import NotCopied, each_tensor

Pair = namedtuple("Pair", "x scale")


@dataclass
class Batch:
    x: Tensor
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    lengths: tuple[int, ...] = (3, 3)


@dataclass
class Nested:
    inner: Batch
    more: dict[str, list[Any]] = field(default_factory=dict)


class Storage:
    """As torch_geometric's: what a Data object holds, with a weak reference back."""

    def __init__(self, parent: Any, mapping: dict[str, Any]) -> None:
        self.__dict__["_mapping"] = mapping
        self.__dict__["_parent"] = weakref.ref(parent)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__["_mapping"]:
            return self.__dict__["_mapping"][name]
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_mapping"][name] = value

    def __copy__(self) -> Storage:
        return Storage(self._parent(), dict(self._mapping))


class Data:
    """As torch_geometric's: attributes go to a store."""

    def __init__(self, **given: Any) -> None:
        self.__dict__["_store"] = Storage(self, given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_store"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._store, name, value)

    def __copy__(self) -> Data:
        return Data(**self._store._mapping)


class Slots:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Sealed:
    """Copies of it cannot be made, nor can it be written to."""

    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        object.__setattr__(self, "x", x)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError


class Stream:
    """An iterator with attributes."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at


# how a tensor is wrapped, and how the model gets at it
WRAPPED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a dataclass": (Batch, lambda batch: batch.x),
    "a frozen one with slots": (Frozen, lambda batch: batch.x),
    "a dataclass in another": (lambda x: Nested(Batch(x), {"a": [1, x]}), lambda batch: batch.inner.x),
    "as torch_geometric": (lambda x: Data(x=x, num_nodes=6), lambda batch: batch.x),
    "slots": (Slots, lambda batch: batch.x),
    "a namespace": (lambda x: SimpleNamespace(x=x, n=3), lambda batch: batch.x),
    "a named tuple": (lambda x: Pair(x, 1.0), lambda batch: batch.x),
    "a dictionary of another class": (lambda x: OrderedDict(x=x), lambda batch: batch["x"]),
    "as transformers' BatchEncoding": (lambda x: UserDict(x=x), lambda batch: batch["x"]),
    "a deque in a dictionary": (lambda x: {"x": deque([x], maxlen=2)}, lambda batch: batch["x"][0]),
    "an array": (lambda x: x.numpy(), torch.from_numpy),
}


class Reads(Plain):
    def __init__(self, read: Callable[[Any], Tensor], write: bool = False) -> None:
        super().__init__()
        self.read, self.write = read, write

    def forward(self, batch: Any) -> Tensor:
        x = batch if isinstance(batch, Tensor) else self.read(batch)  # what the toys' loop runs it on in the end
        out = super().forward(x)
        if self.write:
            x.mul_(2)
        return out


def output_norms(sink: ListSink) -> list[dict[str, float]]:
    return [sink.column(number, "output_norm", "value") for number in range(len(sink.rows))]


def reused(wrap: Callable[[Tensor], Any]) -> Callable[[int], Any]:
    """Each step overwrites the batch of the one before, as loaders with a pinned buffer do."""
    buffer = torch.empty(6, WIDTH)
    batch = wrap(buffer)
    return lambda step: (buffer.copy_(inputs(step)), batch)[1]


@pytest.mark.parametrize("write", [False, True], ids=["reads", "writes into it"])
@pytest.mark.parametrize("how", WRAPPED)
def test_an_object_is_copied_as_the_tensor_itself_would_be(how: str, write: bool) -> None:
    wrap, read = WRAPPED[how]
    bare, sink = Reads(lambda x: x, write), ListSink()
    train(bare, watching(bare, sink), feed=reused(lambda x: x))
    model, own = Reads(read, write), ListSink()
    watched = train(model, watching(model, own), feed=reused(wrap))
    assert alike(train(Reads(read, write), None, feed=reused(wrap)), watched)
    assert len(output_norms(sink)) == 7
    assert output_norms(own) == output_norms(sink)


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a generator": (lambda x: (each for each in [x]), "args[0], a generator, which the first pass would use up"),
    "an iterator in a dataclass": (
        lambda x: Batch(x, Stream()),
        "args[0].scale, a Stream, which the first pass would use up",
    ),
    "what cannot be copied": (lambda x: {"deep": [Sealed(x)]}, "args[0]['deep'][0], a Sealed"),
    "what cannot be looked into": (lambda x: memoryview(x.numpy()), "args[0], a memoryview, into which nothing"),
}
READ: dict[str, Callable[[Any], Tensor]] = {
    "a generator": next,
    "an iterator in a dataclass": lambda batch: batch.x * next(batch.scale),
    "what cannot be copied": lambda batch: batch["deep"][0].x,
    "what cannot be looked into": lambda batch: torch.from_numpy(np.asarray(batch)),
}


@pytest.mark.parametrize("curvature", [False, True])
@pytest.mark.parametrize("how", REFUSED)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_what_cannot_be_copied_is_refused_by_name_and_training_goes_on(
    how: str, curvature: bool, caplog: pytest.LogCaptureFixture
) -> None:
    wrap, named = REFUSED[how]
    plain = train(Reads(READ[how]), None, feed=lambda step: wrap(inputs(step)))
    model, sink, held = Reads(READ[how]), ListSink(), []
    table = "critical_sharpness" if curvature else "output_norm"
    watch = watching(model, sink, probes=f"{table},grad_norm", curvature_every=1)
    watched = train(
        model, lambda optimizer: held.append(watch(optimizer)) or held[0], feed=lambda step: wrap(inputs(step))
    )
    assert alike(plain, watched)
    why = held[0].ended[table]
    assert why.startswith(f"the first batch holds {named}")
    assert "reference=" in why
    assert [row for row, _, tables in sink.rows if "grad_norm" in tables] == list(range(6))
    assert not any(table in tables for _, _, tables in sink.rows)
    assert not any("was not called" in record.message for record in caplog.records)


def test_the_batch_of_an_update_is_copied_or_refused_as_well() -> None:
    def curved(wrap: Callable[[Tensor], Any], read: Callable[[Any], Tensor]) -> tuple[Watcher, ListSink]:
        class Loss(Reads):
            def forward(self, batch: Any) -> Tensor:
                return super().forward(batch).square().mean()

        model, sink, feed = Loss(read, write=True), ListSink(), reused(wrap)
        options = {"probes": "critical_sharpness", "curvature_every": 1, "curvature_batch": "update"}
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        watcher = watching(model, sink, reference=None, **options)(optimizer)
        for step in range(2):
            model(feed(step)).backward()
            watcher.step()
            optimizer.step()
            optimizer.zero_grad()
        watcher.finish()
        watcher.close()
        return watcher, sink

    _, sink = curved(lambda x: x, lambda x: x)
    watcher, own = curved(Batch, lambda batch: batch.x)
    assert not watcher.ended
    columns = [found.rows[0][2]["critical_sharpness"].values for found in (sink, own)]
    np.testing.assert_array_equal(*columns)
    watcher, _ = curved(lambda x: {"deep": [Sealed(x)]}, lambda batch: batch["deep"][0].x)
    assert watcher.ended["critical_sharpness"].startswith("the batch of the update holds args[0]['deep'][0], a Sealed")


def copied(value: Any) -> Any:
    return each_tensor(Tensor.clone, args=value)[0]


def test_objects_keep_their_kind_and_what_is_shared_inside() -> None:
    x = torch.zeros(2)
    batch = Nested(Batch(x), {"a": [x], "b": [{1, 2}]})
    made = copied([batch, batch, x])
    assert isinstance(made[0], Nested)
    assert made[0] is made[1]
    assert made[0].inner.x is made[2]
    assert made[2] is not x
    assert made[0].more["a"][0] is made[2]
    data = copied(Data(x=x, num_nodes=2))
    assert data._store._parent() is data
    assert data.x is not x
    assert batch.inner.x is x  # the batch itself is left alone
    assert isinstance(copied(Pair(x, 2)), Pair)
    made = copied(defaultdict(list, a=[x]))
    assert made["b"] == []
    assert made["a"][0] is not x
    loop: Any = SimpleNamespace(x=x)
    loop.me = loop
    assert copied(loop).me is not loop


def test_a_counter_in_an_object_without_tensors_is_not_shared() -> None:
    """A forward may count in it; the run's own object is left alone."""
    state = SimpleNamespace(calls=0)
    made = copied(state)
    made.calls += 1
    assert state.calls == 0
    sentinel, model = object(), Plain()
    assert copied({"model": model, "function": len})["model"] is model
    with pytest.raises(NotCopied, match=r"args, a object, into which nothing can look"):
        copied(sentinel)


def test_random_streams_are_copied() -> None:
    torchs, pythons, numpys = torch.Generator().manual_seed(3), random.Random(3), np.random.default_rng(3)
    made = copied([torchs, pythons, numpys])
    own = torch.rand(1, generator=torchs), pythons.random(), numpys.random()
    assert (torch.rand(1, generator=made[0]), made[1].random(), made[2].random()) == own
