"""BranchNorm, Figure 5: quality against depth, on three sizes of data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ...experiments import command
from ...store.evaluation import read_evaluation
from .. import style
from ..base import Figure, MissingRuns, Panel, Picture, Series, Spread, figure
from ..collection import LAYERS, Record, Runs
from ..layerwise import counted, failed, grouped, last_nll, one_ramp, states

LEAST_BLEU = 5.0  # below it a model does not translate, and BLEU says nothing
SHARE, DROPOUT = "data.fraction", "model.dropout"  # the paper's dropout goes with its size of the data
EVALUATED = ("row", "beam", "length_penalty", "penalty_kind", "signature", "data", "sentences", "truncated")


@dataclass(frozen=True)
class Quality:
    """How good models are: BLEU, or the held-out cross-entropy as a stand-in; run -> value."""

    is_bleu: bool
    values: dict[str, float]
    cut: str = ""  # what the axis says of sources that were not translated whole

    @property
    def axis(self) -> str:
        return f"BLEU{self.cut}" if self.is_bleu else "held-out nll [nats/token]"

    @property
    def unit(self) -> str:
        return "BLEU" if self.is_bleu else "nats"

    def gain(self, record: Record) -> float:
        """The value, larger for better."""
        return self.values[record.name] if self.is_bleu else -self.values[record.name]


def quality(runs: Iterable[Record]) -> Quality:
    """BLEU where every run that trained was evaluated, all of them alike, and reaches 5; else held-out nll."""
    records = list(runs)
    found = {record.name: _evaluation(record) for record in records}
    trained = [found[record.name] for record in records if not failed(record)]
    alike = len({json.dumps([entry.get(key) for key in EVALUATED]) for entry in trained}) == 1
    if alike and all(entry.get("bleu", -math.inf) >= LEAST_BLEU for entry in trained):
        cut, sentences = (trained[0].get(key) for key in ("truncated", "sentences"))
        how = f", {cut:.0f} of {sentences:.0f} sources cut" if cut and sentences else ""
        return Quality(True, {name: entry.get("bleu", 0.0) for name, entry in found.items()}, how)
    return Quality(False, {record.name: last_nll(record) for record in records})


def _evaluation(record: Record) -> dict[str, float]:
    """What ``stabilitylab evaluate`` left there; nothing where the run was trained on since."""
    found = read_evaluation(record.run.path) or {}
    scored = found.get("bleu") is not None and found.get("row", record.status.step) == record.status.step
    return found if scored else {}


def share_of(record: Record) -> float:
    return float(record.settings.get(SHARE, 1.0))


def even(record: Record) -> bool:
    """As many encoder as decoder layers, or a single stack: what one number of layers describes."""
    return len({*record.layers} - {0}) == 1


def by_share(runs: Runs) -> dict[float, Runs]:
    """Share of the data -> its runs, smallest first; where one has runs of several dropouts, of the commonest."""
    found = {}
    for share in sorted({share_of(record) for record in runs}):
        own = runs.where(lambda record, share=share: share_of(record) == share)
        rates = [record.settings.get(DROPOUT) for record in own]
        found[share] = own.where(model__dropout=max(rates, key=rates.count))
    return found


def depth_sweeps(runs: Runs) -> list[Runs]:
    """Groups of comparable training runs at any depth and share of the data."""
    free = (*LAYERS, SHARE, DROPOUT)
    groups = grouped(runs.where(even, kind="train"), *free)
    return [Runs(run for own in by_share(one_ramp(g, *free)[0]).values() for run in own) for g in groups]


@figure(
    "branchnorm:5", title="Quality against depth on three data sizes", source="BranchNorm, Figure 5; DeepNet, Fig. 6"
)
class QualityAgainstDepth(Figure):
    """BLEU of ``stabilitylab evaluate`` where all models of a panel reach 5, else held-out cross-entropy: a stand-in.

    Data sizes are shares of one corpus. Runs that diverged or are stuck are crosses, at the depth where they happened.
    """

    def picture(self, runs: Runs) -> Picture:
        group, notes = _group(runs)
        shares = by_share(group)
        measured = {share: quality(own) for share, own in shares.items()}
        panels = [
            Panel(
                _title(share, own), "layers a side", measured[share].axis, _series(own, measured[share]),
                log_x=True, ticks=group.depths,
            )
            for share, own in shares.items()
        ]  # fmt: skip
        if not all(one.is_bleu for one in measured.values()):
            notes.append(
                "Held-out nll (lower is better) stands in for BLEU where not every model was evaluated and reaches 5."
            )
        if any(run.verdict == "diverged" for run in group):
            notes.append("A run that diverged has no value: its cross stands at its panel's worst one, or at 0 BLEU.")
        return Picture(panels, _finding(shares, measured), notes, columns=min(3, len(panels)))


def _group(runs: Runs) -> tuple[Runs, list[str]]:
    """The comparable runs with most depths and sizes that have ended, and notes."""
    sweeps = depth_sweeps(runs)
    ended = [own for sweep in sweeps if (own := sweep.where(lambda run: run.ended and not math.isnan(last_nll(run))))]
    if not ended:
        lacking = "has ended with a held-out loss" if sweeps else "is there"
        raise MissingRuns(f"no training run {lacking}", command("branchnorm:5"))
    best = max(
        ended,
        key=lambda g: (len(g.depths) > 1, len({*map(share_of, g)}), not all(map(failed, g)), len(g.depths), len(g)),
    )
    notes = [f"Drawn: {best.describe()}. Points are means over seeds, bars their range.", *states(best)]
    if others := len(runs.where(kind="train")) - len(best):
        notes.append(f"Not drawn: {others} run{'s' * (others > 1)} with other settings, or without an end.")
    if len(best.depths) == 1:
        notes.append(f"One depth is no depth sweep: '{command('branchnorm:5')}' makes one.")
    return best, notes


def _title(share: float, own: Runs) -> str:
    counts = {record.run.manifest.get("data", {}).get("train") for record in own} - {None}
    return f"{percent(share)} of data" + (f": {counts.pop():,} pairs" if len(counts) == 1 else "")


def percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _series(runs: Runs, measured: Quality) -> list[Series]:
    """A line through the runs that learned, and crosses for those that did not, label by label."""
    values = measured.values
    drawn = [values[run.name] for run in runs if run.verdict != "diverged"]
    worst = 0.0 if measured.is_bleu else max(drawn, default=_unigram(runs))
    series = []
    for label in runs.labels:
        spread, crosses = Spread(), []
        for run in runs.where(label=label):
            if failed(run):
                crosses.append((run.depth, worst if run.verdict == "diverged" else values[run.name]))
            else:
                spread.add([run.depth], [values[run.name]])
        if spread.points:
            series.append(spread.series(style.title(label), arch=label))
        if crosses:
            name = f"{style.title(label)}: diverged or stuck"
            depths, heights = zip(*sorted(crosses), strict=True)
            series.append(Series(name, depths, heights, arch=label, kind="crosses", seeds=len({*runs.seeds})))
    return series


def _unigram(runs: Runs) -> float:
    """Cross-entropy of the unigram baseline: where runs stand that learned nothing, if none else gives a height."""
    return float(runs[0].run.manifest.get("unigram", {}).get("cross_entropy", 1.0))


def _finding(shares: dict[float, Runs], measured: dict[float, Quality]) -> str:
    """What depth changed at each size of the data, by architecture, and how many runs failed."""
    everything = Runs(run for own in shares.values() for run in own)
    depths = everything.depths
    ends = (depths[0], depths[-1])
    parts = []
    for label in everything.labels:
        moves = [(share, _means(own.where(label=label), measured[share], ends)) for share, own in shares.items()]
        known = [(share, means) for share, means in moves if all(map(math.isfinite, means))]
        what = [
            f"{means[1] - means[0]:+.2f} {measured[share].unit} on {percent(share)}"
            if len(depths) > 1
            else f"{means[0]:.2f} {measured[share].unit} on {percent(share)}"
            for share, means in known
        ]
        if what:
            parts.append(f"{style.title(label)} {', '.join(what)} of the data")
    start = (
        f"From {ends[0]} to {ends[1]} layers a side" if len(depths) > 1 else f"At {ends[0]} layers a side, one depth"
    )
    lost = sum(map(failed, everything))
    ending = f"; {lost} of {len(everything)} runs diverged or are stuck" if lost else ""
    return f"{start}: {'; '.join(parts) or 'no architecture trained at both ends'} ({_seeds(everything)}){ending}."


def _seeds(runs: Runs) -> str:
    return counted(len(runs.seeds))


def _means(runs: Runs, measured: Quality, depths: Sequence[int]) -> list[float]:
    """At each depth, the mean over the runs that trained; NaN where none did."""
    found = []
    for depth in depths:
        own = [measured.values[run.name] for run in runs if run.depth == depth and not failed(run)]
        found.append(float(np.mean(own)) if own else math.nan)
    return found
