#!/usr/bin/env python
"""Holds README.md and docs/decoders.md against the ledgers, and draws figures/trained.png and figures/table-keel.

python results/keel/page.py [--write]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import judge
import page_blocks
from own_rates import answered, end_of_line
from own_rates_page import answers, draw, ends_on_page, label_of, losses, rates
from protocol import DEEP, DEEP_ARMS, DEEP_RATES, DEEP_SEEDS, DEEP_UPDATES, LAYERS, STUDY, arms
from shared import rows_of

from stabilitylab.reports import paper
from stabilitylab.reports.figures.table.keel import RateTrial, drawn

HERE = Path(__file__).resolve().parent
TITLES = {
    "keel": ("KEEL", "#D55E00"),
    "deepnorm": ("DeepNorm", "#E69F00"),
    "branchnorm": ("BranchNorm", "#0072B2"),
    "keel-no-inner": ("KEEL, no inner norm", "#56B4E9"),
}


def trials() -> Iterator[RateTrial]:
    """Yield every run that went to its end: those of the searches and the judged ones, and those at 200 layers."""
    for layers, updates, names in (*((layers, STUDY.updates, ("search", "ledger")) for layers in LAYERS),
                                   (DEEP, DEEP_UPDATES, ("deep",))):  # fmt: skip
        lines = [line for name in names for line in rows_of(HERE / f"{name}.csv")]
        for arm in arms(layers):
            own = label_of(STUDY, arm, layers)
            for line in lines:
                if (line["label"], int(line["layers"]), int(line["steps"])) == (own, layers, updates):
                    rate, seed = float(line["lr"]), int(line["seed"])
                    yield RateTrial(TITLES[arm][0], layers, updates, rate, seed, line["verdict"])


def deep_table() -> list[str]:
    """The verdicts at 200 layers, and the largest rate at which all three seeds train."""
    lines, rows = rows_of(HERE / "deep.csv"), []
    for arm in DEEP_ARMS:
        own = {
            rate: {
                int(line["seed"]): end_of_line(line)
                for line in lines
                if (line["label"], float(line["lr"])) == (label_of(STUDY, arm, DEEP), rate)
                and int(line["seed"]) in DEEP_SEEDS
            }
            for rate in DEEP_RATES
        }
        cells = (", ".join(end.verdict for _, end in sorted(ends.items())) or "open" for ends in own.values())
        rows.append((TITLES[arm][0], *cells, judge.largest_rate(own)))
    told = "largest rate at which all seeds train"
    return page_blocks.table(("200 layers", *(f"verdicts at {rate:g}" for rate in DEEP_RATES), told), rows)


def questions() -> list[str]:
    """The answers of P1 to P6."""
    return answers(answered(STUDY, ends_on_page(STUDY, HERE), judge.PRIMARY), len(STUDY.seeds), TITLES)


BLOCKS = {
    "rates": lambda: rates(STUDY, HERE, TITLES),
    "losses": lambda: losses(STUDY, ends_on_page(STUDY, HERE), "keel", TITLES),
    "answers": questions,
    "deep": deep_table,
}


PAGES = (HERE / "README.md", HERE.parents[1] / "docs" / "decoders.md")


def renewed(text: str) -> str:
    """A page with its blocks made anew; those of docs/decoders.md have a mark of this study."""
    return page_blocks.renewed(page_blocks.renewed(text, BLOCKS), BLOCKS, "keel")


def main() -> int:
    if ends := ends_on_page(STUDY, HERE):
        draw(STUDY, ends, TITLES, HERE / "figures" / "trained.png")
    if known := [*trials()]:
        told = "decoders of LLaMA's design, 64 wide, English side of Multi30k"
        paper.write(drawn(known, f"{len(known)} runs", told), HERE / "figures", "table-keel")
    return page_blocks.main(__doc__, PAGES, renewed)


if __name__ == "__main__":
    sys.exit(main())
