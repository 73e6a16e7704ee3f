"""Order within cells, hits at few false alarms, errors of edges, on a handful of rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest


def cell(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"layers": 12, "warmup": 40, "k": 0, "shift": 0.0, **columns})


def test_auc_counts_pairs_of_two_architectures_within_a_cell(scripts: Any) -> None:
    rows = cell(arch=["a", "b", "c", "a"], fails=[1.0, 0.0, 0.0, 0.0], p=[0.5, 0.2, 0.5, 0.9])
    assert scripts.measures.auc(rows, ["p"])[0]["p"] == (1 + 0.5) / 2  # a against itself is no pair
    apart = pd.concat([rows, cell(arch=["d"], fails=[1.0], p=[0.0]).assign(k=1)])
    assert scripts.measures.auc(apart, ["p"])[0]["p"] == 0.75  # d has nobody to be compared with
    assert math.isnan(scripts.measures.auc(cell(arch=["a"], fails=[1.0], p=[0.1]), ["p"])[0]["p"])


def test_the_interval_of_auc_is_over_architectures(scripts: Any) -> None:
    rows = cell(arch=list("abcd"), fails=[1.0, 1.0, 0.0, 0.0], p=[0.9, 0.1, 0.5, 0.5])
    area, drawn = scripts.measures.auc(rows, ["p"], 400)
    assert area["p"] == 0.5
    assert set(np.unique(drawn["p"][np.isfinite(drawn["p"])].round(6))) >= {0.0, 0.5, 1.0}  # b or a may be alone


def test_hits_at_few_false_alarms(scripts: Any) -> None:
    rows = pd.DataFrame({"fails": [1.0] * 4 + [0.0] * 20, "p": [0.95, 0.8, 0.65, 0.1, 0.9, 0.7, *[0.2] * 18]})
    assert scripts.measures.hit_rate(rows, "p") == 0.5  # one of 20 may be called: .9; above .7 stand .95 and .8
    assert math.isnan(scripts.measures.hit_rate(pd.DataFrame({"fails": np.ones(3), "p": np.ones(3)}), "p"))
    assert scripts.measures.brier(rows.head(2), "p") == pytest.approx((0.05**2 + 0.2**2) / 2)


def test_seeds_of_one_architecture_count_as_one(scripts: Any) -> None:
    """A second and a third seed that say the same change no measure."""
    random = np.random.default_rng(0)
    one = cell(arch=list("abcdef"), fails=[1.0, 0.0, 1.0, 0.0, 1.0, 0.0], p=random.random(6))
    rows = pd.concat([one.assign(k=k, p=random.random(6)) for k in range(9)])
    copies = pd.concat(
        [
            rows.assign(share=1 / np.where(rows["arch"] == "a", 3, 1)),
            *[rows[rows["arch"] == "a"].assign(share=1 / 3)] * 2,
        ]
    )
    for of in ("hit_rate", "brier"):
        assert getattr(scripts.measures, of)(copies, "p") == pytest.approx(getattr(scripts.measures, of)(rows, "p"))
    both = [scripts.measures.auc(own, ["p"], 50) for own in (rows, copies)]
    assert both[0][0]["p"] == pytest.approx(both[1][0]["p"])
    np.testing.assert_allclose(both[0][1]["p"], both[1][1]["p"])


def test_only_cells_in_which_both_occur_are_contested(scripts: Any) -> None:
    grid = pd.concat([cell(arch=["a", "b"], fails=[1.0, 0.0]), cell(arch=["a", "b"], fails=[1.0, 1.0]).assign(k=1)])
    assert scripts.measures.contested(grid)["k"].tolist() == [0, 0]


def test_errors_of_edges_are_means_by_architecture(scripts: Any) -> None:
    edges = pd.DataFrame({"arch": ["a", "a", "b"], "true": [-2.0, -3.0, math.nan], "p": [-2.3, -2.9, -2.0]})
    assert scripts.measures.error_by_arch(edges, "p").to_dict() == {"a": pytest.approx(0.2)}
    assert scripts.measures.spread(edges, "p") == pytest.approx(0.26)  # .8 of the way from .1 to .3
