"""BranchNorm, Figure 6: which warm-ups and learning rates a model survives, and how much the rate matters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from ...experiments import command
from .. import style
from ..base import Figure, Map, MissingRuns, Panel, Picture, Series, compared, figure
from ..claims import Effect, Share, claim
from ..collection import Runs
from ..layerwise import counted, decided, failed, last_nll, states
from ..statistics import Region, signed_rank, t_interval
from .loss_differences import measured
from .outcomes import mark
from .sensitivity import AXES, Grid, by_seed, cell, grids

PAPER_RATES = (5e-4, 1.5e-3)  # the least and the largest of the paper
BOTH = ("branchnorm", "deepnorm")
LEAST = 4  # warm-ups, and learning rates, of a grid that is judged
NEAR = 0.06  # of the axis: ticks closer than that would lie on one another


@figure("branchnorm:6", title="Warm-up and learning rate", source="BranchNorm, Figure 6; Wortsman et al. 2023")
class WarmupAndRate(Figure):
    """For each architecture a map over learning rate and warm-up: held-out nll after training [nats/token], mean over
    the seeds that trained, and the count of those that did not; a cell where most failed shows how.

    Beside it one number for each warm-up, the sensitivity to the learning rate of Wortsman et al. (2023, 2309.14322):
    mean over rates of min(loss, loss at initialisation), minus the least [nats/token], with the 95 % t-interval over
    seeds. Inferred: the paper changes one of the two at a time, shows BLEU, and states no number.
    """

    def picture(self, runs: Runs) -> Picture:
        fit = runs.where(lambda run: run.ended and run.verdict != "" and len(run.held_out()) > 0, kind="train")
        found = grids(fit)
        if not found:
            raise MissingRuns("no runs of several learning rates at otherwise equal settings", command(self.id))
        grid = found[0]
        labels = grid.runs.labels
        numbers = {label: [by_seed(grid, label, warmup) for warmup in grid.warmups] for label in labels}
        axes = ("learning rate", "warm-up [updates]")
        maps = [Panel(style.title(label), *axes, map=_map(grid, label)) for label in labels]
        panels = [*compared(maps), *_sensitivity(grid, numbers)]
        notes = [
            f"Drawn: {grid.runs.describe()}. Lost: diverged or stuck.",
            *states(grid.runs),
            "Sensitivity: mean over these learning rates of min(loss, loss at initialisation), minus the least, with "
            "its 95 % interval. A rate too small for so short a training counts in it like one too large.",
            *_decay(grid.runs),
        ]
        if others := len(runs.where(kind="train", label=labels)) - len(grid.runs):
            notes.append(f"Not drawn: {others} run{'s' * (others > 1)} outside the grid, or without an end.")
        return Picture(panels, _finding(grid, numbers), notes)


def _decay(runs: Runs) -> list[str]:
    """What a warm-up changes besides the first updates."""
    if runs[0].settings.get("train.schedule") != "inverse_sqrt":
        return []
    return [
        "A warm-up of w updates is also where the decay begins, lr sqrt(w / update); without one the rate stays "
        "what it is up to update 4000. Rows differ in the whole course of the rate."
    ]


def _map(grid: Grid, label: str) -> Map:
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


def _sensitivity(grid: Grid, numbers: Numbers) -> list[Panel]:
    lines = []
    for label, own in numbers.items():
        found = [(warmup, t_interval(values.values())) for warmup, values in zip(grid.warmups, own, strict=True)]
        found = [(warmup, interval) for warmup, interval in found if interval.n]
        if found:
            places, intervals = zip(*found, strict=True)
            ends = [[getattr(one, end) for one in intervals] for end in ("mean", "low", "high")]
            seeds = max(one.n for one in intervals)
            lines.append(Series(style.title(label), places, *ends, arch=label, seeds=seeds))  # type: ignore[arg-type]
    title = f"Sensitivity to the learning rate, {_range(grid)}"
    panel = Panel(title, "warm-up [updates]", "mean - least loss [nats/token]", lines, ticks=_apart(grid.warmups))
    return [panel] if lines else []


def _apart(places: Sequence[int]) -> list[int]:
    """Those that stand far enough from the one before to be read."""
    kept: list[int] = []
    for place in places:
        if not kept or place - kept[-1] > NEAR * (places[-1] - places[0]):
            kept.append(place)
    return kept


def _range(grid: Grid) -> str:
    return f"{grid.rates[0]:g} to {grid.rates[-1]:g}"


def _finding(grid: Grid, numbers: Numbers) -> str:
    warmup = grid.warmups[0]
    with_least = "without warm-up" if warmup == 0 else f"with a warm-up of {warmup}"
    parts = []
    for label, own in numbers.items():
        runs = grid.runs.where(label=label)
        said = f"{style.title(label)} lost {sum(map(failed, runs))} of {len(runs)} runs"
        if own[0]:
            said += f", sensitivity {measured(own[0].values(), '.3f')} nats {with_least} ({counted(len(own[0]))})"
        parts.append(said)
    return f"Over learning rates of {_range(grid)} and {len(grid.warmups)} warm-ups: {'; '.join(parts)}."


def _judged(runs: Runs) -> Grid:
    """The grid of both in which most runs can be compared, of enough warm-ups and rates. Raises MissingRuns."""
    both = [grid for grid in grids(runs.where(kind="train", label=BOTH)) if len(grid.runs.labels) == len(BOTH)]
    enough = [grid for grid in both if min(len(grid.warmups), len(grid.rates)) >= LEAST]
    if not enough:
        raise MissingRuns("needs branchnorm and deepnorm on a grid of four warm-ups and four learning rates")
    return max(enough, key=lambda grid: len(grid.runs))


@claim(
    "C40",
    figure="branchnorm:6",
    paper="BranchNorm",
    sentence="BranchNorm needs no warm-up and tolerates larger learning rates than DeepNorm",
    source="BranchNorm, Fig. 6",
    statistic="share of runs that diverged or are stuck over warm-up {0, 100, 1000, 4000} x lr {5, 8, 10, 15}e-4, or "
    "four warm-ups scaled to the run and four rates from 5e-4 to 1.5e-3 or more of each (rates beyond the paper's are "
    "drawn and not judged); of the runs in which the two differ, the share where DeepNorm failed",
    threshold="R: at most 1/16 of BranchNorm's, more than half of the differing ones DeepNorm's; X: more than 1/16, "
    "or less than half (the plan names no X: ours). With no failure it takes 58 runs of BranchNorm's, and without six "
    "runs that differ the second stays open; runs of one seed share start and order of data",
    sweep="branchnorm:6",
)
def no_warmup_needed(runs: Runs) -> list[Effect | Share]:
    low, high = PAPER_RATES
    within = runs.where(lambda run: low <= run.settings[AXES[1]] <= high and run.verdict != "", kind="train")
    grid = _judged(within)
    cells: dict[tuple[object, ...], dict[str, bool]] = {}
    for run in decided(grid.runs):
        cells.setdefault((*cell(run), run.seed), {})[run.label] = failed(run)
    both = [found for found in cells.values() if len(found) == len(BOTH)]
    differing = [found for found in both if found["branchnorm"] != found["deepnorm"]]
    lost, seeds = sum(found["branchnorm"] for found in both), len(grid.runs.seeds)
    worse = sum(found["deepnorm"] for found in differing)
    p = float(stats.binomtest(worse, len(differing)).pvalue) if differing else math.nan  # McNemar's test, exact
    return [
        Share(
            "BranchNorm's runs that failed",
            lost,
            len(both),
            Region(high=1 / 16 + 1e-9),
            Region(low=1 / 16),
            seeds=seeds,
        ),
        Share("of differing runs, DeepNorm failed", worse, len(differing), Region(low=0.5), Region(high=0.5), p, seeds),
    ]


@claim(
    "C48",
    figure="branchnorm:6",
    paper="BranchNorm",
    sentence="BranchNorm is less sensitive to the learning rate than DeepNorm",
    source="BranchNorm, Fig. 6b: better tolerance for larger learning rates; the measure of Wortsman et al. 2023",
    statistic="mean over rates of min(final held-out nll, nll at initialisation) minus the least, BranchNorm - "
    "DeepNorm [nats], mean over the warm-ups of a grid of four by four or more; over the paper's rates, 5e-4 to "
    "1.5e-3, and, where the grid goes beyond them, over all",
    threshold="R: < -.01 in each range; X: > .01 in either (set before any run of such a grid was made)",
    sweep="branchnorm:6",
)
def less_sensitive(runs: Runs) -> list[Effect]:
    low, high = PAPER_RATES
    measured = runs.where(lambda run: len(run.held_out()) > 0, kind="train")
    ranges = {f"lr {low:g} to {high:g}": measured.where(lambda run: low <= run.settings[AXES[1]] <= high)}
    whole = _judged(measured)
    if whole.rates[0] < low or whole.rates[-1] > high:
        ranges[f"lr {_range(whole)}"] = measured
    better, worse = Region(high=-0.01), Region(low=0.01)
    found = {f"difference, {name}": _gaps(_judged(own)) for name, own in ranges.items()}
    return [Effect(name, gaps, better, worse, p=signed_rank([*gaps.values()])) for name, gaps in found.items()]


def _gaps(grid: Grid) -> dict[int, float]:
    """Seed -> mean over warm-ups of BranchNorm's sensitivity minus DeepNorm's, of seeds that have the whole grid."""
    numbers = [{label: by_seed(grid, label, warmup) for label in BOTH} for warmup in grid.warmups]
    seeds = set.intersection(*({*own[label]} for own in numbers for label in BOTH))
    return {seed: float(np.mean([_gap(own, seed) for own in numbers])) for seed in sorted(seeds)}


def _gap(own: dict[str, dict[int, float]], seed: int) -> float:
    return own["branchnorm"][seed] - own["deepnorm"][seed]
