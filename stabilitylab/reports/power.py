"""The probability that a number of seeds decides a claim, computed before the runs from the spread of a pilot."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from ..errors import InputError
from ..experiments import experiments
from ..labels import label
from .base import MissingRuns
from .claims import CLAIMS, LEAST_COUNTED, LEAST_SEEDS, Claim, Effect, Share
from .collection import Runs
from .statistics import TAIL, Count, Region, decide, effective, share_interval

POINTS = 2000  # quantiles of the sample's standard deviation over which an expectation is taken
DRAWS = 1000  # random draws of a share's counts, with several runs a seed
LEAST_PILOT = 2  # seeds that have a spread


@dataclass(frozen=True)
class Pilot:
    """The primary effect of a claim in a pilot: one number for each seed, or counts of each seed's runs."""

    name: str
    reproduced: Region
    contradicted: Region | None
    numbers: Sequence[float] = ()
    counts: Sequence[Count] = ()
    log: bool = False
    labels: frozenset[str] = frozenset()  # labels of the runs that it was measured on, if known

    @property
    def seeds(self) -> int:
        return len(self.numbers) or len(self.counts)


@dataclass(frozen=True)
class Power:
    """The chances of a verdict with the planned seeds; numbers are NaN if the pilot has no spread."""

    claim: Claim
    planned: int
    pilot: Pilot | None
    mean: float = math.nan
    half_width: float = math.nan  # expected, of the interval; in logs of a ratio
    decides: float = math.nan  # probability of any verdict at the pilot's mean and spread
    reproduces: float = math.nan  # ... and of "reproduced"
    reachable: bool = True  # False if not even the best case, in which all seeds agree, gives a verdict
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        facts = {"id": self.claim.id, "kind": self.claim.kind, "sweep": self.claim.sweep, "planned": self.planned}
        pilot = {"effect": self.pilot.name, "pilot_seeds": self.pilot.seeds} if self.pilot else {}
        names = ("mean", "half_width", "decides", "reproduces", "reachable", "note")
        return {**facts, **pilot, **{name: getattr(self, name) for name in names}}


def of_mean(
    n: int, mean: float, deviation: float, reproduced: Region, contradicted: Region | None = None
) -> tuple[float, float]:
    """Computes the probability that the t-interval of ``n`` normal values decides, and that it lies in ``reproduced``.

    Given the sample's standard deviation s the mean is normal about ``mean``; both are averaged over the distribution
    of s. With one end this is the noncentral t of t.ppf at (mean - end) sqrt(n) / deviation.
    """
    if n < 2 or not math.isfinite(deviation):
        return math.nan, math.nan
    if deviation == 0:
        verdict = decide(mean, mean, reproduced, contradicted)
        return float(verdict != "inconclusive"), float(verdict == "reproduced")
    error = deviation / math.sqrt(n)
    middle = (np.arange(POINTS) + 0.5) / POINTS
    half = stats.t.ppf(1 - TAIL, n - 1) * error * np.sqrt(stats.chi2.ppf(middle, n - 1) / (n - 1))

    def inside(region: Region) -> np.ndarray:
        top, bottom = ((end - mean) / error for end in (region.high - half, region.low + half))
        return np.maximum(stats.norm.cdf(top) - stats.norm.cdf(bottom), 0.0)

    # a value outside R is decided, with X or without
    beyond = [Region(high=reproduced.low)] if math.isfinite(reproduced.low) else []
    beyond += [Region(low=reproduced.high)] if math.isfinite(reproduced.high) else []
    within = inside(reproduced)
    outside = sum((inside(region) for region in beyond), np.zeros(POINTS))
    return float(np.mean(within + outside)), float(np.mean(within))


def of_share(
    seeds: int, runs: float, share: float, reproduced: Region, contradicted: Region | None = None, like: float = 1.0
) -> tuple[float, float]:
    """Compute the probabilities of :func:`of_mean` for a share over ``seeds``. With one run a seed the counts are
    binomial. With several ``runs`` a seed they are DRAWS of beta-binomial counts, in which the runs of one seed
    correlate by the design effect ``like`` = 1 + correlation (runs - 1)."""
    each = round(runs)
    if each <= 1:
        counts = np.arange(seeds + 1)
        found = [_of_count(count / seeds, seeds, 1, seeds, reproduced, contradicted) for count in counts]
        weights = stats.binom.pmf(counts, seeds, share)
    else:
        alike = min(max((like - 1) / (each - 1), 0.0), 0.99)
        draw, size = np.random.default_rng(0), (DRAWS, seeds)
        spread = (1 - alike) / alike if alike > 0 else math.inf
        certain = math.isinf(spread) or share in (0.0, 1.0)
        means = np.full(size, share) if certain else draw.beta(spread * share, spread * (1 - share), size)
        drawn = [[(float(k), float(each)) for k in own] for own in draw.binomial(each, means)]
        enough = seeds >= LEAST_SEEDS and seeds * each >= LEAST_COUNTED
        found = [
            decide(*share_interval(*effective(own)), reproduced, contradicted) if enough else "inconclusive"
            for own in drawn
        ]
        weights = np.full(DRAWS, 1 / DRAWS)
    decided, right = (np.array([test(v) for v in found], float) for test in (_decided, _reproduced))
    return float(weights @ decided), float(weights @ right)


def _decided(verdict: str) -> bool:
    return verdict != "inconclusive"


def _reproduced(verdict: str) -> bool:
    return verdict == "reproduced"


def _of_count(
    share: float, seeds: int, runs: float, independent: float, reproduced: Region, contradicted: Region | None
) -> str:
    """Return the verdict on this share, of so many independent runs."""
    if seeds < LEAST_SEEDS or seeds * runs < LEAST_COUNTED:
        return "inconclusive"
    return decide(*_between(share, seeds, runs, independent), reproduced, contradicted)


def _between(share: float, seeds: int, runs: float, independent: float) -> tuple[float, float]:
    """Return the interval of this share; several runs of one seed count less, as in :func:`statistics.effective`."""
    several = seeds > 1 and runs > 1
    n = independent * (_fewer(seeds * runs, seeds) if several else 1.0)
    return share_interval(share * n, n)


def _fewer(runs: float, seeds: int) -> float:
    return float(stats.t.ppf(1 - TAIL, runs - 1) / stats.t.ppf(1 - TAIL, seeds - 1)) ** 2


def design_effect(counts: Sequence[Count]) -> float:
    """Measures by how much runs of one seed are alike: runs over independent ones, at least 1."""
    n = sum(m for _, m in counts)
    if len(counts) in (1, n):
        return 1.0
    return max(1.0, n * _fewer(n, len(counts)) / effective(counts)[1])


def power(entry: Claim, pilot: Pilot | None) -> Power:
    """Compute the chances of a verdict with the seeds of the claim's sweep, at the pilot's mean and spread."""
    planned = planned_seeds(entry, pilot.labels if pilot else frozenset())
    if pilot is None:
        return Power(entry, planned, None, note="no pilot")
    regions = pilot.reproduced, pilot.contradicted
    if pilot.counts:
        total = sum(m for _, m in pilot.counts)
        share, runs = sum(k for k, _ in pilot.counts) / total, total / len(pilot.counts)
        like = design_effect(pilot.counts)
        best = [_of_count(end, planned, runs, planned * runs, *regions) for end in (0.0, 1.0)]
        reachable = any(map(_decided, best))
        decides, reproduces = of_share(planned, runs, share, *regions, like)
        low, high = _between(share, planned, runs, planned * runs / like)
        note = "" if reachable else "cannot be judged: too few seeds even if all agree"
        return Power(entry, planned, pilot, share, (high - low) / 2, decides, reproduces, reachable, note)
    if planned < LEAST_PILOT:
        return Power(entry, planned, pilot, reachable=False, note="cannot be judged: one seed has no interval")
    sample = np.log(pilot.numbers) if pilot.log and min(pilot.numbers) > 0 else np.asarray(pilot.numbers, float)
    ends = tuple(region and (_logs(region) if pilot.log else region) for region in regions)
    if len(sample) < LEAST_PILOT or not np.isfinite(sample).all() or (pilot.log and min(pilot.numbers) <= 0):
        return Power(entry, planned, pilot, note="the pilot has no spread: it needs two seeds or more that trained")
    mean, deviation = float(sample.mean()), float(sample.std(ddof=1))
    assert ends[0] is not None
    decides, reproduces = of_mean(planned, mean, deviation, ends[0], ends[1])
    half = float(stats.t.ppf(1 - TAIL, planned - 1)) * deviation / math.sqrt(planned)
    narrow = ends[0].high - ends[0].low <= 2 * half
    note = "cannot be reproduced: its interval is wider than R" if narrow else ""
    shown = math.exp(mean) if pilot.log else mean
    return Power(entry, planned, pilot, shown, half, decides, reproduces, True, note)


def _logs(region: Region) -> Region:
    return Region(*(math.log(end) if end > 0 else -math.inf for end in (region.low, region.high)))


def planned_seeds(entry: Claim, labels: Iterable[str] = ()) -> int:
    """Count the seeds of the claim's sweep that all of those ``labels`` have that are in the sweep; if none is, count
    all seeds of the sweep."""
    by_label: dict[str, set[int]] = {}
    for one in experiments(entry.sweep):
        by_label.setdefault(label(one.config.model), set()).add(one.config.train.seed)
    own = [by_label[name] for name in labels if name in by_label]
    return len(set.intersection(*own) if own else set().union(*by_label.values()))


def from_runs(runs: Runs) -> dict[str, Pilot]:
    """Measure each claim's primary effect on all runs that have ended, pilots included; claims that cannot be measured
    are left out."""
    ended = runs.where(lambda run: run.ended)
    found = {}
    for id in sorted(CLAIMS):
        try:
            first = next(iter(CLAIMS[id].measure(ended)), None)
        except MissingRuns:
            continue
        if pilot := first and _pilot(first):
            found[id] = pilot
    return found


def _pilot(first: Effect | Share) -> Pilot | None:
    if first.reproduced is None:
        return None
    labels = frozenset(run.label for run in first.of)
    if isinstance(first, Share):
        counts = [count for count in first.counts.values() if count[1] > 0]
        return Pilot(first.name, first.reproduced, first.contradicted, counts=counts, labels=labels) if counts else None
    numbers = [*dict(first.values).values()]
    return Pilot(first.name, first.reproduced, first.contradicted, numbers, log=first.log, labels=labels)


def from_ledger(path: Path) -> dict[str, Pilot]:
    """Read each claim's primary effect from a ``claims.csv``, which has its numbers by seed.

    Raises InputError if the file is no such table, or has no primary effects.
    """
    try:
        rows = pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a table ({error}): name a claims.csv.") from error
    if not rows or not {"id", "effect_role", "effect_values"} <= {*rows[0]}:
        raise InputError(f"{path} has no primary effects by seed: write it anew with 'stabilitylab report'.")
    first = [row for row in rows if row["effect_role"] == "primary" and row["effect_reproduced"]]
    return {str(row["id"]): pilot for row in first if (pilot := _from_row(row))}


def _from_row(row: Mapping[Any, str]) -> Pilot | None:
    values = [*ast.literal_eval(re.sub(r"-?\b(nan|inf)\b", "None", row["effect_values"])).values()]
    reproduced, other = (region_of(row[f"effect_{kind}"]) for kind in ("reproduced", "contradicted"))
    if not values or reproduced is None:
        return None
    if any(isinstance(value, str) for value in values):
        counts = [(float(k), float(m)) for k, _, m in (str(value).partition("/") for value in values)]
        return Pilot(row["effect_effect"], reproduced, other, counts=counts)
    numbers = [math.nan if value is None else float(value) for value in values]
    return Pilot(row["effect_effect"], reproduced, other, numbers, log=row["effect_log"] == "True")


def region_of(text: str) -> Region | None:
    """Finds the region that prints itself as ``text``; None for an empty one."""
    if not text:
        return None
    numbers = [float(number) for number in re.findall(r"[-+\d.e]+(?=[,)]|$)", text)]
    if text.startswith("in"):
        return Region(*numbers)
    return Region(high=numbers[0]) if text.startswith("<") else Region(low=numbers[0])
