"""A sequence-first copy of a model has the tables of the model, once the caller says ``batch_first=False``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from probe_toys import ListSink
from torch import Tensor, nn

import stabilitylab as sl
from stabilitylab.errors import UsageError
from stabilitylab.probes import Watcher, WatchOptions

WIDTH, HEADS, VOCAB = 8, 2, 23
PROBES = "all,-critical_sharpness,-preconditioned_sharpness,-sharpness,fingerprint,attention_sink"


class Attention(nn.Module):
    """``columns``: the input is (T, B, D). ``turns``: it is turned to (B, T, D) before the projections, not after."""

    def __init__(self, columns: bool, turns: bool) -> None:
        super().__init__()
        self.q, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        # the gradient of a bias on k is nothing but rounding, and Adam's first update makes a step of that
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.columns, self.turns = columns, turns

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        if self.columns and self.turns:
            x = x.transpose(0, 1)
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.columns and not self.turns:
            q, k, v = (z.transpose(0, 1) for z in (q, k, v))
        q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in (q, k, v))
        allowed = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        allowed = allowed if real is None else allowed & real[:, None, None, :] | torch.eye(len(allowed)).bool()
        y = F.scaled_dot_product_attention(q, k, v, allowed).transpose(1, 2).flatten(2)
        if self.columns and not self.turns:
            y = y.transpose(0, 1)
        y = self.o(y)
        return y.transpose(0, 1) if self.columns and self.turns else y


class Layer(nn.Module):
    def __init__(self, columns: bool, turns: bool) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(columns, turns), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        x = x + self.attn(self.norm1(x), real)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Takes tokens (B, T) and returns (B, T, V); inside, its hidden states are (B, T, D) or (T, B, D)."""

    def __init__(self, columns: bool, turns: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.columns, self.embedding = columns, nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(columns, turns) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.double()

    def forward(self, ids: Tensor, real: Tensor | None = None) -> Tensor:
        x = self.embedding(ids.T if self.columns else ids)
        for layer in self.layers:
            x = layer(x, real)
        x = self.head(self.norm(x))
        return x.transpose(0, 1) if self.columns else x


def batch(samples: int, length: int, padded: bool) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(samples)
    ids = torch.randint(VOCAB, (samples, length), generator=draw)
    ends = torch.randint(2, length + 1, (samples, 1), generator=draw) if padded else torch.tensor([[length]])
    return ids, (torch.arange(length) < ends).expand(samples, length)


def tables(model: Decoder, sizes: list[tuple[int, int]], padded: bool, **options: Any) -> ListSink:
    """Row 0 of a watched update with these micro-batches."""
    sink, now = ListSink(), [batch(*sizes[0], padded)]

    def reference() -> None:
        model(*batch(*sizes[0], padded))

    def mask() -> Tensor | None:
        return now[0][1] if padded else None

    optimizer = torch.optim.AdamW(model.parameters())
    with Watcher(
        model, sink, probes=PROBES, every=1, optimizer=optimizer, mask=mask, reference=reference, strict=True, **options
    ) as watcher:
        for each in sizes:
            now[0] = batch(*each, padded)
            ids, real = now[0]
            F.cross_entropy(model(ids, real)[real], ids[real], reduction="sum").backward()
        now[0] = batch(*sizes[0], padded)
        watcher.step()
        optimizer.step()
        watcher.flush()
    return sink


def differing(one: ListSink, other: ListSink) -> list[str]:
    """Return the columns that are not equal up to rounding, in the order of the rows of the first."""
    found = []
    assert one.tables.keys() == other.tables.keys()
    for name, table in one.tables.items():
        assert [row.site for row in table.rows] == [row.site for row in other.tables[name].rows]
        cells, others = one.rows[0][2].get(name), other.rows[0][2].get(name)
        assert (cells is None) is (others is None), name
        if cells is None or others is None:
            continue
        assert np.array_equal(cells.absent, others.absent), name
        for column, a, b in zip(table.columns, cells.values.T, others.values.T, strict=True):
            if not np.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True):
                found.append(f"{name}.{column}")
    return found


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_every_table_of_a_sequence_first_copy_is_that_of_the_model(turns: bool, padded: bool) -> None:
    sizes = [(4, 7), (3, 6)]
    rows, columns = Decoder(False), Decoder(True, turns)
    expected = tables(rows, sizes, padded)
    assert {"rank", "fingerprint", "fingerprint_gradient", "attention", "attention_sink"} <= expected.tables.keys()
    # turning x once before q, k and v changes the order of their backwards
    order = ["fingerprint_gradient.call"] if turns else []
    assert differing(expected, tables(columns, sizes, padded, batch_first=False)) == order
    assert differing(expected, tables(Decoder(False), sizes, padded, batch_first=True)) == []
    if not padded:  # in silence, with the first dimension as the batch
        assert "rank.token_cosine" in differing(expected, tables(Decoder(True, turns), sizes, padded))


@pytest.mark.parametrize("padded", [False, True])
def test_as_many_samples_as_tokens(padded: bool) -> None:
    expected = tables(Decoder(False), [(5, 5)], padded)
    assert differing(expected, tables(Decoder(True), [(5, 5)], padded, batch_first=False)) == []


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("batch_first", [None, False])
def test_torchs_encoder_may_be_told_too_and_its_mask_is_then_by_sample(batch_first: bool | None) -> None:
    found = []
    x, real = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(1)).double(), batch(3, 4, True)[1]
    for first in (True, False):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, 0.0, batch_first=first, dtype=torch.float64)
        model, sink = nn.TransformerEncoder(layer, 2), ListSink()
        own, value = (real, x) if first else (real if batch_first is False else real.T, x.transpose(0, 1))
        with Watcher(
            model, sink, probes="rank,attention,cosine_similarity", mask=own, reference=lambda m=model, v=value: m(v),
            batch_first=first or batch_first, strict=True,
        ) as watcher:  # fmt: skip
            watcher.step()
            watcher.flush()
        found.append(sink)
    assert differing(*found) == []


def test_the_callers_word_goes_before_a_module_that_the_layer_turns_its_values_for() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS)

        def forward(self, x: Tensor) -> Tensor:
            y = x.transpose(0, 1)
            return x + self.attention(y, y, y)[0].transpose(0, 1)

    torch.manual_seed(0)
    model, x, found = nn.Sequential(Turned(), Turned()), torch.randn(3, 4, WIDTH), []
    for batch_first in (True, None):
        sink = ListSink()
        with Watcher(model, sink, probes="rank", reference=lambda: model(x), batch_first=batch_first) as watcher:
            watcher.step()
            watcher.flush()
        found.append(sink.column(0, "rank", "token_cosine")["1"])
    tokens = model(x).detach()
    u = tokens / tokens.norm(dim=-1, keepdim=True)
    by_hand = ((u.sum(1).square().sum(-1) - 4) / 12).mean().item()
    assert found[0] == pytest.approx(by_hand, rel=1e-5)
    assert not math.isclose(found[1], by_hand, rel_tol=1e-2)


def test_a_mask_in_the_layout_of_the_hidden_states_is_refused() -> None:
    model, (ids, real) = Decoder(True), batch(4, 7, True)
    with (
        pytest.raises(UsageError, match=r"mask has shape \(7, 4\) where the layers of stack 'layers' return"),
        Watcher(
            model, ListSink(), probes="rank", mask=real.T, reference=lambda: model(ids), batch_first=False
        ) as watcher,
    ):
        watcher.step()


def test_watch_takes_it_and_the_run_keeps_it(tmp_path: Path) -> None:
    model, (ids, _) = Decoder(True), batch(4, 7, False)
    with sl.watch(model, out=tmp_path / "run", probes="rank", every=1, batch_first=False) as watcher:
        model(ids).square().mean().backward()
        watcher.step()
    assert sl.Run.open(tmp_path / "run").manifest["batch_first"] is False
    with pytest.raises(UsageError, match="batch_first = 'second' must be True, False or None"):
        WatchOptions(batch_first="second")  # type: ignore[arg-type]
