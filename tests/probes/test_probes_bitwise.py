"""A watched run equals an unwatched run bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from probe_toys import CURVATURE, WITHOUT_TAPS, ListSink, Toy, batch, loss_of, train
from rest_slow import rest_slow

from stabilitylab.probes import Probe, Watcher, probe
from stabilitylab.probes.places.sites import layers


def ramp(t: int) -> float:
    return min(1.0, (t + 1) / 4)


def reference(model: Toy) -> Callable[[], dict[str, torch.Tensor]]:
    fixed = batch(99)
    return lambda: {"held_out": loss_of(model, fixed), "noise": torch.rand(())}  # it may even draw


def watched(sink: ListSink, recompute: str = "", accumulate: int = 1, probes: str = "all") -> dict[str, Any]:
    model = Toy(dropout=0.2, recompute=recompute)

    def watch(optimizer: torch.optim.Optimizer) -> Watcher:
        return Watcher(
            model,
            sink,
            probes=probes,
            every=1,
            update_every=1,
            optimizer=optimizer,
            schedule=model.alpha,
            reference=reference(model),
            curvature_every=2,
            curvature_loss=lambda: loss_of(model, batch(98)) + torch.rand(()),
        )

    return train(model, 5, watch, ramp, accumulate)


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    names = [name for name in ("losses", "parameters") for _ in one[name]] + ["rng"]
    tensors = [[*run["losses"], *run["parameters"], run["rng"]] for run in (one, other)]
    return [name for name, a, b in zip(names, *tensors, strict=True) if not torch.equal(a, b)]


@pytest.mark.parametrize(
    ("recompute", "accumulate"),
    rest_slow(product(("", "reentrant", "non-reentrant"), (1, 2)), {("", 2)}),
)
def test_a_watched_run_equals_an_unwatched_one(recompute: str, accumulate: int) -> None:
    sink = ListSink()
    seen = watched(sink, recompute, accumulate)
    assert differences(train(Toy(dropout=0.2, recompute=recompute), 5, None, ramp, accumulate), seen) == []
    # ... and it was watched: every probe at every row, model_update's exchange of weights included
    assert set(sink.tables) == WITHOUT_TAPS | CURVATURE
    assert [step for step, *_ in sink.rows] == [0, 1, 2, 3, 4, 5]
    assert all(set(tables) - CURVATURE == WITHOUT_TAPS for _, _, tables in sink.rows[:5])
    assert [step for step, _, tables in sink.rows if set(tables) >= CURVATURE] == [0, 2, 4]
    assert max(sink.column(3, "model_update", "schedule").values()) > 0


@pytest.mark.usefixtures("scratch")
@pytest.mark.parametrize("harm", ["draws", "writes", "steps"])
def test_the_comparison_notices_a_probe_that_interferes(harm: str) -> None:
    @probe("vandal", on="forward", at=layers)
    class Vandal(Probe):
        def measure(self, site: Any, x: Any, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if harm == "draws":
                torch.rand(())
            elif harm == "writes":
                y.mul_(1 + 1e-6)
            else:
                site.module.norm1.bias.data.add_(1e-6)
            return y.sum(-1)

    assert differences(train(Toy(dropout=0.2), 5, None, ramp), watched(ListSink(), probes="vandal")) != []
