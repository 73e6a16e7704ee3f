"""The error of one run against another along the depth, on the page."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "bisect"))

from in_memory import remembered
from planted import GPT, faulty, ids, loss_in_bf16, loss_of

import stabilitylab as sl
from stabilitylab.bisect.stored import of_stored
from stabilitylab.reports.base import FIGURES, MissingRuns
from stabilitylab.reports.collection import Runs
from stabilitylab.reports.figures.fingerprints.error import _by_model
from stabilitylab.reports.measures.bisection import _depths


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
    assert [*forward.ticks] == [1, 2], "the layers that there are"


def test_ticks_of_many_layers_are_some_of_their_numbers() -> None:
    places = [SimpleNamespace(name=f"h.{n}", stack="decoder", layer=n + 1) for n in range(36)]
    *_, ticks = _depths(places)  # type: ignore[arg-type]
    assert [*ticks] == [4, 8, 12, 16, 20, 24, 28, 32, 36]


def test_runs_of_different_models_are_not_compared() -> None:
    runs = [
        remembered("a", arch="preln"),
        remembered("b", arch="keel"),
        remembered("c", arch="preln", layers=3),
        remembered("d", arch="preln", seed=4),
        remembered("e", arch="preln", settings={"model": {"activation": "gelu"}}),
    ]
    for run in runs:
        run.run.tables = ("fingerprint",)  # type: ignore[misc]
    with pytest.raises(MissingRuns, match="of 5 runs with fingerprints no two have one model"):
        FIGURES["fingerprints:error"]().picture(Runs(runs))
    again = remembered("f", arch="keel", settings={"train": {"lr": 0.5}})
    assert [[run.name for run in group] for group in _by_model(Runs([*runs, again])) if len(group) > 1] == [["b", "f"]]


def test_other_weights_are_said_to_differ_before_anything_is_computed(tmp_path: Path) -> None:
    for name, factor, layers in (("a", 1.0, 2), ("b", 2.0, 2), ("c", 1.0, 3)):
        torch.manual_seed(0)
        model = GPT(layers)
        with torch.no_grad():
            model.h[0].mlp.c_fc.weight.mul_(factor)
        with sl.watch(model, out=tmp_path / name, probes="fingerprint", every=1) as watcher:
            loss_of(model, ids()).backward()
            watcher.step()
    picture = FIGURES["fingerprints:error"]().picture(Runs.load(tmp_path))
    assert picture.finding.startswith("Against a, b has another parameter h.0.mlp")
    assert "before anything is computed" in picture.finding
    assert not any("c against" in panel.title for panel in picture.panels)


def test_fewer_than_two_runs_with_fingerprints_are_named(folder: Path) -> None:
    alone = Runs.load(folder).where(lambda run: run.name in ("a-fp32", "d-plain"))
    with pytest.raises(MissingRuns, match="fewer than two runs have recorded fingerprints"):
        FIGURES["fingerprints:error"]().picture(alone)
