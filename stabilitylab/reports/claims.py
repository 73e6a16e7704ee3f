"""The claims ledger: the sentences of papers, the statistics that test them, and the judgements by the runs at hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..errors import DamagedError, in_words
from ..experiments import command
from ..experiments.sweeps import ROOM
from ..registry import Registry
from .base import MissingRuns
from .collection import Record, Runs, spared
from .conditions import conditions, limits
from .statistics import (
    TAIL,
    Count,
    Region,
    Verdict,
    binomial_outside,
    decide,
    effective,
    holm,
    seeds_needed,
    share_interval,
    t_interval,
    t_outside,
)

Outcome = Literal["reproduced", "contradicted", "not reproduced", "inconclusive", "not testable"]
# published: a paper says it; implied: it follows from what a paper says or draws; control: it tests what else might
# have made a published effect; ours: a question that no paper asks
Kind = Literal["published", "implied", "control", "ours"]
# when the runs are looked at: before an update, in the updates that warm-up takes, or once they are trained
Stage = Literal["initialisation", "first updates", "after training"]
STAGES: tuple[Stage, ...] = ("initialisation", "first updates", "after training")
VERDICTS: tuple[Outcome, ...] = ("reproduced", "contradicted", "not reproduced", "inconclusive", "not testable")
# the text of a claim's ``after`` if its first effect was not chosen before the runs
NAMED_LATER = "its primary effect was named when runs of it had been seen (2026-11-22)"
LEAST_COUNTED = 6  # a count of fewer runs decides nothing
LEAST_SEEDS = 3  # least seeds of counts in which a seed has several runs


@dataclass(frozen=True)
class Effect:
    """One number per seed, with the regions in which its mean decides.

    ``log``: True for a ratio or a norm, which is averaged in logarithms. ``of``: the runs on which it was measured.
    Without regions, the effect describes and decides nothing.
    """

    name: str
    values: Mapping[int, float]
    reproduced: Region | None = None
    contradicted: Region | None = None
    log: bool = False
    of: Iterable[Record] = ()

    def judge(self) -> dict[str, Any]:
        sample = list(self.values.values())
        interval = t_interval(sample, log=self.log)
        return _judged(
            self,
            (interval.mean, interval.low, interval.high),
            sorted(self.values),
            lambda region: t_outside(sample, region, log=self.log),
            lambda: self.reproduced and seeds_needed(sample, self.reproduced, self.contradicted, log=self.log),
            values={str(seed): self.values[seed] for seed in sorted(self.values)},
            log=self.log,
        )


@dataclass(frozen=True)
class Share:
    """A count of each seed's runs, layers or pairs (seed -> count, total), and the share over all seeds.

    The interval is that of Korn and Graubard (:func:`~stabilitylab.reports.statistics.effective`): Clopper and
    Pearson's at the effective number, with the seeds as units. It never leaves [0, 1]. Counts of fewer than six runs,
    or several counts of fewer than three seeds, decide nothing.
    """

    name: str
    counts: Mapping[int, Count]
    reproduced: Region | None = None
    contradicted: Region | None = None
    of: Iterable[Record] = ()

    def judge(self) -> dict[str, Any]:
        known = {seed: count for seed, count in sorted(self.counts.items()) if count[1] > 0}
        total = sum(m for _, m in known.values())
        count, n = effective(known.values())
        low, high = share_interval(count, n) if n else (math.nan, math.nan)
        enough = total >= LEAST_COUNTED and len(known) >= LEAST_SEEDS
        if len(known) == 1 < total:  # one seed alone has no spread
            low, high = math.nan, math.nan
        return _judged(
            self,
            (sum(k for k, _ in known.values()) / total if total else math.nan, low, high),
            list(known),
            lambda region: binomial_outside(count, n, region) if enough else math.nan,
            lambda: None if enough else LEAST_COUNTED,
            values={str(seed): f"{k:g}/{m:g}" for seed, (k, m) in known.items()},
            log=False,
            decides=enough,
        )


def _judged(
    effect: Effect | Share,
    measured: tuple[float, float, float],
    seeds: Sequence[int],
    p_of: Callable[[Region], float],
    needed: Callable[[], int | None],
    *,
    values: Mapping[str, Any],
    log: bool,
    decides: bool = True,
) -> dict[str, Any]:
    """Return the facts of an effect: its interval, its verdict, and p, the smallest over the regions of
    :func:`_tested`."""
    mean, low, high = measured
    verdict: Verdict | Literal[""] = ""
    p = math.nan
    if effect.reproduced is not None:
        verdict = decide(low, high, effect.reproduced, effect.contradicted) if decides else "inconclusive"
        tests = [p_of(region) for region in _tested(verdict, effect.reproduced, effect.contradicted)]
        p = min((p for p in tests if not math.isnan(p)), default=math.nan)
    records = list(effect.of)
    return {
        "effect": effect.name,
        "mean": mean,
        "low": low,
        "high": high,
        "n": len(seeds),
        "seeds": list(seeds),
        "values": dict(values),
        "log": log,
        "reproduced": effect.reproduced,
        "contradicted": effect.contradicted,
        "verdict": verdict,
        "p": p,
        "needed": needed() if verdict == "inconclusive" else None,
        "conditions": conditions(records),
        "limits": limits(records),
    }


def _tested(verdict: str, reproduced: Region, contradicted: Region | None) -> list[Region]:
    """Return the regions for which it is tested if the mean lies outside: the region of the verdict; for "not
    reproduced", the regions beyond R on either side; without a decision, R and the regions beyond it."""
    if verdict == "reproduced":
        return [reproduced]
    if verdict == "contradicted" and contradicted is not None:
        return [contradicted]
    beyond = [Region(high=reproduced.low)] if math.isfinite(reproduced.low) else []
    beyond += [Region(low=reproduced.high)] if math.isfinite(reproduced.high) else []
    return beyond if verdict == "not reproduced" else [reproduced, *beyond]


Measure = Callable[[Runs], Sequence[Effect | Share]]
AnyEffect = TypeVar("AnyEffect", bound=Effect | Share)


def described(effect: AnyEffect, name: str = "") -> AnyEffect:
    """Return the effect without regions, so that it describes and decides nothing. ``name``: another name for it."""
    return replace(effect, name=name or effect.name, reproduced=None, contradicted=None)


def together(
    name: str,
    effects: Sequence[Effect],
    how: Callable[[list[float]], Any],
    reproduced: Region | None = None,
    contradicted: Region | None = None,
) -> Effect:
    """Combine several effects into one, seed by seed, for the seeds that all effects have. ``how``: numpy's mean,
    largest, ..., which keep a NaN. The result has ``log`` if all effects have it, and the runs of all effects."""
    seeds = sorted(set.intersection(*({*effect.values} for effect in effects))) if effects else []
    values = {seed: float(how([effect.values[seed] for effect in effects])) for seed in seeds}
    log, of = all(effect.log for effect in effects), [record for effect in effects for record in effect.of]
    return Effect(name, values, reproduced, contradicted, log=log, of=of)


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper with a test that it can fail. ``measure`` returns effects: the first one decides, the
    others describe. It raises :class:`MissingRuns` if runs are missing.

    A claim about trained models is judged only if every model that its first effect compares reads its source
    (``must_read``). Claims about which runs fail, or about an optimizer, are judged on all models.
    """

    id: str
    figure: str  # the figure that shows it
    paper: str
    sentence: str
    source: str
    statistic: str
    threshold: str
    sweep: str  # its runs make the claim testable (:mod:`stabilitylab.experiments`)
    pilot: str  # the pilot's result, if thresholds were set beside one
    measure: Measure
    kind: Kind = "published"
    after: str = ""  # parts of statistic or thresholds that changed after runs had been seen
    stage: Stage = "after training"
    must_read: bool = True  # of trained models


@dataclass(frozen=True)
class Finding:
    """The judgement of a claim by the runs at hand: the intervals of its effects, and the decision of the first effect.
    ``survives``: True if the claim is still decided after a correction over all published claims of its paper; None if
    it does not count."""

    claim: Claim
    verdict: Outcome
    effects: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""  # not testable: what is missing
    command: str = ""
    error: Exception | None = None  # an error of the test, which then has no verdict
    holm: float = math.nan  # p of the first effect after Holm's correction
    survives: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the finding in JSON's types, with regions as text."""
        facts = {key: value for key, value in vars(self.claim).items() if key != "measure"}
        effects = [
            {**effect, **{kind: str(effect[kind] or "") for kind in ("reproduced", "contradicted")}}
            for effect in self.effects
        ]
        own = {"why": self.why, "command": self.command, "holm": self.holm, "survives": self.survives}
        return {**facts, "verdict": self.verdict, "effects": effects, **own}


CLAIMS: Registry[Claim] = Registry("claim", ROOM)


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
    kind: Kind = "published",
    after: str = "",
    stage: Stage = "after training",
    must_read: bool = True,
) -> Callable[[Measure], Claim]:
    """Register a function from runs to effects as a claim: ``@claim("C41", figure="branchnorm:8", ...)``."""

    def decorate(measure: Measure) -> Claim:
        own = (id, figure, paper, sentence, source, statistic, threshold, sweep, pilot, measure, kind, after)
        entry = Claim(*own, stage=stage, must_read=must_read)
        return CLAIMS.register(id, module=getattr(measure, "__module__", ""))(entry)

    return decorate


def judge(entry: Claim, runs: Runs) -> Finding:
    """Return the judgement of a claim by its first effect. Pilot runs do not count as evidence."""
    try:
        measured = entry.measure(runs.evidence())
        if not measured:
            raise MissingRuns("no runs that this claim is about")
    except MissingRuns as missing:
        return Finding(entry, "not testable", why=missing.sentence, command=missing.command or command(entry.sweep))
    if entry.stage == "after training" and entry.must_read:
        models = list(dict.fromkeys(measured[0].of))
        if unread := [model for model in models if model.reads is False]:
            return _unread(entry, runs.evidence(), models, unread)
    first, *others = (effect.judge() for effect in measured)
    first["role"] = "primary"
    for effect in others:
        effect |= {"role": "descriptive", "verdict": "", "p": math.nan, "needed": None}
    return Finding(entry, first["verdict"] or "inconclusive", [first, *others])


def _unread(entry: Claim, runs: Runs, models: Sequence[Record], unread: Sequence[Record]) -> Finding:
    """Return a finding without a verdict, since a model that ignores its source is no translator. It counts these
    models of each label, and describes the effects among the seeds in which all models read."""
    effects: list[Effect | Share] = []
    for label in dict.fromkeys(model.label for model in models):
        own: dict[int, Count] = {}
        for model in models:
            if model.label == label:
                count, of = own.get(model.seed, (0, 0))
                own[model.seed] = count + (model in unread), of + 1
        of = [model for model in models if model.label == label]
        effects.append(Share(f"models that ignore their source, {label}", own, of=of))
    lost = {model.seed for model in unread}
    with suppress(MissingRuns):
        conditional = entry.measure(runs.where(lambda run: run.seed not in lost))
        effects += [described(one, f"{one.name}, among seeds in which all models read") for one in conditional]
    judged = [{**effect.judge(), "role": "descriptive", "needed": None} for effect in effects]
    why = f"{len(unread)} of {len(models)} models ignore their source"
    return Finding(entry, "not testable", judged, why=why, command=command(entry.sweep))


def tried(entry: Claim, runs: Runs) -> Finding:
    """Return the result of :func:`judge`. If the test raises an error, the claim is not testable, and the finding has
    the error."""
    try:
        return judge(entry, runs)
    except DamagedError:
        raise
    except Exception as error:
        return Finding(entry, "not testable", why=f"its test failed ({in_words(error)})", error=error)


def ledger(
    runs: Runs, broken: list[tuple[Path, str]] | None = None, figures: Collection[str] | None = None
) -> list[Finding]:
    """Judge every claim in the order of the ids, and correct the published claims of each paper after Holm. A run that
    turns out to be damaged is added to ``broken``. With ``figures``: judge the claims about these figures alone,
    without Holm's correction, which needs all claims. Trials of a rate search that stopped early are no evidence."""
    findings, runs = [], runs.without_cut_trials()
    for id in sorted(id for id in CLAIMS if figures is None or CLAIMS[id].figure in figures):
        found, runs = spared(runs, [] if broken is None else broken, lambda left, id=id: tried(CLAIMS[id], left))
        findings.append(found)
    return findings if figures is not None else corrected(findings)


def corrected(findings: Sequence[Finding]) -> list[Finding]:
    """Correct after Holm over the registered published claims of each paper. A claim that was not tested has p = 1, so
    that the number of claims does not depend on the runs. A verdict survives with an adjusted p below .025, the level
    of each end of its interval."""
    found = list(findings)
    for paper in {finding.claim.paper for finding in found}:
        own = [i for i, one in enumerate(found) if one.claim.paper == paper and one.claim.kind == "published"]
        p_values = [_p(found[i]) for i in own]
        for i, adjusted in zip(own, holm(p_values), strict=True):
            decided = found[i].verdict in VERDICTS[:3]
            found[i] = replace(found[i], holm=adjusted, survives=adjusted < TAIL if decided else None)
    return found


def _p(finding: Finding) -> float:
    p = finding.effects[0]["p"] if finding.effects else math.nan
    return 1.0 if math.isnan(p) else p
