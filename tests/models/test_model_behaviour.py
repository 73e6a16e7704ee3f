"""Padding, causality, dropout, precision, training, and that a pass never waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rest_slow import SOME_ARCHS, rest_slow
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stabilitylab.models import ARCHS, Transformer

EVERY = sorted(ARCHS)
STACKS = ["encoder-decoder", "encoder", "decoder"]
CASES = [(arch, stack) for arch in EVERY for stack in STACKS if stack in ARCHS[arch].defined_for]
SOME = [(arch, stack) for arch, stack in CASES if arch in SOME_ARCHS]
PAIRS = [(arch, stack) for arch, stack in CASES if stack == "encoder-decoder"]
NO_NORM = ("rezero", "rfixup", "tfixup")
SHORT, LONG = {torch.bfloat16}, {torch.float32}
SHORT_AND_LONG = SHORT | LONG


def single(pairs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"tokens": pairs["target"], "mask": pairs["target_mask"]}


def inputs_for(stack: str, pairs: dict[str, Tensor]) -> dict[str, Tensor]:
    return pairs if stack == "encoder-decoder" else single(pairs)


def with_other_padding(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    changed = dict(inputs)
    for tokens, mask in (("source", "source_mask"), ("target", "target_mask"), ("tokens", "mask")):
        if tokens in inputs:
            changed[tokens] = torch.where(inputs[mask], inputs[tokens], (inputs[tokens] + 5) % 37)
    return changed


def with_more_padding(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: nn.functional.pad(tensor, (0, 3), value=False if tensor.dtype is torch.bool else 7)
        for name, tensor in inputs.items()
    }


def real(inputs: dict[str, Tensor]) -> Tensor:
    return inputs["target_mask"] if "target_mask" in inputs else inputs["mask"]


@pytest.mark.parametrize(("arch", "stack"), rest_slow(CASES, PAIRS))
def test_padding_changes_nothing_real(arch, stack, small, randomise, pairs, loss_of) -> None:
    model = randomise(small(arch, stack=stack, tie="none").double())
    inputs = inputs_for(stack, pairs)

    def outcome(batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(**batch)[real(batch)]
        labels = torch.arange(len(logits)) % 37
        model.zero_grad()
        nn.functional.cross_entropy(logits, labels).backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return logits.detach(), found

    logits, gradients = outcome(inputs)
    for name, batch in (("other", with_other_padding(inputs)), ("more", with_more_padding(inputs))):
        logits_now, gradients_now = outcome(batch)
        torch.testing.assert_close(logits_now, logits, rtol=0, atol=1e-12, msg=name)
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradients_now[parameter], gradient, rtol=1e-9, atol=1e-13, msg=parameter)


@pytest.mark.parametrize(("arch", "stack"), rest_slow(CASES, PAIRS))
def test_padding_receives_a_gradient_of_exactly_zero(arch, stack, small, randomise, pairs, loss_of) -> None:
    model = randomise(small(arch, stack=stack))
    inputs = inputs_for(stack, pairs)
    streams: list[tuple[str, Tensor]] = []
    for residual in model.residuals():
        residual.register_forward_pre_hook(lambda module, args: streams.append((module.place.stack, first(args[0]))))
    loss = loss_of(model, inputs)
    for (name, _), gradient in zip(streams, torch.autograd.grad(loss, [stream for _, stream in streams]), strict=True):
        mask = inputs["source_mask"] if stack == "encoder-decoder" and name == "encoder" else real(inputs)
        assert gradient[~mask].count_nonzero() == 0
        assert (gradient[mask].abs().sum(-1) > 0).all()


def test_a_sentence_without_any_real_token_stays_finite(small, pairs, loss_of) -> None:
    model = small("postln")
    pairs["source_mask"][2], pairs["target_mask"][2] = False, False
    loss = loss_of(model, pairs)
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_no_mask_means_all_real(small, pairs) -> None:
    model = small("preln").double()
    full = {name: torch.ones_like(mask) for name, mask in pairs.items() if name.endswith("mask")}
    bare = {name: pairs[name] for name in ("source", "target")}
    torch.testing.assert_close(model(**bare), model(**bare, **full), rtol=0, atol=1e-12)


@pytest.mark.parametrize("stack", ["encoder-decoder", "decoder"])
def test_a_decoder_sees_no_later_token(stack, small, randomise, pairs) -> None:
    model = randomise(small("branchnorm", stack=stack, alpha=1.0))
    inputs = inputs_for(stack, pairs)
    name = "target" if stack == "encoder-decoder" else "tokens"
    before = model(**inputs)
    changed = inputs[name].clone()
    changed[:, 4] = (changed[:, 4] + 1) % 37
    after = model(**{**inputs, name: changed})
    assert torch.equal(after[:, :4], before[:, :4])
    assert (after[:, 4:] != before[:, 4:]).any(-1).all()


def test_an_encoder_sees_every_token_and_a_decoder_every_source_token(small, randomise, pairs) -> None:
    encoder = randomise(small("postln", stack="encoder"))
    tokens = pairs["source"]
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 37
    assert (encoder(tokens=tokens) != encoder(tokens=changed)).any(-1).all()
    both = randomise(small("postln"))
    bare = {"source": tokens, "target": pairs["target"]}
    assert (both(**bare) != both(**{**bare, "source": changed})).any(-1).all()


def first(stream: Tensor | tuple[Tensor, ...]) -> Tensor:
    """What sub-layers see, of a stream that may be a tuple (ResiDual)."""
    return stream[0] if isinstance(stream, tuple) else stream


class NoHostRead(TorchDispatchMode):
    """Fails at whatever makes the host wait for a device value."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        assert name not in self.FORBIDDEN, f"{name} reads the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("arch", EVERY)
def test_a_pass_never_reads_the_device(arch, small, pairs) -> None:
    model = small(arch, dropout=0.1, attention_dropout=0.1, activation_dropout=0.1)
    with NoHostRead():
        model(**pairs).sum().backward()
        if model.schedule is not None:
            model.set_row(3)
            model.schedule.get()


def test_the_device_read_detector_can_fail(small, pairs) -> None:
    with NoHostRead(), pytest.raises(AssertionError, match="reads the device"):
        small("postln")(**pairs).sum().item()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arch", EVERY)
def test_a_pass_is_one_graph(arch, small, pairs) -> None:
    torch._dynamo.reset()  # it counts compilations of the layers that all architectures share
    model = small(arch, depth=2, qk_norm=not arch.startswith("hybridnorm"))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**pairs), model(**pairs))
    model.set_row(30)
    torch.testing.assert_close(compiled(**pairs), model(**pairs))


@pytest.mark.parametrize("arch", EVERY)
def test_under_bf16_autocast_the_residual_stream_stays_fp32(arch, small, pairs, loss_of) -> None:
    model = small(arch)
    kinds: set[tuple[str, torch.dtype]] = set()
    for residual in model.residuals():
        residual.register_forward_hook(lambda _m, _i, output: kinds.add(("stream", first(output).dtype)))
        for module in residual.modules():
            if "Norm" in type(module).__name__ and not list(module.children()):
                module.register_forward_hook(lambda _m, _i, output: kinds.add(("norm", output.dtype)))
        residual.branch.register_forward_hook(lambda _m, _i, output: kinds.add(("branch", output.dtype)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.hidden(**pairs)
        loss = loss_of(model, pairs)
    loss.backward()
    branches = {"normformer": SHORT_AND_LONG, "sandwich": LONG, "periln": LONG}.get(arch, SHORT)  # a norm ends them
    expected = {("stream", torch.float32), *(("branch", kind) for kind in branches)}
    assert kinds == (expected if arch in NO_NORM else expected | {("norm", torch.float32)})
    assert hidden.dtype is torch.float32
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
    assert (hidden - model.hidden(**pairs)).abs().mean() < 0.05


def test_dropout_acts_in_training_alone(small, pairs) -> None:
    plain = small("postln")
    for key in ("dropout", "attention_dropout", "activation_dropout"):
        model = small("postln", **{key: 0.5})
        assert torch.equal(model.eval()(**pairs), plain(**pairs))
        torch.manual_seed(1)
        first = model.train()(**pairs)
        torch.manual_seed(1)
        assert torch.equal(model(**pairs), first)
        assert not torch.equal(model(**pairs), first)
        assert (first - plain(**pairs)).abs().max() > 1e-3


def train(model: Transformer, pairs: dict[str, Tensor], loss_of, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    losses = []
    for step in range(steps):
        model.set_row(step)
        loss = loss_of(model, pairs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("arch", "stack"), rest_slow(CASES, [case for case in SOME if case in PAIRS]))
def test_twelve_layers_train(arch, stack, small, pairs, loss_of) -> None:
    inputs = inputs_for(stack, pairs)
    model = small(arch, stack=stack, depth=12, d_model=32, d_ffn=64)
    if model.calibrated is not None:
        model.calibrated.set(False)
        model.calibrate(**inputs)
    losses = train(model, inputs, loss_of, steps=12)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert losses[-1] < losses[0] - 0.2
    model.finalize()
    assert model.eval()(**inputs).isfinite().all()
