#!/usr/bin/env python
"""The tables of the validation, from the ledgers, by the protocol of README.

python results/lr-find/score.py [--folder results/lr-find] [--write]

With --write they are put into scores.md and docs/lr-find.md.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import models
import numpy as np
from make import HERE, TRUE_SEEDS
from scipy import stats

sys.path.append(str(HERE.parent))
import page_blocks
from shared import rows_of

from stabilitylab.reports import statistics

OWN = "lr-find"
RIVALS = ("best of 150", "3e-4", "range test, steepest", "range test, valley", "Hyperband")
PRIMARY = RIVALS[:2]
LEVEL = 0.05
DOCS = (HERE.parents[1] / "docs" / "lr-find.md",)
GOAL_MEDIAN, GOAL_EACH, GOAL_COUNT, GOAL_HORIZONS = 0.02, 0.05, 10, 10


@dataclass(frozen=True)
class Curve:
    """The truth of a model: smoothed losses by rate, NaN at rates at which a seed fails. ``raw``: means over seeds."""

    rates: Sequence[float]
    raw: Sequence[float]
    smoothed: Sequence[float]

    @property
    def best(self) -> float:
        """The rate of the lowest smoothed loss."""
        return self.rates[int(np.nanargmin(self.smoothed))]

    @property
    def lowest(self) -> float:
        return float(np.nanmin(self.smoothed))

    def at(self, rate: float) -> float:
        """The smoothed loss at a rate, between rates by the logarithm; inf beside a rate that fails, NaN outside."""
        if not self.rates[0] * 0.999 <= rate <= self.rates[-1] * 1.001:
            return math.nan
        for own, loss in zip(self.rates, self.smoothed, strict=True):
            if abs(own / rate - 1) < 1e-3:
                return math.inf if math.isnan(loss) else loss
        place = int(np.searchsorted(self.rates, rate))
        low, high = self.smoothed[place - 1], self.smoothed[place]
        if math.isnan(low) or math.isnan(high):
            return math.inf
        share = math.log(rate / self.rates[place - 1]) / math.log(self.rates[place] / self.rates[place - 1])
        return low + share * (high - low)

    def regret(self, rate: float) -> float:
        found = self.at(rate)
        return found if math.isinf(found) else found - self.lowest


def curve(rows: Sequence[Mapping[str, str]]) -> Curve:
    """The curve of the rows of kind ``grid`` of one model."""
    by_rate: dict[float, list[tuple[float, bool]]] = {}
    for row in rows:
        if row["kind"] == "grid":
            by_rate.setdefault(float(row["rate"]), []).append((float(row["loss"]), bool(row["failed"])))
    rates = sorted(rate for rate, own in by_rate.items() if len(own) == len(TRUE_SEEDS))
    raw = [
        math.nan if any(bad for _, bad in by_rate[rate]) else fmean(loss for loss, _ in by_rate[rate]) for rate in rates
    ]
    return Curve(rates, raw, smoothed(raw))


def smoothed(raw: Sequence[float]) -> list[float]:
    """Weights 1/4, 1/2, 1/4 over neighbouring rates, renormalised where a neighbour is missing or fails."""
    found = []
    for place, own in enumerate(raw):
        parts = [(0.5, own)]
        parts += [(0.25, raw[at]) for at in (place - 1, place + 1) if 0 <= at < len(raw) and not math.isnan(raw[at])]
        total = sum(weight for weight, _ in parts)
        found.append(math.nan if math.isnan(own) else sum(weight * loss for weight, loss in parts) / total)
    return found


def unsafe(rows: Sequence[Mapping[str, str]], kind: str, warmup: int | None, limit: float) -> str:
    """Why a rate of that kind is unsafe: a seed fails, or the mean loss lies above ``limit``; "" if it is safe."""
    own = [row for row in rows if row["kind"] == kind and (warmup is None or int(row["warmup"]) == warmup)]
    failed = [row["seed"] for row in own if row["failed"]]
    if failed:
        return f"seed {', '.join(failed)} fails"
    mean = fmean(float(row["loss"]) for row in own)
    return f"loses {mean - limit:.3f} more than delta" if mean > limit else ""


def true_safe(found: Curve, delta: float) -> tuple[float, float]:
    """The largest rate below the first unsafe one above the best, and that one (inf if there is none)."""
    at = found.rates.index(found.best)
    safe = found.best
    for rate, loss in zip(found.rates[at + 1 :], found.smoothed[at + 1 :], strict=True):
        if math.isnan(loss) or loss > found.lowest + delta:
            return safe, rate
        safe = rate
    return safe, math.inf


def holds(low: str, high: str, value: float) -> bool:
    """True if an interval, whose open ends are empty, holds a value."""
    return (float(low) if low else 0.0) <= value * 1.001 and value <= (float(high) if high else math.inf) * 1.001


def wilcoxon(own: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """(median difference, p) of paired regrets by the exact two-sided Wilcoxon signed-rank test; infinite regrets are
    larger than all others, and two of them are a tie."""
    largest = 10 * (1 + max((abs(one) for one in (*own, *other) if math.isfinite(one)), default=0.0))
    a, b = (np.array([one if math.isfinite(one) else largest for one in each]) for each in (own, other))
    difference = a - b
    if not np.any(difference):
        return 0.0, 1.0
    kept = difference[difference != 0]
    return float(np.median(difference)), float(stats.wilcoxon(kept, method="exact").pvalue)


def holm(p: Mapping[str, float], level: float = LEVEL) -> dict[str, bool]:
    """Which hypotheses Holm's procedure rejects."""
    return {name: adjusted <= level for name, adjusted in zip(p, statistics.holm([*p.values()]), strict=True)}


class Scores:
    """The scores of all models whose truth is whole."""

    def __init__(self, folder: Path) -> None:
        self.searches = {row["model"]: row for row in rows_of(folder / "searches.csv")}
        rivals, truths = rows_of(folder / "rivals.csv"), rows_of(folder / "truths.csv")
        self.truths = {name: [row for row in truths if row["model"] == name] for name in self.searches}
        self.curves = {name: found for name, rows in self.truths.items() if len((found := curve(rows)).rates) >= 3}
        self.rates = {
            name: {OWN: float(self.searches[name]["best"])}
            | {row["rival"]: float(row["rate"]) for row in rivals if row["model"] == name}
            for name in self.curves
        }
        self.regrets = {
            name: {who: self.curves[name].regret(rate) for who, rate in own.items()} for name, own in self.rates.items()
        }

    def table(self) -> list[str]:
        """A row a model: its recommended rate, and the regret of each."""
        rows = []
        for name, own in self.regrets.items():
            told = [_nats(own.get(who, math.nan)) for who in (OWN, *RIVALS)]
            rows.append((f"`{name}`", f"{self.rates[name][OWN]:.3g}", f"{self.curves[name].best:.3g}", *told))
        return page_blocks.table(("model", "recommended rate", "true best", OWN, *RIVALS), rows)

    def answers(self) -> list[str]:
        """A row a model: the largest safe rate, coverage, warm-up and cost."""
        rows = []
        for name in self.curves:
            own = self.searches[name]
            cost = f"{int(own['cost']):,} ({int(own['cost']) / int(own['horizon']):.1f} H)"
            parts = f"{int(own['cost_failed']):,}, {int(own['cost_seeds']):,}"
            best, safe = ("yes" if one else "no" for one in self.covers(name))
            rows.append((f"`{name}`", f"{float(own['safe']):.3g}", self.unsafe(name) or "safe", best, safe,
                         self.warmup(name), cost, parts))  # fmt: skip
        head = ("model", "largest safe rate", "found", "best rate covered", "safe rate covered", "least warm-up")
        return page_blocks.table((*head, "updates", "of failed trials, of other seeds"), rows)

    def limit(self, name: str) -> float:
        return self.curves[name].lowest + float(self.searches[name]["delta"])

    def unsafe(self, name: str) -> str:
        return unsafe(self.truths[name], "safe", None, self.limit(name))

    def warmup(self, name: str) -> str:
        own = self.searches[name]["warmup"]
        rows = self.truths[name]
        if not own or not any(row["kind"] == "warmup" for row in rows):
            return own and f"{float(own):.0f}, not checked"
        why = unsafe(rows, "warmup", int(float(own)), self.limit(name))
        return f"{float(own):.0f}, {f'wrong: {why}' if why else 'right'}"

    def covers(self, name: str) -> tuple[bool, bool]:
        """Whether the intervals of the best and of the largest safe rate hold the truth's."""
        own, found = self.searches[name], self.curves[name]
        low, high = true_safe(found, float(own["delta"]))
        above = float(own["safe_high"]) if own["safe_high"] else math.inf
        return holds(own["best_low"], own["best_high"], found.best), float(own["safe_low"]) < high and low < above

    def verdict(self, names: Sequence[str]) -> list[str]:
        """The goals and the primary test over some of the models."""
        regrets = [self.regrets[name][OWN] for name in names]
        costs = [int(self.searches[name]["cost"]) / int(self.searches[name]["horizon"]) for name in names]
        few, cheap = sum(one < GOAL_EACH for one in regrets), sum(one <= GOAL_HORIZONS for one in costs)
        count = math.ceil(GOAL_COUNT / 12 * len(names))
        lines = [
            f"- Median regret {_nats(median(regrets))} nats (goal {GOAL_MEDIAN}): "
            f"**{_goal(median(regrets) <= GOAL_MEDIAN)}**.",
            f"- {few} of {len(names)} models below {GOAL_EACH} nats (goal {count}): **{_goal(few >= count)}**.",
            f"- {cheap} of {len(names)} searches cost at most {GOAL_HORIZONS} horizons, median {median(costs):.1f}: "
            f"**{_goal(median(costs) <= GOAL_HORIZONS and cheap >= count)}**.",
        ]
        tests = {}
        for rival in PRIMARY:
            pairs = [
                (self.regrets[name][OWN], self.regrets[name][rival]) for name in names if rival in self.regrets[name]
            ]
            tests[rival] = wilcoxon([a for a, _ in pairs], [b for _, b in pairs])
        rejected = holm({rival: p for rival, (_, p) in tests.items()})
        for rival, (difference, p) in tests.items():
            word = "not shown to differ"
            if rejected[rival] and difference:
                word = "better" if difference < 0 else "worse"
            lines.append(f"- Against {rival}: median difference {difference:+.4f} nats, p = {p:.3g}: **{word}**.")
        for what, count_of in (
            ('unsafe "safe" rates', sum(bool(self.unsafe(name)) for name in names)),
            ("best rates covered", sum(self.covers(name)[0] for name in names)),
            ("safe rates covered", sum(self.covers(name)[1] for name in names)),
        ):
            low, high = statistics.share_interval(count_of, len(names))
            lines.append(f"- {count_of} of {len(names)} {what} [{low:.0%}, {high:.0%}].")
        return lines

    def page(self) -> list[str]:
        if not self.curves:
            return ["No truth is made yet."]
        names = [*self.curves]
        unseen = [name for name in names if name not in models.SEEN]
        lines = [f"Regret in nats, {len(names)} of {len(models.CASES)} models.", "", *self.table(), "", *self.answers()]
        lines += ["", f"All {len(names)} models:", "", *self.verdict(names)]
        if unseen and len(unseen) < len(names):
            lines += ["", f"Without {', '.join(models.SEEN)}, of which numbers were known:", "", *self.verdict(unseen)]
        return lines


def text_of(folder: Path) -> str:
    """Return the text of scores.md."""
    return "\n".join(["<!-- written by score.py -->", *Scores(folder).page(), ""])


def anew(page: str) -> str:
    """Return a page of the docs with the tables of the ledgers here between its marks."""
    scores = Scores(HERE)
    blocks = {"regrets": scores.table, "answers": scores.answers, "goals": lambda: scores.verdict([*scores.curves])}
    return page_blocks.renewed(page, blocks)


def _nats(value: float) -> str:
    return "-" if math.isnan(value) else "fails" if math.isinf(value) else f"{value:.4f}"


def _goal(reached: bool) -> str:
    return "reached" if reached else "missed"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE)
    parser.add_argument("--write", action="store_true", help="write scores.md and docs/lr-find.md")
    given = parser.parse_args(arguments)
    text = text_of(given.folder)
    if given.write:
        (given.folder / "scores.md").write_text(text, encoding="utf-8")
        page_blocks.differing(DOCS, anew, write=True)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
