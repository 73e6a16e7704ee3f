"""Token cosine, distance from rank one, effective and stable rank."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from probe_toys import ListSink, Toy
from seen import batches, real, real_tokens, reference_of, seen_by
from torch import Tensor, nn

from stabilitylab.probes import Watcher
from stabilitylab.probes.library.rank import likeness, spectrum

LAYERS = [f"{stack}.layers.{i}" for stack in ("encoder", "decoder") for i in range(2)]


def cosine(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


def sentence(tokens: list[list[float]]) -> tuple[float, float]:
    """Mean cosine over all pairs, and the relative distance from copies of the mean token."""
    pairs = [cosine(a, b) for i, a in enumerate(tokens) for b in tokens[:i]]
    x = np.array(tokens)
    return statistics.fmean(pairs) if pairs else 1.0, float(np.linalg.norm(x - x.mean(0)) / np.linalg.norm(x))


def ranks(tokens: list[list[float]]) -> tuple[float, float]:
    sigma = np.linalg.svd(np.array(tokens), compute_uv=False)
    share = sigma[sigma > 1e-12] / sigma.sum()
    return float(np.exp(-(share * np.log(share)).sum())), float((sigma**2).sum() / sigma[0] ** 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("calls", [1, 2])
def test_every_layer_with_padding_and_several_batches(dtype: torch.dtype, calls: int) -> None:
    model, several = Toy().to(dtype), batches(calls)
    sink = reference_of(model, several, "rank")
    for site, values in seen_by(model, several, LAYERS).items():
        stack, by_sentence, sizes = site.split(".")[0], [], []
        for value, mask in zip(values, real(several, stack), strict=True):
            for tokens, own in zip(value, mask, strict=True):
                by_sentence.append(sentence(tokens[own].tolist()))
                sizes.append(int(own.sum()))
        by_call = [ranks(real_tokens([inputs], stack, [value])) for inputs, value in zip(several, values, strict=True)]
        weighted = [sum(n * each[i] for n, each in zip(sizes, by_sentence, strict=True)) / sum(sizes) for i in (0, 1)]
        expected = dict(
            zip(
                sink.tables["rank"].columns,
                (*weighted, *map(statistics.fmean, zip(*by_call, strict=True))),
                strict=True,
            )
        )
        recorded = {column: sink.column(0, "rank", column)[site] for column in expected}
        assert recorded == pytest.approx(expected, rel=1e-6 if dtype is torch.float64 else 1e-4)


class Constant(nn.Module):
    """A model whose first layer yields what it is told."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(1, 1)) for _ in range(2))
        self.layers[0].forward = lambda x: value
        self.layers[1].forward = lambda x: x

    def forward(self) -> Tensor:
        return self.layers[1](self.layers[0](torch.zeros(1)))


def of(value: Tensor, mask: Tensor | None = None) -> dict[str, float]:
    model, sink = Constant(value), ListSink()
    watcher = Watcher(model, sink, probes="rank", mask=mask, reference=model)
    watcher.step()
    watcher.flush()
    watcher.close()
    return {column: sink.column(0, "rank", column)["layers.0"] for column in sink.tables["rank"].columns}


def numbers(cosine: float, residual: float, effective: float, stable: float) -> dict[str, float]:
    names = ("token_cosine", "residual_rank_one", "effective_rank", "stable_rank")
    return dict(zip(names, (cosine, residual, effective, stable), strict=True))


def test_the_identity_and_copies_of_one_token() -> None:
    n = 8
    identity, copies = torch.eye(n)[None], torch.tensor([3.0, -4.0]).expand(2, 5, 2)
    assert of(identity) == pytest.approx(numbers(0.0, math.sqrt(1 - 1 / n), n, n), abs=1e-12)
    assert of(copies) == pytest.approx(numbers(1.0, 0.0, 1.0, 1.0), abs=1e-7)
    assert of(torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])) == pytest.approx(numbers(-1.0, 1.0, 1.0, 1.0), abs=1e-7)


def test_known_singular_values() -> None:
    sigma = torch.tensor([4.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, 4, generator=draw, dtype=torch.float64))[0] for n in (9, 6))
    found = of((u * sigma @ v.T)[None])
    assert found["stable_rank"] == pytest.approx(22 / 16)
    assert found["effective_rank"] == pytest.approx(2**1.75)  # shares 1/2, 1/4, 1/8, 1/8
    for matrix in (u * sigma @ v.T, v * sigma @ u.T):
        assert spectrum(matrix).sort(descending=True).values[:4].tolist() == pytest.approx([16, 4, 1, 1])


def test_padding_may_hold_anything_and_a_sentence_may_be_empty_or_one_token() -> None:
    draw = torch.Generator().manual_seed(0)
    value = torch.randn(4, 3, 5, generator=draw, dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, False], [True, True, False], [False, False, False]])
    spoilt = value.masked_fill(~mask[..., None], math.nan)
    by_sentence = [sentence(value[i][mask[i]].tolist()) for i in range(3)]
    weighted = [sum(n * each[i] for n, each in zip((3, 1, 2), by_sentence, strict=True)) / 6 for i in (0, 1)]
    assert by_sentence[1] == (1.0, 0.0)
    assert of(spoilt, mask) == pytest.approx(numbers(*weighted, *ranks(value[mask].tolist())), rel=1e-9)


def test_what_is_not_finite_is_recorded_and_raises_nothing() -> None:
    value = torch.ones(2, 3, 4)
    value[0, 0, 0] = math.nan
    assert all(math.isnan(number) for number in of(value).values())
    value[0, 0, 0] = math.inf
    assert math.isnan(of(value)["effective_rank"])


def test_an_image_of_tokens_is_one_sentence_and_one_sentence_needs_no_batch() -> None:
    value = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert of(value) == pytest.approx(of(value.reshape(2, 12, 5)))
    assert of(value[0, 0]) == pytest.approx(of(value[:1, 0]))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_sentences_in_columns() -> None:
    torch.manual_seed(0)
    rows, columns = (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=first, dtype=torch.float64), 2)
        for first in (True, False)
    )
    columns.load_state_dict(rows.state_dict())
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    mask = torch.arange(4) < torch.tensor([[4], [2], [3]])
    found = []
    for model, value, own in ((rows, x, mask), (columns, x.transpose(0, 1), mask.T)):
        sink = ListSink()
        watcher = Watcher(model, sink, probes="rank", mask=own, reference=lambda m=model, v=value: m(v))
        watcher.step()
        watcher.flush()
        watcher.close()
        found.append({column: sink.column(0, "rank", column)["layers.1"] for column in sink.tables["rank"].columns})
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert 0 < found[0]["token_cosine"] < 1


def test_likeness_by_the_closed_form() -> None:
    """(||sum u||^2 - n) / (n (n - 1))."""
    x = torch.randn(1, 7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    units = x / x.norm(dim=-1, keepdim=True)
    closed = (units.sum(1).square().sum() - 7) / 42
    assert likeness(x, torch.ones(1, 7, dtype=torch.bool))[0].mean().item() == pytest.approx(closed.item())
