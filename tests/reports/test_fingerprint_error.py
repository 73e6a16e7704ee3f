"""The error of one run against another along the depth, on the page."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "bisect"))

from planted import GPT, faulty, ids, loss_in_bf16, loss_of

import stabilitylab as sl
from stabilitylab.bisect.stored import of_stored
from stabilitylab.reports.base import FIGURES, MissingRuns
from stabilitylab.reports.collection import Runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    made = {
        "a-fp32": (GPT(2), loss_of),
        "b-bf16": (GPT(2), loss_in_bf16),
        "c-scale": (faulty(GPT(2), "wrong scale"), loss_of),
    }
    for name, (model, loss) in made.items():
        probes = "fingerprint"
        with sl.watch(model, out=out / name, probes=probes, every=1) as watcher:
            loss(model, ids()).backward()
            watcher.step()
    with sl.watch(torch.nn.Linear(3, 3), out=out / "d-plain", probes="grad_norm", every=1):
        pass
    return out


def test_it_shows_the_errors_of_bisect_and_marks_the_first_place(folder: Path) -> None:
    picture = FIGURES["fingerprints:error"]().picture(Runs.load(folder))
    titles = [panel.title for panel in picture.panels]
    assert titles == [
        f"{name} against a-fp32: {phase}"
        for name in ("b-bf16", "c-scale")
        for phase in ("forward pass", "backward pass, gradients at the same places")
    ]
    found = of_stored(folder / "a-fp32", folder / "c-scale")
    forward = picture.panels[2]
    expected = {place.name: place.error for place in found.places if place.phase == "forward" and place.error}
    drawn = np.asarray(forward.series[0].y)
    assert sorted(drawn[np.isfinite(drawn)]) == pytest.approx(sorted(expected.values()))
    (mark,) = forward.references
    assert found.first is not None
    assert mark.label == f"first: {found.first.name}"
    assert 2 <= mark.value < 3, "the fault is in the second layer"
    assert f"c-scale computes something else in {found.where}" in picture.finding
    assert "b-bf16 differs by no more than rounding" in picture.finding


def test_places_lie_between_their_layer_and_the_next(folder: Path) -> None:
    forward = FIGURES["fingerprints:error"]().picture(Runs.load(folder)).panels[0]
    at = np.asarray(forward.series[0].x)
    assert (np.diff(at) >= 0).all()
    assert at[0] == 0, "the embedding comes before the first layer"
    assert {1, 2} <= {int(x) for x in at}
    assert forward.x == "layer"


def test_fewer_than_two_runs_with_fingerprints_are_named(folder: Path) -> None:
    alone = Runs.load(folder).where(lambda run: run.name in ("a-fp32", "d-plain"))
    with pytest.raises(MissingRuns, match="fewer than two runs have recorded fingerprints"):
        FIGURES["fingerprints:error"]().picture(alone)
