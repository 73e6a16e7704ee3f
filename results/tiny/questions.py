"""The four primary questions of Protocol 2, fixed before their runs, and how they are answered.

Each is a difference of validation losses after training [nats/token], paired by seed. Its 95 % t-interval over seeds
says: "matters" where it lies wholly beyond the margin of .05 on one side; "equivalent" where it lies within the
margin; "differs" where it excludes 0, and the margin does not decide; else "cannot tell". It says nothing before all
seeds of the protocol are there: an interval that is looked at after each seed holds less than it promises. Holm's
correction over the four is printed for both tests, of a difference from 0 (two-sided t) and of equivalence (two one-
sided t). Beside the interval over seeds stands one over sentences: of the losses' means over seeds, the sentences
being the units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from stabilitylab.experiments import protocol
from stabilitylab.reports.statistics import LEVEL, Region, holm, t_interval, t_outside

MARGIN = 0.05  # nats/token
Losses = Callable[[str, int], Mapping[int, float]]  # arm, layers a side -> seed -> validation loss


@dataclass(frozen=True)
class Question:
    """``first`` minus ``second`` at 18 layers a side; ``depths``: how that changes from 6."""

    id: str
    text: str
    first: str
    second: str
    depths: bool = False

    def terms(self) -> list[tuple[float, str, int]]:
        """(sign, arm, layers a side) of what is added."""
        shallow, deep = protocol.LAYERS
        found = [(1.0, self.first, deep), (-1.0, self.second, deep)]
        return found + ([(-1.0, self.first, shallow), (1.0, self.second, shallow)] if self.depths else [])


QUESTIONS = (
    Question("P1", "Does DeepNorm's alpha cost quality?", protocol.DEEP, protocol.SMALL),
    Question("P2", "Is BranchNorm better than DeepNorm?", protocol.BRANCH, protocol.DEEP),
    Question("P3", "Does BranchNorm's ramp matter?", protocol.BRANCH, protocol.SMALL),
    Question("P4", "Does what alpha costs change with depth?", protocol.DEEP, protocol.SMALL, depths=True),
)


def differences(question: Question, losses: Losses) -> dict[int, float]:
    """Seed -> difference, of seeds that all arms of the question have."""
    known = [(sign, losses(arm, layers)) for sign, arm, layers in question.terms()]
    seeds = sorted(set.intersection(*(set(own) for _, own in known)))
    return {seed: sum(sign * own[seed] for sign, own in known) for seed in seeds}


def answer(low: float, high: float) -> str:
    """The words for an interval."""
    if low > -MARGIN and high < MARGIN:
        return "equivalent"
    if low > MARGIN or high < -MARGIN:
        return "matters"
    return "differs" if low > 0 or high < 0 else "cannot tell"


def said(n: int, low: float, high: float) -> str:
    """The answer, or how many of its seeds there are."""
    of = len(protocol.SEEDS)
    return answer(low, high) if n == of else f"open: {n} of {of} seeds"


def table(losses: Losses, sentences: pd.DataFrame | None = None) -> pd.DataFrame:
    """One row a question: n, mean, interval over seeds, interval over sentences, p values after Holm, answer."""
    rows = []
    for question in QUESTIONS:
        values = differences(question, losses)
        found = t_interval(values.values())
        enough = found.n > 1
        rows.append(
            {
                "id": question.id,
                "question": question.text,
                "n": found.n,
                "mean": found.mean,
                "low": found.low,
                "high": found.high,
                "sentences_low": np.nan,
                "sentences_high": np.nan,
                "p": float(stats.ttest_1samp([*values.values()], 0.0).pvalue) if enough else np.nan,
                "p_equivalent": t_outside(values.values(), Region(-MARGIN, MARGIN)),
                "answer": said(found.n, found.low, found.high),
            }
        )
        if sentences is not None and enough:
            ends = over_sentences(question, sentences, [*values])
            rows[-1] |= {"sentences_low": ends[0], "sentences_high": ends[1]}
    for column in ("p", "p_equivalent"):
        for row, adjusted in zip(rows, holm([row[column] for row in rows]), strict=True):
            row[f"{column}_holm"] = adjusted
    return pd.DataFrame(rows)


def over_sentences(question: Question, sentences: pd.DataFrame, seeds: Sequence[int]) -> tuple[float, float]:
    """The interval of the difference of mean losses (over ``seeds``) with the validation sentences as units: a ratio of
    sums, sum of differences over sum of tokens, whose variance is the linearised one."""
    numbers = [column for column in sentences if column.startswith("s") and column[1:].isdigit()]
    tokens = sentences.loc[sentences["arm"] == "tokens", numbers].to_numpy(float)[0]
    total = np.zeros(len(tokens))
    for sign, arm, layers in question.terms():
        own = sentences[(sentences["arm"] == arm) & (sentences["layers"].astype(str) == str(layers))]
        own = own[own["seed"].astype(str).isin([str(seed) for seed in seeds])]
        own = own[own["updates"].astype(str) == str(protocol.UPDATES)]
        own = own[own["lr"].astype(float) == protocol.chosen(arm, layers)]
        total += sign * own[numbers].to_numpy(float).mean(0)
    mean = total.sum() / tokens.sum()
    rest = (total - mean * tokens) / tokens.mean()
    half = stats.t.ppf((1 + LEVEL) / 2, len(tokens) - 1) * rest.std(ddof=1) / np.sqrt(len(tokens))
    return float(mean - half), float(mean + half)
