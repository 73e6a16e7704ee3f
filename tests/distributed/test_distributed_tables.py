"""Every table of two ranks is the table of one process on the same global batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from rank_toys import extra_probes, train
from rest_slow import rest_slow, slow


@cache
def alone(**options: Any) -> dict[str, Any]:
    return train("one", **options)


@cache
def alone_with_maxima() -> dict[str, Any]:
    with extra_probes():
        return train("one", steps=2)


def worst(some: dict[str, Any], others: dict[str, Any]) -> float:
    """Largest relative difference of two recordings; rows, tables, gaps, infinities and absences must be the same."""
    assert some["tables"] == others["tables"]
    assert [row for row, *_ in some["rows"]] == [row for row, *_ in others["rows"]]
    differences = [0.0]
    for (_, metrics, tables), (_, other_metrics, other_tables) in zip(some["rows"], others["rows"], strict=True):
        assert metrics.keys() == other_metrics.keys()
        for name, value in metrics.items():
            other = other_metrics[name]
            assert (value is None) == (other is None), name
            if value is not None and other is not None:
                differences.append(abs(value - other) / max(abs(other), 1e-300))
        assert tables.keys() == other_tables.keys()
        for name, cells in tables.items():
            other = other_tables[name]
            np.testing.assert_array_equal(cells.absent, other.absent, name)
            np.testing.assert_array_equal(np.isnan(cells.values), np.isnan(other.values), name)
            scale = np.maximum(np.abs(other.values), 1e-300)
            equal = (cells.values == other.values) | np.isnan(other.values)
            differences.append(float(np.where(equal, 0, np.abs(cells.values - other.values) / scale).max()))
    return max(differences)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_step_0_in_float32(ranks: Any, kind: str) -> None:
    several, one = ranks(f"{kind}_start")[0], alone(dtype=torch.float32, steps=1)
    assert worst(several | {"rows": several["rows"][:1]}, one | {"rows": one["rows"][:1]}) < 1e-6


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("ddp_updates", {}),
        ("fsdp_updates", {}),
        slow("columns_updates", {"steps": 3}),
        slow("hsdp_updates", {"steps": 3}),
        slow("hsdp-flat_updates", {"steps": 3}),
        slow("ddp_accumulated", {"steps": 2, "accumulate": 2}),
        ("fsdp_accumulated", {"steps": 2, "accumulate": 2}),
    ],
)
def test_updates_in_float64(ranks: Any, case: str, options: dict[str, Any]) -> None:
    first, second = ranks(case)
    assert worst(first, alone(**options)) < 1e-9
    assert second["rows"] == []  # rank 0 alone writes


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_cosines_of_replicas_and_shards(ranks: Any, kind: str) -> None:
    first, second = ranks(f"{kind}_alignment")
    assert worst(first, alone(steps=3, probes="gradient_alignment")) < 1e-9
    assert second["rows"] == []


def test_a_rank_did_hold_nothing_of_a_parameter(ranks: Any) -> None:
    first, second = ranks("fsdp_updates")
    assert (first["empty"], second["empty"]) == ([], ["single"])


@pytest.mark.parametrize("kind", rest_slow(["ddp", "fsdp"], ["ddp"]))
def test_a_reference_batch_may_be_split_over_ranks(ranks: Any, kind: str) -> None:
    """Means over tokens are those of the whole batch; what is centred by a mean token uses this rank's."""
    split, whole = ranks(f"{kind}_split_reference")[0], alone(steps=2)
    for (_, _, tables), (_, _, others) in zip(split["rows"], whole["rows"], strict=True):
        for name, column in (("activation_sparsity", 0), ("model_update", 0), ("branch_variance", 0)):
            np.testing.assert_allclose(tables[name].values[:, column], others[name].values[:, column], rtol=1e-9)
        raw = "cosine_similarity"
        np.testing.assert_allclose(tables[raw].values[:, 0], others[raw].values[:, 0], rtol=1e-9)
        assert not np.allclose(tables[raw].values[:, 1], others[raw].values[:, 1], rtol=1e-9)


def test_maxima_and_a_nan_of_one_rank(ranks: Any) -> None:
    several, one = ranks("maxima")[0]["recorded"], alone_with_maxima()
    table = several["tables"]["peak"]
    spoilt = table.columns.index("spoilt")
    for (row, _, tables), (_, _, others) in zip(several["rows"][:2], one["rows"][:2], strict=True):
        assert np.isnan(tables["peak"].values[:, spoilt]).all(), row
        kept = [c for c in range(len(table.columns)) if c != spoilt]
        np.testing.assert_allclose(tables["peak"].values[:, kept], others["peak"].values[:, kept], rtol=1e-9)
        np.testing.assert_allclose(tables["gradient_peak"].values, others["gradient_peak"].values, rtol=1e-9)


@pytest.mark.slow
def test_a_bf16_run_records_the_gradients_that_the_optimizer_gets(ranks: Any) -> None:
    """Against the norm of the gathered gradients; activations are close to those of the float32 run."""
    result = ranks("bf16")[0]
    recorded = [metrics["grad_norm_total"] for _, metrics, _ in result["recorded"]["rows"][:2]]
    np.testing.assert_allclose(recorded, result["gathered"], rtol=1e-6)
    one = alone(dtype=torch.float32, steps=1)
    for name in ("ln_input", "activation_grad_norm", "grad_norm"):
        got, expected = (run["rows"][0][2][name].values[:, 0] for run in (result["recorded"], one))
        np.testing.assert_allclose(got, expected, rtol=0.1)


def test_a_site_that_only_the_second_rank_calls_is_in_the_table(ranks: Any) -> None:
    values, absent = ranks("expert")[0]
    assert absent.tolist() == [False, False]
    assert np.isfinite(values).all()
