"""Counts how often ``check`` fails healthy models, and how often it fails broken ones for the right reason.

    python results/check/judge.py            # healthy.csv, broken.csv: about a minute
    python results/check/judge.py --say      # the tables of docs/preflight.md against these; --write makes them anew

A model of broken.csv is judged rightly where the first failure that ``check`` names is one of its ``reasons``.
"""

from __future__ import annotations

import csv
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from broken import BROKEN, Broken
from healthy import ENTRIES
from models import Entry, told

import stabilitylab as sl
from stabilitylab.check import Preflight

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "preflight.md"
sys.path.append(str(HERE.parent))
import page_blocks  # noqa: E402
from page_blocks import table  # noqa: E402
from shared import rows_of  # noqa: E402


def found(entry: Entry) -> Preflight:
    logging.getLogger("stabilitylab").setLevel(logging.ERROR)
    return sl.preflight(**entry.given())


def healthy(entry: Entry) -> dict[str, str]:
    result = found(entry)
    row = {"model": entry.name, "family": entry.family, "optimizer": entry.optimizer, "rate": f"{entry.rate:g}"}
    return row | {"warmup": f"{entry.warmup}", "ok": f"{result.ok}"} | told(result)


def broken(one: Broken) -> dict[str, str]:
    ill, well = map(found, one.entries())
    row = {"fault": one.name, "reasons": "; ".join(one.reasons), "ok": f"{ill.ok}", "fails": told(ill)["fails"]}
    first = "" if ill.suspect is None or ill.ok else ill.suspect.bound
    row |= {"first": first, "right": f"{first in one.reasons}", "measured": ""}
    if ill.suspect is not None:
        row["measured"] = ill.suspect.text
    return row | {"without the fault ok": f"{well.ok}", "without the fault fails": told(well)["fails"]}


def write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(name: str) -> list[dict[str, str]]:
    return rows_of(HERE / f"{name}.csv")


def counts() -> list[str]:
    """Shares of the two lists, with the models that are judged wrongly."""
    well, ill = read("healthy"), read("broken")
    false = [f"{row['model']} (`{row['fails']}`)" for row in well if row["ok"] == "False"]
    warned = [f"{row['model']} (`{row['warns']}`)" for row in well if row["warns"]]
    missed = [row["fault"] for row in ill if row["right"] == "False"]
    doubted = [row["fault"] for row in ill if row["without the fault ok"] == "False"]
    rows = (
        ("healthy models that fail", len(false), len(well), false),
        ("healthy models with a warning", len(warned), len(well), warned),
        ("models with a fault of which the first failure is that fault", len(ill) - len(missed), len(ill), missed),
        ("the same models without the fault that fail", len(doubted), len(ill), doubted),
    )
    columns = ("models", "count", "exceptions")
    return table(columns, ((what, f"{n} of {of}", ", ".join(which) or "none") for what, n, of, which in rows))


def faults() -> list[str]:
    rows = ((row["fault"], row["first"] or "none", row["measured"]) for row in read("broken"))
    return table(("fault", "first failure", "measured"), rows)


def corpus() -> list[str]:
    """The corpus' models: how many fail, and how many only warn."""
    runs, rows = read("corpus"), []
    groups = (
        ("GPT-2 and LLaMA, healthy", True, "healthy"),
        ("GPT-2 and LLaMA, failed from within", True, "failure"),
        ("reference Transformers, healthy, one of each", False, "healthy"),
    )
    for at, name in (("first", "of step one"), ("peak", "the highest, without a warm-up")):
        for which, language, group in groups:
            own = [row for row in runs if (row["at"], row["group"]) == (at, group)]
            own = [row for row in own if row["subject"].startswith(("gpt2", "llama")) == language]
            fails, warns = (
                sum(row["ok"] == "False" for row in own),
                sum(row["ok"] == "True" and bool(row["warns"]) for row in own),
            )
            rows.append((which, name, f"{fails} of {len(own)}", f"{warns} of {len(own)}"))
    return table(("runs", "rate", "check fails", "check only warns"), rows)


def anew(text: str) -> str:
    return page_blocks.renewed(text, {"counts": counts, "faults": faults, "corpus": corpus})


def main() -> int:
    if "--say" in sys.argv or "--write" in sys.argv:
        sys.argv = [word for word in sys.argv if word != "--say"]
        return page_blocks.main(__doc__, [PAGE], anew)
    write(HERE / "healthy.csv", [healthy(entry) for entry in ENTRIES])
    write(HERE / "broken.csv", [broken(one) for one in BROKEN])
    return 0


if __name__ == "__main__":
    sys.exit(main())
