"""The runs of the ledger, and how the pages write numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pandas as pd

from stabilitylab.experiments import protocol
from stabilitylab.reports import style
from stabilitylab.sweep import Ledger

HERE = Path(__file__).parent
SECOND = HERE / "second"  # the tables of Protocol 2
sys.path.append(str(HERE.parent))  # results/page_blocks.py
COLUMNS = ["label", "layers", "steps", "seed", "lr", "T", "verdict", "nll_gap", "metrics.validation_nll"]
TITLES = {
    protocol.POST: "Post-LN (gain 1)",
    protocol.SMALL: "Post-LN, DeepNorm's initialisation (T = 1)",
    protocol.ALPHA_ALONE: "DeepNorm's alpha alone (gain 1)",
}


def title(arm: str) -> str:
    return TITLES.get(arm, style.title(arm))


@cache
def cells() -> pd.DataFrame:
    """A row a run of second/ledger.csv, with settings and metrics as columns."""
    return Ledger(SECOND / "ledger.csv").frame().reindex(columns=COLUMNS)


def losses(arm: str, layers: int, updates: int = protocol.UPDATES) -> Mapping[int, float]:
    """Seed -> validation loss after training of an arm of the comparison."""
    data = cells()
    ramp = 1 if arm == protocol.SMALL else protocol.share(updates)
    own = data[(data["label"] == arm) & (data["layers"] == 2 * layers) & (data["steps"] == updates)]
    own = own[(own["T"] == ramp) & (own["lr"] == protocol.chosen(arm, layers))]
    return dict(zip(own["seed"].astype(int), own["metrics.validation_nll"].astype(float), strict=True))


def number(value: float, form: str = "+.3f") -> str:
    return "" if math.isnan(value) else f"{value:{form}}"


def interval(low: float, high: float, form: str = "+.3f") -> str:
    return "" if math.isnan(low) else f"[{low:{form}}, {high:{form}}]"


def states(rows: pd.DataFrame) -> str:
    return ", ".join(f"{count} {state}" for state, count in rows["verdict"].value_counts().items())
