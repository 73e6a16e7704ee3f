"""AdamW over one buffer is AdamW: the same numbers, the same state, the same checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import pytest
import torch
from torch import nn

from stabilitylab.config import parse_set, resolve
from stabilitylab.store import Run, RunWriter
from stabilitylab.train import loop, plan
from stabilitylab.train.flat import FlatAdamW
from stabilitylab.train.loop import Trainer
from stabilitylab.train.recipe import adamw

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = ((3, 5), (7,), (16, 16), (1,), (33, 2))


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=random, dtype=dtype)) for shape in SHAPES]


def train(
    optimizer: torch.optim.Optimizer, theta: Sequence[nn.Parameter], updates: range, without: Sequence[int] = ()
) -> None:
    for update in updates:
        random = torch.Generator().manual_seed(update)
        for place, parameter in enumerate(theta):
            gradient = torch.randn(parameter.shape, generator=random, dtype=parameter.dtype)
            parameter.grad = None if update in without and place == 2 else gradient
        optimizer.step()


def pair(dtype: torch.dtype = torch.float64) -> tuple[Any, list[nn.Parameter], Any, list[nn.Parameter]]:
    one, other = parameters(dtype), parameters(dtype)
    return FlatAdamW(one, **OPTIONS), one, torch.optim.AdamW(other, fused=True, **OPTIONS), other


def alike(one: Any, other: Any, tolerance: float = 1e-14) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_twenty_updates_are_those_of_adamw(dtype: torch.dtype, tolerance: float) -> None:
    flat, one, plain, other = pair(dtype)
    train(flat, one, range(20))
    train(plain, other, range(20))
    alike(one, other, tolerance)
    for name in ("step", "exp_avg", "exp_avg_sq"):
        alike([flat.state[p][name] for p in one], [plain.state[p][name] for p in other], tolerance)
    assert flat.together
    assert len({p.untyped_storage().data_ptr() for p in one}) == 1
    begins = parameters(dtype)
    assert all((a - b).abs().max() > 1e-2 for a, b in zip(one, begins, strict=True))


def test_a_rate_on_the_device_is_read_at_each_update() -> None:
    theta, other = parameters(torch.float32), parameters(torch.float32)
    rate = torch.tensor(0.0)
    flat = FlatAdamW(theta, **{**OPTIONS, "lr": rate, "weight_decay": 0.0}, capturable=True)
    train(flat, theta, range(1))
    alike(theta, other, 0.0)
    rate.fill_(1e-2)
    train(flat, theta, range(1, 2))
    assert all(torch.any(a != b) for a, b in zip(theta, other, strict=True))


@pytest.mark.parametrize("order", ["flat then plain", "plain then flat"])
def test_each_goes_on_from_the_others_checkpoint(order: str) -> None:
    flat, one, plain, other = pair()
    first, theta, second, rest = (flat, one, plain, other) if order == "flat then plain" else (plain, other, flat, one)
    train(first, theta, range(5))
    with torch.no_grad():
        for a, b in zip(rest, theta, strict=True):
            a.copy_(b)
    state = deepcopy(first.state_dict())  # torch shares what it loads
    assert state["param_groups"][0].keys() >= {"lr", "betas", "eps", "weight_decay", "fused", "capturable"}
    second.load_state_dict(state)
    train(first, theta, range(5, 10))
    train(second, rest, range(5, 10))
    alike(theta, rest)
    assert flat.together


def test_a_parameter_without_a_gradient_is_left_alone_and_keeps_its_own_count() -> None:
    flat, one, plain, other = pair()
    for optimizer, theta in ((flat, one), (plain, other)):
        train(optimizer, theta, range(8), without=(3, 4))
    alike(one, other)
    assert not flat.together
    assert [flat.state[p]["step"].item() for p in one] == [8, 8, 6, 8, 8]
    fresh, two = FlatAdamW(again := parameters(torch.float64), **OPTIONS), again
    with torch.no_grad():
        for a, b in zip(two, one, strict=True):
            a.copy_(b)
    fresh.load_state_dict(flat.state_dict())  # counts that differ have no place in one buffer
    assert not fresh.together
    train(fresh, two, range(8, 11))
    train(plain, other, range(8, 11))
    alike(two, other)


def test_parameters_that_were_moved_are_updated_where_they_are() -> None:
    flat, one, plain, other = pair()
    train(flat, one, range(3))
    train(plain, other, range(3))
    one[0].data = one[0].data.clone()
    train(flat, one, range(3, 6))
    train(plain, other, range(3, 6))
    assert not flat.together
    alike(one, other)


def test_a_closure_is_called_with_gradients_on() -> None:
    theta = parameters(torch.float64)
    flat = FlatAdamW(theta, **OPTIONS)

    def closure() -> torch.Tensor:
        flat.zero_grad()
        loss = torch.stack([(p * p).sum() for p in theta]).sum()
        loss.backward()
        return loss

    before = flat.step(closure)
    assert flat.step(closure) < before


@pytest.mark.parametrize("arch", ["branchnorm", "admin"])
def test_the_trainers_tables_are_the_same_with_and_without(arch: str, tmp_path: Path) -> None:
    runs = []
    for flat in (True, False):
        sets = f"model.arch={arch} train.steps=6 probes.every=1 probes.update_every=2 data.sentences=4 data.held_out=6"
        prepared = plan(resolve(parse_set([*sets.split(), "probes.names=['default','adam']"]), depth=4))
        writer = RunWriter.create(tmp_path / str(flat), {"config": prepared.config.model_dump(mode="json")})
        with mock.patch.object(loop, "adamw", lambda *a, flat, choice=flat, **o: adamw(*a, flat=choice, **o)):
            trainer = Trainer(prepared.config, prepared.dataset, writer, prepared.device)
        assert isinstance(trainer.optimizer, FlatAdamW) is flat
        trainer.fit(lambda: False, lambda report: None)
        trainer.watcher.close()
        runs.append(Run.open(writer.path))
    for name in runs[0].tables:
        pd.testing.assert_frame_equal(*(run.frame(name) for run in runs), rtol=1e-3, atol=1e-7)
    pd.testing.assert_series_equal(*(run.metrics["loss"] for run in runs), rtol=1e-5)


@pytest.mark.parametrize("lie", ["host to device", "device to host"])
def test_where_the_rate_lies_is_not_the_checkpoints_matter(lie: str) -> None:
    """A run that goes on where graphs are replayed: a rate that is a number would be the same for ever."""
    on_host = FlatAdamW(parameters(torch.float32), **{**OPTIONS, "lr": 0.25})
    rate = torch.tensor(0.5)
    on_device = FlatAdamW(parameters(torch.float32), **{**OPTIONS, "lr": rate}, capturable=True)
    if lie == "host to device":
        on_device.load_state_dict(on_host.state_dict())
        assert on_device.param_groups[0]["lr"] is rate
        assert (rate.item(), on_device.param_groups[0]["capturable"]) == (0.25, True)
    else:
        on_host.load_state_dict(on_device.state_dict())
        assert (on_host.param_groups[0]["lr"], on_host.param_groups[0]["capturable"]) == (0.5, False)
        assert isinstance(on_host.param_groups[0]["lr"], float)
