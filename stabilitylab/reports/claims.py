"""The claims ledger: what a paper says, the statistic that tests it, and the verdict of the runs at hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import DamagedError, in_words
from ..experiments import command
from ..registry import Registry
from .base import MissingRuns
from .collection import Runs, spared
from .statistics import Region, decide, holm, seeds_needed, share_interval, t_interval

Outcome = Literal["reproduced", "contradicted", "inconclusive", "not testable"]
LEAST_COUNTED = 6  # runs an arm, below which a count decides nothing
LEAST_SEEDS = 3  # of counts in which a seed has several runs


@dataclass(frozen=True)
class Effect:
    """One number a seed, and the regions in which it decides. ``log``: a ratio or norm, averaged in logs."""

    name: str
    values: Mapping[int, float]
    reproduced: Region
    contradicted: Region | None = None
    log: bool = False
    p: float = math.nan  # of the test that the ledger names; printed, never decisive

    def judge(self) -> dict[str, Any]:
        sample = list(self.values.values())
        interval = t_interval(sample, log=self.log)
        return {
            "effect": self.name,
            "mean": interval.mean,
            "low": interval.low,
            "high": interval.high,
            "n": interval.n,
            "seeds": sorted(self.values),
            "log": self.log,
            "reproduced": self.reproduced,
            "contradicted": self.contradicted,
            "verdict": decide(interval.low, interval.high, self.reproduced, self.contradicted),
            "p": self.p,
            "needed": seeds_needed(sample, self.reproduced, self.contradicted, log=self.log),
        }


@dataclass(frozen=True)
class Share:
    """``count`` of ``n`` independent runs (a diverged one, say), judged by the Clopper-Pearson interval.

    ``seeds``: how many there are, where one seed has several of these runs, which share start and order of data; fewer
    than three decide nothing then.
    """

    name: str
    count: int
    n: int
    reproduced: Region
    contradicted: Region | None = None
    p: float = math.nan
    seeds: int | None = None

    def judge(self) -> dict[str, Any]:
        low, high = share_interval(self.count, self.n) if self.n else (math.nan, math.nan)
        enough = self.n >= LEAST_COUNTED and (self.seeds is None or self.seeds >= LEAST_SEEDS)
        return {
            "effect": self.name,
            "mean": self.count / self.n if self.n else math.nan,
            "low": low,
            "high": high,
            "n": self.n,
            "seeds": [],
            "log": False,
            "reproduced": self.reproduced,
            "contradicted": self.contradicted,
            "verdict": decide(low, high, self.reproduced, self.contradicted) if enough else "inconclusive",
            "p": self.p,
            "needed": None if enough else LEAST_COUNTED,
        }


Measure = Callable[[Runs], Sequence[Effect | Share]]


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper as a falsifiable test. ``measure`` raises :class:`MissingRuns` where runs are missing."""

    id: str
    figure: str  # the figure that shows it
    paper: str
    sentence: str
    source: str
    statistic: str
    threshold: str  # set before the runs
    sweep: str  # of :mod:`stabilitylab.experiments`: what makes it testable
    pilot: str  # what the pilot measured, where thresholds were set next to one
    measure: Measure


@dataclass(frozen=True)
class Finding:
    """A claim with what the runs at hand say: every effect's interval and verdict, and the verdict of all together."""

    claim: Claim
    verdict: Outcome
    effects: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""  # not testable: what is missing
    command: str = ""
    error: Exception | None = None  # of the test itself, which then says nothing

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it: regions as they print themselves."""
        facts = {key: value for key, value in vars(self.claim).items() if key != "measure"}
        effects = [
            {**effect, **{kind: str(effect[kind] or "") for kind in ("reproduced", "contradicted")}}
            for effect in self.effects
        ]
        return {**facts, "verdict": self.verdict, "effects": effects, "why": self.why, "command": self.command}


CLAIMS: Registry[Claim] = Registry("claim")


def claim(
    id: str,
    *,
    figure: str,
    paper: str,
    sentence: str,
    source: str,
    statistic: str,
    threshold: str,
    sweep: str,
    pilot: str = "",
) -> Callable[[Measure], Claim]:
    """Registers a function from runs to effects as a claim: ``@claim("C41", figure="branchnorm:8", ...)``."""

    def decorate(measure: Measure) -> Claim:
        entry = Claim(id, figure, paper, sentence, source, statistic, threshold, sweep, pilot, measure)
        return CLAIMS.register(id)(entry)

    return decorate


def judge(entry: Claim, runs: Runs) -> Finding:
    """Reproduced where all effects are, contradicted where one is, else inconclusive; pilot runs are no evidence."""
    try:
        effects = [effect.judge() for effect in entry.measure(runs.evidence())]
        if not effects:
            raise MissingRuns("no runs that this claim is about")
    except MissingRuns as missing:
        return Finding(entry, "not testable", why=missing.sentence, command=missing.command or command(entry.sweep))
    verdicts = {effect["verdict"] for effect in effects}
    together: Outcome = "inconclusive"
    if verdicts == {"reproduced"}:
        together = "reproduced"
    elif "contradicted" in verdicts:
        together = "contradicted"
    return Finding(entry, together, effects)


def tried(entry: Claim, runs: Runs) -> Finding:
    """As :func:`judge`; a claim whose test fails is not testable, and keeps the error."""
    try:
        return judge(entry, runs)
    except DamagedError:
        raise
    except Exception as error:
        return Finding(entry, "not testable", why=f"its test failed ({in_words(error)})", error=error)


def ledger(runs: Runs, broken: list[tuple[Path, str]] | None = None) -> list[Finding]:
    """Every claim in the order of its number, with Holm's correction of the printed p values within a paper; a run that
    turns out to be damaged goes to ``broken``."""
    from . import figures  # noqa: F401  (registers them)

    findings = []
    for id in sorted(CLAIMS):
        found, runs = spared(runs, [] if broken is None else broken, lambda left, id=id: tried(CLAIMS[id], left))
        findings.append(found)
    for paper in {finding.claim.paper for finding in findings}:
        effects = [effect for finding in findings if finding.claim.paper == paper for effect in finding.effects]
        for effect, adjusted in zip(effects, holm([effect["p"] for effect in effects]), strict=True):
            effect["holm"] = adjusted
    return findings
