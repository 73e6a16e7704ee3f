#!/usr/bin/env python
"""The five primary questions of Protocol 3, fixed before their runs, and how they are answered.

    python results/tiny/judge.py [--tables results/tiny/third]

P1 to P4 are those of Protocol 2 (questions.py): differences of losses after training [nats/token], paired by seed, on
``test_2016_flickr``, which had no part in the choice of the rates. A model is *eligible* if another sentence's source
raises its loss by more than .1 nats/token at the end (``source_worth``).

- A question is answered if all seeds are there and every model of its arms is eligible. The 95 % t-interval over seeds
  says: "matters" where it lies wholly beyond the margin of .05 on one side; "undecidable at this n" where it does not,
  and its half-width is above the margin; "equivalent" where it lies within the margin; "differs" where it excludes 0;
  else "cannot tell". Holm's correction over P1 to P4 is printed for the test of a difference from 0; a question
  without an answer has none, and counts with p = 1.
- Otherwise the answer is "not testable: N of M models ignore their source", and the difference over the seeds in which
  every model is eligible is printed as *conditional*: it describes, and decides nothing.

**At half the rates** (four seeds): an answer depends on the rate only if the 95 % interval of its change, paired by
seed, excludes 0, or if its sign turns and the interval at half the rates excludes 0; else it is "not contradicted at
half the rate (n = 4)". A question with a model that ignores its source, at either rate, is not testable here either.

P(constant) of an arm is the share of its runs whose encoder is a constant function at the end: source worth below .1,
and 1 - cosine between tokens of different sentences below 1e-4; with the interval of Clopper and Pearson.

P5 is of the map of the collapse: log2 of the largest rate up to which a model reads, BranchNorm minus DeepNorm by seed;
a paired t-interval. BranchNorm's T and both warm-ups are 240 updates, 4 % of the schedule. A seed that reads at no rate
of the grid counts with half its lowest rate, one that reads at all of them with its highest; where there is such a
seed, its rate lies beyond the grid, and the answer says so (collapse_map.py).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from questions import MARGIN, QUESTIONS, Question
from scipy import stats

from stabilitylab.experiments import protocol
from stabilitylab.reports.statistics import Interval, holm, share_interval, t_interval
from stabilitylab.sweep import Ledger

TABLES, HALVED = (Path(__file__).parent / name for name in ("third", "half"))
READS = 0.1  # nats/token
CONSTANT = 1e-4  # 1 - cosine between sentences


@dataclass(frozen=True)
class Model:
    """What a run ended with: its loss, by how much another source raises it, and how far sentences lie apart."""

    loss: float
    worth: float
    between: float

    @property
    def eligible(self) -> bool:
        return self.worth > READS

    @property
    def constant(self) -> bool:
        return self.worth < READS and self.between < CONSTANT


Models = Mapping[tuple[str, int], Mapping[int, Model]]  # (arm, layers a side) -> seed -> model


@dataclass(frozen=True)
class Answer:
    """The difference over ``over`` its seeds; ``ignoring`` of ``models`` models ignore their source."""

    question: Question
    found: Interval
    p: float
    models: int
    ignoring: int

    @property
    def complete(self) -> bool:
        return self.models == len(protocol.JUDGED_SEEDS) * len(self.question.terms())

    @property
    def answered(self) -> bool:
        """True if all models are there and read their source; else the difference is conditional."""
        return self.complete and not self.ignoring

    def said(self) -> str:
        """The answer in words."""
        if not self.complete:
            return f"open: {self.models} of {len(protocol.JUDGED_SEEDS) * len(self.question.terms())} models"
        if self.ignoring:
            return f"not testable: {self.ignoring} of {self.models} models ignore their source"
        return decided(self.found)


def decided(found: Interval) -> str:
    """The word for an interval of which every model is eligible."""
    if found.low > MARGIN or found.high < -MARGIN:
        return "matters"
    if found.high - found.low > 2 * MARGIN:
        return "undecidable at this n"
    if found.low > -MARGIN and found.high < MARGIN:
        return "equivalent"
    return "differs" if excludes_zero(found) else "cannot tell"


def cells(question: Question) -> list[tuple[float, tuple[str, int]]]:
    """(sign, (arm, layers a side)) of what is added."""
    return [(sign, (arm, layers)) for sign, arm, layers in question.terms()]


def answer(question: Question, models: Models) -> Answer:
    """Answers ``question`` over the seeds in which every model of its arms is there and eligible."""
    own = [(sign, models.get(cell, {})) for sign, cell in cells(question)]
    known = [model for _, runs in own for model in runs.values()]
    seeds = set.intersection(*({seed for seed, model in runs.items() if model.eligible} for _, runs in own))
    values = [sum(sign * runs[seed].loss for sign, runs in own) for seed in sorted(seeds)]
    p = float(stats.ttest_1samp(values, 0.0).pvalue) if len(values) > 1 else math.nan
    return Answer(question, t_interval(values), p, len(known), sum(not model.eligible for model in known))


@dataclass(frozen=True)
class Robustness:
    """A question's difference at half the rates, and its change from that at the rates themselves, by seed. Of
    ``models`` at both, ``ignoring`` ignore their source."""

    question: Question
    at: Interval
    half: Interval
    change: Interval
    models: int
    ignoring: int

    def said(self) -> str:
        """The judgement in words."""
        planned = 2 * len(protocol.HALVED_SEEDS) * len(self.question.terms())
        if self.models < planned:
            return f"open: {self.models} of {planned} models"
        if self.ignoring:
            return f"not testable: {self.ignoring} of {self.models} models ignore their source"
        turned = self.at.mean * self.half.mean < 0 and excludes_zero(self.half)
        if turned or excludes_zero(self.change):
            return "depends on the rate"
        return f"not contradicted at half the rate (n = {self.half.n})"


def excludes_zero(found: Interval) -> bool:
    return found.low > 0 or found.high < 0


def robustness(question: Question, models: Models, halved: Models) -> Robustness:
    """Compares the answer at the rates of the search with that at half of them."""
    both = [
        [(sign, {seed: runs[seed] for seed in protocol.HALVED_SEEDS if seed in runs}) for sign, runs in found]
        for found in ([(sign, each.get(cell, {})) for sign, cell in cells(question)] for each in (models, halved))
    ]
    known = [model for found in both for _, runs in found for model in runs.values()]
    seeds = set.intersection(*({*runs} for found in both for _, runs in found))
    at, half = ([sum(sign * runs[seed].loss for sign, runs in found) for seed in sorted(seeds)] for found in both)
    change = t_interval(later - first for first, later in zip(at, half, strict=True))
    ignoring = sum(not model.eligible for model in known)
    return Robustness(question, t_interval(at), t_interval(half), change, len(known), ignoring)


def apart(models: Models, first: str, second: str, layers: int) -> Interval:
    """The loss of arm ``first`` minus that of ``second`` [nats/token], paired by seed. It describes: the questions are
    those of questions.py. Raises ValueError if a model of theirs ignores its source."""
    one, other = models[first, layers], models[second, layers]
    if not all(model.eligible for runs in (one, other) for model in runs.values()):
        raise ValueError(f"a model of {first} or {second} ignores its source: their losses are not to be compared")
    return t_interval(one[seed].loss - other[seed].loss for seed in sorted({*one} & {*other}))


def constant(models: Mapping[int, Model]) -> tuple[int, int, tuple[float, float]]:
    """How many of an arm's runs end with a constant encoder, of how many, and the interval of the share."""
    count = sum(model.constant for model in models.values())
    return count, len(models), share_interval(count, len(models))


@dataclass(frozen=True)
class Largest:
    """P5: the interval of log2 of a ratio of rates, and how many of the ``rates`` lie beyond the grid."""

    found: Interval
    beyond: int
    rates: int

    def said(self) -> str:
        """The answer in words."""
        low, high = self.found.low, self.found.high
        which = "a lower" if high < 0 else "a higher" if low > 0 else ""
        word = f"BranchNorm reads up to {which} rate than DeepNorm" if which else "cannot tell"
        edge = f"; {self.beyond} of {self.rates} rates lie beyond the grid" if self.beyond else ""
        return f"{word} (log2 of the ratio {self.found.mean:+.2f} [{low:+.2f}, {high:+.2f}], n = {self.found.n}{edge})"


def largest_rates(largest: Mapping[str, Mapping[int, float]], grid: Sequence[float]) -> Largest:
    """P5, from arm -> seed -> the largest rate of ``grid`` up to which the model reads; 0 where it reads at none."""
    first, second = largest[protocol.BRANCH], largest[protocol.DEEP]
    seeds = sorted({*first} & {*second})
    known = [arm[seed] for arm in (first, second) for seed in seeds]
    ratios = [math.log2((first[seed] or min(grid) / 2) / (second[seed] or min(grid) / 2)) for seed in seeds]
    return Largest(t_interval(ratios), sum(rate in (0.0, max(grid)) for rate in known), len(known))


def models_of(tables: Path, part: float = 1) -> Models:
    """The runs of ``tables``/ledger.csv at the rates that the search chose, or at this part of them."""
    found: dict[tuple[str, int], dict[int, Model]] = {}
    if not (tables / "ledger.csv").exists():
        return found
    ledger = Ledger(tables / "ledger.csv").frame()
    for line in ledger.to_dict("records"):
        arm, layers = str(line["label"]), int(line["layers"]) // 2
        rate = protocol.SEARCH.get(arm, {}).get(layers, math.nan) * part
        if int(line["steps"]) != protocol.UPDATES or float(line["lr"]) != rate:
            continue
        found.setdefault((arm, layers), {})[int(line["seed"])] = model_of(line)
    return found


def model_of(line: Mapping[str, Any]) -> Model:
    """The end of a run, from its line in a ledger."""
    names = ("validation_nll", "source_worth", "encoder_distance_between")
    return Model(*(float(line[f"metrics.{name}"]) for name in names))


def table(models: Models) -> pd.DataFrame:
    """One row a question: mean, interval and n over eligible seeds, half-width, p after Holm, whether the difference is
    conditional, answer."""
    answers = [answer(question, models) for question in QUESTIONS]
    rows = []
    for one, p in zip(answers, holm([one.p if one.answered else 1.0 for one in answers]), strict=True):
        mean, low, high, n = one.found.mean, one.found.low, one.found.high, one.found.n
        tested = p if one.answered else math.nan
        own = (one.question.id, one.question.text, n, mean, low, high, (high - low) / 2, tested)
        rows.append((*own, not one.answered, one.said()))
    columns = ["id", "question", "n", "mean", "low", "high", "half_width", "p_holm", "conditional", "answer"]
    return pd.DataFrame(rows, columns=columns)


def shares(models: Models) -> pd.DataFrame:
    """One row an arm and depth: P(constant) with its interval, and how many runs read."""
    rows: list[Sequence[object]] = []
    for (arm, layers), runs in models.items():
        count, n, (low, high) = constant(runs)
        rows.append((arm, layers, n, sum(model.eligible for model in runs.values()), count, count / n, low, high))
    return pd.DataFrame(rows, columns=["arm", "layers", "n", "reads", "constant", "share", "low", "high"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=TABLES, help="folder of the ledger")
    models = models_of(parser.parse_args().tables)
    print(table(models).to_string(index=False))
    print(shares(models).to_string(index=False))
    halved = models_of(HALVED, 0.5)
    for question in QUESTIONS:
        print(f"{question.id} at half the rates: {robustness(question, models, halved).said()}")


if __name__ == "__main__":
    main()
