from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from stabilitylab.config import TrainConfig
from stabilitylab.train.recipe import accuracy, adamw, learning_rate, optimizer_of, own_rates, token_losses


def test_inverse_square_root_with_warmup() -> None:
    train = TrainConfig(lr=5e-4, warmup=4000, warmup_init_lr=1e-7)
    assert learning_rate(train, 0) == 1e-7
    assert learning_rate(train, 2000) == pytest.approx((5e-4 + 1e-7) / 2)
    assert learning_rate(train, 4000) == 5e-4
    assert learning_rate(train, 16_000) == pytest.approx(2.5e-4)


def test_no_warmup_starts_at_the_full_rate() -> None:
    train = TrainConfig(lr=5e-4, warmup=0)
    assert [learning_rate(train, t) for t in (0, 1, 4000)] == [5e-4] * 3
    assert learning_rate(train, 16_000) == pytest.approx(2.5e-4)


def test_linear_schedule_reaches_zero_after_the_last_update() -> None:
    train = TrainConfig(lr=1e-3, warmup=10, warmup_init_lr=0.0, steps=110, schedule="linear")
    assert [learning_rate(train, update) for update in (0, 5, 10, 60, 109, 110)] == pytest.approx(
        [0, 5e-4, 1e-3, 5e-4, 1e-5, 0]
    )
    assert learning_rate(TrainConfig(warmup=4, steps=4, schedule="linear"), 4) == 0


def test_constant_schedule() -> None:
    train = TrainConfig(lr=1e-3, warmup=10, schedule="constant")
    assert learning_rate(train, 10**6) == 1e-3
    assert learning_rate(train, 5) < 1e-3


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_match_their_definition_in_float64(smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=generator)
    labels = torch.randint(5, (2, 3), generator=generator)
    weight = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    loss, nll = token_losses(logits, labels, weight, smoothing)
    want_loss = want_nll = 0.0
    for b, t in [(0, 0), (0, 1), (1, 0)]:
        row = logits[b, t].double()
        log_p = (row - math.log(row.exp().sum().item())).tolist()
        label = int(labels[b, t])
        target = [smoothing / 5 + (1 - smoothing) * (i == label) for i in range(5)]
        want_loss -= sum(q * p for q, p in zip(target, log_p, strict=True))
        want_nll -= log_p[label]
    assert loss.item() == pytest.approx(want_loss, rel=1e-6)
    assert nll.item() == pytest.approx(want_nll, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_of_both_losses_is_that_of_their_definition(smoothing: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 3, 5, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(5, (2, 3), generator=generator)
    weight = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.5]])
    loss, nll = token_losses(logits, labels, weight, smoothing)
    (0.3 * loss + 0.7 * nll).backward()
    exact = logits.detach().double().requires_grad_()
    smoothed, plain = (
        F.cross_entropy(exact.flatten(0, 1), labels.flatten(), label_smoothing=s, reduction="none").view(2, 3)
        for s in (smoothing, 0.0)
    )
    ((0.3 * smoothed + 0.7 * plain) * weight).sum().backward()
    assert logits.grad is not None
    assert exact.grad is not None
    assert logits.grad.dtype is dtype
    assert (logits.grad[0, 2] == 0).all()  # padding
    rounding = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float64: 1e-12}[dtype]
    assert loss.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert torch.allclose(logits.grad.double(), exact.grad, rtol=rounding, atol=rounding * 0.1)


def test_accuracy_counts_weighted_tokens_only() -> None:
    logits = torch.eye(4).expand(2, 4, 4)
    labels = torch.tensor([[0, 1, 2, 0], [0, 0, 0, 3]])
    weight = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]])
    assert accuracy(logits, labels, weight).item() == pytest.approx(4 / 6)


def test_radam_is_its_formula_with_decoupled_decay() -> None:
    """Liu et al. 2020, Algorithm 2: plain momentum while the variance of the second moment is intractable."""
    train = TrainConfig(optimizer="radam", lr=1e-2, warmup=0, beta1=0.9, beta2=0.98, weight_decay=0.1)
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = optimizer_of(train, [weight])
    x, m, v, slopes = 1.0, 0.0, 0.0, [math.sin(t) for t in range(1, 13)]
    rectified = []
    for t, g in enumerate(slopes, start=1):
        weight.grad = torch.full((3,), g, dtype=torch.float64)
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g, 0.98 * v + 0.02 * g * g
        longest = 2 / (1 - 0.98) - 1
        rho = longest - 2 * t * 0.98**t / (1 - 0.98**t)
        step = m / (1 - 0.9**t)
        if rho > 5:
            r = math.sqrt((rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho))
            step *= r * math.sqrt(1 - 0.98**t) / (math.sqrt(v) + 1e-8)
            rectified.append(t)
        x -= 1e-2 * 0.1 * x + 1e-2 * step
        assert weight.tolist() == pytest.approx([x] * 3, rel=1e-9)
    assert 0 < len(rectified) < 12
    assert isinstance(optimizer_of(TrainConfig(), [weight]), torch.optim.AdamW)


def test_decay_is_decoupled_so_that_a_weight_without_gradient_barely_moves() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = adamw(TrainConfig(lr=1e-3, warmup=0, weight_decay=1e-4), [weight])
    weight.grad = torch.zeros(4)
    optimizer.step()
    assert torch.allclose(weight, torch.full((4,), 1 - 1e-7), rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ["adamw", "radam"])
@pytest.mark.parametrize("lie", ["host to device", "device to host"])
def test_where_the_rate_lies_is_not_the_checkpoints_matter(lie: str, name: str) -> None:
    """A run that goes on where updates are replayed: a rate that is a number would be the same for ever."""
    on_host, on_device = (
        optimizer_of(TrainConfig(optimizer=name), [torch.nn.Parameter(torch.ones(3))])  # type: ignore[arg-type]
        for _ in range(2)
    )
    rate = torch.tensor(0.5)
    on_device.param_groups[0] |= {"lr": rate, "capturable": True}
    on_host.param_groups[0]["lr"] = 0.25
    first, second = (on_host, on_device) if lie == "host to device" else (on_device, on_host)
    with own_rates(second):
        second.load_state_dict(first.state_dict())
    group = second.param_groups[0]
    if lie == "host to device":
        assert group["lr"] is rate
        assert (rate.item(), group["capturable"]) == (0.25, True)
    else:
        assert (type(group["lr"]), group["lr"], group["capturable"]) == (float, 0.5, False)
