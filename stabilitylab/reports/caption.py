"""The words of a figure: the small line below it, its caption, and the LaTeX that includes it."""

from __future__ import annotations

import re

import numpy as np

from ..export.latex import SPECIAL
from ..printable import printable
from .base import LEAST_SEEDS, Panel, Picture

MATHS = {"‖": r"$\Vert$", "Δ": r"$\Delta$", "√": r"$\surd$", "β": r"$\beta$", "²": "$^2$", "−": "$-$", "·": r"$\cdot$",
         "×": r"$\times$", "≥": r"$\geq$", "≤": r"$\leq$"}  # fmt: skip


def small_print(picture: Picture) -> str:
    """Return the line below a figure, such as ``18L-18L, 64 wide, ... · n = 3 · bands: range over seeds``."""
    return " · ".join(filter(None, [picture.key, picture.provenance, *_counted(picture)]))


def _counted(picture: Picture) -> list[str]:
    panels = [*picture.panels, *picture.controls]
    bands = any(one.band for panel in panels for one in panel.series)
    return [word for word in (_seeds(panels), _hollow(panels), f"bands: {picture.band}" if bands else "") if word]


def _counts(panels: list[Panel]) -> np.ndarray:
    counts = [one.counts for panel in panels for one in panel.series if not one.faint]
    maps = [np.asarray(panel.map.seeds).ravel() for panel in panels if panel.map and panel.map.seeds is not None]
    found = np.concatenate([np.empty(0, int), *counts, *maps])
    return found[found > 0]


def _seeds(panels: list[Panel]) -> str:
    counts = _counts(panels)
    if not len(counts):
        return ""
    least, most = int(counts.min()), int(counts.max())
    return f"n = {least}" if least == most else f"n = {least} to {most}"


def _hollow(panels: list[Panel]) -> str:
    marked = [one for panel in panels for one in panel.series if not one.faint and one.marker != "none"]
    return (
        f"hollow: n < {LEAST_SEEDS}"
        if any(((one.counts > 0) & (one.counts < LEAST_SEEDS)).any() for one in marked)
        else ""
    )


def caption(picture: Picture, title: str = "", source: str = "") -> str:
    """Writes title, panels, finding, notes and small print, as a caption reads."""
    named = [f"{picture.letter(place)}{panel.title}" for place, panel in enumerate(picture.panels) if panel.title]
    after = f"After {source}" if source else ""
    runs = [] if any(note.startswith("Drawn: ") for note in picture.notes) else [picture.provenance]  # said there
    small = " · ".join(filter(None, [picture.key, *runs, *_counted(picture)]))
    parts = [title, "; ".join(named), picture.finding, *picture.notes, small, after]
    return " ".join(f"{part.rstrip('.')}." for part in parts if part)


def tex(picture: Picture, name: str, title: str = "", source: str = "") -> str:
    """Writes a figure environment that includes ``name``.pdf with its caption."""
    said = "".join(MATHS.get(sign) or SPECIAL.get(sign, sign) for sign in printable(caption(picture, title, source)))
    label = re.sub(r"[^A-Za-z0-9-]", "-", name)
    return (
        f"\\begin{{figure}}\n  \\centering\n  \\includegraphics[width=\\linewidth]{{{name}.pdf}}\n"
        f"  \\caption{{{said}}}\n  \\label{{fig:{label}}}\n\\end{{figure}}\n"
    )
