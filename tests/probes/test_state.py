"""The state of a model: every kind of tensor is found, its bits are compared and restored; what a sample can see."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stabilitylab.probes.state import SAMPLE, Span, StateSnapshot, packed, spans, survey


def model_with(tensor: Any) -> nn.Module:
    model = nn.Linear(2, 2)
    model.extra = tensor  # a plain attribute, unless it is a parameter
    return model


def bits(tensor: Tensor) -> list[int]:
    return [number for part, _ in spans(tensor) or () for number in packed(part).tolist()]


def special(dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (24 * dtype.itemsize,), dtype=torch.uint8, generator=draw).view(
        dtype
    )  # any bits, NaNs


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64,
          torch.complex128, torch.int64, torch.int16, torch.int8)  # fmt: skip
KINDS: dict[str, Tensor] = {
    **{str(dtype): special(dtype) for dtype in DTYPES},
    "bool": torch.tensor([True, False, True]),
    "a view of a larger tensor": torch.arange(60.0).view(6, 10)[1:4, 2:5],
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "expanded": torch.zeros(1).expand(5),
    "sparse": torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,), check_invariants=True).coalesce(),
    "no dimension": torch.tensor(3.0),
}


def changed_in_place(tensor: Tensor) -> None:
    """The lowest bit of the first word, which no comparison of numbers would see where it is one of a NaN."""
    _, span = (spans(tensor) or [])[-1]
    span.words()[:1].bitwise_xor_(1)


@pytest.mark.parametrize("how", KINDS)
def test_one_bit_is_found_and_restored(how: str) -> None:
    tensor = KINDS[how].clone() if how not in ("a view of a larger tensor", "transposed", "expanded") else KINDS[how]
    before = bits(tensor)
    model = model_with(tensor)
    snapshot = StateSnapshot(model)
    assert snapshot.complete
    changed_in_place(tensor)
    assert bits(tensor) != before
    found = snapshot.compare()
    assert [(change.name, change.undone) for change in found.changes] == [("extra", True)]
    assert bits(tensor) == before
    sampled = StateSnapshot(model, copied=False)
    changed_in_place(tensor)
    assert [(change.name, change.undone) for change in sampled.compare().read()] == [("extra", False)]
    changed_in_place(tensor)
    assert StateSnapshot(model).compare().changes == []


def test_each_place_of_a_tensor_is_found_once_and_named() -> None:
    class Helper:
        def __init__(self) -> None:
            self.mean = torch.zeros(2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            self.tied = self.inner[0].weight
            self.register_buffer("hidden", torch.zeros(1), persistent=False)
            self.register_buffer("missing", None)
            self.plain = torch.zeros(1)
            self.nested = {"a": [torch.zeros(1), (torch.zeros(1), {"b": torch.zeros(1)})], 3: deque([torch.zeros(1)])}
            self.unregistered = [nn.Linear(1, 1)]
            self.helper = Helper()
            self.again = self.nested
            self.settings = SimpleNamespace(width=3)
            self.array = np.zeros(3)
            self.empty, self.meta = torch.zeros(0), torch.zeros(3, device="meta")
            self.lazy = nn.LazyLinear(3)

    found = survey(Model())
    kinds = {held.name: held.kind for held in found.tensors}
    assert len(kinds) == len(found.tensors)
    assert {name for name, kind in kinds.items() if kind == "buffer"} == {
        "hidden", "inner.1.running_mean", "inner.1.running_var", "inner.1.num_batches_tracked",
    }  # fmt: skip
    # "inner.0.weight" is a parameter of the model itself too, where it comes first
    assert {name for name, kind in kinds.items() if kind == "parameter"} == {
        "tied", "inner.0.bias", "inner.1.weight", "inner.1.bias", "lazy.weight", "lazy.bias",
    }  # fmt: skip
    assert {name for name, kind in kinds.items() if kind == "attribute"} == {
        "plain", "nested['a'][0]", "nested['a'][1][0]", "nested['a'][1][1]['b']", "nested[3][0]",
        "unregistered[0].weight", "unregistered[0].bias", "helper.mean", "array", "empty", "meta",
    }  # fmt: skip
    assert not found.unseen
    assert not StateSnapshot(Model()).compare().unseen


def test_a_model_that_refers_to_itself_ends() -> None:
    model: Any = nn.Linear(2, 2)
    model.box = [model]
    model.box.append(model.box)
    model.box.append(SimpleNamespace(owner=model, tensor=torch.zeros(1)))
    assert {held.name for held in survey(model).tensors} == {"weight", "bias", "box[2].tensor"}


def test_a_buffer_that_a_wrapper_lists_keeps_its_name() -> None:
    """As DistributedDataParallel lists those that it broadcasts."""
    wrapper: Any = nn.Module()
    wrapper.module = nn.BatchNorm1d(2, affine=False)
    wrapper.listed = list(wrapper.module.buffers())
    held = [(each.name, each.kind) for each in survey(wrapper).tensors]
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert held == [(f"module.{name}", "buffer") for name in names]  # a wrapper is told by its class, and this is none


def test_the_wrappers_of_a_model_do_not_change_the_names() -> None:
    names = [held.name for held in survey(torch.compile(nn.Linear(2, 2), backend="eager")).tensors]
    assert names == ["weight", "bias"]


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 127, 128, 1000, 4097])
def test_turns_come_by_every_word_and_each_sees_any_block_of_a_64th(count: int) -> None:
    tensor = torch.zeros(count)
    span, block = Span.of(tensor), -(-count // SAMPLE)
    seen = torch.zeros(count, dtype=torch.bool)
    for turn in range(8 * block):
        tensor.copy_(torch.arange(count))
        places = span.sampled(SAMPLE, turn).view(torch.float32).long()
        assert 1 <= len(places) <= SAMPLE
        assert places[0] < block
        assert (places.diff() == block).all()
        assert places[-1] + block >= count
        seen[places] = True
    assert seen.all()


def test_generators_and_lists_are_put_back_and_other_objects_are_left() -> None:
    model: Any = nn.Linear(1, 1)
    model.draw, model.numbers = torch.Generator().manual_seed(1), np.random.RandomState(1)
    model.list, model.cache, model.mixed = [1], None, [object()]
    first = torch.rand(3, generator=model.draw), model.numbers.rand()
    model.draw.manual_seed(1)
    model.numbers.seed(1)
    snapshot = StateSnapshot(model, copied=False)
    torch.rand(5, generator=model.draw), model.numbers.rand(5)
    model.list.append(2)
    model.cache, model.mixed[0] = SimpleNamespace(kernel=1), 5
    model.new = torch.zeros(1)
    found = snapshot.compare()
    assert not found.changes
    assert set(found.rebound) == {"list[1]", "new"}
    assert model.list == [1]
    assert not hasattr(model, "new")
    assert model.cache.kernel == 1  # what is made on first use, and is no tensor, may be a kernel or a handle
    assert torch.equal(torch.rand(3, generator=model.draw), first[0])
    assert model.numbers.rand() == first[1]


def test_a_parameter_that_is_replaced_is_put_back() -> None:
    model = nn.Linear(2, 2)
    own = model.weight
    snapshot = StateSnapshot(model, copied=False)
    model.weight = nn.Parameter(torch.zeros(2, 2))
    assert [(c.name, c.undone) for c in snapshot.compare().read()] == [("weight", True)]
    assert model.weight is own
    snapshot = StateSnapshot(model, copied=False)
    model.weight = nn.Parameter(own.detach().clone())  # the optimizer has the other one
    assert snapshot.compare().read() == []
    assert model.weight is own
