#!/usr/bin/env python
"""Every number that docs/forecast.md says of the edges, from the files beside this one.

    python results/forecast/tell.py [--write]

Blocks between ``<!-- results:NAME -->`` and ``<!-- end -->`` are what this script makes, once score.py and fit.py have
written theirs. Without ``--write`` it compares and ends with 1 where a digit differs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import truth
from make import HERE, known
from truth import Cell, Outcome

from stabilitylab.forecast.fitting import FILE, fitted

sys.path.append(str(HERE.parent))

import page_blocks

PAGES = (HERE.parents[1] / "docs" / "forecast.md",)
NOT_YET = "**Nothing is forecast yet**: the edges to which forecasts will be fitted are being looked for."
NO_SCORES = "Not there yet: too few edges are known."
NO_FINAL = "Not made yet."


class Ledger:
    """The files of one folder, and the stored fit, as blocks of a page."""

    def __init__(self, folder: Path = HERE, fit: Path = FILE) -> None:
        self._folder, self._fit = folder, fit
        self.blocks: page_blocks.Blocks = {
            one.__name__: one for one in (self.worth, self.known, self.scores, self.new, self.final)
        }

    def worth(self) -> list[str]:
        """What a forecast is worth, first of all."""
        fit = fitted(self._fit)
        if fit is None:
            return [NOT_YET]
        return [f"**What it is worth.** On architectures left out: {fit.errors}"]

    def known(self) -> list[str]:
        """Which edges are known."""
        cells: dict[tuple[int, int, float], dict[Cell, Mapping[int, Outcome]]] = {}
        for cell, own in known(self._folder / "runs.csv").items():
            cells.setdefault((cell.layers, cell.warmup, cell.shift), {})[cell] = own
        rows = []
        for (layers, warmup, shift), here in sorted(cells.items()):
            done = [cell for cell, own in here.items() if truth.edge(own).done]
            archs, seeds = len({cell.arch for cell in done}), ", ".join(map(str, sorted({cell.seed for cell in done})))
            depth = f"{layers} (final test)" if shift else layers
            rows.append((depth, warmup, archs, seeds or "-", len(done), sum(map(len, here.values()))))
        return page_blocks.table(("layers", "warm-up", "architectures", "seeds", "edges", "runs"), rows)

    def scores(self) -> list[str]:
        return self._written("scores.md", NO_SCORES)

    def new(self) -> list[str]:
        return self._written("new-seeds.md", NO_SCORES)

    def final(self) -> list[str]:
        return self._written("final.md", NO_FINAL)

    def _written(self, name: str, otherwise: str) -> list[str]:
        path = self._folder / name
        if not path.exists():
            return [otherwise]
        return [line for line in path.read_text(encoding="utf-8").strip().splitlines() if not line.startswith("<!--")]


def anew(text: str) -> str:
    return page_blocks.renewed(text, Ledger().blocks)


if __name__ == "__main__":
    sys.exit(page_blocks.main(__doc__, PAGES, anew))
