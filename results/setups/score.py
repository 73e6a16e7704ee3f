"""Compare docs/setups.md with the ledgers: ``python results/setups/score.py``; ``--write`` makes its tables."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import page_blocks
from page_blocks import table

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "setups.md"


def read(name: str) -> list[dict[str, str]]:
    with (HERE / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def counts() -> list[str]:
    """The shares of the lists, with what was judged wrongly."""
    first, later, setups = read("faults"), read("later"), read("setups")
    faults = [*first, *later]
    missed, missed_later = ([row["bug"] for row in own if row["found"] != "True"] for own in (first, later))
    accused = [row["set-up"] for row in setups if row["accused"] == "True"]
    doubted = [row["bug"] for row in faults if row["findings without the bug"]]
    silent = [row["set-up"] for row in setups if "gradient scale" in row["not checked"].split("; ")]
    rows = (
        ("published bugs of the first list that are found", len(first) - len(missed), len(first), missed),
        ("published bugs of the later list that are found", len(later) - len(missed_later), len(later), missed_later),
        ("the same set-ups without the bug that have a finding", len(doubted), len(faults), doubted),
        ("correct set-ups that have a finding", len(accused), len(setups), accused),
        ("correct set-ups whose gradient scale could not be told", len(silent), len(setups), silent),
    )
    return table(
        ("set-ups", "count", "exceptions"),
        ((what, f"{n} of {of}", "; ".join(which) or "none") for what, n, of, which in rows),
    )


def faults(name: str = "faults") -> list[str]:
    """Each bug, its source and the first finding."""
    rows = ((row["bug"], f"`{row['source']}`", row["ranks"], row["first finding"] or "none") for row in read(name))
    return table(("bug", "source", "ranks", "first finding"), rows)


def anew(text: str) -> str:
    return page_blocks.renewed(text, {"counts": counts, "faults": faults, "later": lambda: faults("later")})


if __name__ == "__main__":
    sys.exit(page_blocks.main(__doc__, [PAGE], anew))
