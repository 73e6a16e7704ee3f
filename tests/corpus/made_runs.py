"""Runs of a made-up corpus."""

from __future__ import annotations

from typing import Any

import numpy as np


def corpus_run(scripts: Any, rows: int = 400, **facts: Any) -> Any:
    told = {"name": "r", "subject": "postln-d4", "family": "rate", "kind": "endogenous", "seed": 1, "rows": rows}
    told |= {"fault": None, "failed": None, "benign": (), "open": False}
    return scripts("corpus").CorpusRun(**{**told, **facts})


def spikes(rows: int, *at: int) -> np.ndarray:
    score = np.zeros(rows)
    score[list(at)] = 1.0
    return score
