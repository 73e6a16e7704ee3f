"""What ``tap`` shows on two ranks is what it shows in one process."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_every_table_is_that_of_one_process(ranks: Any, kind: str) -> None:
    own, _ = ranks("taps_")
    spread, _ = ranks(f"taps_{kind}")
    assert set(spread) == set(own) == {"ln_input", "residual_norm", "activation_grad_norm", "activation_sparsity"}
    for table, rows in own.items():
        assert set(spread[table]) == set(rows)
        assert any("norm1" in site or "middle" in site or "inner" in site for site in rows)
        for site, numbers in rows.items():
            assert spread[table][site] == pytest.approx(numbers, rel=1e-9, nan_ok=True), (table, site)
