"""Models that code of their own splits over two ranks: Megatron's way, experts, and loops that forget to average."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_toys import ListSink, sentence
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stabilitylab.probes import SplitOver, Watcher

WIDTH, INNER = 6, 10
SPLIT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # parameter -> dimension


class Copied(torch.autograd.Function):
    """The same value on every rank, whose gradients add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


class Added(torch.autograd.Function):
    """The sum over ranks, whose gradient every rank has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Layer(nn.Module):
    def __init__(self, inner: int, parts: bool) -> None:
        super().__init__()
        self.norm, self.parts = nn.LayerNorm(WIDTH), parts
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        entering = self.norm(x)
        if not self.parts:
            return x + self.down(self.up(entering).relu())
        return x + Added.apply(self.down(self.up(Copied.apply(entering)).relu()))


class Net(nn.Module):
    """Two layers; ``parts``: this rank's half of each feed-forward block."""

    def __init__(self, parts: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(INNER // 2 if parts else INNER, parts) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def whole() -> Net:
    torch.manual_seed(4)
    return Net().double()


def half(rank: int) -> Net:
    """This rank's half of :func:`whole`."""
    own, full = Net(parts=True).double(), dict(whole().named_parameters())
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            dim = SPLIT.get(name.split(".", 2)[2])
            parameter.copy_(full[name] if dim is None else full[name].chunk(2, dim)[rank])
    return own


def recorded(model: nn.Module, **options: Any) -> dict[str, Any]:
    """Two updates, watched: rows, what ended and why, what the log said."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stabilitylab").addHandler(handler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    sink = ListSink()
    given = {"probes": "all", "every": 1, "update_every": 1, "reference": lambda: model(batch), **options}
    watcher = Watcher(model, sink, optimizer=optimizer, **given)
    for _ in range(2):
        loss = model(batch).square().mean()
        loss.backward()
        watcher.step(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
    watcher.finish()
    watcher.close()
    logging.getLogger("stabilitylab").removeHandler(handler)
    tables = {
        (row, name): dict(zip([each.site for each in sink.tables[name].rows], cells.values.tolist(), strict=True))
        for row, _, every in sink.rows
        for name, cells in every.items()
    }
    metrics = {row: metrics for row, metrics, _ in sink.rows}
    return {"tables": tables, "metrics": metrics, "ended": dict(watcher.ended), "said": said}


def split_up(name: str, parameter: nn.Parameter) -> Any:
    return dist.group.WORLD if name.split(".", 2)[2] in SPLIT else None


def split_by_hand(folder: Path) -> Any:
    """Said to be averaged copies, which it is not; with ``share=``; and in one piece."""
    rank = dist.get_rank()
    return {
        "averaged": recorded(half(rank), parallel="ddp"),
        "strict": sentence(lambda: recorded(half(rank), parallel="ddp", strict=True)),
        "share": recorded(half(rank), share=split_up),
        "one": recorded(whole(), parallel="off"),
        "parameters": {name: p.numel() for name, p in half(rank).named_parameters()},
    }


def spread_experts(folder: Path) -> Any:
    """An expert on each rank, with batches of their own: the norm over both."""
    torch.manual_seed(4 + dist.get_rank())  # both experts' weights differ
    model = Net().double()
    with torch.no_grad():
        for norm in (model.layers[0].norm, model.layers[1].norm):
            norm.weight.fill_(1.1)
    sink = ListSink()

    def share(name: str, parameter: nn.Parameter) -> Any:
        return None if ".norm." in name else SplitOver(dist.group.WORLD, same_batch=False)

    watcher = Watcher(model, sink, probes="grad_norm", every=1, share=share)
    loss = model(torch.randn(3, 4, WIDTH, dtype=torch.float64)).square().mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        if ".norm." in name:
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
    own = sum(float(p.grad.square().sum()) for n, p in model.named_parameters() if ".norm." not in n)
    shared = sum(float(p.grad.square().sum()) for n, p in model.named_parameters() if ".norm." in n)
    row = dict(watcher.step(loss=loss))
    watcher.close()
    return {"total": row["grad_norm_total"], "own": own, "shared": shared, "ended": dict(watcher.ended)}


def not_averaged(folder: Path) -> Any:
    """A backward that DistributedDataParallel was told not to average -> what is said of it."""
    found = {}
    for sync in (True, False):
        model = DistributedDataParallel(Net().double())
        sink = ListSink()
        with Watcher(model, sink, probes="grad_norm,ln_input", every=1) as watcher:
            x = torch.randn(3, 4, WIDTH, dtype=torch.float64) * (1 + dist.get_rank())
            with nullcontext() if sync else model.no_sync():
                loss = model(x).square().mean()
                loss.backward()
            watcher.step(loss=loss)
        found[sync] = dict(watcher.ended)
    return found


def refused_shares(folder: Path) -> Any:
    """What ``share=`` may not return, or go with -> what is said."""
    mine = [dist.new_group([rank]) for rank in range(2)]
    rank = dist.get_rank()

    def groups(name: str, parameter: nn.Parameter) -> Any:
        return dist.group.WORLD if "up" in name else mine[rank] if "down" in name else None

    answers: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "a number": (lambda name, parameter: 2, {}),
        "another's group": (lambda name, parameter: mine[1 - rank], {}),
        "two groups": (groups, {}),
        "no group": (lambda name, parameter: SplitOver("tensor"), {}),
        "off": (split_up, {"parallel": "off"}),
        "curvature": (split_up, {"probes": "sharpness", "curvature_loss": lambda: torch.zeros(())}),
    }
    found = {}
    for name, (share, options) in answers.items():
        model = half(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"probes": "grad_norm", "optimizer": optimizer, "share": share, **options}
        found[name] = sentence(lambda m=model, g=given: Watcher(m, ListSink(), **g))
    return found


SHARE_CASES = {each.__name__: each for each in (split_by_hand, spread_experts, not_averaged, refused_shares)}
