"""``stabilitylab.tap`` inside compiled code: the same graphs, the same training, the tables of eager code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rest_slow import rest_slow
from torch import Tensor
from torch._dynamo.utils import counters

from stabilitylab import tapping
from stabilitylab.probes import Watcher

sys.path.append(str(Path(__file__).parents[1] / "probes"))
from probe_toys import ListSink
from tap_toys import BareDecoder, ids

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
PROBES = "ln_input,residual_norm,activation_grad_norm,activation_sparsity,outliers"
EXACT = {"rel": 1e-9, "abs": 1e-12}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tapping, "_shown", None)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(how: str, watched: bool, backend: str, **options: Any) -> tuple[list[Tensor], ListSink, int]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model, sink = BareDecoder(**options).double(), ListSink()
    watcher = None
    if watched:
        watcher = Watcher(model, sink, probes=PROBES, every=2, update_every=2, reference=lambda: model(ids(100)))
    if how == "method":
        model.compile(backend=backend, fullgraph=not options.get("recompute"))
    for block in model.blocks if how == "blocks" else ():
        block.compile(backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for t in range(4):
        for part in range(2):
            model(ids(2 * t + part)).square().mean().backward()
        if watcher is not None:
            watcher.step()
        optimizer.step()
        optimizer.zero_grad()
    if watcher is not None:
        watcher.close()
    return [p.detach() for p in model.parameters()], sink, counters["stats"]["unique_graphs"]


def check(how: str, backend: str, **options: Any) -> None:
    plain, _, graphs = trained(how, False, backend, **options)
    parameters, sink, own = trained(how, True, backend, **options)
    assert own == graphs
    assert all(map(torch.equal, plain, parameters))
    _, eager, _ = trained("not", True, backend, **options)
    assert set(sink.tables) == set(eager.tables)
    for name, table in eager.tables.items():
        assert sink.tables[name].rows == table.rows
        for step, _, _ in eager.rows:
            if name in eager.row(step)[1]:
                assert sink.column(0, name, table.main) == pytest.approx(eager.column(0, name, table.main), **EXACT)
    assert not sink.absent(2, "ln_input")
    assert not sink.absent(2, "activation_grad_norm")
    assert "ln_input" not in sink.row(1)[1]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["method", "blocks"])
def test_graphs_training_and_tables_are_those_of_the_unwatched_and_of_eager_code(how: str) -> None:
    check(how, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("recompute", rest_slow(["reentrant", "not"], ["not"]))
def test_checkpointed_layers_count_once(recompute: str) -> None:
    check("method", "aot_eager", recompute=recompute)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inside torch._inductor
@pytest.mark.parametrize("how", ["method", "blocks"])
def test_the_same_holds_under_inductor(how: str) -> None:
    check(how, "inductor")


@pytest.mark.slow
def test_a_name_alone_is_one_place_in_compiled_code_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    _, sink, _ = trained("method", True, "aot_eager", owner=False)
    assert set(sink.column(0, "ln_input", "value")) == {"norm1", "norm2"}
    assert list(sink.column(2, "activation_sparsity", "nonzero_fraction")) == ["inner"]
    assert not sink.absent(2, "activation_sparsity")
    said = [record.getMessage() for record in caplog.records if "tap" in record.getMessage()]
    assert len(said) == 1
    assert "tap norm1, tap middle, tap norm2 ran several times in one pass" in said[0]
    assert "write tap(x, name, self) in compiled code" in said[0]


def test_compiled_code_of_a_process_that_never_watched_holds_nothing_of_it() -> None:
    model = BareDecoder(owner=False)
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(model, backend=keep, fullgraph=True)(ids())
    assert len(graphs) == 1
    assert "stabilitylab" not in graphs[0].code
