"""What watching costs, counted in operator calls, which no noise moves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of, masks
from rest_slow import rest_slow
from torch.utils._python_dispatch import TorchDispatchMode

from stabilitylab.probes import Probe, Watcher, probe
from stabilitylab.probes.instruments.step_order import LOOKS
from stabilitylab.probes.places.sites import norms


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls(
    layers: int, probes: str, tapped: Sequence[str] = ("ln_input", "activation_grad_norm")
) -> tuple[int, int, int]:
    """Operator calls of forward and backward, of ``step`` and the update, and how many numbers a hook recorded."""
    model, sink, inputs = Toy(layers), ListSink(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = Watcher(
        model, sink, probes=probes, every=1, optimizer=optimizer, mask=masks(inputs), total_every_step=False
    )
    for _ in range(LOOKS + 2):  # the first row builds what later ones reuse; LOOKS rows look at the order
        with Calls() as passes:
            loss_of(model, inputs).backward()
        with Calls() as rest:
            watcher.step()
            optimizer.step()
        optimizer.zero_grad()
    watcher.close()
    return passes.count, rest.count, sum(len(t.rows) for t in sink.tables.values() if t.name in tapped)


@pytest.mark.parametrize(
    "probes",
    rest_slow(["ln_input", "activation_grad_norm", "ln_input,activation_grad_norm"], ["ln_input,activation_grad_norm"]),
)
def test_at_most_two_operators_a_recorded_activation_number_plus_a_constant(probes: str) -> None:
    constant = 6  # the masks
    for layers in (1, 4, 8):
        plain, _, _ = calls(layers, "none")
        watched, _, numbers = calls(layers, probes)
        assert numbers >= 2 * layers
        assert watched - plain <= 2 * numbers + constant


@pytest.mark.slow
def test_each_further_activation_number_of_the_standard_set_costs_at_most_two_operators() -> None:
    extra, numbers = {}, {}
    for layers in (2, 4, 8, 12):
        watched, rest, _ = calls(layers, "standard", tapped := ("ln_input", "activation_grad_norm", "residual_norm"))
        plain, without, _ = calls(layers, "none")
        parameters = calls(layers, "grad_norm")[1] - without
        extra[layers] = watched - plain + (rest - without - parameters)
        numbers[layers] = calls(layers, "standard", tapped)[2]
    slopes = [(extra[b] - extra[a]) / (numbers[b] - numbers[a]) for a, b in pairwise(extra)]
    assert max(slopes) <= 2
    assert all(extra[layers] - 2 * numbers[layers] <= 100 for layers in extra)  # adding up, finishing, and the copy


@pytest.mark.usefixtures("scratch")
def test_the_count_notices_a_probe_with_three_operators() -> None:
    @probe("wasteful", on="forward", at=norms)
    class Wasteful(Probe):
        def measure(self, site: Any, x: Any, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch.linalg.vector_norm(y * 2 + 1, dim=-1)

    few, many = (calls(layers, "wasteful", ("wasteful",)) for layers in (2, 8))
    bare_few, bare_many = (calls(layers, "none") for layers in (2, 8))
    assert (many[0] - bare_many[0] - few[0] + bare_few[0]) / (many[2] - few[2]) == 3


@pytest.mark.parametrize(
    "probes", rest_slow(["ln_input", "activation_grad_norm", "grad_norm", "standard"], ["standard"])
)
def test_a_rows_reductions_do_not_grow_with_depth(probes: str) -> None:
    def of_step(layers: int) -> int:
        return calls(layers, probes)[1] - calls(layers, "none")[1]

    # per operator that takes a list (stack, foreach) the dispatcher still sees one call
    assert of_step(8) <= of_step(2) <= 150


def test_a_row_that_is_not_probed_costs_no_operator() -> None:
    model, inputs = Toy(), batch()
    watcher = Watcher(model, ListSink(), every=1000, total_every_step=False)
    counts = []
    for _ in range(4):
        with Calls() as passes:
            loss_of(model, inputs).backward()
        with Calls() as rest:
            watcher.step()
        counts.append((passes.count, rest.count))
    watcher.close()
    with Calls() as bare:
        loss_of(model, inputs).backward()
    number = torch.ones(1)
    with Calls() as read:
        number.numpy()
    assert counts[1] == (bare.count, read.count)  # row 0 is read
    assert counts[2:] == [(bare.count, 0)] * 2
    assert counts[0] > counts[1]
