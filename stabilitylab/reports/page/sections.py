"""A figure on the page: its text, files, numbers and switches as the templates take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal
from urllib.parse import quote

import numpy as np

from ..base import Panel, Picture
from ..claims import Finding
from ..pooling import COLUMNS
from . import screen

LISTED, ALL_LISTED = 60, 2000  # rows of one figure's table, and of all of them; the CSV has every row
Group = Literal["figures", "runs", "curves"]


@dataclass(frozen=True)
class PageSection:
    """A figure on the page, and the files of it that stand beside the page: kind (csv, pdf, ...) -> relative path."""

    id: str
    title: str
    source: str
    picture: Picture
    files: dict[str, str]
    group: Group = "figures"

    @property
    def anchor(self) -> str:
        return anchor(self.id)

    @cached_property
    def plots(self) -> str:
        """The data of its plots, as JSON."""
        return self.pooled(COLUMNS)

    def pooled(self, columns: int) -> str:
        """The data of its plots as JSON, with maps of at most so many columns."""
        return json.dumps(screen.plots(self.picture, columns), separators=(",", ":"), allow_nan=False)

    def check(self) -> None:
        """Raise now an error that would stop the page later; the data of the plots are kept."""
        "".join((self.picture.finding, *self.picture.notes))  # text
        self.plots  # noqa: B018
        described(self, (), LISTED)


def anchor(id: str) -> str:
    """Return ``id`` as the name of a place on the page."""
    return "".join(letter if letter.isalnum() else f"-{ord(letter):x}-" if letter != ":" else "-" for letter in id)


def described(section: PageSection, findings: Sequence[Finding], listed: int) -> dict[str, Any]:
    shown = section.picture.head(listed).dropna(axis="columns", how="all")
    text = shown.map(lambda x: "" if x is None or x != x else f"{x:.5g}" if isinstance(x, float) else str(x))
    files = {kind: quote(path) for kind, path in section.files.items()}
    return {
        "id": section.id,
        "anchor": section.anchor,
        "title": section.title,
        "source": section.source,
        "group": section.group,
        "finding": section.picture.finding,
        "notes": [*section.picture.notes, *filter(None, [section.picture.key])],
        "files": [(kind, path) for kind, path in files.items() if not kind.endswith("-column")],
        "narrow": [(kind.removesuffix("-column"), path) for kind, path in files.items() if kind.endswith("-column")],
        "panels": [_panel(section.picture, place) for place in range(len(section.picture.panels))],
        "columns": max(1, min(section.picture.columns, len(section.picture.panels))),
        "switches": _switches(section.picture),
        "head": list(text.columns),
        "rows": text.to_numpy().tolist(),
        "cut": section.picture.rows - len(shown),
        "claims": [finding for finding in findings if finding.claim.figure == section.id],
    }


def _panel(picture: Picture, place: int) -> dict[str, Any]:
    panel = picture.panels[place]
    return {
        "title": picture.letter(place) + panel.title,
        "scale": "colour" if panel.map is not None else "y",
        "log": panel.map.log if panel.map is not None else panel.log_y,
        "switchable": screen.switchable(panel),
        "signs": _signs(panel),
        "alt": _alt(panel),
        "n": _seeds(panel),
    }


def _switches(picture: Picture) -> list[dict[str, Any]]:
    """The toggles of a figure in the order of its legend, each with the look that it stands for."""
    found: dict[str, dict[str, Any]] = {}
    for one in (one for panel in picture.panels for one in panel.series if not one.faint):
        look = screen.look(one)
        if one.detail:  # its dash has another meaning, named below the panel
            look["dash"] = "solid"
        found.setdefault(screen.key(one), look | {"line": one.kind == "line"})
    return [{"name": name, **look} for name, look in found.items()]


def _signs(panel: Panel) -> list[dict[str, str]]:
    """List the meanings of dashes and crosses of this panel that its legend does not give."""
    dashes = {one.detail: screen.look(one)["dash"] for one in panel.series if one.detail and not one.faint}
    signs = [{"name": name, "dash": dash} for name, dash in dashes.items()] if len(dashes) > 1 else []
    crossed = {one.label for one in panel.series if one.kind == "crosses" and one.label != screen.key(one)}
    return signs + [{"name": name, "dash": ""} for name in sorted(crossed)]


def _alt(panel: Panel) -> str:
    """Describe a panel for readers who cannot see it."""
    if panel.map is not None:
        rows, columns = panel.map.z.shape
        return f"Heat map of {panel.map.unit}, {panel.y} ({rows}) by {panel.x} ({columns})"
    names = list(dict.fromkeys(one.name for one in panel.series))
    return f"{panel.y} by {panel.x}, of {', '.join(names[:12])}{' and others' if len(names) > 12 else ''}"


def _seeds(panel: Panel) -> str:
    """Return the number of seeds of a map, such as ``n = 3``; "" if the map does not say it."""
    if panel.map is None or panel.map.seeds is None:
        return ""
    counts = np.unique(np.asarray(panel.map.seeds))
    return f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
