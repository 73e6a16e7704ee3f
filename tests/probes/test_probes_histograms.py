"""The counts of histograms against numpy's, over micro-batches, padding, dtypes and values that have no size."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of, masks, train

from stabilitylab.errors import UsageError
from stabilitylab.histograms import COLUMNS, HIGH, LOW, NONFINITE, TABLES, ZERO
from stabilitylab.probes import PROBES, Watcher
from stabilitylab.probes.library import histograms

SIZES = [0.0, *(2.0**power for power in range(LOW, HIGH + 1)), math.inf]


def counted(values: np.ndarray) -> np.ndarray:
    """By numpy.histogram, one side after the other. A bin of the negative side is open at its smaller end too."""
    values = values.astype(np.float64).ravel()
    finite = values[np.isfinite(values)]
    largest = np.finfo(np.float64).max  # numpy's last bin holds its end, inf is no edge of it
    edges = [*SIZES[:-1], largest]
    plus, minus = (np.histogram(side, edges)[0] for side in (finite[finite > 0], -finite[finite < 0]))
    return np.array([*minus[::-1], (values == 0).sum(), *plus, len(values) - len(finite)])


def of(sink: ListSink, table: str, step: int = 0) -> dict[str, np.ndarray]:
    """Site -> counts of all columns."""
    cells = sink.row(step)[1][table]
    assert sink.tables[table].columns == COLUMNS
    return {row.site: cells.values[at] for at, row in enumerate(sink.tables[table].rows)}


def test_the_columns_go_from_the_most_negative_to_the_most_positive() -> None:
    assert COLUMNS[0] == "-above"
    assert COLUMNS[ZERO - 1 : ZERO + 2] == ("-below", "zero", "+below")
    assert COLUMNS[-3:] == ("+2^15", "+above", "nonfinite")
    assert NONFINITE == len(COLUMNS) - 1 == 165
    assert set(TABLES) == {"histograms", *PROBES["histograms"].brings}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_edges_zeros_and_what_is_not_finite(dtype: torch.dtype) -> None:
    """A power of two begins its bin, the number before it ends the one below, in every dtype."""
    powers = torch.tensor([2.0**power for power in range(-70, 20)], dtype=torch.float64).to(dtype)
    powers = powers[powers.isfinite() & (powers > 0)]
    before = torch.nextafter(powers, torch.zeros_like(powers))
    special = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-300, -1e300], dtype=torch.float64).to(dtype)
    values = torch.cat([powers, before, -powers, -before, special])
    found = histograms.counts(values).numpy()
    assert found.tolist() == counted(values.double().numpy()).tolist()
    assert found.sum() == values.numel()
    assert found[NONFINITE] >= 3
    assert histograms.counts(torch.tensor(2.0**3, dtype=dtype)).numpy()[COLUMNS.index("+2^3")] == 1


def test_sparse_complex_empty_and_masked_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(histograms.CHUNK, "cpu", 7)  # parts that end within a row of tokens
    draw = torch.Generator().manual_seed(0)
    dense = torch.randn(9, 5, generator=draw) * 1e-3
    dense[2:7] = 0
    assert histograms.counts(dense.to_sparse(1)).tolist() == counted(dense.numpy()).tolist()
    both = torch.complex(dense, -dense)
    assert histograms.counts(both).tolist() == (counted(dense.numpy()) + counted(-dense.numpy())).tolist()
    assert histograms.counts(torch.zeros(0, 3)).sum() == 0
    values, real = torch.randn(3, 4, 5, generator=draw), torch.rand(3, 4, generator=draw) < 0.5
    values[~real] = math.nan
    assert histograms.counts(values, real).tolist() == counted(values[real].numpy()).tolist()


def test_weights_gradients_and_updates_of_every_parameter() -> None:
    model, sink = Toy().double(), ListSink()
    model.register_parameter("spare", torch.nn.Parameter(torch.tensor([0.0, -3.0, math.nan])))  # without a gradient
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Watcher(
        model, sink, probes=["histograms"], every=1, optimizer=optimizer, reference=None, strict=True
    ) as watcher:
        for part in range(2):
            (loss_of(model, batch(part)) / 2).backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        watcher.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        updates = {name: (p.detach() - before[name]) for name, p in model.named_parameters()}
    assert set(sink.tables) == set(TABLES)
    for table, truth in (("histograms", before), ("histograms_gradient", gradients), ("histograms_update", updates)):
        found = of(sink, table)
        assert list(found) == [name for name, _ in model.named_parameters()]
        for name, values in truth.items():
            assert found[name].tolist() == counted(values.numpy()).tolist(), (table, name)
    assert sink.absent(0, "histograms_gradient") == {"spare"}
    assert of(sink, "histograms")["spare"][[ZERO, NONFINITE]].tolist() == [1, 1]


@pytest.mark.parametrize("parts", [1, 2])
def test_activations_are_those_of_real_tokens_of_all_micro_batches(parts: int) -> None:
    model, sink = Toy().double(), ListSink()
    whole = batch(3, rows=4)
    several = [{key: value.chunk(parts)[n] for key, value in whole.items()} for n in range(parts)]
    values: dict[str, list[np.ndarray]] = {}
    state = {"now": several[0]}

    def hook(name: str, stack: str, take: str):
        def look(module, args, output) -> None:
            real = masks(state["now"])[stack]
            value = args[0] if take == "in" else output
            values.setdefault(name, []).append(value.detach()[real].numpy())

        return look

    for stack in ("encoder", "decoder"):
        for n, layer in enumerate(getattr(model, stack).layers):
            layer.register_forward_hook(hook(f"{stack}.layers.{n}", stack, "out"))
            layer.linear2.register_forward_hook(hook(f"{stack}.layers.{n}.linear2", stack, "in"))
    probes = "histograms_activation"
    mask = lambda: masks(state["now"])  # noqa: E731
    watcher = Watcher(model, sink, probes=probes, every=1, mask=mask, reference=None, strict=True)
    for state["now"] in several:
        loss_of(model, state["now"]).backward()
    watcher.step()
    watcher.flush()
    watcher.close()
    found = of(sink, "histograms_activation")
    assert set(found) == set(values)
    for name, own in values.items():
        assert found[name].tolist() == counted(np.concatenate(own)).tolist(), name
    assert any(counts[ZERO] > 0 for counts in found.values())  # behind the ReLU


@pytest.mark.parametrize("recompute", ["", "reentrant", "non-reentrant"])
def test_a_run_with_histograms_equals_an_unwatched_one(recompute: str) -> None:
    sink, model = ListSink(), Toy(dropout=0.2, recompute=recompute)
    seen = train(
        model,
        3,
        lambda optimizer: Watcher(model, sink, probes=["histograms"], every=1, optimizer=optimizer, strict=True),
        accumulate=2,
    )
    bare = train(Toy(dropout=0.2, recompute=recompute), 3, accumulate=2)
    assert set(sink.row(2)[1]) == set(TABLES)
    for name in ("losses", "parameters"):
        assert all(map(torch.equal, seen[name], bare[name]))
    assert torch.equal(seen["rng"], bare["rng"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_has_the_counts_of_eager_code() -> None:
    def run(compiled: bool) -> ListSink:
        torch._dynamo.reset()
        sink = ListSink()
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        if compiled:
            model.compile(backend="eager", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Watcher(model, sink, probes=["histograms"], every=1, optimizer=optimizer, reference=None) as watcher:
            model(torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))).square().mean().backward()
            watcher.step()
            optimizer.step()
        return sink

    eager, compiled = run(False), run(True)
    for table in TABLES:
        ours, theirs = of(eager, table), of(compiled, table)
        assert list(ours) == list(theirs)
        assert ours
        for name in ours:
            assert ours[name].tolist() == theirs[name].tolist(), (table, name)
    torch._dynamo.reset()


def test_the_group_all_leaves_them_out_and_one_can_be_left_out() -> None:
    model, optimizer = Toy(), None
    assert not set(TABLES) & set(Watcher(model, ListSink(), probes="all", optimizer=optimizer).tables)
    watcher = Watcher(model, ListSink(), probes="none,histograms,-histograms_activation", reference=None)
    assert set(watcher.tables) == {"histograms", "histograms_gradient"}
    assert ("histograms_update", "needs optimizer=, the optimizer") in watcher.dropped
    with pytest.raises(UsageError, match="Did you mean 'histograms'"):
        Watcher(model, ListSink(), probes="histogram")
