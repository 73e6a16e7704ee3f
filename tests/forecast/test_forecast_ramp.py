"""The range test: its end on losses that are made up, its losses against a loop of PyTorch's own."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from forecast_cases import candidate_of, config_of, dataset, model_of

from stabilitylab.forecast.ramp import LOWEST, MOST, PER_DECADE, _losses, ended, rate

FALL = [8.0 - 0.1 * n for n in range(31)]  # to 5.0 after 30 updates


def test_rates_are_thirty_a_decade_up_to_one() -> None:
    assert rate(0) == LOWEST
    assert rate(PER_DECADE) == pytest.approx(10 * LOWEST)
    assert 1 <= rate(MOST - 1) < 10 ** (1 / PER_DECADE)


def test_a_loss_that_comes_back_to_the_baseline_ends_it() -> None:
    found = ended([*FALL, 5.2, 5.4, 5.49, 5.6, 9.0], baseline=5.5)
    assert (found.why, found.updates, found.lowest) == ("back at the baseline", 34, 5.0)
    assert found.low == pytest.approx(rate(29))  # the update that led to the lowest loss
    assert found.end == pytest.approx(rate(33))


def test_a_loss_that_never_was_below_the_baseline_ends_a_decade_after_its_lowest() -> None:
    found = ended([*FALL, *[5.3] * 100], baseline=4.9)
    assert found.why == "no fall over a decade of rates"
    assert found.end == pytest.approx(10 * found.low)
    near = ended([*FALL, *[5.3] * 100], baseline=5.04)  # too little below it to have learnt
    assert near.why == "no fall over a decade of rates"


def test_without_a_baseline_it_ends_by_the_fall_alone() -> None:
    assert ended([*FALL, 5.6, *[5.7] * 100], baseline=None).why == "no fall over a decade of rates"


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_finite_ends_it(broken: float) -> None:
    found = ended([8.0, 7.0, broken], baseline=5.5)
    assert (found.why, found.end, found.low, found.updates) == ("not finite", rate(1), rate(0), 2)
    assert ended([broken], None).end == LOWEST


def test_one_that_falls_to_the_end_says_so() -> None:
    found = ended([8.0, 7.0, 6.0], 5.5)
    assert (found.why, found.end, found.updates) == ("the last rate", rate(1), 2)


@pytest.mark.parametrize("arch", ["preln", "branchnorm", "admin"])
def test_its_losses_are_those_of_a_loop_of_pytorchs_own(arch: str) -> None:
    losses = _losses(candidate_of(arch))
    model, data = model_of(config_of(arch)), dataset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-8, weight_decay=1e-4)

    def loss(batch, smoothing: float) -> torch.Tensor:
        counted = batch.weight > 0
        return F.cross_entropy(model(**batch.inputs)[counted], batch.labels[counted], label_smoothing=smoothing)

    for update in range(6):
        model.eval()
        model.set_row(update)
        with torch.no_grad():
            expected = float(loss(data.held_out, 0.0))
        assert next(losses) == pytest.approx(expected, rel=1e-4)
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = rate(update)
        loss(data.micro_batch(update), 0.1).backward()
        optimizer.step()
        optimizer.zero_grad()
