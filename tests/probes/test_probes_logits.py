"""log Z and the size of output logits."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from probe_toys import VOCAB, ListSink, Toy
from seen import batches, real_tokens, reference_of, seen_by
from torch import nn
from torch.optim.swa_utils import AveragedModel

from stabilitylab.errors import UsageError
from stabilitylab.probes import Watcher, find_sites


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("calls", [1, 2])
def test_log_z_of_real_tokens(dtype: torch.dtype, calls: int) -> None:
    model, several = Toy().to(dtype), batches(calls)
    with torch.no_grad():
        model.head.weight.mul_(10)
    sink = reference_of(model, several, "logits")
    tokens = real_tokens(several, "decoder", seen_by(model, several, ["head"])["head"])
    log_z = [math.log(math.fsum(math.exp(logit) for logit in x)) for x in tokens]
    expected = {
        "log_z": statistics.fmean(log_z),
        "mean_logit": statistics.fmean(statistics.fmean(x) for x in tokens),
        "max_abs": max(abs(logit) for x in tokens for logit in x),
    }
    for column, number in expected.items():
        close = pytest.approx({"head": number}, rel=1e-9 if dtype is torch.float64 else 1e-5, abs=1e-6)
        assert sink.column(0, "logits", column) == close
    p99 = np.quantile(np.abs(log_z), 0.99, method="inverted_cdf")
    assert sink.column(0, "logits", "abs_log_z_p99")["head"] == pytest.approx(p99, rel=0.0222)


@pytest.mark.parametrize("shift", [0.0, -100.0])
def test_equal_logits_have_log_z_log_v_plus_their_value(shift: float) -> None:
    model = Toy().double()
    nn.init.zeros_(model.head.weight)
    nn.init.constant_(model.head.bias, shift)
    sink = reference_of(model, batches(1), "logits")
    numbers = {c: sink.column(0, "logits", c)["head"] for c in sink.tables["logits"].columns}
    log_z = math.log(VOCAB) + shift
    assert numbers["abs_log_z_p99"] == pytest.approx(abs(log_z), rel=0.0222)  # a negative one has a size too
    del numbers["abs_log_z_p99"]
    assert numbers == pytest.approx({"log_z": log_z, "mean_logit": shift, "max_abs": abs(shift)})


def test_large_logits_do_not_overflow() -> None:
    model = Toy()
    nn.init.zeros_(model.head.weight)
    nn.init.constant_(model.head.bias, 3e4)
    numbers = reference_of(model, batches(1), "logits").column(0, "logits", "log_z")
    assert numbers["head"] == pytest.approx(3e4 + math.log(VOCAB), rel=1e-6)


class Bert(nn.Module):
    """A pooler, and perhaps a head that the model names itself."""

    def __init__(self, head: nn.Module | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 4)) for _ in range(2))
        self.pooler = nn.Linear(4, 4)
        self.first, self.second = nn.Linear(4, 7), nn.Linear(4, 7)
        self.head = head

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head


def test_where_the_logits_are() -> None:
    head = nn.Linear(4, 9)
    assert [site.name for site in find_sites(Bert(head)).logits] == ["head"]
    assert [site.name for site in find_sites(Bert(None)).logits] == ["second"]  # the last as wide as an embedding
    model = Bert(None)
    model.first = model.second = None
    assert find_sites(model).logits == ()  # neither the pooler nor a layer's own linear
    for wrapped in (torch.compile(Bert(head), backend="eager"), AveragedModel(Bert(head))):
        assert isinstance(wrapped, nn.Module)
        assert [site.name for site in find_sites(wrapped).logits] == ["head"]
    with pytest.raises(UsageError, match="'logits' finds no projection onto a vocabulary in this model"):
        Watcher(model, ListSink(), probes="logits", reference=lambda: None)
    assert [(site.name, site.stack) for site in find_sites(Toy()).logits] == [("head", "decoder")]
