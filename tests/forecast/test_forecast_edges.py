"""The figure of the edges, from runs whose edges are known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest


@pytest.fixture
def edges(scripts: Any, tmp_path: Path) -> Any:
    """``of(arch=..., outcomes={k: outcome})``: what draw.py makes of runs of 12 layers, and seeds 3 and 4."""

    def of(layers: int = 12, shift: float = 0.0, **outcomes: dict[int, str]) -> Any:
        key = {"layers": layers, "warmup": 40, "shift": shift}
        runs = [
            {**key, "arch": arch, "seed": seed, "k": k, "outcome": outcome}
            for arch, own in outcomes.items()
            for seed in (3, 4)
            for k, outcome in own.items()
        ]
        pd.DataFrame(runs).to_csv(tmp_path / "runs.csv", index=False)
        return scripts.draw.picture(scripts.draw.edges(tmp_path / "runs.csv"))

    return SimpleNamespace(truth=scripts.truth, of=of)


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


def test_the_edge_between_the_rates_of_the_final_test(edges: Any) -> None:
    drawn = edges.of(60, 0.5, postln={0: "trains", 1: "fails"}, preln={22: "trains"})
    assert drawn.panels[0].map.x_names == ["60 layers\nwarm-up 40"]
    assert np.allclose(drawn.panels[0].map.z[:, 0], [1e-3 * edges.truth.RATIO**k for k in (22.5, 1)], rtol=5e-3)
