"""BranchNorm, Figure 5: quality against depth, on three sizes of data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ....experiments import SEEDS, Experiment, Recipe, command, probing, protocol, sweep
from ....experiments.recipe import BRANCHNORM
from ... import style
from ...arrange import alike, apart
from ...base import Figure, MissingRuns, Panel, Picture, Reference, Series, figure
from ...claims import NAMED_LATER, Effect, claim, together
from ...collection import LAYERS, Runs
from ...measures.comparison import (
    counted,
    failed,
    grouped,
    last_nll,
    not_drawn,
    one_ramp,
    states,
    with_the_protocols_ramp,
)
from ...measures.outcomes import outcomes, worst
from ...measures.provenance import provenance
from ...measures.quality import DROPOUT, SHARE, Quality, even, quality, share_of
from ...statistics import Region, slope

BOTH = ("deepnorm", "branchnorm")
Slopes = dict[int, dict[float, float]]  # seed -> share of the data -> slope of quality with log N


def by_share(runs: Runs) -> dict[float, Runs]:
    """Return runs by their share of the data, smallest first. Of runs with several dropouts at one share, the commonest
    dropout is kept."""
    found = {}
    for share in sorted({share_of(record) for record in runs}):
        own = runs.where(lambda record, share=share: share_of(record) == share)
        rates = [record.settings.get(DROPOUT) for record in own]
        found[share] = own.where(model__dropout=max(rates, key=rates.count))
    return found


def depth_sweeps(runs: Runs) -> list[Runs]:
    """Return groups of comparable training runs at any depth and share of the data."""
    free = (*LAYERS, SHARE, DROPOUT)
    groups = grouped(runs.where(even, kind="train"), *free)
    return [Runs(run for own in by_share(one_ramp(g, *free)[0]).values() for run in own) for g in groups]


@figure(
    "branchnorm:5", title="Quality against depth on three data sizes", source="BranchNorm, Figure 5; DeepNet, Fig. 6"
)
class QualityAgainstDepth(Figure):
    """The BLEU of ``stabilitylab evaluate`` if all models of a panel reach 5, otherwise the held-out cross-entropy as a
    stand-in.

    The data sizes are shares of one corpus. Runs that diverged or are stuck are crosses at their depth.
    """

    def picture(self, runs: Runs) -> Picture:
        group, notes = _group(runs)
        shares = by_share(group)
        measured = {share: quality(own) for share, own in shares.items()}
        panels = [
            Panel(
                _title(share, own), "layers a side", measured[share].axis, _series(own, measured[share]),
                _baseline(own, measured[share]), log_x=True, ticks=group.depths,
            )
            for share, own in shares.items()
        ]  # fmt: skip
        if not all(one.is_bleu for one in measured.values()):
            notes.append(
                "Held-out nll (lower is better) stands in for BLEU where not every model was evaluated and reaches 5."
            )
        if any(run.verdict == "diverged" for run in group):
            notes.append("A run that diverged has no value: its cross stands at its panel's worst one, or at 0 BLEU.")
        main, controls = apart(panels, BOTH)
        return Picture(
            alike(main),
            _finding(shares, measured),
            notes,
            columns=min(3, len(panels)),
            controls=controls,
            provenance=provenance(group),
        )


def _group(runs: Runs) -> tuple[Runs, list[str]]:
    """Return the comparable runs with most depths and sizes that have ended, and notes."""
    sweeps = depth_sweeps(runs)
    ended = [own for sweep in sweeps if (own := sweep.where(lambda run: run.ended and not math.isnan(last_nll(run))))]
    if not ended:
        lacking = "has ended with a held-out loss" if sweeps else "is there"
        raise MissingRuns(f"no run of `probe` {lacking}", command("branchnorm:5"))
    best = max(
        ended,
        key=lambda g: (len(g.depths) > 1, len({*map(share_of, g)}), not all(map(failed, g)), len(g.depths), len(g)),
    )
    notes = [f"Drawn: {best.describe()}. Points are means over seeds, bars their range.", *states(best)]
    notes += not_drawn(len(runs.where(kind="train")) - len(best), "with other settings, or without an end")
    if len(best.depths) == 1:
        notes.append(f"One depth is no depth sweep: '{command('branchnorm:5')}' makes one.")
    return best, notes


def _title(share: float, own: Runs) -> str:
    counts = {record.run.manifest.get("data", {}).get("train") for record in own} - {None}
    return f"{percent(share)} of data" + (f": {counts.pop():,} pairs" if len(counts) == 1 else "")


def percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _series(runs: Runs, measured: Quality) -> list[Series]:
    """Return a line through the runs that learned, and crosses for the others, label by label."""
    values = measured.values
    bad = 0.0 if measured.is_bleu else worst(runs, values)
    return [
        line
        for label in runs.labels
        for line in outcomes(runs.where(label=label), values, lambda run: run.depth, style.title(label), bad=bad,
                             arch=label)
    ]  # fmt: skip


def _baseline(runs: Runs, measured: Quality) -> list[Reference]:
    """Return the line of the unigram baseline: a model below it has learned more than token frequencies."""
    known = [run.baseline for run in runs if math.isfinite(run.baseline)]
    return [Reference(float(np.mean(known)), "unigram baseline")] if known and not measured.is_bleu else []


def _finding(shares: dict[float, Runs], measured: dict[float, Quality]) -> str:
    """Say what depth changed at each size of the data, by architecture, and how many runs failed."""
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
    """Return the mean at each depth over the runs that trained; NaN if none did."""
    found = []
    for depth in depths:
        own = [measured.values[run.name] for run in runs if run.depth == depth and not failed(run)]
        found.append(float(np.mean(own)) if own else math.nan)
    return found


@claim(
    "C45",
    figure="branchnorm:5",
    stage="after training",
    paper="BranchNorm",
    sentence="What depth gains depends on the amount of data: little data loses with depth",
    source="BranchNorm, Fig. 5",
    statistic="of the quality of the runs that trained (BLEU where all reach 5, else -nll): its slope with log N on "
    "each size of the data, the slope of these slopes with log data size (the interaction), mean of DeepNorm and "
    "BranchNorm; beside it each architecture's interaction, and its slope on the smallest data",
    threshold="R: interaction > 0; X: < 0 (the plan names no X: ours)",
    sweep="branchnorm:5",
    after=NAMED_LATER,
)
def depth_needs_data(runs: Runs) -> list[Effect]:
    best: list[tuple[str, Runs, Slopes]] = []
    fit = runs.where(lambda run: not failed(run), kind="train", label=BOTH)
    for group in depth_sweeps(with_the_protocols_ramp(fit)):
        arms = [(label, group.where(label=label)) for label in BOTH]
        found = [(label, own, _slopes(own, quality(group))) for label, own in arms]
        best = max(best, found, key=lambda one: min((len(slopes) for *_, slopes in one), default=0))
    if not best or not all(slopes for *_, slopes in best):
        raise MissingRuns(
            "needs deepnorm and branchnorm trained at two depths or more on two data sizes or more, seed by seed"
        )
    apart, smallest = [], []
    for label, own, slopes in best:
        name, of = style.title(label), own.where(lambda run, slopes=slopes: run.seed in slopes)
        interaction = {seed: _interaction(found) for seed, found in slopes.items()}
        least = {seed: found[min(found)] for seed, found in slopes.items()}
        apart.append(Effect(f"interaction, {name}", interaction, of=of))
        smallest.append(Effect(f"slope on the smallest data, {name}", least, of=of))
    return [together("interaction, mean of both", apart, np.mean, Region(low=0), Region(high=0)), *apart, *smallest]


def _slopes(runs: Runs, measured: Quality) -> Slopes:
    """Fit slopes of seeds that have two depths or more at each of two sizes or more."""
    shares = by_share(runs)
    found: Slopes = {}
    for seed in runs.seeds:
        slopes = {}
        for share, own in shares.items():
            values = {run.depth: measured.gain(run) for run in own.where(seed=seed)}
            if len(values) > 1 and all(map(math.isfinite, values.values())):
                slopes[share] = slope([math.log(depth) for depth in values], [*values.values()])
        if len(slopes) == len(shares) > 1:
            found[seed] = slopes
    return found


def _interaction(slopes: dict[float, float]) -> float:
    return slope([math.log(share) for share in slopes], [*slopes.values()])


PAPER_DROPOUT = {0.01: 0.4, 0.1: 0.2, 1.0: 0.1}  # for small, medium and large data, by share of the corpus


@sweep("branchnorm:5", minutes=21)
def depths_and_sizes(ask: Recipe) -> Iterator[Experiment]:
    """Crosses 3, 6 and 18 layers a side with 1, 10 and 100 % of the data, 400 updates by the protocol at the
    comparison's rates; at full size up to 500 layers a side."""
    for fraction, dropout in PAPER_DROPOUT.items():
        axes: dict[str, Any] = {"data": {"fraction": fraction}}
        tag = f"data{fraction:g}"
        if ask.tiny:
            for seed, layers, arch in itertools.product(ask.seeds or SEEDS[:3], (3, 6, 18), BOTH):
                rate = protocol.chosen(arch, layers)
                yield protocol.run(arch, layers, seed, rate, 400, probing(), ask.settings, axes, tags=[tag])
        else:
            axes["model"] = {"dropout": dropout}
            depths = (6, 18, 50, 100, 250, 500)
            yield from ask.runs(BOTH, depths, BRANCHNORM, probing(), seeds=SEEDS[:3], axes=axes, tag=tag)
