#!/usr/bin/env python
"""Draws the edges of runs.csv: up to which rate each architecture trains, by depth and warm-up.

python results/forecast/draw.py      # figures/edges.*
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import truth
from make import HERE, known
from truth import Cell, Edge

from stabilitylab.reports import Map, Panel, Picture, style
from stabilitylab.reports.paper import write

Case = tuple[str, int, int]  # architecture, layers, warm-up
Found = Sequence[tuple[Cell, Edge]]  # of each seed


def edges(path: Path) -> dict[Case, Found]:
    """The edges that are known."""
    found: dict[Case, list[tuple[Cell, Edge]]] = {}
    for cell, own in sorted(known(path).items(), key=lambda one: one[0].seed):
        if (edge := truth.edge(own)).done:
            found.setdefault((cell.arch, cell.layers, cell.warmup), []).append((cell, edge))
    return {**found}


def middle(seeds: Found) -> tuple[float, str]:
    """(rate, sign): the geometric mean over seeds; of a seed that fails nowhere, or trains nowhere, the last rate seen,
    with the sign that says so."""
    ends, sign = [], ""
    for cell, edge in seeds:
        if math.isinf(edge.high):
            end, sign = math.log10(cell.rate(int(edge.low))), ">"
        elif math.isinf(edge.low):
            end, sign = math.log10(cell.rate(int(edge.high))), sign or "<"
        else:
            end = cell.middle(edge)
        ends.append(end)
    return 10 ** float(np.mean(ends)), sign


def picture(found: Mapping[Case, Found]) -> Picture:
    """Architectures as rows, by the edge in the fullest column; depths, with warm-up and without, as columns."""
    cells = {case: middle(own) for case, own in found.items()}
    columns = sorted({case[1:] for case in cells}, key=lambda column: (column[0], -column[1]))
    fullest = max(columns, key=lambda column: sum(case[1:] == column for case in cells))  # the first of those
    own = {arch: cells[arch, *fullest] for arch, *_ in cells if (arch, *fullest) in cells}
    archs = sorted({arch for arch, *_ in cells}, key=lambda arch: (-own.get(arch, (0.0, ""))[0], arch))
    z = np.full((len(archs), len(columns)), np.nan)
    text, seeds = np.full(z.shape, "", object), np.zeros(z.shape, int)
    for case, (rate, sign) in cells.items():
        at = archs.index(case[0]), columns.index(case[1:])
        z[at], text[at], seeds[at] = rate, f"{sign}{rate:.2g}", len(found[case])
    drawn = Map(
        [*range(len(columns))], [*range(len(archs))], z, np.zeros(z.shape, int), "edge of the learning rate",
        x_names=[_named(column).replace(", ", "\n") for column in columns],
        y_names=[style.title(arch) for arch in archs], text=text, seeds=seeds,
    )  # fmt: skip
    high, low = (pick(own, key=lambda arch: own[arch][0]) for pick in (max, min))
    finding = (
        f"{_named(fullest)}: edges lie between {own[low][1]}{own[low][0]:.2g} ({style.title(low)}) and "
        f"{own[high][1]}{own[high][0]:.2g} ({style.title(high)}), a factor of {own[high][0] / own[low][0]:.0f}."
    )
    runs = sum(map(len, found.values()))
    return Picture([Panel("", "", "", map=drawn)], finding, columns=1, provenance=f"64-128-2, Multi30k, {runs} edges")


def _named(column: tuple[int, int]) -> str:
    layers, warmup = column
    return f"{layers} layers, {f'warm-up {warmup}' if warmup else 'no warm-up'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE)
    given = parser.parse_args()
    write(picture(edges(given.folder / "runs.csv")), given.folder / "figures", "edges", "The edge of the learning rate")


if __name__ == "__main__":
    main()
