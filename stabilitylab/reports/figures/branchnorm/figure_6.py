"""BranchNorm, Figure 6: the warm-ups and learning rates at which a model trains, and the sensitivity to the rate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ....config import Config
from ....experiments import Experiment, Recipe, command, probing, protocol, sweep
from ....experiments.recipe import BRANCHNORM
from ... import style
from ...arrange import alike, apart
from ...base import Figure, Map, MissingRuns, Panel, Picture, Series, compared, figure
from ...claims import NAMED_LATER, Effect, Share, claim
from ...collection import Record, Runs
from ...measures.comparison import (
    counted,
    decided,
    failed,
    judged,
    last_nll,
    lost_by_seed,
    not_drawn,
    states,
    with_the_protocols_ramp,
)
from ...measures.loss_differences import measured
from ...measures.outcomes import mark, outcomes, worst
from ...measures.provenance import provenance
from ...measures.sensitivity import (
    PAPER_WIDTH,
    RateGrid,
    at_width,
    by_seed,
    by_warmup,
    cell,
    grids,
    on_common_scale,
    within,
)
from ...statistics import Region, t_interval
from ...style import of_amounts

PAPER_RATES = (5e-4, 1.5e-3)  # the least and the largest of the paper, whose models are 512 wide
BOTH = ("branchnorm", "deepnorm")
MARKERS = "ovs^DP"  # of warm-ups, shortest first
LEAST = 4  # least warm-ups, and learning rates, of a grid for the claim
NEAR = 0.06  # share of the axis: ticks that are closer would overlap


@figure("branchnorm:6", title="Warm-up and learning rate", source="BranchNorm, Figure 6; Wortsman et al. 2023")
class WarmupAndRate(Figure):
    """The held-out nll after training [nats/token] against the learning rate, for each architecture, with one line per
    warm-up: the mean over the seeds that trained, and a cross for each seed that did not. The controls show the same as
    maps, with counts.

    The last panel has one number for each warm-up and both architectures, as in claim C48, with the 95 % t-interval
    over seeds. The number is the mean over rates of min(loss, unigram baseline), minus the least loss of either
    architecture at that seed anywhere in the grid [nats/token]. Runs that diverged or are stuck count at the baseline.
    In the controls, and in the main picture if one of the two architectures is missing, is the sensitivity to the
    learning rate of Wortsman et al. (2023, 2309.14322): the mean over rates of min(loss, loss at initialisation), minus
    the architecture's own least. Inferred: the paper changes either the warm-up or the rate, shows BLEU, and states no
    number.
    """

    def picture(self, runs: Runs) -> Picture:
        found = grids(judged(runs).where(lambda run: len(run.held_out()) > 0))
        if not found:
            raise MissingRuns("no runs of several learning rates at otherwise equal settings", command(self.id))
        grid = found[0]
        labels = grid.runs.labels
        numbers = {label: [by_seed(grid, label, warmup) for warmup in grid.warmups] for label in labels}
        axes = ("learning rate", "warm-up [updates]")
        maps = [Panel(style.title(label), *axes, map=_map(grid, label)) for label in labels]
        losses = alike(_losses(grid, label) for label in labels)
        first = {*BOTH} & {*labels} or {*labels}
        shown, aside = (
            [panel for panel, label in zip(losses, labels, strict=True) if (label in first) == wanted]
            for wanted in (True, False)
        )
        known = replace(grid, runs=_known(grid.runs))
        own = _over_warmups(grid, numbers, "its own least")
        both = _over_warmups(known, by_warmup(known, BOTH[::-1]), "the least of both")
        told, all_told = apart(own, BOTH)
        panels = [*shown, *(both or told)]
        aside += own if both else all_told
        notes = [
            f"Drawn: {grid.runs.describe()}. Lost: diverged or stuck.",
            *states(grid.runs),
            "Sensitivity: mean loss over these learning rates minus the least, with its 95 % interval. A rate too "
            "small for so short a training counts in it like one too large. Above the least of both, as claim C48: "
            "runs that failed stand at the unigram baseline. Above its own least, as Wortsman et al.: no loss is more "
            "than that at initialisation.",
            *_decay(grid.runs),
        ]
        notes += not_drawn(
            len(runs.where(kind="train", label=labels)) - len(grid.runs), "outside the grid, or without an end"
        )
        finding = _finding(grid, numbers, on_common_scale(known, BOTH))
        return Picture(
            panels, finding, notes, columns=min(3, len(panels)), controls=[*aside, *compared(maps)],
            provenance=provenance(grid.runs), band="range over seeds; of the sensitivity its 95 % interval",
        )  # fmt: skip


def _losses(grid: RateGrid, label: str) -> Panel:
    """Return the loss over learning rates, a line a warm-up, the longer the darker; runs that failed are crosses."""
    own = grid.runs.where(label=label)
    values = {run.name: last_nll(run) for run in grid.runs}
    bad, shades = worst(grid.runs, values), of_amounts(len(grid.warmups))
    lines = [
        line
        for place, (warmup, colour) in enumerate(zip(grid.warmups, shades, strict=True))
        for line in outcomes(
            own.where(train__warmup=warmup), values, lambda run: float(run.settings["train.lr"]), f"warm-up {warmup}",
            bad=bad, colour=colour, marker=MARKERS[place % len(MARKERS)], dash="solid",
        )
    ]  # fmt: skip
    y = "held-out nll [nats/token]"
    return Panel(style.title(label), "learning rate", y, lines, log_x=True, ticks=grid.rates)


def _decay(runs: Runs) -> list[str]:
    """Say what a warm-up changes besides the first updates."""
    if runs[0].settings.get("train.schedule") != "inverse_sqrt":
        return []
    return [
        "A warm-up of w updates is also where the decay begins, lr sqrt(w / update); without one the rate stays "
        "what it is up to update 4000. Rows differ in the whole course of the rate."
    ]


def _map(grid: RateGrid, label: str) -> Map:
    shape = (len(grid.warmups), len(grid.rates))
    z, finding, text = np.full(shape, np.nan), np.zeros(shape, np.int8), np.full(shape, "", dtype=object)
    for row, warmup in enumerate(grid.warmups):
        for column, rate in enumerate(grid.rates):
            own = grid.at(label, (warmup, rate))
            trained = [last_nll(run) for run in own if not failed(run)]
            ends = [run.verdict for run in own]
            finding[row, column] = mark(ends.count("diverged"), ends.count("stuck"), len(ends))
            if trained and not finding[row, column]:
                z[row, column] = np.mean(trained)
                text[row, column] = f"{z[row, column]:.2f}"
            if len(trained) < len(own):
                lost = f"{len(own) - len(trained)}/{len(own)} lost"
                text[row, column] = "\n".join(filter(None, (text[row, column], lost)))
    return Map(
        range(len(grid.rates)), range(len(grid.warmups)), z, finding, "held-out nll [nats/token]", log=False,
        x_names=[f"{rate:g}" for rate in grid.rates], y_names=[str(warmup) for warmup in grid.warmups], text=text,
    )  # fmt: skip


Numbers = dict[str, list[dict[int, float]]]  # label -> for each warm-up: seed -> sensitivity


def _known(runs: Runs) -> Runs:
    """Return the runs whose loss and baseline are known."""
    return runs.where(lambda run: not math.isnan(run.baseline) and not math.isnan(last_nll(run)))


def _over_warmups(grid: RateGrid, numbers: Numbers, least: str) -> list[Panel]:
    lines = []
    for label, own in numbers.items():
        found = [(warmup, t_interval(values.values())) for warmup, values in zip(grid.warmups, own, strict=True)]
        found = [(warmup, interval) for warmup, interval in found if interval.n]
        if found:
            places, intervals = zip(*found, strict=True)
            ends = [[getattr(one, end) for one in intervals] for end in ("mean", "low", "high")]
            counts = [one.n for one in intervals]
            seeds = counts[0] if len({*counts}) == 1 else counts
            lines.append(Series(style.title(label), places, *ends, arch=label, seeds=seeds))  # type: ignore[arg-type]
    y = f"mean loss - {least} [nats/token]"
    panel = Panel("Sensitivity to the rate", "warm-up [updates]", y, lines, ticks=_apart(grid.warmups))
    return [panel] if lines else []


def _apart(places: Sequence[int]) -> list[int]:
    """Return the ticks that are far enough from the one before to be read."""
    kept: list[int] = []
    for place in places:
        if not kept or place - kept[-1] > NEAR * (places[-1] - places[0]):
            kept.append(place)
    return kept


def _range(grid: RateGrid) -> str:
    return f"{grid.rates[0]:g} to {grid.rates[-1]:g}"


def _finding(grid: RateGrid, numbers: Numbers, common: dict[str, dict[int, float]]) -> str:
    warmup = grid.warmups[0]
    with_least = "without warm-up" if warmup == 0 else f"with a warm-up of {warmup}"
    parts = []
    for label, own in numbers.items():
        runs = grid.runs.where(label=label)
        said = f"{style.title(label)} lost {sum(map(failed, runs))} of {len(runs)} runs"
        if above := common.get(label):
            said += f" and is {measured(above.values(), '.3f')} nats above the least of both ({counted(len(above))})"
        elif own[0]:
            said += f", sensitivity {measured(own[0].values(), '.3f')} nats {with_least} ({counted(len(own[0]))})"
        parts.append(said)
    warmups = "one warm-up" if len(grid.warmups) == 1 else f"{len(grid.warmups)} warm-ups"
    return f"Over learning rates of {_range(grid)} and {warmups}: {'; '.join(parts)}."


def _judged(runs: Runs) -> RateGrid:
    """Return the grid of both architectures in which most runs can be compared, with enough warm-ups and the paper's
    rates at their width.

    Raises MissingRuns.
    """
    fit = runs.where(lambda run: run.verdict != "" and within(run, PAPER_RATES), kind="train", label=BOTH)
    both = [grid for grid in grids(with_the_protocols_ramp(fit)) if len(grid.runs.labels) == len(BOTH)]
    enough = [grid for grid in both if min(len(grid.warmups), len(grid.rates)) >= LEAST]
    if not enough:
        low, high = PAPER_RATES
        raise MissingRuns(
            "needs branchnorm and deepnorm on a grid of four warm-ups and four learning rates from "
            f"{low:g} to {high:g} times {PAPER_WIDTH} / width"
        )
    return max(enough, key=lambda grid: len(grid.runs))


@claim(
    "C40",
    figure="branchnorm:6",
    stage="after training",
    must_read=False,
    paper="BranchNorm",
    sentence="BranchNorm needs no warm-up and tolerates larger learning rates than DeepNorm",
    source="BranchNorm, Fig. 6",
    statistic="over warm-up {0, 100, 1000, 4000} x lr {5, 8, 10, 15}e-4 times 512 / width, or four warm-ups scaled to "
    "the run and four rates between these: DeepNorm's share of cells that diverged or are stuck minus BranchNorm's, "
    "seed by seed, over the cells in which both can be judged; beside it the share of each",
    threshold="R: > 0; X: < 0 (the plan names other regions: ours)",
    sweep="branchnorm:6",
    after=f"{NAMED_LATER}, and so was the rule that rates go with the width",
)
def no_warmup_needed(runs: Runs) -> list[Effect | Share]:
    cells: dict[tuple[object, ...], dict[str, Record]] = {}
    for run in decided(_judged(runs).runs):
        cells.setdefault((*cell(run), run.seed), {})[run.label] = run
    common = [found for found in cells.values() if len(found) == len(BOTH)]
    arms = {label: Runs([found[label] for found in common]) for label in BOTH}
    lost = {label: lost_by_seed(own) for label, own in arms.items()}
    more = {seed: (lost["deepnorm"][seed][0] - lost["branchnorm"][seed][0]) / n
            for seed, (_, n) in lost["branchnorm"].items()}  # fmt: skip
    of = [*arms["deepnorm"], *arms["branchnorm"]]
    return [
        Effect("DeepNorm's share that failed - BranchNorm's", more, Region(low=0), Region(high=0), of=of),
        *(Share(f"{style.title(label)}'s cells that failed", lost[label], of=arms[label]) for label in BOTH),
    ]


@claim(
    "C48",
    figure="branchnorm:6",
    stage="after training",
    paper="BranchNorm",
    sentence="BranchNorm is less sensitive to the learning rate than DeepNorm",
    source="BranchNorm, Fig. 6b: better tolerance for larger learning rates; the measure of Wortsman et al. 2023",
    statistic="mean over the cells of C40 of min(final held-out nll, that of the unigram baseline), at which runs "
    "stand that diverged or are stuck, minus the least loss that either architecture has at that seed: BranchNorm - "
    "DeepNorm [nats]; beside it each architecture's",
    threshold="R: < -.01; X: > .01",
    sweep="branchnorm:6",
    kind="implied",
    after=NAMED_LATER,
)
def less_sensitive(runs: Runs) -> list[Effect]:
    grid = _judged(_known(runs))
    found = on_common_scale(grid, BOTH)
    seeds = {*found["branchnorm"]}
    of = grid.runs.where(lambda run: run.seed in seeds, label=BOTH)
    gap = {seed: found["branchnorm"][seed] - found["deepnorm"][seed] for seed in sorted(seeds)}
    apart = [Effect(f"above the common least, {style.title(label)}", found[label], of=of.where(label=label))
             for label in BOTH]  # fmt: skip
    return [Effect("difference", gap, Region(high=-0.01), Region(low=0.01), of=of), *apart]


WARMUPS, RATES = (0, 100, 1000, 4000), (5e-4, 8e-4, 1e-3, 1.5e-3)  # the paper's
UPDATES = 500  # at scale tiny


@sweep("branchnorm:6", minutes=63)
def warmups_and_rates(ask: Recipe) -> Iterator[Experiment]:
    """Crosses the paper's four warm-ups with its four learning rates, 6L-6L, 500 updates; at full size 100L-100L.

    At scale tiny the warm-ups are the same shares of the run (0, .1, 1 and 4 %; T is 4 %), and the rates are multiplied
    by 512 / 64, as a narrower model bears larger ones (Adam's rate goes with 1 / width, Yang et al. 2022, 2203.03466).
    """
    for warmup, rate in itertools.product(WARMUPS, RATES):
        if ask.tiny:
            updates = math.ceil(warmup / 100_000 * UPDATES)
            axes = {"train": {"warmup": updates}}
            for seed, arch in itertools.product(ask.seeds or protocol.SEEDS, (protocol.DEEP, protocol.BRANCH)):
                wide = at_width(rate, Config().model.d_model)
                settings = (probing(), ask.settings, axes)
                yield protocol.run(arch, 6, seed, wide, UPDATES, *settings, tags=[f"warmup{updates}"])
        else:
            axes = {"train": {"warmup": warmup, "lr": rate}}
            tag = f"warmup{warmup}-lr{rate:g}"
            yield from ask.runs(("deepnorm", "branchnorm"), [100], BRANCHNORM, probing(), axes=axes, tag=tag)
