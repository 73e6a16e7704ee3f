"""The figure of the edges, from runs whose edges are known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from loose_scripts import scripts_of


@pytest.fixture
def edges(tmp_path: Path) -> Any:
    """``of(arch=..., outcomes={k: outcome})``: what draw.py makes of runs of 12 layers, and seeds 3 and 4."""
    with scripts_of("results/forecast") as load:
        truth, draw = load("truth"), load("draw")

        def of(**outcomes: dict[int, str]) -> Any:
            key = {"layers": 12, "warmup": 40, "shift": 0.0}
            runs = [
                {**key, "arch": arch, "seed": seed, "k": k, "outcome": outcome}
                for arch, own in outcomes.items()
                for seed in (3, 4)
                for k, outcome in own.items()
            ]
            pd.DataFrame(runs).to_csv(tmp_path / "runs.csv", index=False)
            return draw.picture(draw.edges(tmp_path / "runs.csv"))

        yield SimpleNamespace(truth=truth, of=of)


def test_the_edge_is_the_middle_between_two_neighbours(edges: Any) -> None:
    drawn = edges.of(postln={0: "trains", 1: "fails"}, preln={22: "trains"}, dsinit={-12: "fails"})
    [panel] = drawn.panels
    assert panel.map.y_names == ["Pre-LN", "Post-LN", "DS-Init"]  # the highest on top
    assert np.allclose(panel.map.z[1, 0], 1e-3 * edges.truth.RATIO**0.5)
    highest, lowest = (edges.truth.Cell("", 0, 0, 0).rate(k) for k in (22, -12))
    assert [*panel.map.text[:, 0]] == [f">{highest:.2g}", "0.0011", f"<{lowest:.2g}"]
    assert (panel.map.seeds == 2).all()
    assert "between <4.3e-05 (DS-Init) and >0.32 (Pre-LN)" in drawn.finding


def test_an_edge_that_is_still_looked_for_is_not_drawn(edges: Any) -> None:
    drawn = edges.of(postln={0: "trains", 1: "fails"}, preln={0: "trains", 5: "fails"})
    assert drawn.panels[0].map.y_names == ["Post-LN"]


def test_an_edge_that_could_not_be_told_upwards_is_a_bound(edges: Any) -> None:
    drawn = edges.of(subln={20: "trains", 21: "cannot tell", 22: "cannot tell"}, postln={0: "trains", 1: "fails"})
    assert [*drawn.panels[0].map.text[:, 0]] == [f">{1e-3 * edges.truth.RATIO**20:.2g}", "0.0011"]
