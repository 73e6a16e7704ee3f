"""Lemma 4.1's numbers, query by query."""

from __future__ import annotations

import math

import pytest
import torch
from onestep_cases import column

from stabilitylab.models.initialisation import named_normal
from stabilitylab.onestep.attention import lemma41


@pytest.mark.parametrize("width", [8, 64])
def test_attention_of_independent_tokens_query_by_query(width: int) -> None:
    table = lemma41(width, seed=5)
    w_q, w_k = (named_normal(5, f"lemma41.{m}", torch.Size((width, width))).double() for m in "qk")
    scale = math.sqrt(2 / (width + width))
    for n in (4, 64):
        raw = named_normal(5, f"lemma41.x.{n}", torch.Size((1024 // n, n, width))).double()
        ratios, bounds = [], []
        for sequence in raw:
            x = torch.stack([(t - t.mean()) / (t.var(correction=0) + 1e-5).sqrt() for t in sequence])
            logits = (x @ (scale * w_q)) @ (x @ (scale * w_k)).T / math.sqrt(width)
            mixed = [sum(weight * token for weight, token in zip(row.softmax(0), x, strict=True)) for row in logits]
            sizes = [float(m.norm()) for m in mixed]  # type: ignore[union-attr]
            ratios += [size / float(token.norm()) for size, token in zip(sizes, x, strict=True)]
            bounds.append(max(sizes) / max(float(token.norm()) for token in x))
        assert column(table, "ratio")[f"n={n}"] == pytest.approx(math.fsum(ratios) / len(ratios), rel=1e-9)
        assert column(table, "bound")[f"n={n}"] == pytest.approx(max(bounds), rel=1e-9)


def test_the_ratio_falls_with_length_and_the_bound_holds() -> None:
    table = lemma41(64, seed=3)
    assert [row.site for row in table[0].rows] == ["n=4", "n=16", "n=64", "n=256"]
    ratio, bound = ([*column(table, name).values()] for name in ("ratio", "bound"))
    assert ratio == sorted(ratio, reverse=True)
    assert max(bound) <= 1
    assert all(a <= b for a, b in zip(ratio, bound, strict=True))
    assert column(lemma41(64, seed=3), "ratio") == column(table, "ratio") != column(lemma41(64, seed=4), "ratio")
