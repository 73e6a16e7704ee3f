#!/usr/bin/env python
"""What papers say of warnings before a failure, held against the corpus's test half.

    python results/alarm/claims.py      # claims.csv

Statistics and regions were committed before that half was opened; the regions are ours, the papers have none. A rise of
the loss is one that the definition of t* found, undone or not; seeds are the units.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from corpus import FIRST, HERE, HORIZON, LATE, CorpusRun, read
from events import outcomes, recall, value
from freeze import scored
from rivals import rivals
from score import Line, write

from stabilitylab.reports.claims import Share
from stabilitylab.reports.statistics import Region

RMS = 2.3
BEFORE = 8  # rows
Z = 7.0


def rises(run: CorpusRun) -> tuple[int, ...]:
    """Rows at which the training loss begins to rise, in runs that nothing was done to from outside."""
    if run.fault is not None:
        return ()
    last = (run.failed,) if run.failed is not None and run.why == "rise" else ()
    return tuple(row for row in (*run.benign, *last) if row > LATE)


def by_seed(runs: Sequence[CorpusRun], of: Callable[[CorpusRun], Iterator[bool]]) -> dict[int, tuple[int, int]]:
    """seed -> (how many are so, of how many)."""
    found: dict[int, list[bool]] = defaultdict(list)
    for run in runs:
        found[run.seed] += of(run)
    return {seed: (sum(own), len(own)) for seed, own in sorted(found.items())}


def rms_leads(run: CorpusRun) -> Iterator[bool]:
    """Of each rise: whether RMS_t exceeds 2.3 somewhere in the eight rows before it."""
    over = run.columns["rms_t.level"] > RMS
    for row in rises(run):
        yield bool(over[max(0, row - BEFORE) : row].any())


def rms_elsewhere(run: CorpusRun) -> Iterator[bool]:
    """Of each eight healthy rows, one after the other: the same."""
    over = run.columns["rms_t.level"] > RMS
    if run.outcome == "healthy" and not run.benign:
        for row in range(FIRST, run.rows - BEFORE + 1, BEFORE):
            yield bool(over[row : row + BEFORE].any())


def first(values: np.ndarray, row: int) -> float:
    """The first row within the horizon, up to 5 after the rise, at which a z-score exceeds 7; inf for none."""
    start = max(FIRST, row - HORIZON)
    high = np.flatnonzero(values[start : row + 6] > Z)
    return start + int(high[0]) if len(high) else math.inf


def updates_first(run: CorpusRun) -> Iterator[bool]:
    """Of each rise: whether some relative update leaves its past by 7 deviations before the loss does."""
    for row in rises(run):
        yield first(run.columns["update.z"], row) < first(run.columns["loss.z"], row)


def zclip_is_right(runs: Sequence[CorpusRun]) -> tuple[dict[int, tuple[int, int]], str]:
    """seed -> (failures that z > 2.5 announces, these and its false alarms); and its recall in words."""
    rival = rivals()["ZClip"]
    found = outcomes(runs, scored(runs, rival.score), rival.own or 0.0)
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for one in found:
        hit = int(one.fails and one.lead is not None)
        counts[one.run.seed][0] += hit
        counts[one.run.seed][1] += hit + one.false
    return {seed: (own[0], own[1]) for seed, own in sorted(counts.items())}, f"recall: {value(recall(found)):.3g}"


def claims(runs: Sequence[CorpusRun]) -> list[Line]:
    within = Region(low=0.5), Region(high=0.25)
    alarms, recalled = zclip_is_right(runs)
    shares = (
        (
            "2304.13013",
            "a rise of the loss follows, 1 to 8 updates later, an RMS_t above 2.3",
            Share("share of rises", by_seed(runs, rms_leads), *within),
            Share("of eight healthy rows", by_seed(runs, rms_elsewhere)),
        ),
        (
            "2304.13013, 2304.09871 (INFER)",
            "updates leave their past before the loss does",
            Share("share of rises", by_seed(runs, updates_first), *within),
            None,
        ),
        (
            "2504.02507",
            "z > 2.5 of the gradient norm detects what goes wrong",
            Share("share of its alarms that announce a failure", alarms, *within),
            None,
        ),
    )
    found = []
    for source, sentence, share, beside in shares:
        told: dict[str, Any] = share.judge()
        line = {"source": source, "sentence": sentence, "statistic": share.name, "n": told["n"]}
        line |= {key: f"{told[key]:.3f}" for key in ("mean", "low", "high")}
        line |= {"reproduced": str(within[0]), "contradicted": str(within[1]), "verdict": told["verdict"]}
        found.append({**line, "beside": f"{beside.name}: {beside.judge()['mean']:.3f}" if beside else ""})
    found[-1]["beside"] = recalled
    return found


def main(folder: Path = HERE) -> None:
    write(folder / "claims.csv", claims(read("test", folder)))


if __name__ == "__main__":
    main()
