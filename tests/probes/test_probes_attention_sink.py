"""The share of attention on the first key, of each head, against a softmax in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from probe_toys import ListSink
from test_probes_attention_heads import HEADS, TOKENS, Decoder, ids, trained
from torch import Tensor

from stabilitylab.probes import Watcher
from stabilitylab.probes.library.attention import AttentionSink

REAL = torch.arange(TOKENS)[None] < torch.tensor([[5], [3], [4]])


def shares(model: Decoder, batches: list[Tensor]) -> dict[str, float]:
    """Site -> mean over real queries of A_i0, a causal softmax one query at a time; of a module that of its heads."""
    found: dict[str, list[float]] = {}
    with torch.no_grad():
        for tokens in batches:
            x = model.embed(tokens)
            for n, layer in enumerate(model.layers):
                q, k, _ = (part.numpy() for part in layer[1].qkv(layer[0](x)).chunk(3, -1))
                for head in range(HEADS):
                    own = slice(head * 4, head * 4 + 4)
                    for b, i in REAL.nonzero().tolist():
                        logits = k[b, : i + 1, own] @ q[b, i, own] / 2
                        weights = np.exp(logits - logits.max())
                        found.setdefault(f"layers.{n}.1.head_{head}", []).append(float(weights[0] / weights.sum()))
                x = x + layer(x)
    means = {name: float(np.mean(values)) for name, values in found.items()}
    modules = {f"layers.{n}.1": float(np.mean([means[f"layers.{n}.1.head_{h}"] for h in range(HEADS)])) for n in (0, 1)}
    return means | modules


@pytest.mark.parametrize("kernel", ["fused", "written out"])
def test_each_head_and_each_module_has_its_share(kernel: str) -> None:
    def run(probes: str) -> tuple[list[Tensor], ListSink]:
        torch.manual_seed(0)
        model, sink = Decoder(kernel).double(), ListSink()
        watcher = Watcher(model, sink, probes=probes, every=1, mask=REAL, strict=True)
        for part in range(2):
            model(ids(part)).square().mean().backward()
        watcher.step()
        watcher.flush()
        watcher.close()
        return [p.grad for p in model.parameters() if p.grad is not None], sink

    gradients, sink = run("attention_sink,attention_heads")  # each catches the same softmaxes
    torch.manual_seed(0)
    exact = shares(Decoder(kernel).double(), [ids(0), ids(1)])
    assert sink.column(0, "attention_sink", "value") == pytest.approx(exact, rel=1e-12)
    uniform = float(np.mean([1 / (i + 1) for _, i in REAL.nonzero().tolist()]))
    assert sink.column(0, "attention_sink", "uniform") == pytest.approx(dict.fromkeys(exact, uniform), rel=1e-12)
    alone, other = run("attention_heads")
    assert all(map(torch.equal, gradients, alone))
    assert sink.column(0, "attention_heads", "max_logit") == other.column(0, "attention_heads", "max_logit")


def test_a_watched_run_equals_an_unwatched_one() -> None:
    untouched, _ = trained(False)
    torch.manual_seed(0)
    model, sink = Decoder().double(), ListSink()
    watcher = Watcher(model, sink, probes="attention_sink", every=1, mask=REAL, strict=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for row in range(2):
        for part in range(2):
            model(ids(row * 2 + part)).square().mean().backward()
        watcher.step()
        optimizer.step()
        optimizer.zero_grad()
    watcher.close()
    assert all(map(torch.equal, [p.detach() for p in model.parameters()], untouched))


def test_the_first_key_is_the_first_that_a_mask_allows() -> None:
    """Padding on the left; a query that may see nothing has 0."""
    logits = torch.tensor([[[[3.0, 1.0, 2.0], [3.0, 1.0, 2.0], [3.0, 1.0, 2.0]]]], dtype=torch.float64)
    allowed = torch.tensor([[False, False, False], [False, True, False], [False, True, True]])
    found: Any = AttentionSink.caught(logits, allowed)
    assert found["value"][0, 0].tolist() == pytest.approx([0, 1, 1 / (1 + np.e)])
    assert found["uniform"][0, 0].tolist() == pytest.approx([0, 1, 0.5])
    weights = F.softmax(logits[0, 0, 0], -1)
    assert float(AttentionSink.caught(logits, torch.tensor(True))["value"][0, 0, 0]) == pytest.approx(float(weights[0]))
