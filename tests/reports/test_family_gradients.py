"""The figure of every architecture's gradients by layer: what is drawn, what is left out, and its runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from making import Made, load, make_run
from PIL import Image

from stabilitylab import arch_notes
from stabilitylab.experiments import SWEEPS, Recipe
from stabilitylab.models import ARCHS
from stabilitylab.reports import FIGURES, MissingRuns
from stabilitylab.reports.figures.family.gradients import LEFT_OUT
from stabilitylab.schema import Row

LAYERS = 20
ROWS = [Row(f"decoder.layers.{n - 1}.ffn", "decoder", n, "ffn") for n in range(1, LAYERS + 1)]


def once(folder: Path, arch: str, seed: int, growth: float) -> None:
    table = Made(ROWS, ("value",), lambda _step, row: [0.1 * growth ** (row.layer - 1) if growth else 0.0])
    settings = {"model": {"arch": arch, "stack": "decoder", "encoder_layers": 0, "decoder_layers": LAYERS}}
    make_run(
        folder, f"{arch}-{seed}", arch=arch, seed=seed, layers=LAYERS, settings=settings,
        tables={"grad_norm": table}, kind="onestep",
    )  # fmt: skip


def test_a_panel_a_family_over_the_lines_of_all_others(tmp_path: Path) -> None:
    growths = {"postln": 1.3, "preln": 0.8, "deepnorm": 1.0, "keel": 1.0, "hyper-connections": 0.95, "rezero": 0.0}
    for arch, growth in growths.items():
        for seed in (3, 4):
            once(tmp_path, arch, seed, growth)
    picture = FIGURES["family:gradients"]().picture(load(tmp_path))
    assert [panel.title for panel in picture.panels] == ["The papers' own", "Since 2024", "More streams, since 2024"]
    own = {line.arch: line for line in picture.panels[0].series if line.arch}
    assert {*own} == {"postln", "preln", "deepnorm"}
    assert own["postln"].x == list(range(1, LAYERS + 1))
    assert own["postln"].y == pytest.approx([0.1 * 1.3**n for n in range(LAYERS)])
    assert sum(line.faint for line in picture.panels[1].series) == 4
    assert "within a factor of 10 in 3 of 5 architectures" in picture.finding
    assert "fall most in Pre-LN (0.018 times) and rise most in Post-LN (1.1e+02 times)" in picture.finding
    assert any("Not drawn: ReZero, whose gradient is exactly 0" in note for note in picture.notes)


@pytest.mark.parametrize(
    ("growths", "said"),
    [
        ({"postln": 0.9, "preln": 0.8}, "fall in all, most in Pre-LN (0.018 times) and least in Post-LN (0.15 times)."),
        ({"postln": 1.2, "preln": 1.1}, "rise in all, most in Post-LN (27 times) and least in Pre-LN (5.6 times)."),
        ({"postln": 0.9}, "fall in Post-LN (0.15 times)."),
        ({"postln": 1.1}, "rise in Post-LN (5.6 times)."),
    ],
)
def test_a_ratio_below_1_is_a_fall(tmp_path: Path, growths: dict[str, float], said: str) -> None:
    for arch, growth in growths.items():
        once(tmp_path, arch, 3, growth)
    picture = FIGURES["family:gradients"]().picture(load(tmp_path))
    assert picture.finding.endswith(f"to the last they {said}")


def test_without_runs_it_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(MissingRuns) as raised:
        FIGURES["family:gradients"]().picture(load(tmp_path))
    assert "sweep family:gradients" in raised.value.command


def test_its_runs_are_decoders_of_200_layers_of_every_architecture_but_two() -> None:
    made = list(SWEEPS["family:gradients"](Recipe("tiny", {})))
    assert {experiment.config.model.arch for experiment in made} == set(ARCHS) - set(LEFT_OUT)
    for experiment in made:
        model = experiment.config.model
        assert (model.stack, model.encoder_layers, model.decoder_layers) == ("decoder", 0, 200)
        assert experiment.kind == "onestep"
    assert {experiment.config.train.seed for experiment in made} == {3, 4, 5}
    assert "decoder" not in ARCHS["tfixup"].defined_for


def test_the_picture_in_the_docs_has_the_colour_of_every_architecture() -> None:
    """A palette of too few colours gives several architectures one colour."""
    path = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "family-gradients.png"
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"), dtype=int).reshape(-1, 3)
    for note in arch_notes.built_in():
        if note.name not in LEFT_OUT:
            wanted = [int(note.colour[place : place + 2], 16) for place in (1, 3, 5)]
            assert (np.abs(pixels - wanted).max(axis=1) <= 6).sum() > 100, note.name
