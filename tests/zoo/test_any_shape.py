"""Models of other shapes: convolutions, experts, shared layers, odd outputs, compiled code; and what is refused."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from animals import born, fed, transformers
from probe_toys import ListSink
from rest_slow import rest_slow
from torch import Tensor, nn
from torch._dynamo.utils import counters
from truth import product

from stabilitylab import sites
from stabilitylab.errors import UsageError
from stabilitylab.probes import Watcher, find_sites

EXACT = {"rel": 1e-12, "abs": 1e-15}


def cells(sink: ListSink, table: str, column: str, step: int = 0) -> dict[str, float]:
    spec = sink.tables[table]
    values = sink.row(step)[1][table].values[:, spec.columns.index(column)]
    return {row.site: float(value) for row, value in zip(spec.rows, values, strict=True)}


def one_row(model: nn.Module, run: Any, **options: Any) -> ListSink:
    sink = ListSink()
    with Watcher(model, sink, every=1, update_every=1, reference=run, **options) as watcher:
        loss = run()
        loss.backward()
        watcher.step(loss=loss)
    return sink


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 6], depths=[3, 2], layer_type="basic")
    ).double()


def test_a_convolutional_network_has_a_stack_a_stage_and_its_own_numbers() -> None:
    model = resnet()
    model.train()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)

    def run() -> Tensor:
        return model(images).logits.square().mean()

    seen: dict[str, tuple[Tensor, Tensor]] = {}
    names = [f"resnet.encoder.stages.{s}.layers.{i}" for s, n in ((0, 3), (1, 2)) for i in range(n)]
    sink = one_row(model, run)
    model.eval()
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda m, a, y, n=name: seen.__setitem__(n, (a[0], y)))
    with torch.no_grad():
        run()
    similar = cells(sink, "cosine_similarity", "raw")
    assert list(similar) == names
    for name, (x, y) in seen.items():
        if x.shape != y.shape:  # the first of a stage makes the map smaller
            assert np.isnan(similar[name])
            continue
        a, b = x.flatten(2), y.flatten(2)  # (B, C, H W): one cosine a pixel
        exact = ((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))).mean()
        # a pixel of zeros after the ReLU has no direction
        assert similar[name] == pytest.approx(float(exact), **EXACT, nan_ok=True)
    assert sum(not np.isnan(value) for value in similar.values()) >= 1
    assert "ln_input" not in sink.tables  # BatchNorm normalises over channels and positions
    assert set(cells(sink, "activation_grad_norm", "value")) >= set(names)
    sparse = cells(sink, "activation_sparsity", "nonzero_fraction")
    for name, (_, y) in seen.items():  # a layer of a ResNet ends in its ReLU
        assert sparse[f"{name}.activation"] == pytest.approx(float((y > 0).double().mean()), **EXACT)


class Shared(nn.Module):
    """One layer, called three times (ALBERT)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layers[0](x).hidden
        return x


@dataclass
class Out:
    steps: int
    hidden: Tensor


class Block(nn.Module):
    """Yields a dataclass, and takes its input by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.act, self.fc2 = nn.LayerNorm(6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Out:
        return Out(1, x + self.fc2(self.act(self.fc1(self.norm(x)))))


def test_a_layer_that_is_called_three_times_counts_three_times() -> None:
    torch.manual_seed(1)
    model, x = Shared().double(), torch.randn(2, 5, 6, dtype=torch.float64)
    entering: list[Tensor] = []
    leaving: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor], out: Out) -> None:
        if model.training:
            out.hidden.retain_grad()
            entering.append(args[0])
            leaving.append(out.hidden)

    handle = model.layers[0].register_forward_hook(keep)
    sink = one_row(model, lambda: model(x).square().mean())
    handle.remove()
    exact = torch.stack([one.detach().norm(dim=-1).mean() for one in entering]).mean()
    assert cells(sink, "ln_input", "value") == {"layers.0.norm": pytest.approx(float(exact), **EXACT)}
    flow = torch.stack([one.grad.square().sum() for one in leaving if one.grad is not None])
    assert len(flow) == 3
    assert cells(sink, "activation_grad_norm", "value")["layers.0"] == pytest.approx(float(flow.sum().sqrt()), **EXACT)


def test_tokens_that_a_router_sends_to_experts_count_whatever_the_mask_says() -> None:
    batch = fed("mixtral", 0)
    model = born("mixtral")
    kept: list[Tensor] = []
    sink = one_row(model, lambda: model(**batch).loss, mask=batch["attention_mask"].bool())
    model.eval()
    experts = model.get_submodule("model.layers.0.mlp.experts")
    experts.register_forward_pre_hook(lambda m, args: kept.append(product(m, *args)))
    with torch.no_grad():
        model(**batch)
    assert sum(len(part) for part in kept) == batch["input_ids"].numel() * 2  # two experts a token, padding included
    exact = float((torch.cat(kept) > 0).double().mean())
    recorded = cells(sink, "activation_sparsity", "nonzero_fraction")["model.layers.0.mlp.experts"]
    assert recorded == pytest.approx(exact, **EXACT)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from inside torch._dynamo
@pytest.mark.parametrize(
    ("name", "how"),
    rest_slow(
        itertools.product(("llama", "gpt2", "bert", "t5"), ("function", "method", "layers")),
        [("bert", "layers")],
        [("llama", "function"), ("gpt2", "method"), ("t5", "layers")],
    ),
)
def test_compiled_models_keep_their_graphs_and_have_all_tables(name: str, how: str) -> None:
    def counted(watched: bool) -> tuple[Counter[str], Counter[str], ListSink]:
        torch._dynamo.reset()
        counters.clear()
        batch, model, sink = fed(name, 0), born(name), ListSink()
        called = compiled(model, how)
        reference = lambda: called(**batch)  # noqa: E731
        with (
            Watcher(called, sink, every=1, update_every=1, reference=reference) if watched else nullcontext() as watcher
        ):
            for _ in range(2):
                loss = called(**batch).loss
                loss.backward()
                if watcher is not None:
                    watcher.step(loss=loss)
                model.zero_grad()
        return Counter(counters["stats"]), Counter(counters["graph_break"]), sink

    plain, plain_breaks, _ = counted(watched=False)
    watched, breaks, sink = counted(watched=True)
    assert (watched["unique_graphs"], breaks) == (plain["unique_graphs"], plain_breaks)
    batch, model = fed(name, 0), born(name)
    exact = one_row(model, lambda: model(**batch).loss)
    assert set(sink.tables) == set(exact.tables) >= {"ln_input", "activation_grad_norm", "cosine_similarity"}
    for table, spec in exact.tables.items():
        if "value" in spec.columns or table == "activation_sparsity":
            column = "value" if "value" in spec.columns else "active_fraction"
            assert cells(sink, table, column) == pytest.approx(cells(exact, table, column), rel=1e-6, nan_ok=True)


def compiled(model: nn.Module, how: str) -> nn.Module:
    if how == "function":
        return torch.compile(model, backend="eager")  # pyright: ignore
    if how == "method":
        model.compile(backend="eager")
    else:
        for stack in find_sites(model).stacks:
            for _, _, layer in stack.numbered():
                layer.compile(backend="eager")
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from inside torch._dynamo
def test_layers_that_are_compiled_one_by_one_keep_their_own_places() -> None:
    torch._dynamo.reset()
    model, x = nn.Sequential(), torch.randn(2, 5, 6)
    plain = [nn.TransformerEncoderLayer(6, 2, 9, 0.0, batch_first=True) for _ in range(2)]
    model.layers = nn.ModuleList(torch.compile(layer, backend="eager") for layer in plain)

    def run() -> Tensor:
        y = x
        for layer in model.layers:
            y = layer(y)
        return y.square().mean()

    sink = one_row(model, run)
    assert set(cells(sink, "activation_grad_norm", "value")) == {"layers.input", "layers.0", "layers.1"}
    assert all(value > 0 for name, value in cells(sink, "activation_grad_norm", "value").items() if "input" not in name)
    assert list(cells(sink, "ln_input", "value")) == [f"layers.{n}.norm{k}" for n in (0, 1) for k in (1, 2)]
    assert all(value > 0 for value in cells(sink, "ln_input", "value").values())


class Flat(nn.Module):
    """Norms over heads, and a feed-forward block that sees tokens in one long row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"norm": nn.LayerNorm(6), "q_norm": nn.LayerNorm(3)})])

    def forward(self, x: Tensor, heads_first: bool) -> Tensor:
        x = self.layers[0]["norm"](x.flatten(0, 1)).view_as(x)
        x = x.unflatten(-1, (2, 3))
        return self.layers[0]["q_norm"](x.transpose(1, 2) if heads_first else x)


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_mask_fits_flattened_tokens_and_tokens_of_heads(heads_first: bool) -> None:
    model, x = Flat().double(), torch.randn(2, 5, 6, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]).bool()
    sink = one_row(model, lambda: model(x, heads_first).square().sum(), mask=mask, probes="ln_input")
    recorded = cells(sink, "ln_input", "value")
    assert recorded["layers.0.norm"] == pytest.approx(float(x.norm(dim=-1)[mask].mean()), **EXACT)
    heads = torch.nn.functional.layer_norm(x, (6,)).unflatten(-1, (2, 3)).norm(dim=-1)[mask]
    assert recorded["layers.0.q_norm"] == pytest.approx(float(heads.mean()), **EXACT)


def test_a_mask_that_may_mean_either_is_refused() -> None:
    model, x = Flat(), torch.randn(2, 2, 6)
    with pytest.raises(UsageError, match=r"mask has shape \(2, 2\) where stack 'layers' has tokens \(2, 2, 2\)"):
        one_row(model, lambda: model(x, True).sum(), mask=torch.ones(2, 2).bool(), probes="ln_input")


class Odd(nn.Module):
    """Layers as attributes: no list says that they are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.TransformerEncoderLayer(6, 2, 9, batch_first=True), nn.Linear(6, 6)
        self.third, self.end = nn.TransformerEncoderLayer(6, 2, 9, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.third(self.second(self.first(x))))


def test_places_may_be_chosen_by_kind() -> None:
    own = {"layers": "first|third", "norms": r".*\.norm1", "activations": r"\w+\.linear2", "outputs": "third"}
    found = find_sites(Odd(), own=own)
    assert [(s.name, s.stack, s.layer) for s in found.layers] == [("first", "layers", 1), ("third", "layers", 2)]
    assert [(s.name, s.layer) for s in found.norms] == [("first.norm1", 1), ("third.norm1", 2)]
    assert [(s.name, s.take) for s in found.activations] == [("first.linear2", "input"), ("third.linear2", "input")]
    assert [s.name for s in found.outputs] == ["third"]
    model, x = Odd(), torch.randn(2, 3, 6)
    sink = one_row(model, lambda: model(x).sum(), sites=own | {"ln_input": "third"})
    assert list(cells(sink, "ln_input", "value")) == ["third.norm1"]
    assert list(cells(sink, "cosine_similarity", "raw")) == ["first", "third"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"layers": "fist"}, "no module's full name matches 'fist' for layers; near it are first"),
        ({"layers": "zzz"}, "no module's full name matches 'zzz' for layers: give a name of model.named_modules()."),
        (
            {"ln_inputs": "."},
            "'ln_inputs' is neither a kind (layers, norms, activations, outputs) nor a probe. Did",
        ),
    ],
)
def test_places_that_do_not_exist_are_named(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        Watcher(Odd(), ListSink(), sites=given)
    assert sentence in str(caught.value)


def test_the_table_of_places_says_what_was_matched_and_what_was_not() -> None:
    shown = str(sites(born("llama")))
    lines = [line.split() for line in shown.splitlines()]
    assert lines[0] == ["kind", "stack", "layers", "count", "places", "module", "probes"]
    assert lines[2][:8] == [
        "norms",
        "model",
        "1-2",
        "2",
        "model.layers.*.input_layernorm",
        "input",
        "of",
        "LlamaRMSNorm",
    ]
    assert "ln_input" in lines[2][8]
    assert ["activations", "model", "1-2", "2", "model.layers.*.mlp.down_proj", "input", "of", "Linear"] in [
        line[:8] for line in lines
    ]
    assert "no layers found; nearest are first (TransformerEncoderLayer)" in str(sites(Odd()))
    assert "third.*" not in str(sites(Odd(), sites={"layers": "first|third"}))


def test_what_cannot_be_watched_is_refused_in_one_sentence() -> None:
    with pytest.raises(UsageError, match="use DistributedDataParallel or one device"):
        Watcher(nn.DataParallel(Odd()), ListSink())
    split = Odd()
    split.end.to("meta")
    with pytest.raises(UsageError, match=r"parameters lie on several devices \(cpu, meta\)"):
        Watcher(split, ListSink())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from inside torch._dynamo
def test_one_compiled_layer_among_others_keeps_its_number_and_its_places() -> None:
    torch._dynamo.reset()
    model, x = nn.Sequential(), torch.randn(2, 5, 6)
    layers = [nn.TransformerEncoderLayer(6, 2, 9, 0.0, batch_first=True) for _ in range(3)]
    model.layers = nn.ModuleList([layers[0], torch.compile(layers[1], backend="eager"), layers[2]])

    def run() -> Tensor:
        y = x
        for layer in model.layers:
            y = layer(y)
        return y.square().mean()

    sink = ListSink()
    with Watcher(model, sink, every=1) as watcher:
        run().backward()
        watcher.step(loss=1.0)
    assert [(row.site, row.layer) for row in sink.tables["ln_input"].rows] == [
        (f"layers.{n}.norm{k}", n + 1) for n in range(3) for k in (1, 2)
    ]
    assert (sink.rows[0][2]["ln_input"].values > 0).all()
    assert {row.layer for row in sink.tables["grad_norm"].rows} == {1, 2, 3}
