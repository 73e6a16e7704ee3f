"""Panels of every architecture: one for each family, in colour, with the lines of all others in grey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ... import arch_notes
from .. import style
from ..base import Series

OTHERS = "the others"
CONTEXT = "#7f7f7f"


def families(labels: Sequence[str]) -> dict[str, list[str]]:
    """Return ``labels`` by the title of their family; controls go with their architecture, unknown labels come last."""
    known = arch_notes.families()
    home = {arch: title for title, archs in known.items() for arch in archs}
    found: dict[str, list[str]] = {title: [] for title in (*known, "Others")}
    for label in labels:
        found[home.get(style.family(label), "Others")].append(label)
    return {title: own for title, own in found.items() if own}


def among_others(lines: Mapping[str, Sequence[Series]], own: Sequence[str]) -> list[Series]:
    """Return the series of the labels ``own`` over the lines of all other labels in grey."""
    grey = [
        replace(line, label=OTHERS, arch="", colour=CONTEXT, dash="solid", low=None, high=None, faint=True)
        for label, found in lines.items()
        for line in found
        if line.kind == "line" and label not in own
    ]
    return [*grey, *(line for label in own for line in lines[label])]
