"""Which kernels attention takes: each gives the same numbers, what was chosen is recorded, and a bad one is named."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rest_slow import rest_slow
from torch import Tensor

import stabilitylab as sl
from stabilitylab.config import parse_set, resolve
from stabilitylab.diagnose import diagnose
from stabilitylab.kernels import suspected
from stabilitylab.models.transformer import additive
from stabilitylab.probes.numerics import attention, enabled, numerics
from stabilitylab.store import Run, RunWriter
from stabilitylab.train import plan, start
from stabilitylab.train.environment import attention_kernels
from stabilitylab.train.loop import Trainer
from stabilitylab.train.run import Nobody

SETTINGS = "data.sentences=4 model.d_model=16 model.d_ffn=32 data.max_length=12 train.steps=3 probes.names=['none']"


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> list[Tensor]:
    """softmax(q k^T / sqrt(d) + mask) v in float64, and its gradients of the sum of squares."""
    q, k, v = (each.detach().double().cpu().requires_grad_() for each in (q, k, v))
    logits = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        logits = logits + mask.double().cpu()
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:]).tril() == 0, -torch.inf)
    found = logits.softmax(-1) @ v
    found.square().sum().backward()
    return [found.detach(), *(each.grad for each in (q, k, v) if each.grad is not None)]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [24, 63, 64])
@pytest.mark.parametrize("way", ["mask", "causal"])
@pytest.mark.parametrize("kernel", ["flash", "efficient", "math"])
def test_each_kernel_computes_attention_and_its_gradients(
    device: str, precision: torch.dtype, length: int, way: str, kernel: str
) -> None:
    """With the mask of the model; logits of about -100, at which a sum of exponentials is hard, among them."""
    cannot = {"cpu": kernel == "efficient", "cuda": kernel == "flash" and (way == "mask" or precision is torch.float32)}
    if cannot[device]:
        pytest.skip(f"no {kernel} attention with a {way} in {precision} on a {device}")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, length, 8).to(device, precision).requires_grad_() for _ in "qkv")
    with torch.no_grad():
        q[0, 0, :, 0], k[0, 0, :, 0] = 1.0, -100 * math.sqrt(8)
    real = torch.arange(length, device=device) < torch.tensor([[length], [length - 9]], device=device)
    mask = additive(real, q) if way == "mask" else None
    with attention([kernel]):
        try:
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=way == "causal")
        except RuntimeError as error:
            # Torch's own: where a processor has AMX, its flash kernel packs for it whatever ATEN_CPU_CAPABILITY says.
            if "ATEN_CPU_CAPABILITY" in os.environ and "only supported when avx512 is supported" in str(error):
                pytest.skip(f"torch's own {kernel} kernel cannot run: {error}")
            raise
        found.square().sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in (q, k, v))
    expected = by_hand(q, k, v, mask, way == "causal")
    assert q.grad is not None
    q.grad[..., 0], expected[1][..., 0] = 0, 0  # rounding times 280, the size of that feature of the keys
    scale = {torch.float32: 1e-4, torch.bfloat16: 4e-2}[precision]
    for ours, right in zip((found.detach(), q.grad, k.grad, v.grad), expected, strict=True):
        assert ours is not None
        assert (ours.double().cpu() - right).norm() <= scale * right.norm()


def test_the_choice_is_the_settings() -> None:
    def chosen(asked: str, device: str) -> tuple[str, ...] | None:
        return attention_kernels(resolve(parse_set([f"train.attention={asked}"]), depth=2).train, torch.device(device))

    assert chosen("auto", "cuda") == ("flash", "efficient", "math")  # not cuDNN's
    assert chosen("auto", "cpu") is chosen("torch", "cuda") is None
    assert chosen("math", "cpu") == chosen("math", "cuda") == ("math",)


def test_a_run_uses_it_in_every_pass_and_leaves_the_process_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under checkpointing a layer is computed anew in the backward pass."""
    seen: list[tuple[bool, bool, tuple[str, ...]]] = []
    product = F.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch._C._current_graph_task_id() >= 0, tuple(enabled())))
        return product(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    before = enabled()
    monkeypatch.setattr("stabilitylab.train.passes.attention_kernels", lambda *_: ("flash", "math"))
    settings = [*SETTINGS.split(), "train.activation_checkpointing=true"]
    prepared = plan(resolve(parse_set(settings), depth=2))
    seen.clear()
    result = start(prepared, tmp_path, "run", Nobody())
    assert enabled() == before
    assert {kernels for *_, kernels in seen} == {("flash", "math")}
    assert {(grad, backward) for grad, backward, _ in seen} == {(True, False), (True, True), (False, False)}
    assert Run.open(result.path).status.state == "finished"


@pytest.mark.parametrize("precision", rest_slow(["fp32", "bf16"], ["bf16"]))
def test_runs_by_each_kernel_are_alike(precision: str, tmp_path: Path) -> None:
    losses = {}
    for kernel in ("torch", "math"):
        settings = [*SETTINGS.split(), f"train.attention={kernel}", f"train.precision={precision}"]
        prepared = plan(resolve(parse_set(settings), depth=2))
        writer = RunWriter.create(tmp_path / kernel, {"config": {}})
        trainer = Trainer(prepared.config, prepared.dataset, writer, prepared.device)
        losses[kernel] = [trainer.update()["loss"] for _ in range(1)]
        trainer.watcher.close()
    assert losses["torch"] == pytest.approx(losses["math"], rel={"fp32": 1e-6, "bf16": 1e-2}[precision])


def test_how_numbers_were_computed_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings = [*SETTINGS.split(), "train.attention=math"]
    result = start(plan(resolve(parse_set(settings), depth=2)), tmp_path, "run", Nobody())
    found = Run.open(result.path).manifest["numerics"]
    assert found == {
        "attention": ["math"],
        "capability": None,
        "cudnn": None,
        "float32_matmul": "highest",
        "cudnn_tf32": True,
        "cudnn_benchmark": False,
        "cublas_workspace": ":4096:8",
        "deterministic": False,
    }
    model = torch.nn.Linear(2, 2)
    with sl.watch(model, out=tmp_path / "watched", probes="grad_norm") as w:
        model(torch.ones(1, 2)).sum().backward()
        w.step()
    assert Run.open(tmp_path / "watched").manifest["numerics"] == numerics(torch.device("cpu"))


H200 = {"attention": ["flash", "efficient", "cudnn", "math"], "capability": [9, 0]}


@pytest.mark.parametrize(
    ("numerics", "types", "is_one"),
    [
        (H200, ["bf16"], True),
        (H200, None, True),
        (H200, ["fp32"], False),
        (H200 | {"attention": ["flash", "efficient", "math"]}, ["bf16"], False),
        (H200 | {"capability": [8, 0]}, ["bf16"], False),
        (H200 | {"capability": None}, ["bf16"], False),
        ({"attention": "cudnn", "capability": "9"}, ["bf16"], False),  # of a run.json of somebody's making
        (None, ["bf16"], False),
    ],
)
def test_when_a_kernel_is_suspected(numerics: Any, types: Any, is_one: bool) -> None:
    found = suspected(numerics, types, "do this")
    assert ("pytorch#196678): do this" in found) is is_one is bool(found)
    assert found.startswith("if attention computed in bfloat16") is (types is None)


def broken_run(folder: Path, computed: Any, loss: tuple[float, ...], grad: tuple[float, ...], **config: Any) -> Run:
    writer = RunWriter.create(folder, {"config": config, "numerics": computed})
    writer.open([])
    for step, (one, other) in enumerate(zip(loss, grad, strict=True)):
        writer.append(step, {"loss": one, "grad_norm_total": other}, {})
    writer.set_status("failed", len(loss), "it broke")
    writer.close()
    return Run.open(folder)


def test_diagnose_names_the_kernel(tmp_path: Path) -> None:
    nan, trained = float("nan"), {"model": {}, "train": {"precision": "bf16"}}
    late = diagnose(broken_run(tmp_path / "late", H200, (1.0, 1.0, nan), (1.0, nan, nan), **trained))
    assert "cuDNN's attention may have run" in late.paragraph
    assert "leave train.attention at auto and see" in late.paragraph
    unseen = diagnose(broken_run(tmp_path / "unseen", H200, (1.0, nan), (1.0, nan)))  # a loop of somebody's own
    assert "if attention computed in bfloat16 or float16, cuDNN's" in unseen.paragraph
    assert "enable_cudnn_sdp(False)" in unseen.paragraph
    first = diagnose(broken_run(tmp_path / "first", H200, (nan, nan), (nan, nan), **trained))
    assert "cuDNN" not in first.paragraph  # its loss was lost before any backward pass
    safe = broken_run(tmp_path / "safe", H200 | {"attention": ["flash", "math"]}, (1.0, nan), (nan, nan), **trained)
    assert "cuDNN" not in diagnose(safe).paragraph
    whole = diagnose(broken_run(tmp_path / "whole", H200, (1.0, 1.0), (1.0, 1.0), **trained))
    assert "cuDNN" not in json.dumps(whole.as_dict())


def test_preflight_names_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return grad * torch.nan

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    checked = sl.preflight(model, torch.ones(2, 4), lambda model, batch: Lost.apply(model(batch)).sum())
    assert "cuDNN" not in str(checked)
    monkeypatch.setattr("stabilitylab.check.measure.numerics", lambda device: H200)
    checked = sl.preflight(model, torch.ones(2, 4), lambda model, batch: Lost.apply(model(batch)).sum())
    assert not checked.ok
    assert "cuDNN's attention may have run" in str(checked)
