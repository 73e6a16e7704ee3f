"""Loops that run the model inside transforms of torch.func: training is that of an unwatched loop, and the loss of
numbers is said once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from probe_toys import ListSink
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from stabilitylab.probes import Watcher

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")  # which torch's own rules of jvp call
UPDATES = 3
Backward = Callable[[nn.Module, Tensor], Tensor]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o((self.q(x) @ self.k(x).transpose(-1, -2)).softmax(-1) @ self.v(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.linear = nn.LayerNorm(6), Attention(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + torch.tanh(self.linear(x))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def given(t: int) -> Tensor:
    return torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(t), dtype=torch.float64)


def loss_at(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(model, parameters, (x,)).square().mean()


def with_grad(model: nn.Module, x: Tensor) -> Tensor:
    at = {name: p.detach() for name, p in model.named_parameters()}
    found = grad(lambda parameters: loss_at(model, parameters, x))(at)
    for name, p in model.named_parameters():
        p.grad = found[name]
    return loss_at(model, at, x).detach()


def with_gradients_of_samples(model: nn.Module, x: Tensor) -> Tensor:
    at = {name: p.detach() for name, p in model.named_parameters()}
    found = vmap(grad(lambda parameters, one: loss_at(model, parameters, one[None])), in_dims=(None, 0))(at, x)
    for name, p in model.named_parameters():
        p.grad = found[name].mean(0)
    return torch.zeros(())


def with_a_vmapped_forward(model: nn.Module, x: Tensor) -> Tensor:
    own: dict[str, Tensor] = dict(model.named_parameters())
    loss = vmap(lambda one: loss_at(model, own, one[None]))(x).mean()
    loss.backward()
    return loss.detach()


def with_a_penalty_by_jvp(model: nn.Module, x: Tensor) -> Tensor:
    own: dict[str, Tensor] = dict(model.named_parameters())
    along: Tensor = jvp(lambda at: functional_call(model, own, (at,)), (x,), (torch.ones_like(x),))[1]
    loss = model(x).square().mean() + along.square().mean()
    loss.backward()
    return loss.detach()


def loop(backward: Backward, watched: bool, probes: str) -> tuple[nn.Module, ListSink, Any, list[float]]:
    torch.manual_seed(0)
    model, sink, norms = Small().double(), ListSink(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"reference": "first batch", "every": 1, "optimizer": optimizer, "probes": probes}
    watcher = Watcher(model, sink, **options) if watched else None
    for t in range(UPDATES):
        optimizer.zero_grad()
        loss = backward(model, given(t))
        norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()))
        if watcher is not None:
            watcher.step(loss=loss)
        optimizer.step()
    if watcher is not None:
        watcher.finish()
        watcher.close()
    return model, sink, watcher, norms


@pytest.mark.parametrize(
    "backward", [with_grad, with_gradients_of_samples, with_a_vmapped_forward, with_a_penalty_by_jvp]
)
def test_a_loop_with_torch_func_trains_as_unwatched_and_its_losses_are_said(backward: Backward) -> None:
    probes = "default,residual_norm,fingerprint,attention_heads"
    model, sink, watcher, norms = loop(backward, True, probes)
    alone, _, _, _ = loop(backward, False, probes)
    for p, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, wanted)
    for t, norm in enumerate(norms):
        assert sink.row(t)[0]["grad_norm_total"] == pytest.approx(norm, rel=1e-12)
    assert not watcher.ended
    told = [text for text in watcher.loop_warnings if "torch.func (grad, vmap, jvp) are not recorded" in text]
    assert len(told) == 1
    assert not any("model.train()" in text for text in watcher.loop_warnings)


def test_the_forward_outside_of_the_transform_is_recorded_alone() -> None:
    _, sink, _, _ = loop(with_a_penalty_by_jvp, True, "ln_input")
    _, plain, watcher, _ = loop(lambda model, x: _plain(model, x), True, "ln_input")
    assert not watcher.loop_warnings
    wanted = float(given(0).norm(dim=-1).mean())
    assert sink.column(0, "ln_input", "value")["layers.0.norm"] == pytest.approx(wanted, rel=1e-12)
    assert sink.column(0, "ln_input", "value") == plain.column(0, "ln_input", "value")


def _plain(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def test_a_transform_in_a_block_of_off_is_not_told() -> None:
    torch.manual_seed(0)
    model = Small().double()
    with Watcher(model, ListSink(), probes="ln_input", reference=None) as watcher:
        with watcher.off():
            with_grad(model, given(1))
        model.zero_grad()
        watcher.step(loss=_plain(model, given(0)))
    assert not watcher.loop_warnings
