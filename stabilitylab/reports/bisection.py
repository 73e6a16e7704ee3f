"""The picture of a bisection as a file of its own."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from ..bisect import Bisection
from . import paper, style
from .base import Picture
from .measures.bisection import error_panels

WIDTH = 7.0  # inches


def write(found: Bisection, path: Path) -> None:
    """Draw error against depth to a file of the kind that its name says, with the answer below."""
    answer = found.sentences()[0]
    with matplotlib.rc_context():
        style.use_print_style()
        drawn = paper.draw(Picture(list(error_panels(found)), answer, columns=1, key=answer), WIDTH)
        drawn.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
