"""Watching changes no bit of three updates of any model of the zoo, with all default probes and the first batch as the
reference: a few here, all of them in the slow set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoders import made
from entries import TEXT, WIDTH, Entry, ids
from test_zoo import ZOO

import stabilitylab as sl

SAMPLE = ("llama: pre-norm, gated", "convnext: convolutions with norms over channels")


def loop(entry: Entry) -> Callable[[], tuple[Any, Any]]:
    def make() -> tuple[Any, Any]:
        model = entry.born()
        return model, trained(model, lambda: entry.loss(model), rate=1e-3)

    return make


def trained(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], rate: float) -> Callable[[Any], torch.Tensor]:
    """One update by AdamW, as verify_neutral takes it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def update(watcher: Any) -> torch.Tensor:
        loss = loss_of()
        loss.backward()
        watcher.step(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return update


def check(name: str) -> None:
    found = sl.verify_neutral(loop(ZOO[name]))
    assert found.verdict == "neutral", f"{name}: {found}"
    assert not found.left_out
    kinds = set(found.compared)
    assert {"loss", "parameter", "gradient", "optimizer", "random-state"} <= kinds
    assert found.compared["parameter"] == len(list(ZOO[name].born().parameters()))


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_few(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if name not in SAMPLE])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_all_others(name: str) -> None:
    check(name)


def rescaled() -> tuple[Any, Any]:
    """RWKV of 8 layers, which divides weights of the last two in place where it is in eval mode."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 8, "attention_hidden_size": WIDTH, "intermediate_size": 24}
    model = made("RwkvForCausalLM", rescale_every=6, **{**TEXT, **sizes}).train()
    return model, trained(model, lambda: model(ids(), labels=ids()).loss, rate=1e-2)


def test_rwkv_that_rescales_its_weights_is_put_back_and_its_passes_end() -> None:
    found = sl.verify_neutral(rescaled, updates=2, probes="model_update")
    assert found.verdict == "neutral"
    assert "the reference pass changed rwkv.blocks.6.attention.output.weight" in found.ended["model_update"]


@pytest.mark.slow
def test_rwkv_that_rescales_its_weights_is_put_back_each_time() -> None:
    found = sl.verify_neutral(rescaled, restore=True)
    assert found.verdict == "neutral"
    assert not found.ended
