"""Parameters that code of its own splits over ranks: found out where they are said to be copies, right with share=."""

from __future__ import annotations

from typing import Any

import pytest

from stabilitylab.errors import UsageError
from stabilitylab.probes.parameters.spreading import spread_out

EXACT = {"rel": 1e-9, "abs": 1e-15}
OF_GRADIENTS = {"grad_norm", "activation_grad_norm", "update_ratio"}


def test_copies_whose_gradients_differ_end_the_tables_of_gradients(ranks: Any) -> None:
    first, second = (found["averaged"] for found in ranks("split_by_hand"))
    assert first["ended"].keys() >= OF_GRADIENTS
    assert first["ended"] == second["ended"]
    assert "grad_norm_total" not in first["metrics"][0]
    (told,) = [text for text in first["said"] if "differs between ranks" in text]
    assert "row 0: the gradient of layers.0.up.weight, layers.0.up.bias and 4 more differs between ranks" in told
    assert "give share=" in told
    assert not any("differs between ranks" in text for text in second["said"])  # the first rank says it
    one = ranks("split_by_hand")[0]["one"]["tables"][0, "ln_input"]
    assert first["tables"][0, "ln_input"].keys() == one.keys()
    assert all(first["tables"][0, "ln_input"][site] == pytest.approx(cells, **EXACT) for site, cells in one.items())


def test_strict_raises_on_both_ranks(ranks: Any) -> None:
    for found in ranks("split_by_hand"):
        assert found["strict"].startswith("UsageError: row 0: the gradient of layers.0.up.weight")


def test_share_makes_parts_one_model(ranks: Any) -> None:
    found = ranks("split_by_hand")[0]
    shared, one = found["share"], found["one"]
    for row in (0, 1):
        assert shared["metrics"][row]["grad_norm_total"] == pytest.approx(
            one["metrics"][row]["grad_norm_total"], **EXACT
        )
        for table in (*OF_GRADIENTS, "ln_input", "residual_norm"):
            wanted = one["tables"][row, table]
            assert shared["tables"][row, table].keys() == wanted.keys()
            for site, cells in wanted.items():
                assert shared["tables"][row, table][site] == pytest.approx(cells, nan_ok=True, **EXACT), (table, site)


def test_a_place_that_holds_a_part_ends_its_table_by_name(ranks: Any) -> None:
    first, second = (found["share"] for found in ranks("split_by_hand"))
    assert "activation_sparsity at 'layers.0.down' differs between ranks" in first["ended"]["activation_sparsity"]
    assert not OF_GRADIENTS & first["ended"].keys()
    assert first["ended"] == second["ended"]


def test_experts_with_batches_of_their_own(ranks: Any) -> None:
    first, second = ranks("spread_experts")
    assert first["shared"] == pytest.approx(second["shared"], **EXACT)
    expected = (first["own"] + second["own"] + first["shared"]) ** 0.5
    assert first["total"] == second["total"] == pytest.approx(expected, **EXACT)
    assert first["ended"] == {}


def test_a_backward_that_was_not_averaged_is_found_under_ddp_too(ranks: Any) -> None:
    for found in ranks("not_averaged"):
        assert found[True] == {}
        assert list(found[False]) == ["grad_norm"]
        assert "call step() after gradients are averaged over ranks" in found[False]["grad_norm"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("a number", "share= returns 2 for 'layers.0.norm.weight': return the process group"),
        ("another's group", "a process group that this rank is not in"),
        ("two groups", "over several process groups that work on one batch .*same_batch=False"),
        ("no group", "share= gives no process group for 'layers.0.norm.weight'"),
        ("off", "share= does not go with parallel = 'off'"),
        ("curvature", "does not know parameters that share= says are split"),
    ],
)
def test_an_answer_that_cannot_serve_is_refused(ranks: Any, answer: str, message: str) -> None:
    for found in ranks("refused_shares"):
        with pytest.raises(AssertionError, match=f"^UsageError: .*{message}"):
            raise AssertionError(found[answer])


def test_share_is_a_function() -> None:
    with pytest.raises(UsageError, match="share= is a function"):
        spread_out(None, "auto", {"up": None})  # type: ignore[arg-type]
