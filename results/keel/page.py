#!/usr/bin/env python
"""Compares README.md and docs/decoders.md with the ledgers, or writes their tables anew with --write; draws
figures/trained.png and figures/table-keel.

python results/keel/page.py [--write]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import judge
from own_rates import End, Ends, answered, end_of_line
from own_rates_page import StudyPage, answers, runs_of
from page_blocks import table
from protocol import DEEP, DEEP_ARMS, DEEP_RATES, DEEP_SEEDS, DEEP_UPDATES, LAYERS, STUDY, arms
from shared import rows_of

from stabilitylab.reports import paper
from stabilitylab.reports.figures.table.keel import RateEnd, drawn

HERE = Path(__file__).resolve().parent
TITLES = {
    "keel": ("KEEL", "#882255"),
    "deepnorm": ("DeepNorm", "#E69F00"),
    "branchnorm": ("BranchNorm", "#0072B2"),
    "keel-no-inner": ("KEEL, no inner norm", "#CC79A7"),
}


def ends_by_rate() -> Iterator[RateEnd]:
    """Yield every run that went to its end: those of the searches and the judged ones, and those at 200 layers."""
    searched = [(layers, STUDY.updates, ("search", "ledger")) for layers in LAYERS]
    for layers, updates, names in (*searched, (DEEP, DEEP_UPDATES, ("deep",))):
        lines = [line for name in names for line in rows_of(HERE / f"{name}.csv")]
        for arm in arms(layers):
            for rate, seed, line in runs_of(lines, STUDY, arm, layers, updates):
                yield RateEnd(TITLES[arm][0], layers, updates, rate, seed, line["verdict"])


def deep_table() -> list[str]:
    """The verdicts at 200 layers, the largest rate at which all three seeds train, and the losses, which decide
    nothing."""
    lines, found = rows_of(HERE / "deep.csv"), {}
    for arm in DEEP_ARMS:
        for rate, seed, line in runs_of(lines, STUDY, arm, DEEP, DEEP_UPDATES):
            if seed in DEEP_SEEDS:
                found.setdefault((arm, rate), {})[seed] = end_of_line(line)
    rows = [
        (TITLES[arm][0], *verdicts, largest, *(_losses(found.get((arm, rate), {})) for rate in DEEP_RATES))
        for arm, verdicts, largest in judge.deep_rows(found)
    ]
    columns = [f"verdicts at {rate:g}" for rate in DEEP_RATES], [f"loss by seed at {rate:g}" for rate in DEEP_RATES]
    return table(("200 layers", *columns[0], "largest rate at which all seeds train", *columns[1]), rows)


def _losses(ends: Mapping[int, End]) -> str:
    """The losses on the judged text of all seeds; "" while some are missing."""
    return ", ".join(f"{end.loss:.3f}" for _, end in sorted(ends.items())) if len(ends) == len(DEEP_SEEDS) else ""


def questions(ends: Ends) -> list[str]:
    """The answers of P1 to P6."""
    return answers(answered(STUDY, ends, judge.PRIMARY), len(STUDY.seeds), TITLES)


PAGE = StudyPage(STUDY, HERE, TITLES, "keel", "keel", questions, {"deep": deep_table})


def main() -> int:
    if known := [*ends_by_rate()]:
        told = "decoders of LLaMA's design, 64 wide, English side of Multi30k; of seven seeds one is of the search"
        paper.write(drawn(known, f"{len(known)} runs", told), HERE / "figures", "table-keel")
    return PAGE.main(__doc__)


if __name__ == "__main__":
    sys.exit(main())
