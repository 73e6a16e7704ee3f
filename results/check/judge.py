"""Counts how often ``check`` fails healthy models, and how often it fails broken ones for the right reason.

    python results/check/judge.py            # healthy.csv, broken.csv: about a minute
    python results/check/judge.py --say      # the tables of docs/preflight.md against these; --write makes them anew

A model of broken.csv is judged rightly where the first failure that ``check`` names is one of its ``reasons``.
"""

from __future__ import annotations

import csv
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from broken import BROKEN, Broken
from healthy import ENTRIES
from models import Entry

import stabilitylab as sl
from stabilitylab.check import Preflight

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "preflight.md"
sys.path.append(str(HERE.parent))
import page_blocks  # noqa: E402
from page_blocks import table  # noqa: E402


def found(entry: Entry) -> Preflight:
    logging.getLogger("stabilitylab").setLevel(logging.ERROR)
    return sl.preflight(**entry.given())


def told(result: Preflight, severity: str) -> str:
    return "; ".join(dict.fromkeys(one.bound for one in result.findings if one.severity == severity))


def healthy(entry: Entry) -> dict[str, str]:
    result = found(entry)
    row = {"model": entry.name, "family": entry.family, "optimizer": entry.optimizer, "rate": f"{entry.rate:g}"}
    row |= {"warmup": f"{entry.warmup}", "ok": f"{result.ok}"}
    row |= {"fails": told(result, "fail"), "warns": told(result, "warn")}
    return row | {"not checked": "; ".join(one.name for one in result.checks if one.state == "not checked")}


def broken(one: Broken) -> dict[str, str]:
    ill, well = map(found, one.entries())
    row = {"fault": one.name, "reasons": "; ".join(one.reasons), "ok": f"{ill.ok}", "fails": told(ill, "fail")}
    first = "" if ill.suspect is None or ill.ok else ill.suspect.bound
    row |= {"first": first, "right": f"{first in one.reasons}", "measured": ""}
    if ill.suspect is not None:
        row["measured"] = ill.suspect.text
    return row | {"without the fault ok": f"{well.ok}", "without the fault fails": told(well, "fail")}


def write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(name: str) -> list[dict[str, str]]:
    with (HERE / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def counts() -> Iterator[str]:
    """What the tables count, as the page says it."""
    well, ill = read("healthy"), read("broken")
    false = [row for row in well if row["ok"] == "False"]
    which = ": ".join(dict.fromkeys(f"{row['model']} (`{row['fails']}`)" for row in false))
    yield f"{len(false)} of {len(well)} healthy models fail" + (f": {which}." if which else ".")
    warned = sum(bool(row["warns"]) for row in well)
    yield f"{warned} of them {'has' if warned == 1 else 'have'} a warning."
    right = sum(row["right"] == "True" for row in ill)
    yield f"{right} of {len(ill)} broken models fail, and the first failure that is named is the fault."
    passing = sum(row["without the fault ok"] == "True" for row in ill)
    yield f"Without the fault {passing} of the {len(ill)} pass."


def faults() -> list[str]:
    rows = ((row["fault"], row["first"] or "none", row["measured"]) for row in read("broken"))
    return table(("fault", "first failure", "measured"), rows)


def anew(text: str) -> str:
    return page_blocks.renewed(text, {"counts": lambda: list(counts()), "faults": faults})


def main() -> int:
    if "--say" in sys.argv or "--write" in sys.argv:
        sys.argv = [word for word in sys.argv if word != "--say"]
        return page_blocks.main(__doc__, [PAGE], anew)
    write(HERE / "healthy.csv", [healthy(entry) for entry in ENTRIES])
    write(HERE / "broken.csv", [broken(one) for one in BROKEN])
    return 0


if __name__ == "__main__":
    sys.exit(main())
