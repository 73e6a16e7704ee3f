"""The router's numbers against sums by hand, and where routers are found."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from probe_toys import ListSink
from torch import Tensor, nn

from stabilitylab.probes import Watcher, find_sites

E, D = 4, 6


class Experts(nn.Module):
    """Stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, D, D))

    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        return (torch.einsum("btd,edf->btef", x, self.up) * p[..., None]).sum(-2)


class Listed(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__(nn.Linear(D, D) for _ in range(E))

    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        return (torch.stack([expert(x) for expert in self], -2) * p[..., None]).sum(-2)


class TopRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(D, E, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, experts: nn.Module, router: nn.Module) -> None:
        super().__init__()
        self.norm, self.gate, self.experts = nn.LayerNorm(D), router, experts
        self.shared = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.experts(h, self.gate(h).softmax(-1)) + self.shared(h)


def model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    make = {
        "stacked": lambda: Block(Experts(), nn.Linear(D, E)),
        "listed": lambda: Block(Listed(), nn.Linear(D, E)),
        "router": lambda: Block(Experts(), TopRouter()),
    }[kind]
    return nn.Sequential(make(), make()).double()


PLACES = {"stacked": "gate", "listed": "gate", "router": "gate.proj"}


@pytest.mark.parametrize("kind", PLACES)
def test_routers_are_found_beside_their_experts(kind: str) -> None:
    found = find_sites(model(kind)).routers
    assert [site.name for site in found] == [f"{layer}.{PLACES[kind]}" for layer in (0, 1)]
    assert [site.layer for site in found] == [1, 2]


def test_a_dense_model_has_none() -> None:
    dense = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    assert find_sites(dense).routers == ()


@pytest.mark.parametrize("kind", PLACES)
def test_its_numbers_equal_sums_by_hand(kind: str) -> None:
    """Padding left out, of two micro-batches."""
    net, sink = model(kind), ListSink()
    inputs = [torch.randn(2, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
    masks = [torch.arange(5)[None] < torch.tensor([[3], [5]]), torch.arange(5)[None] < torch.tensor([[5], [2]])]
    seen: list[list[tuple[Tensor, Tensor]]] = [[], []]
    current = 0
    for number, block in enumerate(net):
        weight, bias = own(block)

        def note(
            _: nn.Module, __: object, y: Tensor, number: int = number, weight: Tensor = weight, bias: Tensor = bias
        ) -> None:
            seen[number].append(((y @ weight.T + bias).detach(), masks[current]))

        block.norm.register_forward_hook(note)
    with Watcher(net, sink, probes="router", every=1, mask=lambda: masks[current]) as watcher:
        for current, x in enumerate(inputs):  # noqa: B007
            net(x).square().mean().backward()
        watcher.step(loss=1.0)
    for number, calls in enumerate(seen):
        logits = [logit[mask] for logit, mask in calls]
        every = torch.cat(logits)
        p = every.softmax(-1)
        loads = [torch.bincount(one.argmax(-1), minlength=E).double() * E / len(one) for one in logits]
        row = {
            column: list(sink.column(0, "router", column).values())[number] for column in sink.tables["router"].columns
        }
        assert row["entropy"] == pytest.approx(float(-(p * p.log()).sum(-1).mean()), rel=1e-12)
        assert row["log_z"] == pytest.approx(float(every.logsumexp(-1).mean()), rel=1e-12)
        assert row["max_logit"] == pytest.approx(float(every.abs().max()), rel=1e-12)
        assert row["load_max"] == pytest.approx(sum(float(load.max()) for load in loads) / 2, rel=1e-12)
        assert row["load_min"] == pytest.approx(sum(float(load.min()) for load in loads) / 2, rel=1e-12)


def own(block: nn.Module) -> Sequence[Tensor]:
    gate = getattr(block.gate, "proj", block.gate)
    return gate.weight.detach(), torch.zeros(E).double() if gate.bias is None else gate.bias.detach()


def test_an_undecided_router_has_the_entropy_of_its_experts_and_one_that_collapsed_has_their_number() -> None:
    net, sink = model("stacked"), ListSink()
    nn.init.zeros_(net[0].gate.weight)
    nn.init.zeros_(net[0].gate.bias)
    with torch.no_grad():
        net[1].gate.weight.zero_()
        net[1].gate.bias.copy_(torch.tensor([0.0, 50.0, 0.0, 0.0]))
    with Watcher(net, sink, probes="router", every=1) as watcher:
        net(torch.randn(2, 5, D).double()).square().mean().backward()
        watcher.step(loss=1.0)
    assert sink.column(0, "router", "entropy") == pytest.approx({"0.gate": math.log(E), "1.gate": 0.0}, abs=1e-15)
    assert sink.column(0, "router", "load_max") == {"0.gate": E, "1.gate": E}  # argmax of equals is the first
    assert sink.column(0, "router", "load_min") == {"0.gate": 0, "1.gate": 0}


def test_under_autocast_the_logits_are_in_float32() -> None:
    subject, sink, entered = model("stacked").float(), ListSink(), []
    gate = subject[0].gate
    gate.register_forward_pre_hook(lambda module, args: entered.append(args[0].detach()))
    with Watcher(subject, sink, probes="router") as watcher:
        with torch.autocast("cpu", torch.bfloat16):
            subject(30 * torch.randn(3, 5, D)).float().square().mean().backward()
        watcher.step()
    logits = entered[0].double() @ gate.weight.detach().double().T + gate.bias.detach().double()
    wanted = {"log_z": logits.logsumexp(-1).mean().item(), "max_logit": logits.abs().max().item()}
    found = {column: sink.column(0, "router", column)["0.gate"] for column in wanted}
    assert found == pytest.approx(wanted, rel=1e-6)
