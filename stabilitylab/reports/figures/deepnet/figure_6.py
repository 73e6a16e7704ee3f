"""DeepNet, Figure 6: quality against depth, every architecture. And claim C52."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ....experiments import Experiment, Recipe, command, sweep, table_runs
from ....experiments.recipe import DEEPNET
from ... import style
from ...arrange import alike
from ...base import Figure, MissingRuns, Panel, Picture, Series, figure
from ...claims import Effect, claim
from ...collection import LAYERS, Runs
from ...measures.comparison import ENOUGH, comparable, counted, failed, last_nll, not_drawn, states
from ...measures.families import among_others, families
from ...measures.outcomes import outcomes, worst
from ...measures.provenance import provenance
from ...measures.quality import Quality, even, quality, share_of
from ...stability import own_recipes, recipe_notes, table_groups
from ...statistics import Region, slope
from .figure_8 import fits

LEAST = 3  # depths through which quality rises or falls


@figure("deepnet:6", title="Quality against depth, every architecture", source="DeepNet, Figure 6")
class QualityOfAll(Figure):
    """The BLEU of ``stabilitylab evaluate`` if all models that trained reach 5, otherwise the held-out cross-entropy
    [nats/token] as a stand-in. Lines are means over seeds, bands their range; a run that diverged or is stuck is a
    cross.

    Each panel has one family in colour, and the lines of all others in grey. Inferred: DeepNet draws one panel of fewer
    architectures.
    """

    def picture(self, runs: Runs) -> Picture:
        group = _group(runs)
        measured = quality(group)
        bad = 0.0 if measured.is_bleu else worst(group, measured.values)
        lines = {
            label: outcomes(group.where(label=label), measured.values, lambda run: run.depth, style.title(label),
                            bad=bad, arch=label)
            for label in group.labels
        }  # fmt: skip
        panels = [_panel(title, own, lines, measured, group.depths) for title, own in families(group.labels).items()]
        notes = [f"Drawn: {group.describe()}. Lines are means over seeds, bands their range.", *states(group)]
        notes += recipe_notes(group)
        notes += not_drawn(len(runs.where(kind="train")) - len(group), "with other settings, or without an end")
        if not measured.is_bleu:
            notes.append("Held-out nll (lower is better) stands in for BLEU where not every model was evaluated.")
        if any(run.verdict == "diverged" for run in group):
            notes.append("A run that diverged has no value: its cross stands at the worst one, or at 0 BLEU.")
        return Picture(alike(panels), _finding(group, measured), notes, provenance=provenance(group))


def _group(runs: Runs) -> Runs:
    """Return the comparable runs with most architectures at most depths."""
    groups = [g for g in table_groups(runs) if any(not math.isnan(last_nll(run)) for run in g)]
    if not groups:
        raise MissingRuns("no run of `probe` has ended with a held-out loss", command("deepnet:6"))
    several = [group for group in groups if len(group.depths) > 1] or groups
    return several[0].where(lambda run: not math.isnan(last_nll(run)))


def _panel(
    title: str,
    own: Sequence[str],
    lines: dict[str, list[Series]],
    measured: Quality,
    depths: Sequence[int],
) -> Panel:
    series = among_others(lines, own)
    return Panel(title, "layers a side", measured.axis, series, log_x=True, ticks=depths, direct=True)


def _finding(group: Runs, measured: Quality) -> str:
    """Say which architecture is best at the deepest depth, how DeepNorm depends on depth, and how many runs failed."""
    depth = group.depths[-1]
    deepest = group.where(lambda run: not failed(run), depth=depth)
    means = {label: _mean(deepest.where(label=label), measured) for label in deepest.labels}
    best = sorted(means, key=lambda label: means[label], reverse=measured.is_bleu)[:3]
    apart = own_recipes(group)
    named = ", ".join(
        f"{style.title(label)}{' (own recipe)' if label in apart else ''} {means[label]:.2f}" for label in best
    )
    parts = [
        f"Best at {depth} layers a side: {named} {measured.unit}"
        if best
        else f"Nothing trained at {depth} layers a side"
    ]
    first = group.where(lambda run: not failed(run), depth=group.depths[0], label="deepnorm")
    if "deepnorm" in means and first and len(group.depths) > 1:
        move = means["deepnorm"] - _mean(first, measured)
        parts.append(f"DeepNorm {move:+.2f} from {group.depths[0]}")
    lost = sum(map(failed, group))
    ending = f"; {lost} of {len(group)} runs diverged or are stuck" if lost else ""
    return f"{'; '.join(parts)} ({counted(len(group.seeds))}){ending}."


def _mean(runs: Runs, measured: Quality) -> float:
    return float(np.mean([measured.values[run.name] for run in runs]))


@claim(
    "C52",
    figure="deepnet:6",
    stage="after training",
    paper="DeepNet",
    sentence="DeepNorm's quality rises with depth",
    source="DeepNet, Fig. 6",
    statistic="of DeepNorm's quality (BLEU where all reach 5, else -nll): slope with log depth over three depths or "
    "more, seed by seed, in the group with most data, the deepest model and the longest training; a seed that failed "
    "at one of these depths is undecided",
    threshold="R: > 0; X: < 0 (the plan names neither: ours)",
    sweep="deepnet:6",
    pilot="one seed of these runs was known at 6 and 18 layers a side when the threshold was set",
)
def rises_with_depth(runs: Runs) -> list[Effect]:
    found: list[tuple[tuple[float, ...], dict[int, float], Runs]] = []
    for group in comparable(runs.where(even, kind="train", label="deepnorm"), *LAYERS):
        slopes = fits(group, LEAST, lambda depths, values: slope([*map(math.log, depths)], values))
        if slopes:
            rank = (min(len(slopes), ENOUGH), share_of(group[0]), group.depths[-1], float(group[0].updates))
            found.append((rank, slopes, group))
    if not found:
        raise MissingRuns(f"needs deepnorm trained at {LEAST} depths or more", command("deepnet:6"))
    _, slopes, group = max(found, key=lambda one: one[0])
    own = group.where(lambda run: run.seed in slopes)
    return [Effect("quality per unit of log depth", slopes, Region(low=0), Region(high=0), of=own)]


@sweep("deepnet:6", minutes=97, folder={"tiny": "table"}, command="stabilitylab sweep table")
def every_architecture(ask: Recipe) -> Iterator[Experiment]:
    """Takes the runs of table:stability; at full size DeepNet's own, 10 to 100 layers a side and 8,000 updates."""
    yield from table_runs(ask, depths=() if ask.tiny else range(20, 201, 20), full=DEEPNET)
