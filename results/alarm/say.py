#!/usr/bin/env python
"""Every number that pages say of the corpus, from the tables beside this file.

    python results/alarm/say.py [--write]

Blocks between ``<!-- results:NAME -->`` and ``<!-- end -->`` in these pages are what this script makes. Without
``--write`` it compares and ends with 1 where a digit differs.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from corpus import HERE, lines, read
from events import healthy_rows
from freeze import COMBINATION, LEAD, RATES

sys.path.append(str(HERE.parent))

import page_blocks
from page_blocks import table

from stabilitylab.alarm import names

PAGES = (HERE / "README.md",)
AT = f"{RATES[0]:g}"
SHARES = ("of the test half", "share", "95 %", "runs")
GROUPS = {"healthy": "healthy runs", "failures": "failures from within"}
Line = Mapping[str, str]


class Corpus:
    """The tables of one folder, as blocks of a page."""

    def __init__(self, folder: Path = HERE) -> None:
        self._folder = folder
        own = (self.runs, self.verdict, self.rules, self.own, self.faults, self.claims)
        diagnosed = (self.causes, self.judged, self.consequence, self.bounds)
        self.blocks: page_blocks.Blocks = {one.__name__: one for one in (*own, *diagnosed)}

    def _lines(self, name: str, **where: str) -> list[dict[str, str]]:
        found = lines(self._folder, f"{name}.csv")
        return [line for line in found if all(line[key] == value for key, value in where.items())]

    def runs(self) -> list[str]:
        """How many runs became what."""
        rows = []
        for half in ("train", "test"):
            own = read(half, self._folder)
            counts = Counter(run.outcome for run in own)
            kinds = [counts[kind] for kind in ("healthy", "failure", "early", "fault", "open")]
            seeds = ", ".join(map(str, sorted({run.seed for run in own})))
            rows.append((half, seeds, len(own), *kinds, f"{healthy_rows(own):,}"))
        columns = ("half", "seeds", "runs", "healthy", "failed from within at t* > 50", "failed before")
        return table((*columns, "fault from outside", "undecided", "healthy rows"), rows)

    def verdict(self) -> list[str]:
        """The goal, and what came of it."""
        rows = []
        held = self._lines("verdict")
        for line in held:
            own = self._lines("left_out", left_out=line["left_out"], target=AT)
            [ours] = [one for one in own if one["rule"] == COMBINATION]
            [other] = [one for one in own if one["rule"] == line["over"]]
            what = {"family": "each way to fail", "arch": "each architecture"}[line["left_out"]]
            gain = f"{signed(other['gain_lead_20'])} [{signed(other['gain_low'])}, {signed(other['gain_high'])}]"
            told = (with_ends(ours, name) for name in ("recall", "lead", "false_per_1000", "recall_lead_20"))
            best = f"{with_ends(other, 'recall_lead_20')} ({line['over']})"
            rows.append((what, line["failures"], *told, best, gain, "yes" if line["reached"] == "1" else "no"))
        columns = ("left out", "failures", "recall", "median lead", "false alarms per 1,000 rows")
        columns += (f"recall {LEAD} rows before", "best baseline's")
        told = "reached" if all(line["reached"] == "1" for line in held) else "missed"
        sentence = (
            f"**The goal is {told}** (recall .7 with a median lead of {LEAD} rows, and .15 above the best baseline "
            f"{LEAD} rows before, both ways, at {AT} false alarms per 1,000 healthy rows)."
        )
        return [sentence, "", *table((*columns, "difference", "goal reached"), rows)]

    def rules(self) -> list[str]:
        """The combination, the best signal and the rules of others at .5 false alarms per 1,000 rows of the training
        half."""
        areas = {line["rule"]: line["auc_50"] for line in self._lines("auc")}
        beaten = {line["over"] for line in self._lines("verdict")}
        kept = beaten.union({line["rule"] for line in self._lines("recall")} - {*names()})
        own = sorted((line for line in self._lines("recall", target=AT) if line["rule"] in kept), key=_order)
        rows = [
            (
                line["rule"],
                *(with_ends(line, name) for name in ("recall", "recall_lead_20")),
                short(line["lead"], 0),
                with_ends(line, "false_per_1000"),
                areas[line["rule"]].lstrip("0"),
            )
            for line in own
        ]
        columns = ("rule", "recall", f"recall {LEAD} rows before", "median lead", "false alarms per 1,000 rows")
        return table((*columns, "AUC, 50 rows"), rows)

    def own(self) -> list[str]:
        """Rules of others at the thresholds that they come with, below the combination where it is as loud."""
        [ours] = self._lines("recall", target="1", rule=COMBINATION)
        found = [(ours, "threshold for 1"), *((line, line["source"]) for line in self._lines("recall", target="own"))]
        rows = [
            (
                f"{line['rule']} ({note})" if note else line["rule"],
                *(with_ends(line, name) for name in ("recall", "recall_lead_20", "false_per_1000")),
                "/".join(short(line[f"precision_{base}"]) for base in ("0.01", "0.1")),
            )
            for line, note in found
        ]
        columns = ("rule as it comes", "recall", f"recall {LEAD} rows before", "false alarms per 1,000 rows")
        return table((*columns, "right, where 1 %/10 % of runs fail"), rows)

    def faults(self) -> list[str]:
        """Faults from outside: share announced within 50 rows, and the median delay."""
        own = self._lines("faults")
        told = self._lines("verdict")
        rules = list(dict.fromkeys([COMBINATION, *(line["over"] for line in told), "loss: mean + 6 sd"]))
        by = {(line["rule"], line["fault"]): line for line in own}
        rows = []
        for fault in dict.fromkeys(line["fault"] for line in own):
            cells = []
            for rule in rules:
                line = by[rule, fault]
                delay = f", after {line['delay']}" if line["delay"] else ""
                cells.append(f"{short(line['announced'])}{delay}")
            rows.append((fault.replace("_", " "), by[COMBINATION, fault]["runs"], *cells))
        return table(("fault", "runs", *rules), rows)

    def claims(self) -> list[str]:
        """What papers say."""
        rows = [
            (
                f"{line['sentence']} ({line['source']})",
                f"{line['statistic']}: {with_ends(line, 'mean', ('low', 'high'))}",
                line["beside"],
                line["verdict"],
            )
            for line in self._lines("claims")
        ]
        return table(("says", "measured", "beside it", "verdict"), rows)

    def causes(self) -> list[str]:
        """What was put in, and what diagnose named first."""
        rows: dict[str, list[tuple[int, str]]] = {}
        for line in self._lines("confusion", half="test"):
            rows.setdefault(line["put in"], []).append((int(line["runs"]), line["first"]))
        made = []
        for family, own in rows.items():
            named = ", ".join(f"{first} {runs}" for runs, first in sorted(own, key=lambda one: (-one[0], one[1])))
            made.append((family.replace("_", " "), sum(runs for runs, _ in own), named))
        return table(("put in", "runs", "first, of so many runs"), made)

    def judged(self) -> list[str]:
        """Shares of the test half that diagnose judged rightly, and of which a later rule speaks."""
        found = [line for line in self._lines("judged", half="test") if "preflight" not in line["measure"]]
        found += [
            {**line, "measure": f"explosion of the loss at the start, of {GROUPS[line['runs']]}"}
            for line in self._lines("bounds", half="test", bound="early_explosion")
        ]
        return table(SHARES, map(_share, found))

    def consequence(self) -> list[str]:
        """Shares of the test half without the rule of consequence and with it."""
        rows: dict[str, dict[str, str]] = {}
        for line in self._lines("consequence", half="test"):
            rows.setdefault(line["measure"], {"runs": line["of"]})[line["rule"]] = " ".join(_share(line)[1:3])
        columns = ("before", "unknown stands", "unknown does not stand")
        made = [(measure, own["runs"], *(own[rule] for rule in columns)) for measure, own in rows.items()]
        return table(("of the test half", "runs", *columns), made)

    def bounds(self) -> list[str]:
        """Shares of the test half of which preflight warns, or says that they fail."""
        found = [line for line in self._lines("judged", half="test") if "preflight" in line["measure"]]
        for line in self._lines("bounds", half="test", bound="output moved"):
            measure = f"preflight warns that the output moves by {line['limit']} of its size, of {GROUPS[line['runs']]}"
            found.append({**line, "measure": measure})
        apart = self._lines("bounds", half="test", limit="")
        found += [{**line, "measure": f"{line['bound']}, of {GROUPS[line['runs']]}"} for line in apart]
        return table(SHARES, map(_share, found))


def _order(line: Line) -> tuple[bool, float]:
    """The combination first, then by how much is announced early."""
    return line["rule"] != COMBINATION, -float(line["recall_lead_20"])


def _share(line: Line) -> tuple[str, ...]:
    return line["measure"], short(line["share"]), f"[{short(line['low'])}, {short(line['high'])}]", line["of"]


def with_ends(line: Line, name: str, ends: tuple[str, str] | None = None) -> str:
    """A number with its 95 % interval."""
    low, high = ends or (f"{name}_low", f"{name}_high")
    digits = 0 if name == "lead" else 2
    if line[name] == "nan":
        return "-"
    return f"{short(line[name], digits)} [{short(line[low], digits)}, {short(line[high], digits)}]"


def short(number: str, digits: int = 2) -> str:
    """So many digits after the point, and none before it where that is 0."""
    if number in ("nan", ""):
        return "-"
    text = f"{float(number):.{digits}f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def signed(number: str) -> str:
    return short(number) if number.startswith("-") else f"+{short(number)}"


def anew(text: str) -> str:
    return page_blocks.renewed(text, Corpus().blocks)


if __name__ == "__main__":
    sys.exit(page_blocks.main(__doc__, PAGES, anew))
