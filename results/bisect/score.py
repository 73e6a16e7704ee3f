#!/usr/bin/env python
"""Makes the tables of the validation from its ledgers.

python results/bisect/score.py [--folder results/bisect] [--write]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from stabilitylab.reports.statistics import share_interval

sys.path.append(str(Path(__file__).resolve().parents[1]))

from page_blocks import differing, renewed
from shared import rows_of

HERE = Path(__file__).resolve().parent
PAGES = (HERE / "README.md", HERE.parents[1] / "docs" / "bisect.md")
CONTROL = {"fp32": 0.6 * 2.0**-23, "bf16": 0.6 * 2.0**-7}  # rule 2
TIMES = 3.0
WHO = {"where": "bisect", "suspected": "bisect, sums only", "norms": "norms", "l1": "L1"}


def read(folder: Path, name: str) -> list[dict[str, str]]:
    return rows_of(folder / f"{name}.csv")


def share(hits: int, of: int) -> str:
    if not of:
        return "-"
    low, high = share_interval(hits, of)
    return f"{hits} of {of} ({100 * hits / of:.0f} % [{100 * low:.0f}, {100 * high:.0f}])"


def counting(folder: Path) -> dict[str, set[tuple[str, str, str]]]:
    """The mutants whose effect is above the control, by setting."""
    found = read(folder, "effects")
    return {
        setting: {(r["mutant"], r["model"], r["seed"]) for r in found if float(r["effect"]) > TIMES * control}
        for setting, control in CONTROL.items()
    }


def homes() -> Mapping[str, str]:
    from mutants import MUTANTS

    return {mutant.name: mutant.where for mutant in MUTANTS}


def tables(folder: Path, where: Mapping[str, str]) -> list[str]:
    judged, counts, clean = read(folder, "mutants"), counting(folder), read(folder, "clean")
    lines = [
        "| setting | mutants that count | right side | "
        + " | ".join(f"right sub-layer: {w}" for w in WHO.values())
        + " |"
    ]
    lines.append("|" + "---|" * (len(WHO) + 3))
    missed = []
    for setting, chosen in counts.items():
        rows = [r for r in judged if r["setting"] == setting and (r["mutant"], r["model"], r["seed"]) in chosen]
        right = sum(r["verdict"] == "different" for r in rows)
        hits = [sum(r[column] == where[r["mutant"]] for r in rows) for column in WHO]
        cells = [f"{len(rows)} of {len(chosen)} run", share(right, len(rows)), *(share(h, len(rows)) for h in hits)]
        lines.append(f"| {setting} | " + " | ".join(cells) + " |")
        missed += [
            f"| {setting} | {r['mutant']} | {r['model']} | {where[r['mutant']]} | {r['where'] or r['verdict']} |"
            for r in rows
            if r["where"] != where[r["mutant"]]
        ]
    lines += ["", f"Clean pairs flagged: {share(sum(r['verdict'] == 'different' for r in clean), len(clean))}."]
    if clean:
        fed, sums = (max(float(r[name]) for r in clean) for name in ("largest", "largest_sums"))
        lines.append(
            f"The largest added error of a clean pair is {fed:.2g} times the control (fed), {sums:.2g} (sums)."
        )
    lines += further_table(folder, where, counts["fp32"])
    if missed:
        lines += [
            "",
            "Answers of bisect that are not right:",
            "",
            "| setting | mutant | model | fault in | answer |",
            "|" + "---|" * 5,
        ]
        lines += missed
    return lines


def further_table(folder: Path, where: Mapping[str, str], counting: set[tuple[str, str, str]]) -> list[str]:
    """Return the table of the further settings, and their answers that are not right."""
    known = {(mutant, model) for mutant, model, _ in counting}
    rows = read(folder, "further")
    lines = [
        "",
        "| further setting | mutants that count | cannot be cut | right side | right sub-layer | clean flagged |",
    ]
    lines.append("|" + "---|" * 6)
    wrong = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        own = [r for r in rows if r["setting"] == setting]
        clean = [r for r in own if r["mutant"] not in where]
        counted = [r for r in own if (r["mutant"], r["model"]) in known]
        asked = [r for r in counted if not r["error"]]
        right = sum(r["verdict"] == "different" for r in asked)
        hits = [r for r in asked if r["where"] == where[r["mutant"]]]
        cells = [
            f"{len(counted)}",
            f"{len(counted) - len(asked)}",
            share(right, len(asked)),
            share(len(hits), len(asked)),
        ]
        flagged = share(sum(r["verdict"] == "different" for r in clean), len(clean))
        lines.append(f"| {setting} | {' | '.join(cells)} | {flagged} |")
        answers: dict[tuple[str, str], list[str]] = {}
        for r in asked:
            if r not in hits:
                answers.setdefault((r["model"], r["where"] or r["verdict"]), []).append(r["mutant"])
        for (model, answer), mutants in answers.items():
            which = "; ".join(mutants) if len(mutants) < 6 else f"{len(mutants)} mutants"
            wrong.append(f"| {setting} | {model} | {answer} | {which} |")
    if not rows:
        return []
    return [
        *lines,
        *(
            ["", "| further setting | model | answer that is not right | of |", "|" + "---|" * 4, *wrong]
            if wrong
            else []
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(arguments)
    print("\n".join(tables(given.folder, homes())))
    if given.write:
        differing(PAGES, anew, write=True)
    return 0


def anew(page: str) -> str:
    """Return a page with the tables of the ledgers here between its marks."""
    return renewed(page, {"scores": lambda: tables(HERE, homes())})


if __name__ == "__main__":
    raise SystemExit(main())
