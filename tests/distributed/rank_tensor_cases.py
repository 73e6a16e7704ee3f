"""What tensor-parallel ranks do, case by case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_tensor import PLANS, Decoder, Heard, cut, train_cut
from rank_toys import ListSink, sentence
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from stabilitylab.probes import Watcher

TENSOR_CASES: dict[str, Callable[[Path], Any]] = {}
FOUR_CASES: dict[str, Callable[[Path], Any]] = {}

for plan in PLANS:
    for when in ("before", "after"):
        TENSOR_CASES[f"cut_{plan}_{when}"] = lambda folder, plan=plan, when=when: train_cut(plan, when)
    FOUR_CASES[f"cut_{plan}_fsdp"] = lambda folder, plan=plan: train_cut(plan, around="fsdp")
TENSOR_CASES["cut_histograms"] = lambda folder: {
    plan: train_cut(plan, steps=2, probes=["histograms"]) for plan in PLANS
}
TENSOR_CASES["cut_fingerprint"] = lambda folder: {
    plan: train_cut(plan, when, steps=2, probes="fingerprint")
    for plan, when in zip(PLANS, ("after", "before", "after"), strict=True)
}
FOUR_CASES["cut_fingerprint_fsdp"] = lambda folder: train_cut("sequence", around="fsdp", steps=2, probes="fingerprint")
TENSOR_CASES["cut_start"] = lambda folder: train_cut("columns", dtype=torch.float32, steps=1)


def case(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    TENSOR_CASES[function.__name__] = function
    return function


@case
def cut_bitwise(folder: Path) -> Any:
    """Plan -> whether a watched run trains as an unwatched one."""
    found = {}
    for plan in PLANS:
        pairs = zip(*(train_cut(plan, watched=watched)["parameters"] for watched in (False, True)), strict=True)
        found[plan] = all(torch.equal(one, other) for one, other in pairs)
    return found


def one_row(model: Decoder, watcher: Watcher) -> None:
    model(torch.arange(12).view(2, 6)).logsumexp(-1).mean().backward()
    watcher.step()
    watcher.close()


@case
def cut_apart(folder: Path) -> Any:
    """What is said where ranks of one layer do not have the same."""
    mesh = init_device_mesh("cpu", (2,))
    found: dict[str, Any] = {}

    forgotten: Any = cut(Decoder(), "columns", mesh)
    for layer in forgotten.layers:  # a norm that sees this rank's heads alone, as if it were not in the plan
        layer.attention.q_norm = torch.nn.LayerNorm(4)
    with Heard() as heard:
        one_row(forgotten, Watcher(forgotten, ListSink(), probes="grad_norm", every=1))
    found["a gradient"] = heard.lines

    dropped: Any = cut(Decoder(), "columns", mesh)
    dropped.layers[0].ffn.fc2 = torch.nn.Sequential(dropped.layers[0].ffn.fc2, torch.nn.Dropout(0.5))
    torch.manual_seed(dist.get_rank())
    watcher = Watcher(dropped, ListSink(), probes="residual_norm", every=1)
    found["dropout"] = sentence(lambda: one_row(dropped, watcher))

    plain = Decoder()
    watcher = Watcher(plain, ListSink(), probes="grad_norm", every=1, parallel="later")
    found["never cut"] = sentence(lambda: one_row(plain, watcher))
    watcher.close()

    sharded = Decoder()
    watcher = Watcher(sharded, ListSink(), probes="grad_norm", every=1, parallel="later")
    found["fully_shard"] = sentence(lambda: one_row(fully_shard(sharded), watcher))  # pyright: ignore
    watcher.close()

    early = Decoder()
    optimizer = torch.optim.SGD(early.parameters())
    watcher = Watcher(early, ListSink(), probes="grad_norm", every=1, parallel="later", optimizer=optimizer)
    found["an early optimizer"] = sentence(lambda: one_row(cut(early, "columns", mesh), watcher))
    watcher.close()
    return found
