"""Two ranks whose set-ups are checked: a right one that stays as it is, and single faults."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_shares import SPLIT, Added, Copied
from rank_toys import sentence
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import stabilitylab as sl
from stabilitylab.probes.state import Digester, random_states

WIDTH = 6
Given = dict[str, Any]


class Net(nn.Module):
    """Two layers, a dropout, a buffer, and weights that are tied on demand."""

    def __init__(self, seed: int = 0, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("shift", torch.randn(WIDTH) / 10)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.norm(self.first(x) + self.shift)))


class Half(nn.Module):
    """This rank's half of a feed-forward block, between norms that both ranks hold."""

    def __init__(self, alike: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm, self.dropout, self.head = nn.LayerNorm(WIDTH), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH)
        torch.manual_seed(4 if alike else 4 + dist.get_rank())
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(Added.apply(self.down(self.up(Copied.apply(self.norm(x))).relu())))
        return self.head(x)


def batch(number: int, rows: int = 5) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(60 + number))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


def replicated(**options: Any) -> Given:
    model = DistributedDataParallel(Net(**options))
    torch.manual_seed(70 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "batch": batch(dist.get_rank()), "loss_fn": loss_fn, "optimizer": optimizer}


def cut(**options: Any) -> Given:
    model = Half(**options)
    torch.manual_seed(70)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {
        "model": model,
        "batch": batch(0),
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "share": lambda name, parameter: dist.group.WORLD if name in SPLIT else None,
    }


def sharded() -> Given:
    model = Net()
    for one in (model.first, model.last):
        fully_shard(one)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "batch": batch(dist.get_rank()), "loss_fn": loss_fn, "optimizer": optimizer}


def answers(given: Given) -> dict[str, Any]:
    """What the check says: by question its state and sentence, and the whole text."""
    found = sl.check_ranks(**given)
    told = {check.name: (check.state, check.measured) for check in found.checks}
    return {"checks": told, "findings": [one.bound for one in found.findings], "text": str(found), "ok": found.ok}


def bits(given: Given) -> dict[str, Any]:
    """Every tensor and number that a training step on this rank depends on."""
    model, optimizer, digester = given["model"], given["optimizer"], Digester()
    state = {
        f"{number} {key}": int(digester.of(value)) if isinstance(value, Tensor) else value
        for number, own in enumerate(model.parameters())
        for key, value in optimizer.state.get(own, {}).items()
    }
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {
        "parameters": [int(digester.of(own)) for own in model.parameters()],
        "ids": [id(own) for own in model.parameters()],
        "buffers": [int(digester.of(own)) for own in model.buffers()],
        "gradients": [None if own.grad is None else int(digester.of(own.grad)) for own in model.parameters()],
        "gradient ids": [id(own.grad) for own in model.parameters()],
        "modes": [one.training for one in model.modules()],
        "state": state,
        "settings": copy.deepcopy(settings),
        "random": int(random_states()["torch"].long().sum()),
        "numpy": random_states()["numpy"][1].tolist(),
    }


def update(given: Given) -> None:
    given["loss_fn"](given["model"], given["batch"]).backward()
    given["optimizer"].step()


def neutral(make: Callable[[], Given]) -> dict[str, Any]:
    """A loop of four updates, checked after the second or not: its bits at both places."""
    told = {}
    for checked in (True, False):
        given = make()
        given["optimizer"].zero_grad()
        update(given)
        given["model"].eval()
        given["optimizer"].zero_grad()
        update(given)
        before = bits(given)
        if checked:
            told["answers"] = answers(given)
            after = bits(given)
            told["changed"] = [key for key in before if before[key] != after[key]]
        given["model"].train()
        for _ in range(2):
            update(given)
        end = bits(given)
        told[checked] = {key: value for key, value in end.items() if "ids" not in key}
    told["later"] = [key for key in told[True] if told[True][key] != told[False][key]]
    return {key: told[key] for key in ("answers", "changed", "later")}


def added_up(divided: bool) -> Given:
    """Gradients that the loop adds up by itself, and divides by the ranks or forgets to."""

    def after_backward(model: nn.Module) -> None:
        for own in model.parameters():
            dist.all_reduce(own.grad)
            if divided:
                own.grad /= dist.get_world_size()

    model = Net()
    return {
        "model": model,
        "batch": batch(dist.get_rank()),
        "loss_fn": loss_fn,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "after_backward": after_backward,
    }


def doubled() -> Given:
    given = replicated(tied=True)
    own = list(given["model"].parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given["optimizer"] = torch.optim.SGD([*own, own[0]], lr=0.1)
    return given


def rates() -> Given:
    given = replicated()
    given["optimizer"].param_groups[0]["lr"] = 1e-2 * (1 + dist.get_rank())
    return given


def scattered() -> Given:
    given = replicated()
    with torch.no_grad():
        given["model"].module.norm.weight += dist.get_rank()
        if dist.get_rank() == 1:
            given["model"].module.shift += 1
    given["model"].forward_sync_buffers = False
    return given


def around() -> Given:
    def inner(model: nn.Module, x: Tensor) -> Tensor:
        return loss_fn(getattr(model, "module", model), x)

    return replicated() | {"loss_fn": inner}


def missing() -> Given:
    given = replicated()
    own = [one for name, one in given["model"].named_parameters() if "norm" not in name]
    return given | {"optimizer": torch.optim.SGD(own, lr=0.1)}


def evaluating(reshards: bool) -> Given:
    def evaluate(model: Any) -> None:
        with torch.no_grad():
            loss_fn(model, batch(9))
        if reshards:
            model.reshard()

    return sharded() | {"evaluate": evaluate}


def drawn() -> Given:
    given = cut(dropout=0.5)
    if dist.get_rank() == 1:
        torch.rand(1)
    return given


def one_seed() -> Given:
    given = replicated(dropout=0.5)
    torch.manual_seed(5)
    return given


class _Failing(torch.optim.SGD):
    """An optimizer whose step fails on one rank, and needs a closure on none."""

    def __init__(self, fails: bool) -> None:
        super().__init__(Net().parameters(), lr=0.1)
        self.fails = fails

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise TypeError("closure")
        return super().step()


def failing(folder: Path) -> dict[str, str]:
    """What every rank says where one alone fails: in the loss, in what follows it, and with other arguments."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise KeyError("labels")
        return loss_fn(model, x)

    def after(model: nn.Module) -> None:
        if dist.get_rank() == 0:
            raise OSError("disk")

    def check(given: Given) -> str:
        try:
            sl.check_ranks(**given)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    given = added_up(True)
    told = {
        "loss": check(replicated() | {"loss_fn": loss}),
        "after": check(given | {"after_backward": after}),
        "other": check(replicated() | ({"optimizer": None} if dist.get_rank() else {})),
        "layout": sentence(lambda: sl.check_ranks(**cut() | {"share": lambda name, own: dist.get_rank() or None})),
        "skip": check(replicated() | {"skip": ["update"] if dist.get_rank() else []}),
        "wrapped": check(replicated() | ({"model": Net()} if dist.get_rank() else {})),
        "step": check(replicated() | {"optimizer": _Failing(dist.get_rank() == 1)}),
        "number": check(replicated() | {"loss_fn": lambda model, x: model(x)}),
    }
    given = given | {
        "batch": object() if dist.get_rank() else batch(0),
        "loss_fn": lambda model, x: loss_fn(model, batch(1)),
    }
    return told | {"batch": answers(given)["checks"]["same batch"][1]}


SETUP_CASES: dict[str, Callable[[Path], Any]] = {
    "setups_right": lambda folder: neutral(lambda: replicated(dropout=0.5)),
    "setups_sharded": lambda folder: neutral(sharded),
    "setups_failing": failing,
    "setups_cut": lambda folder: answers(cut(dropout=0.5)),
    "setups_cut_copies": lambda folder: answers(cut(alike=True)),
    "setups_cut_batch": lambda folder: answers(cut() | {"batch": batch(dist.get_rank())}),
    "setups_cut_drawn": lambda folder: answers(drawn()),
    "setups_summed": lambda folder: answers(added_up(False)),
    "setups_averaged": lambda folder: answers(added_up(True)),
    "setups_doubled": lambda folder: answers(doubled()),
    "setups_missing": lambda folder: answers(missing()),
    "setups_rates": lambda folder: answers(rates()),
    "setups_scattered": lambda folder: answers(scattered()),
    "setups_around": lambda folder: answers(around()),
    "setups_one_seed": lambda folder: answers(one_seed()),
    "setups_same": lambda folder: answers(replicated() | {"batch": batch(0)}),
    "setups_overlap": lambda folder: answers(
        replicated() | {"batches": [torch.cat([batch(dist.get_rank(), 6), batch(9, 2)])]}
    ),
    "setups_stale": lambda folder: answers(evaluating(False)),
    "setups_resharded": lambda folder: answers(evaluating(True)),
    "setups_skipped": lambda folder: answers(replicated() | {"batch": batch(0), "skip": ["same batch"]}),
}


SLOW_SETUPS = frozenset(
    f"setups_{case}"
    for case in ("cut", "cut_batch", "averaged", "doubled", "rates", "one_seed", "overlap", "resharded", "skipped")
)


def four_replicas(folder: Path) -> dict[str, Any]:
    """HSDP on four ranks, whose second pair starts from another seed."""
    model = Net(seed=dist.get_rank() // 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = {"model": model, "batch": batch(dist.get_rank()), "loss_fn": loss_fn, "optimizer": optimizer}
    return answers(given)


FOUR_SETUPS: dict[str, Callable[[Path], Any]] = {"setups_four": four_replicas}
