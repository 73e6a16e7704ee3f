"""``watch`` for a loop with an Accelerator: read between backward and clipping, once an update."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from subjects import LR, batch, model, norm, token_loss
from torch import nn

import stabilitylab as sl
from stabilitylab.errors import UsageError
from stabilitylab.integrations import before_clipping as seam
from stabilitylab.integrations.accelerate import watch

CLIP = 1e-3


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Accelerate keeps its state in the process; here each test has its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def scaled(accelerator: Accelerator) -> Accelerator:
    """As under fp16 on a GPU, with a scaler for the CPU."""
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"
    return accelerator


def loop(
    subject: nn.Module, out: Path | None, *, clip: str = "norm", fp16: bool = False, fail_at: int = -1, **options: Any
) -> nn.Module:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if fp16:
        accelerator = scaled(accelerator)
    prepared, optimizer = accelerator.prepare(subject, torch.optim.SGD(subject.parameters(), lr=LR))

    def train() -> None:
        for number in range(6):
            with accelerator.accumulate(prepared):
                content: Any = batch(range(2 * number, 2 * number + 2))
                accelerator.backward(prepared(**content).loss)
                if number == fail_at:
                    raise RuntimeError("the loop broke")
                if accelerator.sync_gradients and clip == "norm":
                    accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
                if accelerator.sync_gradients and clip == "value":
                    accelerator.clip_grad_value_(prepared.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()

    if out is None:
        train()
    else:
        with watch(prepared, optimizer, out=out, every=1, **options):
            train()
    return subject


def first_update() -> tuple[float, float]:
    """(loss, gradient norm) of the first four sentences in two batches, each batch's loss the mean over its tokens."""
    subject, losses = model().train(), []
    for numbers in (range(2), range(2, 4)):
        total, _ = token_loss(subject, numbers)
        losses.append(total / int((batch(numbers)["labels"][:, 1:] != -100).sum()))
    loss = torch.stack(losses).mean()
    return loss.item(), norm(torch.autograd.grad(loss, list(subject.parameters())))


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("clip", ["norm", "value", "no"])
def test_gradients_are_raw_unscaled_and_of_the_whole_update(tmp_path: Path, clip: str, fp16: bool) -> None:
    loop(model(), tmp_path / "run", clip=clip, fp16=fp16)
    run, (loss, total) = sl.Run.open(tmp_path / "run"), first_update()
    assert run.status.state == "finished"
    assert list(run.metrics["step"]) == [0, 1, 2]
    assert run.metrics["loss"][0] == pytest.approx(loss, rel=1e-6)
    assert run.metrics["grad_norm_total"][0] == pytest.approx(total, rel=1e-6)
    assert total > 100 * CLIP


@pytest.mark.parametrize("fp16", [False, True])
def test_training_does_not_notice(tmp_path: Path, fp16: bool) -> None:
    plain = loop(model(dropout=0.1), None, fp16=fp16)
    watched = loop(model(dropout=0.1), tmp_path / "run", fp16=fp16, probes="all", reference=batch([20]))
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not seam._OPEN


def test_an_update_that_the_scaler_skips_has_its_row(tmp_path: Path) -> None:
    subject = model()
    with torch.no_grad():
        subject.transformer.ln_f.weight[0] = torch.inf
    loop(subject, tmp_path / "run", clip="no", fp16=True)
    metrics = sl.Run.open(tmp_path / "run").metrics
    assert list(metrics["step"]) == [0, 1, 2]
    assert not np.isfinite(metrics["grad_norm_total"]).any()


def test_an_error_in_the_loop_keeps_the_rows_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the loop broke"):
        loop(model(), tmp_path / "run", fail_at=4)
    run = sl.Run.open(tmp_path / "run")
    assert (run.status.state, run.status.reason) == ("failed", "RuntimeError: the loop broke")
    assert list(run.metrics["step"]) == [0, 1]


def test_another_accelerator_is_not_listened_to(tmp_path: Path) -> None:
    accelerator, subject, other = Accelerator(cpu=True), model(), model(seed=8)
    prepared, optimizer = accelerator.prepare(subject, torch.optim.SGD(subject.parameters(), lr=LR))
    stranger = Accelerator(cpu=True)
    theirs, their_optimizer = stranger.prepare(other, torch.optim.SGD(other.parameters(), lr=LR))
    content: Any = batch(range(2))
    with watch(prepared, optimizer, out=tmp_path / "run", every=1):
        for one, its, steps in ((stranger, theirs, their_optimizer), (accelerator, prepared, optimizer)):
            one.backward(its(**content).loss)
            one.clip_grad_norm_(its.parameters(), CLIP)
            steps.step()
            steps.zero_grad()
    metrics = sl.Run.open(tmp_path / "run").metrics
    assert list(metrics["step"]) == [0]
    with torch.no_grad():
        assert metrics["loss"][0] == pytest.approx(model()(**content).loss.item(), rel=1e-6)


def test_a_schedule_that_was_made_meanwhile_survives_the_end(tmp_path: Path) -> None:
    accelerator, subject = Accelerator(cpu=True), model()
    prepared, optimizer = accelerator.prepare(subject, torch.optim.SGD(subject.parameters(), lr=LR))
    content: Any = batch(range(2))
    with watch(prepared, optimizer, out=tmp_path / "run", every=1):
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    before = [p.clone() for p in subject.parameters()]
    accelerator.backward(prepared(**content).loss)
    optimizer.step()
    schedule.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, subject.parameters(), strict=True))
    assert len(sl.Run.open(tmp_path / "run").metrics) == 0


def test_an_optimizer_that_was_not_prepared_is_refused(tmp_path: Path) -> None:
    subject = model()
    with (
        pytest.raises(UsageError, match=r"accelerator\.prepare"),
        watch(subject, torch.optim.SGD(subject.parameters()), out=tmp_path / "run"),
    ):
        pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("when", ["after clipping", "before clipping"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_update_has_its_row_after_one_that_the_loop_left_out(tmp_path: Path, when: str, accumulate: int) -> None:
    """An update that is left out after clipping has a row of its own; one that is left out before has none, and its
    loss goes with its gradients."""
    accelerator, subject, wanted = Accelerator(cpu=True), model(), []
    prepared, optimizer = accelerator.prepare(subject, torch.optim.SGD(subject.parameters(), lr=LR))
    with watch(prepared, optimizer, out=tmp_path / "run", every=1):
        for t in range(5):
            losses = []
            for part in range(accumulate):
                content: Any = batch(range(2 * (accumulate * t + part), 2 * (accumulate * t + part) + 2))
                losses.append(prepared(**content).loss)
                accelerator.backward(losses[-1])
            row = (
                sum(loss.item() for loss in losses),
                norm([p.grad for p in subject.parameters() if p.grad is not None]),
            )
            if t != 2 or when == "after clipping":
                wanted.append(row)
                accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
            if t != 2:
                optimizer.step()
            optimizer.zero_grad()
    metrics = sl.Run.open(tmp_path / "run").metrics
    assert list(metrics["step"]) == list(range(len(wanted)))
    assert list(metrics["loss"]) == pytest.approx([loss for loss, _ in wanted], rel=1e-6)
    assert list(metrics["grad_norm_total"]) == pytest.approx([total for _, total in wanted], rel=1e-9)


def test_a_backward_of_another_model_between_clipping_and_the_step_begins_no_update(tmp_path: Path) -> None:
    accelerator, subject, other = Accelerator(cpu=True), model(), model(seed=8)
    prepared, optimizer = accelerator.prepare(subject, torch.optim.SGD(subject.parameters(), lr=LR))
    beside = accelerator.prepare(other)
    with watch(prepared, optimizer, out=tmp_path / "run", every=1):
        for t in range(3):
            content: Any = batch(range(2 * t, 2 * t + 2))
            accelerator.backward(prepared(**content).loss)
            accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
            accelerator.backward(beside(**content).loss)
            optimizer.step()
            optimizer.zero_grad()
    assert list(sl.Run.open(tmp_path / "run").metrics["step"]) == [0, 1, 2]


@pytest.mark.parametrize("clip", [False, True])
def test_an_update_that_evaluates_its_closure_several_times_has_one_row(tmp_path: Path, clip: bool) -> None:
    """L-BFGS: the row is of the first evaluation, at theta_t."""

    def train(watched: bool) -> tuple[nn.Module, list[tuple[float, float, float]], int]:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator, subject, wanted, count = Accelerator(cpu=True), model(), [], 0
        lbfgs = torch.optim.LBFGS(subject.parameters(), lr=0.1, max_iter=3, tolerance_grad=0, tolerance_change=0)
        prepared, optimizer = accelerator.prepare(subject, lbfgs)
        inputs: list[torch.Tensor] = []
        handle = subject.transformer.h[0].ln_1.register_forward_pre_hook(
            lambda m, args: inputs.append(args[0].detach())
        )
        out = tmp_path / "run"
        options = {"every": 1, "probes": "standard,ln_input", "mask": None}
        with watch(prepared, optimizer, out=out, **options) if watched else nullcontext():
            for t in range(3):
                content: Any = batch(range(2 * t, 2 * t + 2))
                first = True

                def closure(content: Any = content) -> torch.Tensor:
                    nonlocal first, count
                    optimizer.zero_grad()
                    loss = prepared(**content).loss
                    accelerator.backward(loss)
                    if first:
                        total = norm([p.grad for p in subject.parameters() if p.grad is not None])
                        wanted.append((loss.item(), total, inputs[-1].norm(dim=-1).mean().item()))
                    if clip:
                        accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
                    first, count = False, count + 1
                    return loss

                optimizer.step(closure)
        handle.remove()
        return subject, wanted, count

    (plain, _, _), (subject, wanted, count) = train(False), train(True)
    assert count == 9
    run = sl.Run.open(tmp_path / "run")
    assert list(run.metrics["step"]) == [0, 1, 2]
    assert "loop_warnings" not in run.manifest
    inputs = run.frame("ln_input").query("site == 'transformer.h.0.ln_1'")["value"]
    found = zip(run.metrics["loss"], run.metrics["grad_norm_total"], inputs, strict=True)
    assert [number for row in found for number in row] == pytest.approx([n for row in wanted for n in row], rel=1e-6)
    for one, other in zip(plain.parameters(), subject.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_model_that_is_saved_meanwhile_has_no_hook_of_ours(tmp_path: Path) -> None:
    accelerator, subject = Accelerator(cpu=True), model()
    prepared, optimizer = accelerator.prepare(subject, torch.optim.SGD(subject.parameters(), lr=LR))
    content: Any = batch(range(2))
    with watch(prepared, optimizer, out=tmp_path / "run", every=1, record=sl.Recorder(lambda m, b: m(**b).loss)):
        for number in range(2):
            accelerator.backward(prepared(**content).loss)
            optimizer.step()
            optimizer.zero_grad()
            torch.save(accelerator.unwrap_model(prepared), tmp_path / f"{number}.pt")
    loaded = torch.load(tmp_path / "1.pt", weights_only=False)
    assert b"stabilitylab." not in (tmp_path / "1.pt").read_bytes()
    with torch.no_grad():
        assert torch.equal(loaded(**content).loss, subject(**content).loss)


@pytest.mark.parametrize("fp16", [False, True])
def test_a_plain_watch_takes_the_optimizer_that_was_prepared(tmp_path: Path, fp16: bool) -> None:
    accelerator = scaled(Accelerator(cpu=True)) if fp16 else Accelerator(cpu=True)
    subject, optimizer = accelerator.prepare(linear := nn.Linear(3, 2), torch.optim.SGD(linear.parameters(), lr=LR))
    out = tmp_path / "run"
    with sl.watch(
        subject, out=out, probes="update_ratio", every=1, optimizer=optimizer, scaler=accelerator.scaler
    ) as w:
        for _ in range(2):
            accelerator.backward(subject(torch.ones(4, 3)).float().square().mean())
            accelerator.unscale_gradients(optimizer)
            w.step()
            before, gradient = linear.weight.detach().clone(), linear.weight.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.allclose(linear.weight, before - LR * gradient)
    found = sl.Run.open(out).frame("update_ratio")
    assert found.groupby("step")["rms"].max().gt(0).tolist() == [True, True]
