"""Models under torch.compile: the same graphs, the same training bit for bit, and the tables of eager code."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compiled_toys import GPT, batches
from rest_slow import rest_slow
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from stabilitylab.probes import Watcher

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # from torch._dynamo
WAYS = ("function", "method", "blocks", "listed")
TABLES = (
    "activation_grad_norm",
    "activation_sparsity",
    "attention",
    "grad_norm",
    "layer_branch",
    "ln_input",
    "outliers",
)
EXACT = {"rel": 1e-9, "abs": 1e-12}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class ListSink:
    def __init__(self) -> None:
        self.tables: dict[str, Any] = {}
        self.rows: list[tuple[int, Any, Any]] = []

    def open(self, tables: Any) -> None:
        self.tables = {table.name: table for table in tables}

    def append(self, step: int, metrics: Any, tables: Any) -> None:
        self.rows.append((step, dict(metrics), dict(tables)))

    def close(self) -> None: ...


def compiled(model: GPT, how: str, backend: str) -> Callable[[Tensor], Tensor]:
    """The same model, compiled in one of the ways that people use."""
    if how == "function":
        return torch.compile(model, backend=backend, fullgraph=True)
    if how == "method":
        model.compile(backend=backend, fullgraph=True)
    elif how == "blocks":
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
    elif how == "listed":
        model.blocks = nn.ModuleList(torch.compile(block, backend=backend, fullgraph=True) for block in model.blocks)
    return model


class Run:
    """Some updates of one model: its parameters at the end, what was recorded, and what the compiler did."""

    def __init__(self, how: str, backend: str, watched: str, updates: int = 7, micro: int = 2, **options: Any) -> None:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = GPT().double()
        self.sink = ListSink()
        options = {"every": 3, "probes": "all", "update_every": 1000} | options
        run = compiled(model, how, backend) if watched != "before" else model
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        seen = run if isinstance(run, nn.Module) and watched == "it" else model
        watcher = None if watched == "no" else Watcher(seen, self.sink, optimizer=optimizer, **options)
        run = compiled(model, how, backend) if watched == "before" else run
        data = batches()
        for _ in range(updates):
            for _ in range(micro):
                tokens = next(data)
                loss = F.cross_entropy(run(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
            if watcher is not None:
                watcher.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
        if watcher is not None:
            watcher.finish()
            watcher.close()
        self.model, self.run, self.watcher = model, run, watcher
        self.parameters = [p.detach().clone() for p in model.parameters()]
        self.graphs = counters["stats"]["unique_graphs"]
        self.breaks = dict(counters["graph_break"])
        self.recompiles = dict(counters["recompiles"]) if "recompiles" in counters else {}

    def cells(self, table: str, step: int) -> dict[str, Any]:
        cells = next(tables for at, _, tables in self.sink.rows if at == step)[table]
        names = [row.site.replace("._orig_mod", "") for row in self.sink.tables[table].rows]
        return dict(zip(names, cells.values.tolist(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("watched", rest_slow(["it", "before"], ["it"]))
@pytest.mark.parametrize("how", rest_slow(WAYS, ["method", "blocks"]))
def test_graphs_training_and_tables_are_those_of_the_unwatched_and_of_eager_code(how: str, watched: str) -> None:
    check(how, watched, "aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inside torch._inductor
@pytest.mark.parametrize("how", rest_slow(WAYS, ["method", "blocks"], ()))
def test_the_same_holds_under_inductor(how: str) -> None:
    check(how, "it", "inductor")


def check(how: str, watched: str, backend: str) -> None:
    plain = Run(how, backend, "no")
    eager = Run("not", backend, "it")
    seen = Run(how, backend, watched)
    assert (seen.graphs, seen.breaks) == (plain.graphs, {})
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters, seen.parameters, strict=True))
    assert [step for step, _, tables in seen.sink.rows if "ln_input" in tables] == [0, 3, 6]
    assert set(seen.sink.tables) == set(eager.sink.tables)
    for table in set(eager.sink.tables) - {"attention_heads"}:  # which names what is compiled, and has no number of it
        if "value" not in table and table in seen.sink.rows[0][2]:
            assert set(seen.cells(table, 0)) == set(eager.cells(table, 0))
            for site, values in eager.cells(table, 0).items():
                assert seen.cells(table, 0)[site] == pytest.approx(values, nan_ok=True, **EXACT), (table, site)


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_the_held_out_pass_adds_nothing_to_the_next_row(how: str) -> None:
    """It runs module by module, so that the hooks of the training pass are called too."""
    rows, held_out = [], torch.arange(12)[None]
    for way in ("not", how):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = GPT().double()
        run = compiled(model, way, "aot_eager") if way != "not" else model
        sink = ListSink()
        reference = partial(run, held_out)
        probes = "ln_input,residual_norm,model_update"
        with Watcher(model, sink, every=1, update_every=1, reference=reference, probes=probes) as watcher:
            for tokens in itertools.islice(batches(), 2):
                run(tokens[:, :-1]).square().mean().backward()
                watcher.step()
        rows.append({name: cells.values for name, cells in sink.rows[1][2].items() if name != "model_update"})
    for table, values in rows[0].items():
        np.testing.assert_allclose(rows[1][table], values, rtol=1e-12, err_msg=table)


@pytest.mark.slow
def test_many_layers_share_their_code_as_they_do_unwatched() -> None:
    """Twelve blocks are more than the recompilations that are allowed of one function."""
    graphs = []
    for watched in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = GPT(layers=12)
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=True)
        sink = ListSink()
        with Watcher(model, sink, every=1) if watched else nullcontext() as watcher:
            model(next(batches())).square().mean().backward()
            if watcher is not None:
                watcher.step(loss=1.0)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 1]
    assert not sink.rows[0][2]["activation_grad_norm"].absent.any()
    assert not sink.rows[0][2]["ln_input"].absent.any()


@pytest.mark.slow
def test_what_was_compiled_before_is_compiled_once_more_and_said(caplog: pytest.LogCaptureFixture) -> None:
    model, data, sink = GPT(), batches(), ListSink()
    run = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        run(next(data)).square().mean().backward()
    assert counters["stats"]["unique_graphs"] == 1
    counters.clear()
    with caplog.at_level(logging.INFO, "stabilitylab"), Watcher(run, sink, every=2) as watcher:
        for _ in range(3):
            run(next(data)).square().mean().backward()
            watcher.step(loss=1.0)
    assert [record.message for record in caplog.records if record.name == "stabilitylab"] == [
        "the model is compiled already, and will be once more at its next call, with the probes inside."
    ]
    assert counters["stats"]["unique_graphs"] == 1
    for _, _, tables in sink.rows[0], sink.rows[2]:
        assert (tables["ln_input"].values > 0).all()
        assert (tables["activation_grad_norm"].values > 0).all()
    assert "ln_input" not in sink.rows[1][2]
    counters.clear()
    run(next(data)).square().mean().backward()  # after the watch: no compilation more, and nothing recorded
    assert not counters["stats"]
    assert len(sink.rows) == 3
    again = ListSink()
    with Watcher(run, again, every=1, probes="ln_input") as watcher:
        run(next(data)).square().mean().backward()
        watcher.step(loss=1.0)
    assert (again.rows[0][2]["ln_input"].values > 0).all()
    assert len(model.ln_f._forward_hooks) == 1


@pytest.mark.slow
def test_a_model_that_is_compiled_behind_its_watchers_back_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model, data = GPT(), batches()
    run = torch.compile(model, backend="eager")
    run(next(data))
    with Watcher(model, ListSink(), every=1, probes="ln_input") as watcher:  # which does not see that it was compiled
        run(next(data)).square().mean().backward()
        watcher.step(loss=1.0)
    assert "a model that torch.compile has run already as what torch.compile returned" in caplog.text


@pytest.mark.slow
def test_a_model_that_is_compiled_in_the_middle_of_a_run_is_seen_again(caplog: pytest.LogCaptureFixture) -> None:
    """Its first compiled call is at a row that is not probed, when no hook is there."""
    model, data, sink = GPT(), batches(), ListSink()
    with Watcher(model, sink, every=2, probes="ln_input") as watcher:
        for row in range(7):
            if row == 1:
                model.compile(backend="eager")
            model(next(data)).square().mean().backward()
            watcher.step(loss=1.0)
    probed = {step: tables["ln_input"] for step, _, tables in sink.rows if "ln_input" in tables}
    assert not probed[0].absent.any()
    assert probed[2].absent.all()
    assert not probed[4].absent.any()
    assert not probed[6].absent.any()
    assert sum("row 2: the forward pass was not seen" in record.message for record in caplog.records) == 1


@pytest.mark.slow
def test_validation_between_updates_is_not_recorded() -> None:
    torch.manual_seed(0)
    model, data, sink = GPT().double(), batches(), ListSink()
    run = torch.compile(model, backend="aot_eager")
    with Watcher(run, sink, every=1, probes="ln_input,activation_grad_norm") as watcher:
        tokens = next(data)
        run(tokens).square().mean().backward()
        alone = one_row(tokens)
        with torch.no_grad():
            run(next(data))
        model.eval()
        run(next(data)).square().mean()
        model.train()
        watcher.step(loss=1.0)
    for table in ("ln_input", "activation_grad_norm"):
        assert sink.rows[0][2][table].values == pytest.approx(alone[table].values, **EXACT)


def one_row(tokens: Tensor) -> Any:
    torch.manual_seed(0)
    model, sink = GPT().double(), ListSink()
    with Watcher(model, sink, every=1, probes="ln_input,activation_grad_norm") as watcher:
        model(tokens).square().mean().backward()
        watcher.step(loss=1.0)
    return sink.rows[0][2]


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_inside_compiled_code_count_once(reentrant: bool) -> None:
    data = next(batches())
    found = []
    for backend in ("", "aot_eager"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, sink = Checkpointed(reentrant).double(), ListSink()
        run = torch.compile(model, backend=backend) if backend else model
        with Watcher(run, sink, every=1, probes="ln_input,activation_grad_norm") as watcher:
            run(data).square().mean().backward()
            watcher.step(loss=1.0)
        found.append(sink.rows[0][2])
    for table in ("ln_input", "activation_grad_norm"):
        assert found[1][table].values == pytest.approx(found[0][table].values, **EXACT)


class Checkpointed(GPT):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.lm_head(self.ln_f(x))


def test_copies_and_pickles_of_a_watched_model_carry_no_hook(tmp_path: Any) -> None:
    model, sink = GPT(), ListSink()
    with Watcher(model, sink, every=1) as watcher:
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        for other in (twin, again, loaded):
            other(next(batches())).square().mean().backward()
        tokens = next(batches())
        model(tokens).square().mean().backward()
        watcher.step(loss=1.0)
    grads = [float(each.blocks[0].ln_1.weight.grad.norm()) for each in (model, twin, again, loaded)]
    assert grads == pytest.approx([grads[0]] * 4)
    squares = 0.0

    def note(_: Any, __: Any, y: Tensor) -> None:
        y.register_hook(lambda gradient: add(gradient))

    def add(gradient: Tensor) -> None:
        nonlocal squares
        squares += float(gradient.square().sum())

    model.blocks[0].register_forward_hook(note)
    model(tokens).square().mean().backward()
    row = [row.site for row in sink.tables["activation_grad_norm"].rows].index("blocks.0")
    # of one call, not of four
    assert sink.rows[0][2]["activation_grad_norm"].values[row, 0] == pytest.approx(squares**0.5, rel=1e-5)


@pytest.mark.slow
def test_code_that_is_shared_with_an_unwatched_model_of_the_class_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    data, sink, own = batches(), ListSink(), ListSink()
    teacher, student, watched = GPT(), GPT(), type("Watched", (GPT,), {})()
    for model in (teacher, student, watched):
        model.compile(backend="eager")
    with (
        Watcher(student, sink, every=1, probes="ln_input") as w,
        Watcher(watched, own, every=1, probes="ln_input") as v,
    ):
        for _ in range(3):
            tokens = next(data)
            with torch.enable_grad():
                teacher(tokens)
            for model, watcher in ((student, w), (watched, v)):
                model(tokens).square().mean().backward()
                watcher.step(loss=1.0)
    told = [record.message for record in caplog.records if record.name == "stabilitylab"]
    assert sum("not seen, since the model is compiled already" in text for text in told) == 1
    assert sum("another model of its class may be compiled without probes" in text for text in told) == 1
    assert not any(tables["ln_input"].absent.any() for _, _, tables in own.rows)


@pytest.mark.parametrize("earlier", rest_slow([False, True], [False]))
def test_a_compiled_loss_function_says_that_no_first_batch_is_seen(
    earlier: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, data = GPT(1), batches()

    def loss_of(tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    compiled = torch.compile(loss_of, backend="aot_eager")
    if earlier:  # its code has no probes
        compiled(next(data)).backward()
    sink = ListSink()
    with (
        caplog.at_level(logging.WARNING, "stabilitylab"),
        Watcher(
            model, sink, probes="ln_input,cosine_similarity", every=1, update_every=1, reference="first batch"
        ) as w,
    ):
        for _ in range(2):
            loss = compiled(next(data))
            loss.backward()
            w.step(loss=loss)
    why = "no forward of the model in training mode with gradients on was seen"
    why = why if earlier else "the model runs inside a compiled function, where its arguments are not seen"
    told = [text for text in w.loop_warnings if "reference pass" in text]
    assert told == [
        f"row 0: the reference pass has no batch, since {why}: give reference=, a function that runs the model on a "
        "fixed batch"
    ]
    assert f"{told[0]}." in caplog.messages
    assert not any("not called in the reference pass" in text for text in caplog.messages)
    assert w.unseen["cosine_similarity"] == ["blocks.0"]
    assert "cosine_similarity" not in sink.rows[0][2]


@pytest.mark.slow
def test_a_reference_beside_a_compiled_loss_function_is_recorded() -> None:
    model, data, sink = GPT(1), batches(), ListSink()
    compiled = torch.compile(lambda tokens: model(tokens).square().mean(), backend="aot_eager")
    fixed = next(batches(seed=4))
    with Watcher(model, sink, probes="cosine_similarity", every=1, update_every=1, reference=lambda: model(fixed)) as w:
        loss = compiled(next(data))
        loss.backward()
        w.step(loss=loss)
    assert np.isfinite(sink.rows[0][2]["cosine_similarity"].values).all()
    assert w.loop_warnings == []


@pytest.mark.parametrize("how", ["method", "blocks"])
def test_two_backwards_through_one_forward_add_up_before_the_norm(how: str) -> None:
    """As in eager code: the first row has no number, the others that of ``retain_grad``."""
    torch.manual_seed(0)
    plain = GPT().double()
    model = copy.deepcopy(plain)
    forward = compiled(model, how, "aot_eager")
    sink = ListSink()

    def backward(logits: Tensor) -> None:
        logits.square().mean().backward(retain_graph=True)
        (logits.sum(-1).square().mean() / -3).backward()

    given = list(itertools.islice(batches(), 6))
    with Watcher(model, sink, probes="activation_grad_norm", reference=None, every=1) as watcher:
        for t in range(3):
            model.zero_grad()
            for part in range(2):
                backward(forward(given[2 * t + part]))
            watcher.step()
    kept: list[Tensor] = []
    for block in plain.blocks:
        block.register_forward_hook(lambda _m, _a, y: (y.retain_grad(), kept.append(y))[0])
    for t in range(3):
        kept.clear()
        for part in range(2):
            backward(plain(given[2 * t + part]))
        layout, cells = sink.tables["activation_grad_norm"], sink.rows[t][2]["activation_grad_norm"]
        found = {row.site: float(value) for row, value in zip(layout.rows, cells.values[:, 0], strict=True)}
        depth = len(plain.blocks)
        for number in range(depth):
            if not t:
                assert np.isnan(found[f"blocks.{number}"])
                continue
            gradients = [y.grad.flatten() for y in kept[number::depth] if y.grad is not None]
            assert found[f"blocks.{number}"] == pytest.approx(float(torch.cat(gradients).norm()), **EXACT)
