"""BranchNorm, Figure 7: the growth of alpha to 1, and the effect of its shape."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ....experiments import Experiment, Recipe, command, protocol, sweep
from ...base import Figure, MissingRuns, Panel, Picture, Reference, Series, Spread, figure
from ...claims import Effect, claim
from ...collection import Record, Runs, pairs
from ...measures.comparison import counted, failed, last_nll, not_drawn, states
from ...measures.loss_differences import EQUIVALENT, every_two, measured, of_values, ramped
from ...measures.provenance import provenance
from .t import full_size_ramp

GROWTH = "model.growth"
SHAPES = ("linear", "exp", "sigmoid")
LOOKS = {"linear": ("D", "solid"), "exp": ("o", "dashed"), "sigmoid": ("s", "dotted")}  # all of BranchNorm's colour


@figure("branchnorm:7", title="Growth strategies of alpha", source="BranchNorm, Figure 7")
class GrowthStrategies(Figure):
    """The course of alpha_t as each run recorded it, the held-out cross-entropy [nats/token] of the run, and the final
    difference to linear growth, seed by seed, with the margin within which C39 calls two shapes equal.

    alpha_t = g(t / T), then 1. Inferred: the paper names exponential and sigmoid growth without a formula. Ours are
    g(s) = (1 - e^{-5s}) / (1 - e^{-5}), and the logistic function of 10 (s - 1/2) mapped onto [0, 1].
    """

    def picture(self, runs: Runs) -> Picture:
        group = _group(runs)
        ramp = int(group[0].settings["model.T"])
        alpha = Panel("Growth of alpha", "update", "alpha", [*_lines(group, "alpha", 2 * ramp)])
        loss = Panel("Held-out loss", "update", "cross-entropy [nats/token]", [*_lines(group, "held_out_nll")])
        gaps, failures = _differences(group), _differences(group, lost=True)
        panels = [panel for panel in (alpha, loss, _margin(gaps, failures)) if panel.series]
        notes = [
            f"Drawn: {group.describe()}. Lines are means over seeds, bands their range.",
            *states(group),
        ]
        notes += not_drawn(len(ramped(runs)) - len(group), "of BranchNorm with other settings or another T")
        return Picture(panels, _finding(group, gaps), notes, columns=3, provenance=provenance(group))


def shape(record: Record) -> str:
    return str(record.settings[GROWTH])


def _of(group: Runs, name: str) -> Runs:
    return group.where(lambda run: shape(run) == name)


def _group(runs: Runs) -> Runs:
    """Return runs of one T that differ only in the shape of the ramp: with most shapes, then most runs, then the
    longest."""
    ended = ramped(runs).where(lambda run: run.ended and run.label != "branchnorm T=1")
    found = [
        group.where(model__T=T)
        for group in ended.groups(GROWTH)
        for T in {int(run.settings["model.T"]): None for run in group}
    ]
    several = [group for group in found if len({*map(shape, group)}) > 1]
    if not several:
        raise MissingRuns("no runs of branchnorm that differ in model.growth alone", command("branchnorm:7"))
    return max(several, key=lambda g: (len({*map(shape, g)}), len(g), g[0].updates))


def _shapes(group: Runs) -> list[str]:
    known = {*map(shape, group)}
    return [*(name for name in SHAPES if name in known), *sorted(known - {*SHAPES})]


def _lines(group: Runs, column: str, most: float = float("inf")) -> Iterator[Series]:
    """Yield a line a shape: a metric at the updates where it was measured, up to ``most`` of them."""
    for name in _shapes(group):
        own, spread = _of(group, name), Spread()
        for record in own:
            if column in record.metrics:
                data = record.metrics.loc[record.metrics["step"] <= most, ["step", column]].dropna()
                spread.add(data["step"].tolist(), data[column].tolist())
        if spread.points:
            marker, dash = LOOKS.get(name, ("", ""))
            yield spread.series(f"{name} growth", arch="branchnorm", marker=marker, dash=dash)


def _differences(group: Runs, lost: bool = False) -> dict[str, dict[int, float]]:
    """Return the final nll of each shape minus that of linear growth, seed by seed, where both trained; ``lost``: where
    the shape diverged or is stuck."""
    found = {
        name: {
            seed: last_nll(one) - last_nll(linear)
            for seed, one, linear in pairs(_of(group, name), _of(group, "linear"))
            if failed(one) == lost and not failed(linear) and math.isfinite(last_nll(one))
        }
        for name in _shapes(group)
        if name != "linear"
    }
    return {name: by_seed for name, by_seed in found.items() if by_seed}


def _margin(gaps: dict[str, dict[int, float]], failures: dict[str, dict[int, float]]) -> Panel:
    """Return a panel with the difference of each seed, drawn as points, since there are few."""
    points = [
        Series(
            f"{name} growth", [*by_seed], [*by_seed.values()], arch="branchnorm", kind="points",
            seeds=len(by_seed), marker=LOOKS.get(name, ("", ""))[0],
        )
        for name, by_seed in gaps.items()
    ]  # fmt: skip
    points += [
        Series(f"{name} growth, diverged or stuck", [*by_seed], [*by_seed.values()], arch="branchnorm", kind="crosses",
               seeds=len(by_seed))
        for name, by_seed in failures.items()
    ]  # fmt: skip
    limits = [Reference(EQUIVALENT, f"margin ±{EQUIVALENT:g}"), Reference(0.0, ""), Reference(-EQUIVALENT, "")]
    ticks = sorted({seed for point in points for seed in point.x})
    return Panel("Against linear growth", "seed", "difference in final nll [nats]", points, limits, ticks=ticks)


def _finding(group: Runs, gaps: dict[str, dict[int, float]]) -> str:
    if not gaps:
        lost = sum(map(failed, group))
        return f"No shape trained beside linear growth at one seed: {lost} of {len(group)} runs diverged or are stuck."
    parts = [
        f"{name} growth ends {measured(by_seed.values())} nats from linear ({counted(len(by_seed))})"
        for name, by_seed in gaps.items()
    ]
    lost = {name: sum(map(failed, _of(group, name))) for name in _shapes(group)}
    parts += [f"with {name} growth {count} of {len(_of(group, name))} diverged or are stuck"
              for name, count in lost.items() if count]  # fmt: skip
    return f"{'; '.join(parts).capitalize()}; the margin of equivalence is {EQUIVALENT:g}."


@claim(
    "C39",
    figure="branchnorm:7",
    stage="after training",
    paper="BranchNorm",
    sentence="The shape of alpha's schedule does not matter",
    source="BranchNorm, Fig. 7",
    statistic="final held-out nll with exponential growth minus that with linear growth [nats]; beside it the other "
    "two pairs of linear, exp and sigmoid",
    threshold="R: within .05 nats of 0 (equivalence); X: beyond .05",
    sweep="branchnorm:7",
)
def insensitive_to_shape(runs: Runs) -> list[Effect]:
    found = of_values(runs, GROWTH, 3)
    return every_two(found, GROWTH, ("exp", "linear"), "")


@sweep("branchnorm:7", minutes=33, folder={"paper": "branchnorm:T"}, any_length=("tiny",))
def growths(ask: Recipe) -> Iterator[Experiment]:
    """Leads alpha from 0 to 1 in three ways (linear, exponential, sigmoid) within 4 % of 3000 updates, 6L-6L; at
    full size within the paper's 4000 of 100,000."""
    if ask.tiny:
        yield from protocol.growths(ask)
        return
    for growth in SHAPES:
        yield from full_size_ramp(ask, 4000, 5e-4, growth=growth)
