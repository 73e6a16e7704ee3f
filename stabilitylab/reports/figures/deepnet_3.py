"""DeepNet, Figure 3: Post-LN-init has larger gradients in its last layers than Post-LN, and converges all the same."""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import fisher_exact

from ...experiments import command
from .. import style
from ..base import Figure, MissingRuns, Panel, Picture, Spread, figure
from ..claims import Effect, Share, claim
from ..collection import LAYERS, Record, Runs, pairs
from ..layerwise import by_layer, decided, held_out_panel, layer_values
from ..statistics import Region
from .branchnorm_5 import failed

BOTH = ("postln", "postln-init")
DEPTH = 18  # layers a side of Figs. 3a and 3c
LATER = 100


@figure("deepnet:3", title="Gradients and convergence of Post-LN-init", source="DeepNet, Figure 3")
class LargerGradients(Figure):
    """Norm of the loss's gradient with respect to each decoder layer's parameters at initialisation, by layer (a) and
    of the last layer by depth (b); held-out loss against updates (c).

    Inferred: the paper says neither which tensor nor which step; here all parameters of a layer, at step 0.
    """

    def picture(self, runs: Runs) -> Picture:
        fit = runs.where(label=BOTH, table="grad_norm")
        groups = fit.groups(*LAYERS)
        if not groups:
            raise MissingRuns("no run of postln or postln-init with grad_norm", command(self.id))
        best = max(groups, key=lambda g: (len(g.labels), len(g.depths), len(g)))
        notes = [f"(a), (b): {best.describe()}, at initialisation."]
        depth = min(best.depths, key=lambda n: abs(n - DEPTH))
        profile = by_layer(_at(best, depth), "grad_norm", "value", "decoder", step=0, log=True)
        panels = [
            Panel(f"Decoder of {depth}L-{depth}L", "decoder layer", "gradient norm (L2)", profile, log_y=True),
            _last_layer(best),
        ]
        curves = [g for g in fit.where(kind="train").groups() if g[0].depth == depth]
        if curves:
            chosen = max(curves, key=lambda g: (len(g.labels), not all(map(failed, g)), g[0].updates, len(g)))
            panels.append(held_out_panel(chosen))
            notes.append(f"(c): {chosen.describe()}.")
        return Picture(panels, _finding(best), notes, columns=3)


def _at(runs: Runs, depth: int) -> Runs:
    return runs.where(lambda run: run.depth == depth)


def _last(record: Record, step: int = 0) -> float:
    """Gradient norm of the last decoder layer at the probed step nearest to ``step``."""
    values = layer_values(record, "grad_norm", "value", "decoder", step)
    return values[max(values)] if values else math.nan


def _last_layer(group: Runs) -> Panel:
    lines = []
    for label in group.labels:
        spread = Spread()
        for record in group.where(label=label):
            spread.add([record.depth], [_last(record)])
        lines.append(spread.series(style.title(label), arch=label))
    return Panel("Last decoder layer", "layers a side", "gradient norm (L2)", lines, log_x=True, ticks=group.depths)


def _finding(group: Runs) -> str:
    ratios = {
        depth: [_last(b) / _last(a) for _, a, b in _pairs(group, depth)]
        for depth in group.depths
        if _pairs(group, depth)
    }
    if not ratios:
        return "Post-LN-init against Post-LN needs runs of both."
    middle = {depth: math.exp(np.mean(np.log(values))) for depth, values in ratios.items()}
    above = sum(value > 1 for value in middle.values())
    seeds = max(map(len, ratios.values()))
    return (
        "At initialisation the last decoder layer's gradient is larger in Post-LN-init than in Post-LN at "
        f"{above} of {len(middle)} depths (ratio {min(middle.values()):.2f} to {max(middle.values()):.2f}, "
        f"{'one seed' if seeds == 1 else f'{seeds} seeds'})."
    )


def _pairs(group: Runs, depth: int) -> list[tuple[int, Record, Record]]:
    own = _at(group, depth)
    return pairs(own.where(label=BOTH[0]), own.where(label=BOTH[1]))


@claim(
    "C11",
    figure="deepnet:3",
    paper="DeepNet",
    sentence="Post-LN-init has a larger gradient in the last decoder layer than Post-LN, at all depths",
    source="DeepNet, Figs. 3a and 3b",
    statistic="ratio of the last decoder layer's gradient norm at each N from 6 to 24, at step 0 and at step 100",
    threshold="R: > 1 at every N and both times; X: < 1 at some N",
    sweep="deepnet:3",
)
def larger_last_gradient(runs: Runs) -> list[Effect]:
    fit = runs.where(label=BOTH, table="grad_norm")
    times = {
        "at initialisation": (fit, 0),
        f"at step {LATER}": (fit.where(_reached_later, kind="train"), LATER),
    }
    found = {name: _ratios_by_depth(own, step) for name, (own, step) in times.items()}
    if not any(len(ratios) > 1 for ratios in found.values()):
        raise MissingRuns("needs postln and postln-init at two depths from 6 to 24 layers a side, with the same seeds")
    # a time without runs stays an effect without a value: the other one alone reproduces nothing
    return [
        Effect(f"ratio {name}{place}", values, Region(low=1), Region(high=1), log=True)
        for name, ratios in found.items()
        for place, values in ({f", {n}L": own for n, own in ratios.items()} or {" (no runs)": {}}).items()
    ]


def _reached_later(record: Record) -> bool:
    """Is there a probed step next to the later one?"""
    data = record.at("grad_norm", LATER, ["value"])
    return len(data) > 0 and abs(data["step"].iloc[0] - LATER) <= 0.05 * LATER


def _ratios_by_depth(runs: Runs, step: int) -> dict[int, dict[int, float]]:
    """Depth -> seed -> ratio of last gradients, from the comparable runs of most depths."""
    best: dict[int, dict[int, float]] = {}
    for group in runs.groups(*LAYERS):
        depths = [depth for depth in group.depths if 6 <= depth <= 24 and _pairs(group, depth)]
        ratios = {n: {seed: _last(b, step) / _last(a, step) for seed, a, b in _pairs(group, n)} for n in depths}
        best = max(best, ratios, key=lambda found: (len(found), sum(map(len, found.values()))))
    return best


@claim(
    "C12",
    figure="deepnet:3",
    paper="DeepNet",
    sentence="Post-LN-init converges where Post-LN does not (18L-18L)",
    source="DeepNet, Fig. 3c",
    statistic="share of runs that diverged or are stuck after 3,000 updates or more, at width 512",
    threshold="R: more than half of Post-LN's and less than half of Post-LN-init's; X: the reverse of either",
    sweep="deepnet:3",
)
def converges_where_postln_does_not(runs: Runs) -> list[Share]:
    def fit(run: Record) -> bool:
        return run.updates >= 3000 and run.width >= 512

    long = runs.where(fit, kind="train", label=BOTH, layers=(DEPTH, DEPTH)).groups()
    groups = [group for group in long if len(group.labels) == len(BOTH)]
    if not groups:
        raise MissingRuns(
            "needs 18L-18L runs of 3,000 updates at width 512, six of each arch, which take a GPU",
            command("deepnet:3", "paper") + " --seeds 3..8",
        )
    arms = [decided(groups[0].where(label=label)) for label in BOTH]
    counts = [(sum(map(failed, arm)), len(arm)) for arm in arms]
    p = float(np.asarray(fisher_exact([[lost, n - lost] for lost, n in counts])[1]))
    return [
        Share("Post-LN that failed", *counts[0], Region(low=0.5), Region(high=0.5), p),
        Share("Post-LN-init that failed", *counts[1], Region(high=0.5), Region(low=0.5)),
    ]
