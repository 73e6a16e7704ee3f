#!/usr/bin/env python
"""Holds README.md and docs/decoders.md against the tables of both parts, and draws figures/trained.png.

python results/deepnorm-baseline/page.py [--write]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import exact
import judge
import page_blocks
from own_rates import answered
from own_rates_page import answers, draw, ends_on_page, losses, rates
from protocol import LAYERS, STUDY

HERE = Path(__file__).resolve().parent
TITLES = {arm: (name, colour) for arm, (name, colour, _) in exact.LOOKS.items()}


def questions() -> list[str]:
    """The answers of P1 to P3, and of P4 at each depth."""
    ends = ends_on_page(STUDY, HERE)
    orders = [f"- P4, the order at {layers} layers: {judge.order(ends, layers)}" for layers in LAYERS]
    return [*answers(answered(STUDY, ends, judge.PRIMARY), len(STUDY.seeds), TITLES), "", *orders]


BLOCKS = {
    **exact.BLOCKS,
    "rates": lambda: rates(STUDY, HERE, TITLES),
    "losses": lambda: losses(STUDY, ends_on_page(STUDY, HERE), "deepnorm", TITLES),
    "answers": questions,
}


PAGES = (HERE / "README.md", HERE.parents[1] / "docs" / "decoders.md")


def renewed(text: str) -> str:
    """A page with its blocks made anew; those of docs/decoders.md have a mark of this study."""
    return page_blocks.renewed(page_blocks.renewed(text, BLOCKS), BLOCKS, "baseline")


def main() -> int:
    if ends := ends_on_page(STUDY, HERE):
        draw(STUDY, ends, TITLES, HERE / "figures" / "trained.png")
    return page_blocks.main(__doc__, PAGES, renewed)


if __name__ == "__main__":
    sys.exit(main())
