"""The shares of the squared gradient norm, against sums of squares in numpy, and where they are said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diagnose_cases import Copier, Made, made

import stabilitylab as sl
from stabilitylab.diagnose import diagnose
from stabilitylab.diagnose.attribution import attributed, attribution, percent, shares_of
from stabilitylab.diagnose.evidence import Evidence
from stabilitylab.reports.collection import Runs
from stabilitylab.reports.measures.gradient_shares import LINES, gradient_shares
from stabilitylab.schema import Row
from stabilitylab.store import Run

ROWS = [Row("embed"), *(Row(f"layers.{n}", "layers", n + 1, "mlp") for n in range(5)), Row("head")]


def run(folder: Path, norms: dict[int, list[float]]) -> Run:
    table = Made(ROWS, ("value",), lambda step: [[value] for value in norms[step]], steps=tuple(norms))
    return Run.open(made(folder / "run", {"loss": [2.0 - 0.01 * n for n in range(30)]}, {"grad_norm": table}))


def test_shares_are_squares_over_their_sum_at_any_size() -> None:
    norms = np.random.default_rng(0).lognormal(0, 3, (4, 6))
    expected = norms**2 / (norms**2).sum(1)[:, None]
    for size in (1.0, 1e-200, 1e200):
        np.testing.assert_allclose(shares_of(norms * size), expected, rtol=1e-12)
    assert shares_of(np.zeros(3)).tolist() == [0, 0, 0]
    assert np.isnan(shares_of(np.array([[1.0, np.inf], [np.nan, 1.0]]))).all()


def test_the_first_and_the_last_row_and_that_of_an_event(tmp_path: Path) -> None:
    nan = float("nan")
    norms = {
        0: [1.0, *[0.0] * 5, 7.0],
        5: [3.0, *[0.0] * 5, 4.0],
        10: [1.0, 2.0, *[0.0] * 4, 2.0],
        20: [nan, *[1.0] * 5, 1.0],
    }
    found = attribution(Evidence(run(tmp_path, norms)), 7)
    assert [one.step for one in found] == [0, 5, 10]  # row 20 is not finite
    assert found[1].shares[:2] == ((ROWS[-1], 16 / 25), (ROWS[0], 9 / 25))
    assert attributed(found) == (
        "step 10: 44 % layer 1 of layers (mlp), 44 % head, 11 % embed; step 5: 64 % head, 36 % embed; "
        "step 0: 98 % head, 2 % embed"
    )
    assert percent(0.0004) == "below 0.1 %"
    assert percent(0.004) == "0.4 %"


def test_it_is_that_of_the_gradients_of_a_trained_model(tmp_path: Path) -> None:
    model = Copier(layers=2)
    with sl.watch(model, out=tmp_path / "run", probes="grad_norm", every=1, reference=None) as w:
        tokens = torch.randint(0, 17, (4, 6), generator=torch.Generator().manual_seed(1))
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        w.step(loss=loss)
    squares = {name: float(p.grad.double().square().sum()) for name, p in model.named_parameters()}
    total = sum(squares.values())
    (found,) = attribution(Evidence(Run.open(tmp_path / "run")))
    shares = {row.site: share for row, share in found.shares}
    for module in ("embedding", "head", "layers.1.linear1"):
        own = sum(value for name, value in squares.items() if name.startswith(f"{module}."))
        assert shares[module] == pytest.approx(own / total, rel=1e-6)


def test_diagnose_says_it_and_has_it_as_data(tmp_path: Path) -> None:
    norms = {step: [1.0, *[0.5] * 5, 3.0] for step in (0, 20)}
    found = diagnose(run(tmp_path, norms))
    total = 1 + 5 * 0.25 + 9
    assert found.as_dict()["gradient_shares"][-1]["shares"]["head"] == pytest.approx(9 / total)
    assert attributed(found.attribution).startswith("step 20: 80 % head, 9 % embed")
    bare = diagnose(Run.open(made(tmp_path / "bare", {"loss": [2.0 - 0.01 * n for n in range(30)]})))
    assert bare.attribution == ()


def test_the_panel_has_the_largest_groups_and_all_others(tmp_path: Path) -> None:
    norms = {0: [1.0, 0.1, 0.2, 0.3, 0.4, 0.5, 2.0], 10: [1.0, 0.1, 3.0, 0.3, 0.4, 0.5, 2.0]}
    run(tmp_path, norms)
    (record,) = Runs.load(tmp_path)
    panel = gradient_shares(record, 400)
    assert panel is not None
    assert [line.label for line in panel.series][:2] == ["head", "layer 2 of layers (mlp)"]
    assert panel.series[-1].label == f"{len(ROWS) - LINES} others"
    assert sum(np.asarray(line.y) for line in panel.series) == pytest.approx(np.ones(2))
    assert panel.series[1].y == pytest.approx([0.04 / 5.55, 9 / 14.51])
