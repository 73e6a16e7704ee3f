#!/usr/bin/env python
"""Every table of the second corpus, from the committed features and what was frozen.

    python results/alarm/second/second_score.py

``made.csv``: the runs by label; ``alarms.csv``: each rule; ``families.csv``: by what was done; ``pairs.csv``: pairs
with one schedule; ``archs.csv``: each architecture by what was fitted without it; ``sets.csv``: the calibration;
``findings.csv``: diagnose; ``causes.csv``: what it named first, by what was done; ``verdict.csv``: each goal, reached
or missed. It ends with a sentence as long as frozen.json is not committed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(1, str(Path(__file__).parents[3] / "benchmarks" / "faults"))
sys.path.insert(1, str(Path(__file__).parents[1]))

from combine import Fit
from corpus import HORIZON
from events import PER, Median, Ratio, Statistic, alarms, value
from rivals import Rival
from scipy.stats import binom, binomtest
from score import write
from second_corpus import HERE, SecondRun, lines, read
from second_families import FAMILIES
from second_freeze import load
from second_recipes import COLLAPSES, EVENTS
from second_rules import ALPHAS, COMBINATION, CONTROLS, UNION, announced, known, largest, latched, scores, well

LEAD = 20  # rows before an event is full-blown
LOUD = f"{ALPHAS[1]:g}"
ALIKE_RATE = 0.1  # a pair has one schedule if its rates differ by less than a tenth in every row
FEWEST_FAMILIES = 6  # from within, with a failure
KS = (4, 9)
SETS = 40
DRAWS = 2000
ACCUSED_GOAL, ACCUSED_LIMIT, ACCUSED_ARCH = 0.05, 0.08, 0.15
HEALTHY_GOAL, ILL_GOAL, CAUSE_GOAL, ANNOUNCED_GOAL = 500, 0.85, 0.80, 0.5
ALARM = ("half of the events announced", f"median lead of {LEAD} rows", "above rate over edge")  # the parts of goal 1
# The kinds of diagnose's findings that name what was done, by family; written before any run was diagnosed.
NAMES: Mapping[str, frozenset[str]] = {
    "state_zeroed": frozenset({"optimizer_state"}),
    "state_stale": frozenset({"optimizer_state"}),
    "beta_changed": frozenset({"optimizer_setting"}),
    "decay_changed": frozenset({"optimizer_setting"}),
    "rate_jump": frozenset({"lr_jump"}),
    "schedule_restarts": frozenset({"schedule_restart", "lr_jump"}),
    "layer_frozen": frozenset({"frozen_parameters"}),
    "weights_swapped": frozenset({"foreign_write"}),
    "accumulation_summed": frozenset({"accumulation_change"}),
    "layer_scaled": frozenset({"exploding_gradient"}),
    "gradients_kept": frozenset({"exploding_gradient"}),
    "growing_scale": frozenset({"non_finite"}),
    "attention_growth": frozenset({"attention_collapse", "attention_logits"}),
    "attention_scale": frozenset({"attention_collapse", "attention_logits"}),
}
Line = dict[str, Any]
Scored = Mapping[str, np.ndarray]  # the scores of one rule by the name of the run


@dataclass(frozen=True)
class Counted:
    """A share or a median of runs, with its 95 % interval by a bootstrap over subjects."""

    value: float
    low: float
    high: float
    of: int

    def line(self, name: str) -> Line:
        ends = zip(("", "_low", "_high"), (self.value, self.low, self.high), strict=True)
        return {**{f"{name}{end}": f"{own:.4g}" for end, own in ends}, f"{name}_of": self.of}


def clustered(statistic: Statistic, subjects: Sequence[str], of: int) -> Counted:
    """Return a statistic of runs with its interval, 2,000 draws over their subjects. Where no draw differs the ends are
    those of Clopper and Pearson with the subjects as units, or the value itself if it is neither 0 nor 1."""
    names, own = np.unique(np.asarray(subjects), return_inverse=True)
    if not len(names):
        return Counted(float("nan"), float("nan"), float("nan"), of)
    times = np.random.default_rng(0).multinomial(len(names), np.full(len(names), 1 / len(names)), size=DRAWS)
    drawn = statistic.drawn(times[:, own])
    low, high = np.nanquantile(drawn, [0.025, 0.975]) if np.isfinite(drawn).any() else (np.nan, np.nan)
    middle = value(statistic)
    if low == high and isinstance(statistic, Ratio) and middle in (0.0, 1.0) and statistic.scale == 1:
        ends = binomtest(int(middle) * len(names), len(names)).proportion_ci(method="exact")
        low, high = ends.low, ends.high
    return Counted(middle, float(low), float(high), of)


def share(runs: Sequence[SecondRun], holds: Callable[[SecondRun], object]) -> Counted:
    """Return the share of runs of which something holds."""
    hits = np.array([bool(holds(run)) for run in runs], dtype=float)
    return clustered(Ratio(hits, np.ones(len(runs))), [run.subject for run in runs], len(runs))


def made(runs: Sequence[SecondRun]) -> Iterator[Line]:
    """Yield the number of runs by half, kind, family and label, in words of the labels."""
    found = Counter((run.half, run.kind, run.family, run.labels.outcome) for run in runs)
    for (half, kind, family, outcome), count in sorted(found.items()):
        yield {"half": half, "kind": kind, "family": family, "label": outcome, "runs": count}


def within(runs: Sequence[SecondRun]) -> tuple[int, int, int]:
    """Return the numbers of events and of collapses from within, and of the families that have one or the other."""
    inside = [run for run in runs if run.kind == "endogenous"]
    events, collapses = (sum(getattr(run.labels, name) is not None for run in inside) for name in ("event", "collapse"))
    return events, collapses, len({run.family for run in inside if run.is_failure})


class Look:
    """One rule at one threshold, on runs: what its alarms were. ``told``: the rule's scores by run."""

    def __init__(self, runs: Sequence[SecondRun], told: Scored, threshold: float, union: bool = False) -> None:
        self.runs, self.threshold, self.union = runs, threshold, union
        self._scores = told
        self.events = [run for run in runs if run.outcome == "failure"]
        self.leads = {run.name: announced(run, self._scores[run.name], threshold) for run in self.events}

    def speaks(self, run: SecondRun) -> bool:
        """True if there is an alarm in the run; with ``union`` also if diagnose accuses the run."""
        return bool((self._scores[run.name] > self.threshold).any()) or (self.union and run.is_accused)

    def false(self, once: bool) -> Ratio:
        """Return the false alarms per 1,000 healthy rows; ``once``: one an episode."""
        found, rows = [], []
        above = np.nextafter(self.threshold, np.inf)
        for run in self.runs:
            score, healthy = self._scores[run.name], run.healthy
            at = latched(score, self.threshold) if once else alarms(score, above)
            found.append(sum(bool(healthy[row]) for row in at))
            rows.append(int(healthy.sum()))
        return Ratio(np.array(found), np.array(rows), PER)

    def led(self, least: int) -> Ratio:
        """Return the share of events announced ``least`` rows before they are full-blown, or earlier."""
        hits = [(lead := self.leads[run.name]) is not None and lead >= least for run in self.events]
        return Ratio(np.array(hits, dtype=float), np.ones(len(hits)))

    def median(self) -> Median:
        """Return the median lead of the events that were announced."""
        leads = [self.leads[run.name] for run in self.events]
        return Median(np.array([np.nan if lead is None else lead for lead in leads], dtype=float))

    def line(self) -> Line:
        subjects, all_of = [run.subject for run in self.events], [run.subject for run in self.runs]
        told = share(well(self.runs), self.speaks).line("healthy_accused")
        for name, once in (("false_per_1000", False), ("latched_per_1000", True)):
            told |= clustered(self.false(once), all_of, len(all_of)).line(name)
        told |= clustered(self.led(1), subjects, len(subjects)).line("announced")
        told |= clustered(self.led(LEAD), subjects, len(subjects)).line("announced_20")
        told |= clustered(self.median(), subjects, len(subjects)).line("lead")
        for name, outcome in (("collapses", "collapse"), ("too_fast", "slow"), ("faults", "fault")):
            told |= share([run for run in self.runs if run.outcome == outcome], self.speaks).line(f"{name}_with_alarm")
        return told


def looks(runs: Sequence[SecondRun], frozen: Mapping[str, Any], own: Fit) -> Iterator[tuple[str, str, Look]]:
    """Yield rule, threshold and what came of it."""
    rules = known(own)
    for name, limits in frozen["thresholds"].items():
        told = scored(runs, rules[name])
        for at, threshold in limits.items():
            yield name, at, Look(runs, told, threshold, union=at == UNION)


def scored(runs: Sequence[SecondRun], rule: Rival) -> Scored:
    return {run.name: scores(run, rule.score) for run in runs}


def pairs(runs: Sequence[SecondRun], rules: Mapping[str, Rival]) -> Iterator[Line]:
    """Yield for each rule the share of pairs in which the run with an event has the larger score: an event, and a
    healthy run of the same subject with the same rate in every row up to the event (within a tenth); largest scores of
    the 200 rows before it. Ties count half, so that the rate has .5."""
    found = [
        (run, other)
        for run in runs
        if run.outcome == "failure"
        for other in well(runs)
        if other.subject == run.subject and _one_schedule(run, other)
    ]
    subjects = [run.subject for run, _ in found]
    for name, rule in rules.items():
        told = scored(list({run.name: run for pair in found for run in pair}.values()), rule)
        wins = []
        for run, other in found:
            assert run.failed is not None, f"{run.name}: a failure without a row"
            rows = slice(max(0, run.failed - HORIZON), run.failed)
            a, b = (float(told[each.name][rows].max(initial=-np.inf)) for each in (run, other))
            wins.append(0.5 if a == b or np.isclose(a, b, rtol=1e-3) else float(a > b))
        yield {"rule": name, **clustered(Ratio(np.array(wins), np.ones(len(wins))), subjects, len(wins)).line("first")}


def _one_schedule(run: SecondRun, other: SecondRun) -> bool:
    end = run.failed or 0
    if other.rows < end:
        return False
    one, two = run.columns["lr"][:end], other.columns["lr"][:end]
    return bool((np.abs(np.log(one / two)) < np.log1p(ALIKE_RATE)).all())


def by_family(looked: Mapping[tuple[str, str], Look]) -> Iterator[Line]:
    """Yield for each family the share of its events that the combination and the controls announce."""
    for (name, at), look in looked.items():
        if name not in (COMBINATION, *CONTROLS) or at not in (UNION, LOUD):
            continue
        for family in sorted({run.family for run in look.events}):
            own = [run for run in look.events if run.family == family]
            hits = np.array([look.leads[run.name] is not None for run in own], dtype=float)
            told = clustered(Ratio(hits, np.ones(len(own))), [run.subject for run in own], len(own))
            yield {"rule": name, "threshold": at, "family": family, **told.line("announced")}


def archs(runs: Sequence[SecondRun], frozen: Mapping[str, Any]) -> Iterator[Line]:
    """Yield for each architecture what the combination does that was fitted, and whose thresholds were set, without
    it."""
    for arch, left in frozen["left_out"].items():
        here = [run for run in runs if run.arch == arch]
        told = scored(here, Rival(COMBINATION, "combination", Fit(**left["fit"]).score()))
        for at, threshold in left["thresholds"].items():
            yield {"left_out": arch, "threshold": at, **Look(here, told, threshold, union=at == UNION).line()}


def sets(runs: Sequence[SecondRun], own: Fit) -> Iterator[Line]:
    """Yield a line for each disjoint set of k + 1 healthy runs of one recipe: k calibrate, the last is the new one. Of
    k = 9 the first forty sets, of k = 4 as many (the same runs: each half of them a set of its own)."""
    score = own.score()
    by_subject: dict[str, list[SecondRun]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        if run.half == "calibrate" and run.outcome == "healthy":
            by_subject.setdefault(run.subject, []).append(run)
    for k in KS:
        found = [chosen[at : at + k + 1] for chosen in by_subject.values() for at in range(0, len(chosen) - k, k + 1)]
        for number, members in enumerate(found, 1):
            *before, new = [largest(run, score) for run in members]
            told = {"k": k, "set": number, "subject": members[0].subject, "new": members[-1].name}
            yield {**told, "score": f"{new:.4g}", "largest": f"{max(before):.4g}", "alarm": int(new > max(before))}


def holds(lines_of: Sequence[Line], k: int) -> tuple[int, int, float]:
    """Return alarms, sets, and the probability of at least as many alarms if each has 1 / (k + 1)."""
    own = [int(line["alarm"]) for line in lines_of if int(line["k"]) == k]
    return sum(own), len(own), float(binom.sf(sum(own) - 1, len(own), 1 / (k + 1)))


def is_named(run: SecondRun) -> bool:
    """True if what came first in the diagnosis names what was done. Of a run that did not fail and is not accused a
    note is enough: a change that did no harm is not what broke it."""
    first = {*run.diagnosis["first"]}
    if not run.is_failure and not run.is_accused:
        first |= {kind for kind, *_ in run.diagnosis["events"]}
    return bool(NAMES[run.family] & first)


def is_unknown(run: SecondRun) -> bool:
    """True if the diagnosis names no cause: nothing was found, or the cause is said to be unknown."""
    return not run.is_accused or run.diagnosis["cause"] == "unknown"


def findings(runs: Sequence[SecondRun], look: Look | None) -> Iterator[Line]:
    """Yield the shares that section 3 of the goals asks for; ``look``: the default rule, None if there is none."""
    healthy, failures = well(runs), [run for run in runs if run.is_failure]
    known_cause = [run for run in runs if run.family in NAMES and _is_ill(run)]
    other = [run for run in runs if run.kind != "healthy" and run.family not in NAMES and _is_ill(run)]

    def either(run: SecondRun) -> bool:
        return run.is_accused or (look is not None and look.speaks(run))

    plain = [run for run in healthy if run.half != "calibrate"]
    measures: list[tuple[str, Sequence[SecondRun], Callable[[SecondRun], object]]] = [
        ("healthy runs accused by diagnose", healthy, lambda run: run.is_accused),
        ("healthy runs accused by diagnose or the alarm", healthy, either),
        ("healthy runs accused by diagnose, without the calibration's sets", plain, lambda run: run.is_accused),
        ("failures said to be ill by diagnose", failures, lambda run: run.is_accused),
        ("failures said to be ill by diagnose or the alarm", failures, either),
        ("right cause first, of what can be known", known_cause, is_named),
        ("no wrong cause, of what cannot be known", other, is_unknown),
    ]
    for arch in sorted({run.arch for run in healthy}):
        own = [run for run in healthy if run.arch == arch]
        measures.append((f"healthy runs accused by diagnose or the alarm: {arch}", own, either))
    for kind in ("ledger", "tables"):
        own = [run for run in known_cause if FAMILIES[run.family].known == kind]
        measures.append((f"right cause first, of what the {kind} can know", own, is_named))
    for name, of, holds_of in measures:
        yield {"measure": name, **share(of, holds_of).line("share")}


def causes(runs: Sequence[SecondRun]) -> Iterator[Line]:
    """Yield for each family of ill runs, and for healthy runs, what came first in the diagnosis and of how many runs;
    ``right``: the number in which the first sign names what was done ("": nothing can name it)."""
    groups: dict[str, list[SecondRun]] = {}
    for run in runs:
        if run.outcome == "healthy" or _is_ill(run):
            groups.setdefault(run.family if _is_ill(run) else "healthy", []).append(run)
    for family, own in sorted(groups.items()):
        right = sum(map(is_named, own)) if family in NAMES else ""
        for first, count in Counter("+".join(run.diagnosis["first"]) or "nothing" for run in own).most_common():
            yield {"put in": family, "runs": len(own), "right": right, "first": first, "times": count}


def _is_ill(run: SecondRun) -> bool:
    """True if something was done from outside, or it failed."""
    return run.fault is not None or run.is_failure


def verdict(runs: Sequence[SecondRun], tables: Mapping[str, Sequence[Line]], gain: Counted) -> Iterator[Line]:
    """Yield each goal with what was measured, and 1 if it was reached; "" for goals about failures if the corpus has
    too few of them."""
    events, collapses, of = within(runs)
    many = events >= EVENTS and collapses >= COLLAPSES and of >= FEWEST_FAMILIES
    yield _goal("events and collapses from within, of six families", f"{events}, {collapses}, {of}", many)
    [ours] = [line for line in tables["alarms"] if (line["rule"], line["threshold"]) == (COMBINATION, UNION)]
    half, lead = float(ours["announced"]), float(ours["lead"])
    yield _goal(ALARM[0], f"{half:.3g}", half >= ANNOUNCED_GOAL, many)
    yield _goal(ALARM[1], f"{lead:.3g}", lead >= LEAD, many)
    yield _goal(ALARM[2], f"{gain.value:+.3g} [{gain.low:+.3g}, {gain.high:+.3g}]", gain.low > 0, many)
    for k in KS:
        alarmed, count, p = holds(tables["sets"], k)
        yield _goal(f"calibration, k = {k}", f"{alarmed} of {count}, p {p:.2g}", count >= SETS and p >= 0.05)
    told = {line["measure"]: line for line in tables["findings"]}
    accused = told["healthy runs accused by diagnose or the alarm"]
    every = "healthy runs accused by diagnose or the alarm: "
    by_arch = [float(own["share"]) for name, own in told.items() if name.startswith(every)]
    right = float(accused["share"]) <= ACCUSED_GOAL and float(accused["share_high"]) < ACCUSED_LIMIT
    enough = int(accused["share_of"]) >= HEALTHY_GOAL and max(by_arch, default=np.nan) <= ACCUSED_ARCH
    ends = f"[{accused['share_low']}, {accused['share_high']}] of {accused['share_of']}"
    measured = f"{accused['share']} {ends}, of one architecture at most {max(by_arch, default=np.nan):.3g}"
    yield _goal("healthy runs accused", measured, right and enough)
    for goal, measure, least in (
        ("failures said to be ill", "failures said to be ill by diagnose or the alarm", ILL_GOAL),
        ("right cause first", "right cause first, of what can be known", CAUSE_GOAL),
    ):
        yield _goal(goal, told[measure]["share"], float(told[measure]["share"]) >= least, many)


def _goal(goal: str, measured: str, reached: bool, judged: bool = True) -> Line:
    return {"goal": goal, "measured": measured, "reached": int(reached) if judged else ""}


def gained(one: Look, other: Look) -> Counted:
    """Return the difference of the shares announced 20 rows before, over the same events."""
    first, second = one.led(LEAD), other.led(LEAD)
    subjects = [run.subject for run in one.events]
    return clustered(Ratio(first.of - second.of, first.over), subjects, len(subjects))


def tables(folder: Path = HERE) -> None:
    """Write every table."""
    runs = read(("choose", "test", "calibrate"), folder)
    frozen, own = load(folder)
    test = [run for run in runs if run.half == "test"]
    told: dict[str, list[Line]] = {"made": write(folder / "made.csv", made(runs))}
    found = {(name, at): look for name, at, look in looks(test, frozen, own)}
    told["alarms"] = write(
        folder / "alarms.csv",
        [{"rule": name, "threshold": at, **look.line()} for (name, at), look in found.items()],
    )
    write(folder / "families.csv", by_family(found))
    write(folder / "pairs.csv", pairs(test, known(own)))
    write(folder / "archs.csv", archs(test, frozen))
    told["sets"] = write(folder / "sets.csv", sets(runs, own))
    limit = frozen["thresholds"][COMBINATION][UNION]
    seen = [run for run in runs if run.half != "choose"]
    default = Look(seen, scored(seen, known(own)[COMBINATION]), limit) if np.isfinite(limit) else None
    told["findings"] = write(folder / "findings.csv", findings(seen, default))
    write(folder / "causes.csv", causes(test))
    gain = gained(found[COMBINATION, UNION], found["rate over edge", UNION])
    write(folder / "verdict.csv", verdict(runs, told, gain))
    assert len(list(lines(folder))) >= len(runs), "more runs than lines"


if __name__ == "__main__":
    tables()
