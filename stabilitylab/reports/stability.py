"""The stability table: how the runs of each architecture ended at each depth, counted over seeds."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from .collection import Record, Runs

STATES = ("trained", "learning", "stuck", "diverged")
COLUMNS = ("arch", "depth", "seeds", *STATES, "nll_gap", "low", "high")


def layers_in_all(record: Record) -> int:
    """Encoder and decoder layers together, as ``--depth`` counts them."""
    return sum(record.layers)


def nll_gap(record: Record) -> float:
    """Held-out cross-entropy after training minus the unigram baseline's [nats/token]; NaN for a run that diverged."""
    found = (record.status.facts.get("verdict") or {}).get("nll_gap")
    return math.nan if record.verdict == "diverged" or found is None else float(found)


def judged(runs: Runs) -> Runs:
    """Training runs that have ended with a verdict."""
    return runs.where(lambda run: run.ended and run.verdict in STATES, kind="train")


def stability_table(runs: Runs) -> pd.DataFrame:
    """One row for each architecture and depth (both stacks together) of the training runs that have ended.

    ``seeds`` counts the runs, one a seed; ``trained``, ``learning``, ``stuck`` and ``diverged`` say how many of them
    ended so. ``nll_gap`` is the mean over seeds of the held-out cross-entropy minus the unigram baseline's
    [nats/token], ``low`` and ``high`` its range, all without the runs that diverged: NaN where every one did. Of
    several runs of one seed the last by name counts; runs with other settings are not told apart here.
    """
    ended = judged(runs)
    rows = []
    for label in ended.labels:
        own = ended.where(label=label)
        for depth in sorted({*map(layers_in_all, own)}):
            cell = [*own.where(lambda run, d=depth: layers_in_all(run) == d).by_seed().values()]
            counts = [sum(run.verdict == state for run in cell) for state in STATES]
            gaps = np.array([gap for run in cell if math.isfinite(gap := nll_gap(run))])
            ends = (gaps.mean(), gaps.min(), gaps.max()) if len(gaps) else (math.nan,) * 3
            rows.append((label, depth, len(cell), *counts, *map(float, ends)))
    return pd.DataFrame(rows, columns=[*COLUMNS])
