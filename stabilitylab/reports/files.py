"""Lists the files of a figure, without drawing it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from .base import Picture

COLUMN, PAGE = 3.25, 6.75  # inches: one column of two, and the page's text width
WIDTHS = ((PAGE, ""), (COLUMN, "-column"))
IN_A_COLUMN = 4  # panels; more of them, one above the other, are higher than a page
KINDS = ("png", "svg", "pdf")
CONTROLS = "controls"  # in the names of the files of a picture's controls: ID-controls.pdf


def paths(folder: Path, name: str, picture: Picture) -> dict[str, Path]:
    """List the files of a figure by kind: csv, caption.txt, tex and those in ``extra``; png, svg and pdf at page width;
    the same at column width (png-column, ...) if they fit a page there; and all of its controls (controls-png, ...)."""
    words = {kind: folder / f"{name}.{kind}" for kind in ("csv", "caption.txt", "tex")}
    files = words | {end: folder / f"{name}-{end}" for end in picture.extra}
    files |= {f"{kind}{suffix}": folder / f"{name}{suffix}.{kind}" for _, suffix in widths(picture) for kind in KINDS}
    apart = [paths(folder, f"{name}-{CONTROLS}", own) for own in controls(picture)]
    return files | {f"{CONTROLS}-{kind}": path for own in apart for kind, path in own.items()}


def widths(picture: Picture) -> list[tuple[float, str]]:
    """Lists the widths in inches at which a figure is printed, each with the end of its files' names."""
    return [(width, end) for width, end in WIDTHS if width > COLUMN or len(picture.panels) <= IN_A_COLUMN]


def controls(picture: Picture) -> Iterator[Picture]:
    """Yield the picture of the controls, if there are any."""
    if picture.controls:
        yield replace(picture, panels=picture.controls, controls=(), extra={})
