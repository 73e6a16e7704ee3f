"""On a GPU: no synchronisation in forward, backward or step, the same bits, and the tables of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from probe_toys import ListSink, Toy, batch

from stabilitylab.probes import Watcher
from stabilitylab.probes.library.adam import formulas

# which the mode says of itself when it is first set
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]


def run(device: str, watched: bool, strict: bool = False, probes: str = "all") -> tuple[ListSink, list[torch.Tensor]]:
    model, sink = Toy(dropout=0.0).to(device), ListSink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fixed = {key: value.to(device) for key, value in batch(99).items()}
    options: dict[str, Any] = {"optimizer": optimizer, "reference": lambda: {"mean": model(**fixed).mean()}}
    watcher = Watcher(model, sink, probes=probes, every=1, update_every=1, **options) if watched else None
    for t in range(6):
        inputs = {key: value.to(device) for key, value in batch(t).items()}
        torch.cuda.set_sync_debug_mode("error" if strict and t >= 2 else "default")  # row 0 builds index tensors
        try:
            logits = model(**inputs).transpose(1, 2)
            losses = F.cross_entropy(logits, inputs["target"], reduction="none") * inputs["target_mask"]
            loss = losses.sum()
            loss.backward()
            if watcher is not None:
                watcher.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    if watcher is not None:
        watcher.finish()
        watcher.close()
    return sink, [parameter.detach().cpu() for parameter in model.parameters()]


def test_nothing_waits_for_the_device() -> None:
    by_name = "histograms,gradient_alignment,attention_sink"
    run("cuda", watched=True, strict=True, probes=f"all,-rank,{by_name}")  # an eigenvalue solver waits for its result


def test_the_same_bits_and_the_tables_of_the_cpu() -> None:
    sink, watched = run("cuda", watched=True)
    _, bare = run("cuda", watched=False)
    assert all(torch.equal(a, b) for a, b in zip(watched, bare, strict=True))
    on_cpu, _ = run("cpu", watched=True)
    for name, table in on_cpu.tables.items():
        for column in set(table.columns) - {"p99"}:
            expected = on_cpu.column(1, name, column)
            assert sink.column(1, name, column) == pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True)


def test_one_adam_counts_its_updates_on_the_gpu_and_another_on_the_cpu() -> None:
    gradients = [torch.full((3,), value, device="cuda") for value in (0.5, -2.0)]
    group = {"betas": (0.9, 0.999), "eps": 1e-8}

    def found(*devices: str) -> list[torch.Tensor]:
        counts = [torch.tensor(updates, device=device) for updates, device in zip((3.0, 7.0), devices, strict=True)]
        states = [{"step": n, "exp_avg": 0.5 * g, "exp_avg_sq": g * g} for n, g in zip(counts, gradients, strict=True)]
        return [tensor for tensors in formulas(gradients, states, [group, group]).values() for tensor in tensors]

    assert all(torch.equal(a, b) for a, b in zip(found("cuda", "cpu"), found("cpu", "cpu"), strict=True))
