"""The choice of the runs that a figure draws or a claim compares, with notes on their ends and on what is left out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ...experiments import command
from ...experiments.protocol import RAMP
from ...verdict import UNREAD
from .. import style
from ..base import MissingRuns, Panel
from ..collection import Record, Runs, pairs
from ..conditions import by_protocol

RATE = "train.lr"
ENOUGH = 3  # seeds; beyond them a longer training counts for more than another seed
Pairs = list[tuple[int, Record, Record]]  # seed, run, run


def failed(record: Record) -> bool:
    return record.verdict in ("diverged", "stuck")


def judged(runs: Runs) -> Runs:
    """Return the training runs that have ended with a verdict."""
    return runs.where(lambda run: run.ended and run.verdict != "", kind="train")


def decided(runs: Runs) -> Runs:
    """Pick the runs that are known to have failed or not: neither still descending to the baseline nor untold."""
    return runs.where(lambda run: run.verdict not in ("descending", "cannot tell"))


def lost_by_seed(runs: Runs) -> dict[int, tuple[int, int]]:
    """Count for each seed its runs that diverged or are stuck, and its runs whose state can be told."""
    known = decided(runs)
    return {seed: (sum(map(failed, own)), len(own)) for seed in known.seeds if (own := known.where(seed=seed))}


def one_ramp(runs: Runs, *free: str) -> tuple[Runs, list[str]]:
    """Keep one run of each label, seed and value of ``free``. If a label has several T, the T whose share of the run
    is nearest to the protocol's 4 % is kept, and a note says so.

    T is free in a group of comparable runs, since it has a meaning for BranchNorm alone. If runs of two ramps were
    averaged as if they were seeds, they would show a spread that no seed made.
    """
    kept: dict[tuple[object, ...], Record] = {}
    notes = []
    for label in runs.labels:
        own = runs.where(label=label)
        ramps = {record.ramp or 0 for record in own}
        if len(ramps) > 1:
            wanted = RAMP * max(record.updates for record in own)
            chosen = min(ramps, key=lambda T: (abs(math.log(max(T, 1) / max(wanted, 1))), T))
            own = own.where(lambda record, T=chosen: (record.ramp or 0) == T)
            left = ", ".join(map(str, sorted(ramps - {chosen})))
            notes.append(f"{style.title(label)} with T = {chosen}; left out: T = {left}.")
        for record in sorted(own, key=lambda record: record.name):
            kept[label, record.seed, *(repr(record.settings.get(key)) for key in free)] = record
    return Runs(kept.values()), notes


def comparable(runs: Runs, *free: str) -> list[Runs]:
    """Group runs that differ only in architecture, seed and ``free``, each with one ramp; richest first.

    Besides the groups of one learning rate there are groups in which each architecture has its own at each depth.
    """
    groups = [one_ramp(group, *free)[0] for group in grouped(runs, *free)]
    return sorted(groups, key=lambda group: (len(group.labels), len(group), group[0].updates), reverse=True)


def grouped(runs: Runs, *free: str) -> list[Runs]:
    """Group runs that differ only in architecture, seed, T and ``free``. Add groups in which each architecture also
    has its own learning rate at each depth and value of ``free``: of several rates the one that most seeds have."""
    groups = runs.groups(*free)
    if RATE in free:
        return groups
    for group in runs.groups(*free, RATE):
        seeds: dict[tuple[object, ...], dict[str, dict[float, set[int]]]] = {}
        for run in group:
            place = seeds.setdefault(_place(run, free), {})
            place.setdefault(run.label, {}).setdefault(_rate(run), set()).add(run.seed)
        own = {(place, label): _own(rates) for place, found in seeds.items() for label, rates in found.items()}
        shared = any(len(found) > 1 for found in seeds.values())  # two architectures in one place
        if shared and None not in own.values() and len({*own.values()}) > 1:
            groups.append(group.where(lambda run, own=own: own[_place(run, free), run.label] == _rate(run)))
    return groups


def _place(run: Record, free: Sequence[str]) -> tuple[object, ...]:
    return run.layers, *(repr(run.settings.get(key)) for key in free)


def _rate(run: Record) -> float:
    return float(run.settings.get(RATE, 0.0))


def _own(rates: Mapping[float, set[int]]) -> float | None:
    """Return the rate that most seeds have, since a rate that was only tried has fewer; None if two have as many."""
    counts = Counter({rate: len(seeds) for rate, seeds in rates.items()}).most_common(2)
    return None if len(counts) > 1 and counts[0][1] == counts[1][1] else counts[0][0]


def with_the_protocols_ramp(runs: Runs) -> Runs:
    """Pick the runs for a comparison of architectures: those whose T is 4 % of the run, and those without a ramp.

    Raises MissingRuns if an architecture would have no run left.
    """
    kept = runs.where(by_protocol)
    for label in runs.labels:
        if label not in kept.labels:
            ramps = sorted({(run.ramp or 0, run.updates) for run in runs.where(label=label)})
            said = ", ".join(f"{T} of {updates:,} updates" for T, updates in ramps[:3])
            raise MissingRuns(
                f"{style.title(label)} ramped for {said}: architectures are compared with a ramp of 4 % of the run"
            )
    return kept


def both(found: Pairs) -> list[Record]:
    """Lists all runs of these pairs."""
    return [run for _, *two in found for run in two]


def matched(runs: Runs, first: str, second: str, table: str) -> Pairs:
    """Pair by seed runs of two labels that have trained with the protocol's ramp. The pairs are of one comparable
    group: one with enough seeds, then the one trained longest, then the deepest. Raises MissingRuns."""
    trained = runs.where(lambda run: not failed(run), kind="train", label=(first, second), table=table)
    trained = with_the_protocols_ramp(trained)
    found = [(group, pairs(group.where(label=first), group.where(label=second))) for group in comparable(trained)]
    best = max(found, key=lambda one: _weight(one[0], first, second), default=None)
    if best is None or not best[1]:
        raise MissingRuns(f"needs {first} and {second} trained with the same seeds and settings, with {table}")
    return best[1]


def _weight(group: Runs, *between: str) -> tuple[int, ...]:
    """Rank a group for the comparison of two labels: enough seeds that trained with the protocol's ramp, then a long
    training, then depth, then more seeds; zeros without a pair."""
    trained = group.where(lambda run: not failed(run) and by_protocol(run))
    count = len(pairs(*(trained.where(label=label) for label in between))) if between else 0
    return (min(count, ENOUGH), group[0].updates, group[0].depth, count) if count else (0,) * 4


def largest_group(
    runs: Runs, tables: Sequence[str], figure: str, *free: str, ended: bool = False, between: tuple[str, ...] = ()
) -> tuple[Runs, list[str]]:
    """Pick the richest group of comparable training runs with these tables; notes describe it and what was left out.

    ``between``: two labels that the figure compares; the group that :func:`matched` takes for them comes first.
    ``ended``: if some runs have ended, leave out those that have not, since their last step is another one.
    """
    fit = runs.where(kind="train", table=tables)
    if not fit:
        raise MissingRuns(f"no run of `probe` with {' and '.join(tables) or 'metrics'}", command(figure))
    done = fit.where(lambda run: run.ended) if ended else fit
    groups = grouped(done or fit, *free)
    first = max(groups, key=lambda group: (*_weight(group, *between), len(group.labels), len(group), group[0].updates))
    group, ramps = one_ramp(first, *free)
    notes = [f"Drawn: {group.describe()}. Lines are means over seeds, bands their range.", *ramps, *states(group)]
    drawn = {id(run) for run in first}
    if count := sum(id(run) not in drawn for run in done or fit):
        others = [other for other in (done or fit).groups(*free) if not drawn & {id(run) for run in other}]
        apart = f" ({len(others)} groups)" if len(others) > 1 else ""
        notes += not_drawn(count, f"with other settings{apart}")
    return group, notes + not_drawn(len(fit) - len(done or fit), "without an end")


def states(group: Runs) -> list[str]:
    """Notes the runs that diverged, are stuck, cannot be told or have not ended; none where all is well."""
    said = {
        "diverged": "diverged",
        UNREAD: "ignored their source",
        "stuck": "got stuck at or above the unigram baseline",
        "descending": "still descended to the unigram baseline",
        "cannot tell": "had too few evaluations to tell the state",
    }
    counts = Counter(said.get(run.verdict, "") if run.ended else "did not end" for run in group)
    if len(group) == 1:
        return [f"The run {state}." for state in counts if state]
    parts = [f"{count} {state}" for state, count in sorted(counts.items()) if state]
    return [f"Of {len(group)} runs {', '.join(parts)}."] if parts else []


def hidden(panels: Iterable[Panel]) -> list[str]:
    """Notes what a logarithmic axis cannot show: values of exactly 0."""
    names = [
        f"{line.name} ({panel.title})"
        for panel in panels
        if panel.log_y
        for line in panel.series
        if not line.right and any(value == 0 for value in (line.y if line.low is None else line.low))
    ]
    return [f"Exactly 0 in places, so not on the logarithmic axis: {'; '.join(dict.fromkeys(names))}."] if names else []


def last_nll(record: Record) -> float:
    """Reads the held-out cross-entropy after training; inf for a run that diverged, NaN where none was measured."""
    return math.inf if record.verdict == "diverged" else record.last_nll


def counted(seeds: int | Sequence[int]) -> str:
    """Says ``3 seeds`` or, where not all points have as many, ``2 to 3 seeds``."""
    least, most = (seeds, seeds) if isinstance(seeds, int) else (min(seeds), max(seeds))
    if least < most:
        return f"{least} to {most} seeds"
    return "one seed" if most == 1 else f"{most} seeds"


def nothing_drawn(places: Sequence[str]) -> list[str]:
    """Notes lines that a logarithmic axis cannot show at all."""
    return [f"Exactly 0 throughout, so not drawn: {'; '.join(places)}."] if places else []


def left_out(known: Runs, drawn: Runs) -> list[str]:
    """Notes runs that could be drawn and are not."""
    return not_drawn(len(known) - len(drawn), "with other settings, or repeated")


def not_drawn(count: int, why: str) -> list[str]:
    """Return a note on ``count`` runs that are not drawn, and why; [] if there are none."""
    return [f"Not drawn: {count} run{'s' if count > 1 else ''} {why}."] if count else []
