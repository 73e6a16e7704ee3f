"""Random module graphs against an oracle that sees data flow: what a dispatch mode and autograd's graph show, which
know nothing of names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generated import Generator, Maps, first
from probe_toys import ListSink
from rest_slow import EVERY, slow
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stabilitylab.probes import Watcher, find_sites
from stabilitylab.probes.places.sites import Site

FAST, UPDATES = 12, 2
ALL = 500 if EVERY else 250
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


class Products(TorchDispatchMode):
    """Keeps what is multiplied with the memory of each of these weights, whoever does it."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self._weights = {name: weight.untyped_storage().data_ptr() for name, weight in weights.items()}
        self.seen: dict[str, list[Tensor]] = {name: [] for name in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            one, other = args[-2:]
            for name, place in self._weights.items():  # tied ones have the same place
                if place == other.untyped_storage().data_ptr():
                    self.seen[name].append(one.detach().clone())
        return func(*args, **(kwargs or {}))


def reached(loss: Tensor) -> set[int]:
    """Ids of the parameters that the graph of the loss leads to."""
    found, todo, seen = set(), [loss.grad_fn], set()
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        todo += [each for each, _ in node.next_functions]
    return found


def made(seed: int) -> tuple[nn.Module, Tensor, Generator]:
    generator = Generator(seed)
    model = generator.model().train()
    return model, generator.batch(), generator


def trained(model: nn.Module, x: Tensor, watch: Any = None) -> list[Tensor]:
    """Two updates; everything that watching must not change."""
    torch.manual_seed(5)
    some = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(some, lr=1e-2, momentum=0.9)
    watcher = watch(optimizer) if watch else None
    losses = []
    for _ in range(UPDATES):
        loss = first(model(x)).square().mean()
        loss.backward()
        if watcher is not None:
            watcher.step(loss=loss)
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    if watcher is not None:
        watcher.finish()
        watcher.close()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [*losses, *model.parameters(), *model.buffers(), *states, torch.random.get_rng_state()]


def check(seed: int) -> int:
    """Checks one model; returns how many activations and norms data flow confirmed."""
    plain, x, _ = made(seed)
    model, _, _ = made(seed)
    sink, held = ListSink(), {}

    def watch(optimizer: torch.optim.Optimizer) -> Watcher:
        held["watcher"] = Watcher(model, sink, probes=["all"], every=1, update_every=1, optimizer=optimizer,
                                  reference="first batch", strict=True)  # fmt: skip
        return held["watcher"]

    unwatched, watched = trained(plain, x), trained(model, x, watch)
    assert len(unwatched) == len(watched)
    assert all(torch.equal(dense(one), dense(other)) for one, other in zip(unwatched, watched, strict=True)), "changed"
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    coverage = held["watcher"].parameters.coverage
    assert coverage == (len(list(model.parameters())), len(trainable))
    check_gradients(seed, sink)
    return check_places(seed, sink)


def dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def check_gradients(seed: int, sink: ListSink) -> None:
    model, x, _ = made(seed)
    torch.manual_seed(5)
    loss = first(model(x)).square().mean()
    flows = reached(loss)
    loss.backward()
    own = {id(p): dense(p.grad) for p in model.parameters() if p.grad is not None}
    assert set(own) == flows & {id(p) for p in model.parameters() if p.requires_grad}
    exact = sum(float(grad.abs().double().square().sum()) for grad in own.values()) ** 0.5
    metrics, _ = sink.row(0)
    assert metrics["grad_norm_total"] == pytest.approx(exact, rel=1e-9)
    table = sink.column(0, "grad_norm", "value")
    present = {site: value for site, value in table.items() if site not in sink.absent(0, "grad_norm")}
    assert sum(value**2 for value in present.values()) ** 0.5 == pytest.approx(exact, rel=1e-9)


def check_places(seed: int, sink: ListSink) -> int:
    """Inside each feed-forward block that was drawn, what counts as activation is what enters the product that leads
    back; what enters each norm has the length that is recorded, over the features. Returns how many were seen."""
    model, x, generator = made(seed)
    sites = find_sites(model)
    calls: dict[Site, list[tuple[Tensor, Tensor]]] = {}
    for site in (*sites.activations, *sites.norms):
        site.module.register_forward_hook(
            lambda module, given, result, site=site: calls.setdefault(site, []).append((given[0].detach(), result))
        )
    torch.manual_seed(5)
    with torch.no_grad(), Products({str(n): block.way_back.weight for n, block in enumerate(generator.blocks)}) as flow:
        first(model(x))
    seen = 0
    for site in sites.activations:
        own = [(n, block) for n, block in enumerate(generator.blocks) if site.module in set(block.modules())]
        for n, block in own:
            products = flow.seen[str(n)]
            for call in calls.get(site, []):
                value = site.value(*call).flatten(0, -2)
                assert any(torch.equal(value, each) for each in products), f"{site.name} is not what {block} multiplies"
                seen += 1
    recorded = sink.column(0, "ln_input", "value") if sites.norms else {}
    maps = {each.conv for each in model.modules() if isinstance(each, Maps)}
    for site in sites.norms:
        if site in calls:
            given = [entering.movedim(1, -1) if site.module in maps else entering for entering, _ in calls[site]]
            lengths = torch.cat([each.flatten(0, -2).double().norm(dim=-1) for each in given])
            assert recorded[site.name] == pytest.approx(float(lengths.mean()), rel=1e-5), site.name
            seen += 1
    return seen


@pytest.mark.parametrize("seed", [*range(FAST), *(slow(n) for n in range(FAST, ALL))])
def test_a_random_graph(seed: int) -> None:
    check(seed)


def test_the_oracle_sees_activations_and_norms() -> None:
    assert sum(check(seed) for seed in (3, 5, 8, 11)) >= 12
