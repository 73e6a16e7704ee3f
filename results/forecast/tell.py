#!/usr/bin/env python
"""Writes the table of edges of docs/edges.md from ``runs.csv``, or compares it.

python results/forecast/tell.py [--write]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path

import truth
from make import HERE, known
from truth import Cell, Edge

sys.path.append(str(HERE.parent))
import page_blocks

PAGES = (HERE.parents[1] / "docs" / "edges.md",)
WARMUPS = (40, 0)


def edges(folder: Path) -> dict[tuple[str, int, int], list[tuple[Cell, Edge]]]:
    """(architecture, layers, warm-up) -> the edges that are known, of each seed."""
    found: dict[tuple[str, int, int], list[tuple[Cell, Edge]]] = {}
    for cell, own in known(folder / "runs.csv").items():
        if (edge := truth.edge(own)).done:
            found.setdefault((cell.arch, cell.layers, cell.warmup), []).append((cell, edge))
    return found


def between(seeds: list[tuple[Cell, Edge]]) -> str:
    """The rate up to which every seed trained, and the one from which on every seed failed."""
    low = min(cell.rate(int(edge.low)) if math.isfinite(edge.low) else 0.0 for cell, edge in seeds)
    high = max(cell.rate(int(edge.high)) if math.isfinite(edge.high) else math.inf for cell, edge in seeds)
    trained = f"{low:.2g}" if low else "none"
    failed = f"{high:.2g}" if math.isfinite(high) else "none"
    return f"{trained}, {failed} ({len(seeds)})"


def table(folder: Path = HERE) -> list[str]:
    """A row an architecture and depth, the safest first within a depth."""
    found = edges(folder)
    rows: list[tuple[int, float, tuple[object, ...]]] = []
    for arch, layers in dict.fromkeys((arch, layers) for arch, layers, _ in found):
        cells = [between(found[key]) if (key := (arch, layers, warmup)) in found else "-" for warmup in WARMUPS]
        rows.append((layers, -_first(found, arch, layers), (layers, f"`{arch}`", *cells)))
    return page_blocks.table(("layers", "architecture", "warm-up 40", "no warm-up"), [row for *_, row in sorted(rows)])


def _first(found: Mapping[tuple[str, int, int], list[tuple[Cell, Edge]]], arch: str, layers: int) -> float:
    """The rate up to which an architecture trained with a warm-up; 0 if it is not known."""
    ends = [cell.rate(int(edge.low)) for cell, edge in found.get((arch, layers, 40), ()) if math.isfinite(edge.low)]
    return min(ends, default=0.0)


def anew(text: str) -> str:
    return page_blocks.renewed(text, {"edges": table})


if __name__ == "__main__":
    sys.exit(page_blocks.main(__doc__, PAGES, anew))
