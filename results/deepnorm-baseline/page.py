#!/usr/bin/env python
"""Compares README.md and docs/decoders.md with the tables of both parts, or writes them with --write; draws
figures/trained.png.

python results/deepnorm-baseline/page.py [--write]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import exact
import judge
from own_rates import Ends, answered
from own_rates_page import StudyPage, answers
from protocol import LAYERS, STUDY

TITLES = {arm: (name, colour) for arm, (name, colour, _) in exact.LOOKS.items()}


def questions(ends: Ends) -> list[str]:
    """The answers of P1 to P3, and of P4 at each depth."""
    orders = [f"- P4, the order at {layers} layers: {judge.order(ends, layers)}" for layers in LAYERS]
    return [*answers(answered(STUDY, ends, judge.PRIMARY), len(STUDY.seeds), TITLES), "", *orders]


PAGE = StudyPage(STUDY, Path(__file__).resolve().parent, TITLES, "deepnorm", "baseline", questions, exact.BLOCKS)

if __name__ == "__main__":
    sys.exit(PAGE.main(__doc__))
