"""The ledger in a line: verdicts by paper and kind, and how many survive Holm's correction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from .claims import VERDICTS, Finding, Kind, Outcome


@dataclass(frozen=True)
class Tally:
    """The verdicts on the published claims of one paper, or on all claims of another kind, counted."""

    name: str
    counts: Mapping[Outcome, int]
    survive: int | None = None  # verdicts that survive Holm, of published claims
    listed: int = 0  # published claims of that paper, over which Holm's correction goes

    def __str__(self) -> str:
        """Writes ``BranchNorm: 2 reproduced, 1 contradicted, of which 1 survives Holm over the 20 published claims of
        that paper``; without Holm where none was testable."""
        found = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items() if count)
        judged = any(count for verdict, count in self.counts.items() if verdict != "not testable")
        if self.survive is None or not judged:
            return f"{self.name}: {found}"
        many = "survives" if self.survive == 1 else "survive"
        over = f"the {self.listed} published claims of that paper" if self.listed > 1 else "that one published claim"
        return f"{self.name}: {found}, of which {self.survive} {many} Holm over {over}"


def tallies(findings: Iterable[Finding], registered: Iterable[Finding] | None = None) -> list[Tally]:
    """Count the published claims of each paper, then those of each other kind. ``registered``: the whole ledger, if
    ``findings`` are a part of it."""
    some = list(findings)
    everything = some if registered is None else list(registered)
    found = []
    for paper in dict.fromkeys(one.claim.paper for one in everything):
        own = [one for one in some if one.claim.paper == paper and one.claim.kind == "published"]
        listed = sum(one.claim.paper == paper and one.claim.kind == "published" for one in everything)
        if own:
            # without a corrected p value it is not known which verdicts survive Holm
            known = any(not math.isnan(one.holm) for one in own)
            found.append(Tally(paper, _counts(own), sum(bool(one.survives) for one in own) if known else None, listed))
    others = {kind: [one for one in some if one.claim.kind == kind] for kind in get_args(Kind)[1:]}
    return [*found, *(Tally(kind, _counts(own)) for kind, own in others.items() if own)]


def _counts(findings: Sequence[Finding]) -> dict[Outcome, int]:
    return {verdict: sum(one.verdict == verdict for one in findings) for verdict in VERDICTS}


def headline(findings: Iterable[Finding]) -> dict[str, dict[str, int]]:
    """Counts verdicts by kind; of published claims also how many verdicts ``survive`` Holm."""
    counts: dict[str, dict[str, int]] = {}
    for one in findings:
        own = counts.setdefault(one.claim.kind, dict.fromkeys(VERDICTS, 0) | {"survive": 0})
        own[one.verdict] += 1
        own["survive"] += bool(one.survives)
    return counts
