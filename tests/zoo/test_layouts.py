"""Places and three tables in the layouts that people use, against hand-made lists and hooks of the test's own."""

from __future__ import annotations

import pytest
import torch
from layouts import LAYOUTS, born, ids
from probe_toys import ListSink
from torch import Tensor, nn

from stabilitylab.probes import Watcher, find_sites
from stabilitylab.probes.places.attending import attends
from stabilitylab.probes.places.structure import is_namespace

EXACT = {"rel": 1e-10, "abs": 1e-14}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_places_are_those_named_by_hand(name: str) -> None:
    found, layout = find_sites(born(name)), LAYOUTS[name]
    assert [(site.name, site.layer) for site in found.layers] == list(layout.layers)
    taken = ["<" * (site.take == "input") + site.name for site in found.activations]
    assert taken == list(layout.activations)
    assert [site.name for site in found.outputs] == list(layout.outputs)
    assert [site.name for site in found.attentions] == list(layout.attentions)
    assert len(found.norms) == layout.norms
    numbers = dict(layout.layers)
    for site in (*found.norms, *found.activations, *found.attentions):
        home = next((path for path in numbers if f"{site.name}.".startswith(f"{path}.")), None)
        assert site.layer == (numbers[home] if home else 0)
    assert not [site.name for site in (*found.layers, *found.outputs, *found.inputs) if is_namespace(site.module)]


class Seen:
    """What the modules of a model took and yielded, by full name, and the gradients of what they yielded."""

    def __init__(self, model: nn.Module) -> None:
        self.taken: dict[str, Tensor] = {}
        self.yielded: dict[str, Tensor] = {}
        self.handles = [m.register_forward_hook(self._hook(path)) for path, m in model.named_modules() if path]

    def _hook(self, path: str):
        def hook(_: nn.Module, args: tuple, out: Tensor) -> None:
            if args[0].is_floating_point():
                self.taken[path] = args[0]
            if out.requires_grad:
                out.retain_grad()
            self.yielded[path] = out

        return hook

    def stop(self) -> None:
        for handle in self.handles:
            handle.remove()


def end_of(model: nn.Module, path: str) -> str:
    """The module that yields a layer's output: of a list of modules the last one."""
    while is_namespace(module := model.get_submodule(path)):
        path = f"{path}.{[name for name, _ in module.named_children()][-1]}"
    return path


@pytest.mark.parametrize("name", LAYOUTS)
def test_three_tables_equal_hooks_of_ones_own_and_every_place_fires(name: str) -> None:
    model, layout, batch = born(name), LAYOUTS[name], ids()
    seen = Seen(model)
    model(batch).square().mean().backward()
    seen.stop()
    model.zero_grad()
    sink = ListSink()
    with Watcher(model, sink, every=1, update_every=1, reference=lambda: model(batch)) as watcher:
        loss = model(batch).square().mean()
        loss.backward()
        watcher.step(loss=loss)
    tables = {table: dict(_rows(sink, table)) for table in sink.tables}
    norms = {site.name: float(seen.taken[site.name].detach().norm(dim=-1).mean()) for site in watcher.sites.norms}
    assert tables["ln_input"] == pytest.approx(norms, **EXACT)
    for path, _ in layout.layers:
        gradient = seen.yielded[end_of(model, path)].grad
        assert gradient is not None
        assert tables["activation_grad_norm"][path] == pytest.approx(float(gradient.norm()), **EXACT)
    first = tables["activation_grad_norm"]
    assert sum(value == value for value in first.values()) == len(first)  # all of them fired
    for place in layout.activations:
        value = seen.taken[place.lstrip("<")].detach()
        exact = float((value > 0).double().mean())
        assert tables["activation_sparsity"][place.lstrip("<")] == pytest.approx(exact, **EXACT)
    similar = tables["cosine_similarity"]
    for path, _ in layout.layers:
        if is_namespace(model.get_submodule(path)):
            assert similar[path] != similar[path]  # what enters such a layer is not known: no number, and no wrong one
        else:
            x, y = seen.taken[path].detach(), seen.yielded[path].detach()
            assert similar[path] == pytest.approx(float(torch.cosine_similarity(x, y, dim=-1).mean()), **EXACT)


def _rows(sink: ListSink, table: str):
    spec = sink.tables[table]
    for row, values in zip(spec.rows, sink.row(0)[1][table].values, strict=True):
        yield row.site, float(values[0])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("wq", "wk", "wv", "wo"), True),
        (("q_proj", "k_proj", "v_proj", "o_proj"), True),
        (("to_q", "to_kv", "to_out"), True),
        (("query", "key", "value", "dense"), True),
        (("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"), True),
        (("Wqkv", "out_proj"), True),
        (("3 c_attn", "c_proj"), True),  # of thrice the width
        (("3 in_proj", "out_proj"), True),
        (("gate_proj", "up_proj", "down_proj"), False),
        (("w1", "w2", "w3"), False),
        (("fc1", "fc2"), False),
        (("key", "receptance", "value"), False),  # RWKV's channel mixing has no queries
        (("in_proj", "x_proj", "dt_proj", "out_proj"), False),  # Mamba's
    ],
)
def test_attention_is_told_by_its_projections(names: tuple[str, ...], expected: bool) -> None:
    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    part = Part()
    for name in names:
        wide = name.startswith("3 ")
        part.add_module(name.removeprefix("3 "), nn.Linear(4, 12 if wide else 4))
    assert attends(part) is expected


class Skipping(nn.Module):
    """Its second layer is there and never called, and its output is read before the last module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(6, 2, 9, 0.0, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[2](self.layers[0](x))


def test_a_place_that_is_not_called_is_said_once_by_name(caplog: pytest.LogCaptureFixture) -> None:
    model, x, sink = Skipping(), torch.randn(2, 4, 6), ListSink()
    with Watcher(model, sink, every=1, update_every=1, reference=lambda: model(x)) as watcher:
        for _ in range(3):
            loss = model(x).sum()
            loss.backward()
            watcher.step(loss=loss)
    assert watcher.unseen["activation_grad_norm"] == ["layers.1"]
    assert watcher.unseen["ln_input"] == ["layers.1.norm1", "layers.1.norm2"]
    assert watcher.unseen["cosine_similarity"] == ["layers.1"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2  # one of each kind of pass
    assert said[0].startswith("row 0: layers.1.norm1, layers.1.norm2, layers.1 were not called in the training pass")
    assert "ln_input, activation_grad_norm" in said[0] or "activation_grad_norm, ln_input" in said[0]


def test_a_model_whose_places_are_all_called_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = born("nanogpt"), ids()
    with Watcher(model, ListSink(), every=1, update_every=1, reference=lambda: model(batch)) as watcher:
        loss = model(batch).square().mean()
        loss.backward()
        watcher.step(loss=loss)
    assert (watcher.unseen, caplog.records) == ({}, [])


def test_the_run_keeps_the_places_that_were_not_called(tmp_path) -> None:
    import stabilitylab
    from stabilitylab.store import Run

    model, x = Skipping(), torch.randn(2, 4, 6)
    with stabilitylab.watch(model, out=tmp_path / "run", every=1) as watcher:
        model(x).sum().backward()
        watcher.step(loss=1.0)
    assert Run.open(tmp_path / "run").manifest["places_unseen"]["activation_grad_norm"] == ["layers.1"]
