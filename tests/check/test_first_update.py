"""The loss before training, and what the first update does to the output, at the rate that this update has."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from questioned import VOCABULARY, Decoder, adamw, cross_entropy, next_tokens
from rest_slow import rest_slow
from torch import Tensor, nn

from stabilitylab import preflight
from stabilitylab.check import Check, Preflight
from stabilitylab.errors import UsageError


def check(result: Preflight, name: str) -> Check:
    (found,) = [one for one in result.checks if one.name == name]
    return found


def failures(result: Preflight) -> list[str]:
    return [one.bound for one in result.findings if one.severity == "fail"]


def test_narrow_weights_that_a_step_replaces_are_no_fault() -> None:
    """GPT-2's weights start at a standard deviation of .02: Adam's first step is as large as they are, and harmless."""
    model = Decoder()
    result = preflight(model, next_tokens(), cross_entropy, adamw(model, 0.03))
    assert max(one["update"] for one in result.layers if one.number) > 1
    assert result.ok, str(result)
    assert check(result, "output change").value < 0.5


def test_the_change_of_the_output_is_the_divergence_of_the_predictions() -> None:
    model, batch = Decoder().double(), next_tokens()
    result = preflight(model, batch, cross_entropy, adamw(model, 0.1))
    twin = copy.deepcopy(model)
    optimizer = adamw(twin, 0.1)
    before = twin(batch[0]).softmax(dim=-1).detach()
    cross_entropy(twin, batch).backward()
    optimizer.step()
    after = twin(batch[0]).softmax(dim=-1).detach()
    expected = float((before * (before.log() - after.log())).sum(dim=-1).mean())
    assert check(result, "output change").value == pytest.approx(expected, rel=1e-9)


def test_a_rate_that_throws_the_predictions_away_fails_and_the_rate_that_is_named_does_not() -> None:
    model, batch = Decoder(), next_tokens()
    result = preflight(model, batch, cross_entropy, adamw(model, 3.0))
    found = check(result, "output change")
    assert found.state == "fail"
    assert "output change" in failures(result)
    assert found.remedy.startswith("lower the rate of step one from 3 to about ")
    rate = float(found.remedy.split("about ")[1].split(",")[0])
    lower = preflight(model, batch, cross_entropy, adamw(model, rate))
    assert check(lower, "output change").state == "ok"


def test_the_rate_of_step_one_is_that_of_the_warm_up_or_of_the_scheduler() -> None:
    model, batch = Decoder(), next_tokens()
    warmed = preflight(model, batch, cross_entropy, adamw(model, 3.0), warmup=3000)
    assert warmed.numbers["rate"] == pytest.approx(1e-3)
    assert warmed.ok, str(warmed)
    plain = preflight(model, batch, cross_entropy, adamw(model, 1e-3))
    for name in ("loss_after", "moved"):
        assert warmed.numbers[name] == plain.numbers[name]
    scheduled = adamw(model, 3.0)
    torch.optim.lr_scheduler.LambdaLR(scheduled, lambda step: (step + 1) / 3000)
    result = preflight(model, batch, cross_entropy, scheduled)
    assert result.numbers["rate"] == pytest.approx(1e-3)
    assert result.numbers["loss_after"] == pytest.approx(plain.numbers["loss_after"])


def test_a_schedule_that_begins_at_zero_is_asked_for_its_warm_up() -> None:
    model, batch = Decoder(), next_tokens()
    optimizer = adamw(model, 3.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 3000)
    asked = preflight(model, batch, cross_entropy, optimizer)
    why = "the schedule begins at a rate of 0: say warmup=, the number of updates of its warm-up"
    assert f"updates: not checked, since {why}" in str(asked)
    assert check(asked, "output change").measured == why
    answered = preflight(model, batch, cross_entropy, optimizer, warmup=3000)
    assert answered.numbers["rate"] == pytest.approx(1e-3)
    assert answered.ok


@pytest.mark.parametrize(("name", "value"), [("warmup", -1), ("warmup", 2.5), ("classes", 1), ("classes", True)])
def test_an_argument_that_cannot_serve_is_refused(name: str, value: Any) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(UsageError, match=f"{name} = {value!r} must be the number of"):
        preflight(Decoder(), next_tokens(), cross_entropy, **given)


def test_weights_drawn_thirty_times_as_wide_cost_more_than_a_guess() -> None:
    model, batch = Decoder(std=0.6), next_tokens()
    result = preflight(model, batch, cross_entropy)
    found = check(result, "loss at start")
    expected = cross_entropy(model.double(), batch).item() - math.log(VOCABULARY)
    assert found.value == pytest.approx(expected, rel=1e-4)
    assert expected > 3
    assert failures(result) == ["loss at start"]
    assert f"where a uniform guess among {VOCABULARY} classes costs {math.log(VOCABULARY):.4g}" in found.measured
    usual = preflight(Decoder(), batch, cross_entropy)
    assert abs(check(usual, "loss at start").value) < 0.1
    assert usual.ok


def by_hand(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0])
    return -(logits - logits.logsumexp(-1, keepdim=True)).gather(-1, batch[1][..., None]).mean()


def test_a_cross_entropy_by_hand_is_judged_once_its_classes_are_named() -> None:
    batch = next_tokens()
    unknown = check(preflight(Decoder(std=0.6), batch, by_hand), "loss at start")
    assert unknown.state == "not checked"
    assert "give classes=" in unknown.measured
    told = check(preflight(Decoder(std=0.6), batch, by_hand, classes=VOCABULARY), "loss at start")
    known = check(preflight(Decoder(std=0.6), batch, cross_entropy), "loss at start")
    assert told.state == "fail"
    assert told.value == pytest.approx(known.value, rel=1e-5)


def test_labels_that_are_ignored_do_not_count() -> None:
    ids, labels = next_tokens()
    labels = labels.clone()
    labels[:, ::2] = -100
    model = Decoder(std=0.6).double()
    found = check(preflight(model, (ids, labels), cross_entropy), "loss at start")
    assert found.value == pytest.approx(cross_entropy(model, (ids, labels)).item() - math.log(VOCABULARY), rel=1e-9)


@pytest.mark.parametrize("rate", rest_slow([3.0, 0.5, 1e-3], [3.0]))
def test_a_loss_that_sums_over_predictions_is_judged_as_one_that_averages(rate: float) -> None:
    def summed(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")

    model, batch = Decoder().double(), next_tokens()
    optimizers = [torch.optim.Adam(model.parameters(), lr=rate, eps=1e-30) for _ in range(2)]  # which no scale changes
    mean, total = (
        {one.bound: one for one in preflight(model, batch, loss, optimizer).findings if one.bound == "loss rises"}
        for loss, optimizer in zip((cross_entropy, summed), optimizers, strict=True)
    )
    assert mean.keys() == total.keys()
    for name, one in mean.items():
        assert total[name].severity == one.severity
        assert total[name].value == pytest.approx(one.value, rel=1e-6)


def test_a_loss_of_another_unit_is_judged_by_its_size() -> None:
    """An error of 10,000 that rises by 1 is not one that explodes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x, y = torch.randn(6, 4), torch.full((6, 1), 100.0)

    def squared(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    away = torch.optim.SGD(model.parameters(), lr=1e-6, maximize=True)
    slow = preflight(model, (x, y), squared, away)
    rise = slow.numbers["loss_after"] - slow.numbers["loss_before"]
    assert rise > 0.05
    (found,) = [one for one in slow.findings if one.bound == "loss rises"]
    assert found.severity == "warn"
    assert found.value == pytest.approx(rise / slow.numbers["loss_before"])
    fast = preflight(model, (x, y), squared, torch.optim.SGD(model.parameters(), lr=1.0))
    assert "loss rises" in failures(fast)
