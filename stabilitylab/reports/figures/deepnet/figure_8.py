"""DeepNet, Figure 8: quality grows with the logarithm of depth. And claim C46."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ....experiments import SEEDS, Experiment, Recipe, command, probing, sweep
from ....experiments.recipe import BRANCHNORM, Settings
from ... import style
from ...base import Figure, MissingRuns, Panel, Picture, Series, Spread, figure
from ...claims import NAMED_LATER, Effect, claim
from ...collection import LAYERS, Runs
from ...measures.comparison import comparable, counted, failed, judged, last_nll, states
from ...measures.curves import LEAST, Curve, curves, log_over_best
from ...measures.provenance import provenance
from ...measures.quality import Quality, even, quality
from ...statistics import Region, t_interval
from ...style import AMOUNTS

LABEL = "deepnorm"
FORMULAS = {"logarithmic": "A log d + B", "linear": "A d + B", "saturating": "A (1 - exp(-d / c)) + B"}
LOOKS = dict(zip(FORMULAS, ((AMOUNTS[4], "solid"), (AMOUNTS[1], "dashed"), (AMOUNTS[2], "dotted")), strict=True))
FINE = 60  # points of a curve
Points = dict[int, dict[int, float]]  # seed -> depth -> quality, larger for better


@figure("deepnet:8", title="Quality and the logarithm of depth", source="DeepNet, Figure 8")
class LogarithmOfDepth(Figure):
    r"""DeepNorm's BLEU, or the held-out cross-entropy as a stand-in, against d, the number of layers a side, with
    least-squares fits through the means over seeds of A log d + B (DeepNet's), A d + B and A (1 - exp(-d / c)) + B, and
    their residuals.

    The interval of A is Student's over fits of single seeds, in the quality's unit per unit of log d (BLEU, or
    nats/token with the sign turned, so that a larger A is better). Inferred: the paper means the natural logarithm.
    """

    def picture(self, runs: Runs) -> Picture:
        group = _group(runs)
        trained = group.where(lambda run: not failed(run) and math.isfinite(last_nll(run)))
        measured = quality(trained)
        points = by_seed(trained, measured)
        means = {depth: float(np.mean([own[depth] for own in points.values() if depth in own]))
                 for depth in trained.depths}  # fmt: skip
        notes = [f"Drawn: {group.describe()}. Points are means over seeds, bars their range.", *states(group)]
        fitted = curves([*means], [*means.values()]) if len(means) >= LEAST else {}
        if not fitted:
            notes.append(f"{len(means)} depths: curves are told apart by {LEAST} or more; '{command('deepnet:8')}'.")
        panels = [_quality_panel(trained, measured, means, fitted)]
        if fitted:
            panels.append(_left_panel(points, measured, means, fitted))
        if not measured.is_bleu:
            notes.append("Held-out nll (lower is better) stands in for BLEU where not every model was evaluated.")
        return Picture(panels, _finding(points, measured, means, fitted), notes, provenance=provenance(group))


def _group(runs: Runs) -> Runs:
    """Return the comparable DeepNorm runs that trained at most depths."""
    own = judged(runs.where(even, label=LABEL)).where(lambda run: failed(run) or math.isfinite(last_nll(run)))
    groups = [group for group in comparable(own, *LAYERS) if not all(map(failed, group))]
    if not groups:
        raise MissingRuns("no run of deepnorm has trained", command("deepnet:8"))
    return max(groups, key=lambda g: (len(g.where(lambda run: not failed(run)).depths), len(g)))


def by_seed(runs: Runs, measured: Quality) -> Points:
    """Return seed -> depth -> finite quality of these runs."""
    found: Points = {}
    for run in runs:
        if math.isfinite(value := measured.gain(run)):
            found.setdefault(run.seed, {})[run.depth] = value
    return {seed: dict(sorted(found[seed].items())) for seed in sorted(found)}


def fits(runs: Runs, least: int, fit: Callable[[Sequence[float], Sequence[float]], float]) -> dict[int, float]:
    """Apply ``fit`` to quality on depth, for seeds with ``least`` depths; NaN for a seed that failed at any depth."""
    measured = quality(runs)
    found = {}
    for seed in runs.seeds:
        own = sorted(runs.where(seed=seed), key=lambda run: run.depth)
        points = {run.depth: measured.gain(run) for run in own}
        if len(points) >= least:
            known = all(map(math.isfinite, points.values())) and not any(map(failed, own))
            found[seed] = fit([*points], [*points.values()]) if known else math.nan
    return found


def _quality_panel(runs: Runs, measured: Quality, means: dict[int, float], fitted: dict[str, Curve]) -> Panel:
    sign = 1.0 if measured.is_bleu else -1.0
    spread = Spread()
    for run in runs:
        spread.add([run.depth], [sign * measured.gain(run)])
    dots = spread.series(style.title(LABEL), arch=LABEL, kind="points")
    fine = np.geomspace(min(means), max(means), FINE)
    lines = [
        Series(FORMULAS[name], fine.tolist(), (sign * curve.at(fine)).tolist(), marker="none",
               colour=LOOKS[name][0], dash=LOOKS[name][1], seeds=int(dots.counts.max()))
        for name, curve in fitted.items()
    ]  # fmt: skip
    return Panel("Quality and three fits", "layers a side", measured.axis, [dots, *lines], log_x=True, ticks=[*means])


def _left_panel(points: Points, measured: Quality, means: dict[int, float], fitted: dict[str, Curve]) -> Panel:
    """Return the residuals of each curve for every seed: a shape that fits leaves noise about 0."""
    lines = []
    for name, curve in fitted.items():
        spread = Spread()
        for own in points.values():
            spread.add([*own], (np.array([*own.values()]) - curve.at([*own])).tolist())
        colour, dash = LOOKS[name]
        marker = {"logarithmic": "o", "linear": "s", "saturating": "^"}[name]
        lines.append(spread.series(FORMULAS[name], colour=colour, dash=dash, marker=marker))
    unit = "quality - fit [BLEU]" if measured.is_bleu else "quality - fit [nats/token]"
    return Panel("What the fits leave", "layers a side", unit, lines, log_x=True, ticks=[*means])


def _finding(points: Points, measured: Quality, means: dict[int, float], fitted: dict[str, Curve]) -> str:
    if not fitted:
        seeds = counted(len(points))
        shown = ", ".join(f"{value if measured.is_bleu else -value:.2f} at {depth}" for depth, value in means.items())
        return f"{len(means)} depths are too few for a curve: {measured.axis} {shown} layers a side ({seeds})."
    slopes = [curves([*own], [*own.values()])["logarithmic"].slope for own in points.values() if len(own) >= LEAST]
    interval = t_interval(slopes)
    bounds = f", 95 % interval {interval.low:+.3f} to {interval.high:+.3f}" if math.isfinite(interval.low) else ""
    mean = interval.mean if slopes else fitted["logarithmic"].slope
    seeds = counted(interval.n) if slopes else "of the means: no seed has all depths"
    least = min(curve.aic for curve in fitted.values())
    beside = ", ".join(f"{name} {curve.aic - least:.1f}" for name, curve in fitted.items())
    slope = f"{mean:+.3f} {measured.unit} a unit of log depth{bounds} ({seeds})"
    return f"Quality changes by A = {slope}; AIC above the least: {beside}."


@claim(
    "C46",
    figure="deepnet:8",
    stage="after training",
    paper="DeepNet",
    sentence="Quality grows with the logarithm of depth",
    source="DeepNet, Fig. 8",
    statistic="of DeepNorm's quality (BLEU where all reach 5, else -nll), at each seed: AIC of A log d + B with A >= 0 "
    "minus the least of A log d + B, a straight line and a saturating A (1 - exp(-d / c)) + B; beside it A itself. A "
    "seed that failed at one of its depths is undecided",
    threshold="R: < 2; X: > 2 (the plan names no X: ours)",
    sweep="deepnet:8",
    after=f"{NAMED_LATER}: A >= 0 stood beside it",
)
def logarithmic_in_depth(runs: Runs) -> list[Effect]:
    groups = comparable(runs.where(even, kind="train", label=LABEL), *LAYERS)
    best = max(groups, key=lambda group: len(fits(group, LEAST, log_over_best)), default=Runs([]))
    shape = fits(best, LEAST, log_over_best) if best else {}
    if not shape:
        raise MissingRuns(f"needs deepnorm trained at {LEAST} depths or more")
    own = best.where(lambda run: run.seed in shape)
    growth = fits(best, LEAST, lambda depths, values: curves(depths, values)["logarithmic"].slope)
    return [
        Effect("AIC of the logarithm above the least", shape, Region(high=2), Region(low=2), of=own),
        Effect("A, quality per unit of log depth", growth, of=own),
    ]


@sweep("deepnet:8", minutes=14)
def doubled_depths(ask: Recipe) -> Iterator[Experiment]:
    """Trains DeepNorm of 3 to 48 layers a side, 400 updates; the paper has 6, 10, 50, 100 and 500."""
    recipe: Settings = {"model": {"T": 200}, "train": {"lr": 7e-4, "warmup": 100, "steps": 400}}
    depths = (3, 6, 12, 24, 48) if ask.tiny else (6, 10, 50, 100, 500)
    yield from ask.runs(["deepnorm"], depths, recipe if ask.tiny else BRANCHNORM, probing(), seeds=SEEDS[:3])
