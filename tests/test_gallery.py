"""The gallery of docs/gallery.md: its code runs as it stands there, and a picture stands beside each block."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from stabilitylab.config import resolve
from stabilitylab.terminal import LiveDisplay
from stabilitylab.train import plan, start

DOCS = Path(__file__).resolve().parents[1] / "docs"
sys.path.append(str(DOCS / "pictures"))

import gallery  # noqa: E402

MOST = 60_000  # bytes of a picture


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gallery")
    settings = {"model": {"arch": "branchnorm"}, "train": {"steps": 106, "seed": 3}, "probes": {"every": 15}}
    config = resolve(settings, depth=2)
    start(plan(config), folder, "branchnorm-2-s3", LiveDisplay(Console(file=io.StringIO()), quiet=True))
    return folder / "branchnorm-2-s3"


@pytest.mark.slow
def test_the_code_of_each_picture_draws_what_it_says(run: Path) -> None:
    made = gallery.pictures(run)
    assert len(made) == 6
    for figure in made:
        drawn = [axes for axes in figure.axes if axes.lines or axes.collections]
        assert drawn, "nothing was drawn"
        assert figure.axes[0].get_xlabel() or figure.axes[0].get_ylabel(), "the first axes of a picture have no label"


@pytest.mark.slow
def test_a_block_that_draws_nothing_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "blocks", lambda: ["import matplotlib.pyplot as plt", "pass"])
    (figure,) = gallery.pictures(run)
    assert not figure.axes


def test_every_block_has_its_picture_and_every_picture_is_small() -> None:
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    named = re.findall(r"!\[[^\]]{20,}\]\((pictures/gallery-\d\.png)\)", page)
    assert named == [f"pictures/gallery-{place}.png" for place in range(1, len(gallery.blocks()))]
    for name in named:
        assert (DOCS / name).stat().st_size < MOST
        with Image.open(DOCS / name) as image:
            assert image.width > 300
