"""The standard set: fewer columns and places than its probes have, and the same numbers in them."""

from __future__ import annotations

import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of, masks, train

from stabilitylab.config import parse_set, resolve
from stabilitylab.errors import UsageError
from stabilitylab.models import build_model
from stabilitylab.probes import Watcher
from stabilitylab.probes._engine.selection import STANDARD
from stabilitylab.probes.parameters.squares import CHUNK, SMALL, WIDENED, Squares, WideNorm


def tables_of(probes: str, scale: float = 1.0) -> ListSink:
    model, sink, inputs = Toy(), ListSink(), batch()
    with Watcher(model, sink, probes=probes, every=1, mask=masks(inputs)) as watcher:
        (scale * loss_of(model, inputs)).backward()
        watcher.step()
    return sink


def test_its_tables_hold_the_same_numbers_as_those_of_its_probes() -> None:
    lean, full = tables_of("standard"), tables_of(",".join(STANDARD))
    assert tuple(lean.tables) == STANDARD
    for name, table in lean.tables.items():
        assert table.columns == ("value",)
        own, whole = lean.column(0, name, "value"), full.column(0, name, "value")
        assert own
        assert own == {site: whole[site] for site in own}
    assert "grad_under_eps" not in lean.row(0)[0]


def test_of_a_layer_with_sub_layers_that_show_themselves_the_last_one_counts() -> None:
    config = resolve(parse_set(["model.arch=postln"]), depth=4).model
    model = build_model(config, source_vocab=11, target_vocab=11, seed=0)
    watcher = Watcher(model, sink := ListSink(), probes="standard", every=1)
    watcher.close()
    rows = [(row.stack, row.layer, row.sublayer) for row in sink.tables["residual_norm"].rows]
    assert rows == [
        *(("encoder", 0, "input"), ("encoder", 1, "ffn"), ("encoder", 2, "ffn")),
        *(("decoder", 0, "input"), ("decoder", 1, "ffn"), ("decoder", 2, "ffn")),
    ]
    assert sink.tables["activation_grad_norm"].rows == sink.tables["residual_norm"].rows
    assert sink.tables["ln_input"].columns == ("value",)


@pytest.mark.parametrize(
    ("probes", "columns", "tables"),
    [
        ("standard,-residual_norm", ("value",), set(STANDARD) - {"residual_norm"}),
        ("standard,ln_input", ("value", "p99"), set(STANDARD)),  # who names a probe gets all of it
        ("ln_input,standard", ("value", "p99"), set(STANDARD)),
        ("default,standard", ("value", "p99"), None),
    ],
)
def test_it_mixes_with_other_names(probes: str, columns: tuple[str, ...], tables: set[str] | None) -> None:
    sink = tables_of(probes)
    assert sink.tables["ln_input"].columns == columns
    assert tables is None or set(sink.tables) == tables


def test_a_name_that_is_no_group_is_still_refused() -> None:
    with pytest.raises(UsageError, match="standart"):
        tables_of("standart")


def test_it_leaves_training_alone() -> None:
    def run(watched: bool) -> list[torch.Tensor]:
        model = Toy(dropout=0.2)
        watch = (lambda o: Watcher(model, ListSink(), probes="standard", every=1, optimizer=o)) if watched else None
        result = train(model, 4, watch, accumulate=2)
        return [*result["losses"], *result["parameters"], result["rng"]]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


SIZES = [1, SMALL, SMALL + 1, 4096, 4096, 4096, CHUNK["cpu"], CHUNK["cpu"] + 7, WIDENED, WIDENED + 1]


@pytest.mark.parametrize("scale", [1.2e-38, 1e-25, 1.0, 1e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_of_every_size_keep_what_float32_would_lose(scale: float, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = [(scale * (0.5 + torch.rand(size, generator=draw))).to(dtype) for size in (*SIZES, *[4096] * 40)]
    squares = Squares([(place, None) for place in range(len(tensors))], tensors, torch.device("cpu"))
    for _ in range(2):  # the second time room and plan are there
        torch.testing.assert_close(
            squares(tensors), torch.stack([t.double().square().sum() for t in tensors]), rtol=1e-12, atol=0
        )
    norm = WideNorm()
    for tensor in [*tensors, tensors[5].view(64, 64).T]:
        torch.testing.assert_close(norm(tensor), tensor.double().square().sum().sqrt(), rtol=1e-12, atol=0)


def test_squares_tell_nan_inf_absent_and_sparse_apart() -> None:
    shapes = [torch.zeros(4096) for _ in range(5)]
    squares = Squares([(place, None) for place in range(5)], shapes, torch.device("cpu"))
    bad, large = torch.ones(4096), torch.ones(4096)
    bad[17], large[99] = torch.nan, -torch.inf
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.tensor([3.0, 4.0]), (4096,), check_invariants=True)
    torch.testing.assert_close(
        squares([bad, large, None, sparse, torch.ones(4096)]),
        torch.tensor([torch.nan, torch.inf, 0.0, 25.0, 4096.0], dtype=torch.float64),
        equal_nan=True,
    )
    torch.testing.assert_close(  # and what was there before leaves no trace
        squares([torch.ones(4096)] * 5), torch.full((5,), 4096.0, dtype=torch.float64)
    )
