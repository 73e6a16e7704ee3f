"""Layers under activation checkpointing are recorded once, and as they are without it."""

from __future__ import annotations

import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of, masks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from stabilitylab.probes import Watcher


def recorded(model: Toy, parts: int) -> ListSink:
    sink, current = ListSink(), {}
    watcher = Watcher(
        model, sink, probes="ln_input,activation_grad_norm,grad_norm", every=1, mask=lambda: masks(current)
    )
    for row in range(2):
        for part in range(parts):
            current = batch(10 * row + part)
            (loss_of(model, current) / parts).backward()
        watcher.step()
        model.zero_grad()
    watcher.finish()
    return sink


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "wrapper", "wrapper around sub-layers"])
def test_recomputed_layers_are_recorded_once(kind: str, parts: int) -> None:
    plain = recorded(Toy(dropout=0.2), parts)
    if kind.startswith("wrapper"):
        model = Toy(dropout=0.2)
        for stack in (model.encoder, model.decoder):
            for layer in stack.layers:
                layer.self_attn = checkpoint_wrapper(layer.self_attn)
            if kind == "wrapper":
                stack.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in stack.layers)
    else:
        model = Toy(dropout=0.2, recompute=kind)
    found = recorded(model, parts)
    assert set(found.tables) == set(plain.tables)
    for table in plain.tables:
        assert found.tables[table].rows == plain.tables[table].rows
        for row in (0, 1):
            assert found.column(row, table, "value") == pytest.approx(plain.column(row, table, "value"), rel=1e-6)
    assert found.column(1, "ln_input", "p99") == plain.column(1, "ln_input", "p99")


def test_twice_as_many_tokens_would_be_noticed() -> None:
    """The mean hides a second count of the same tokens; the number of tokens behind it must not change either."""
    counts = []
    for kind in ("", "reentrant", "non-reentrant"):
        model = Toy(recompute=kind)
        watcher = Watcher(model, ListSink(), probes="ln_input", every=1)
        loss_of(model, batch()).backward()
        watcher._training.passes.end()
        counts.append(watcher._watched.boards[0].parts["value"][:, 1].clone())
        watcher.close()
    assert torch.equal(counts[0], counts[1])
    assert torch.equal(counts[0], counts[2])
    assert counts[0].min() == 4 * 5
