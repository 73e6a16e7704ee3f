"""DeepNet, Figure 3: Post-LN-init has larger gradients in its last layers than Post-LN, and converges all the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ....experiments import Experiment, Recipe, command, one_step, probing, sweep
from ....experiments.recipe import DEEPNET, EARLY
from ... import style
from ...arrange import apart
from ...base import Figure, MissingRuns, Panel, Picture, figure
from ...claims import NAMED_LATER, Effect, Share, claim, together
from ...collection import LAYERS, Record, Runs, pairs
from ...measures.by_label import by_label
from ...measures.comparison import both, counted, decided, failed, lost_by_seed
from ...measures.gains import OWN, WORDS, by_gain, dash, of_gain_one
from ...measures.layers import by_layer, held_out_panel, layer_values
from ...measures.provenance import provenance
from ...measures.quality import even
from ...statistics import Region

BOTH = ("postln", "postln-init")
DRAWN = [label + gain for gain in WORDS for label in BOTH]
DEPTH = 18  # layers a side of Figs. 3a and 3c
LATER = 100


@figure("deepnet:3", title="Gradients and convergence of Post-LN-init", source="DeepNet, Figure 3")
class LargerGradients(Figure):
    """The norm of the loss's gradient with respect to each decoder layer's parameters at initialisation, by layer (a)
    and of the last layer by depth (b), and the held-out loss against updates (c).

    Both architectures are drawn as DeepNet defines them, with Xavier gain 1 for every matrix. Beside them are
    fairseq's, with q, k and v over sqrt(2) (dashed). Inferred: the paper says neither which tensor nor which step; here
    it is all parameters of a layer, at step 0.
    """

    def picture(self, runs: Runs) -> Picture:
        fit = runs.where(even, label=DRAWN, table="grad_norm")
        groups = fit.groups(*LAYERS)
        if not groups:
            raise MissingRuns("no run of postln or postln-init with grad_norm", command(self.id))
        best = max(groups, key=lambda g: (len(g.labels), len(g.depths), len(g)))
        notes = [f"(a), (b): {best.describe()}, at initialisation."]
        depth = min(best.depths, key=lambda n: abs(n - DEPTH))
        profile = [
            replace(line, dash=dash(best.labels, line.arch))
            for line in by_layer(best.where(depth=depth), "grad_norm", "value", "decoder", step=0, log=True)
        ]
        panels = [
            Panel(f"Decoder of {depth}L-{depth}L", "decoder layer", "gradient norm (L2)", profile, log_y=True),
            _last_layer(best),
        ]
        curves = [g for g in fit.where(kind="train").groups() if g[0].depth == depth]
        if curves:
            chosen = max(curves, key=lambda g: (len(g.labels), not all(map(failed, g)), g[0].updates, len(g)))
            panel = held_out_panel(chosen)
            lines = [replace(line, dash=dash(chosen.labels, line.arch)) for line in panel.series]
            panels.append(replace(panel, series=lines))
            notes.append(f"(c): {chosen.describe()}.")
        main, controls = apart(panels, [of_gain_one(fit.labels, label) for label in BOTH])
        return Picture(main, _finding(best), notes, columns=3, controls=controls, provenance=provenance(best))


def _last(record: Record, step: int = 0) -> float:
    """Return the gradient norm of the last decoder layer at the probed step nearest to ``step``."""
    values = layer_values(record, "grad_norm", "value", "decoder", step)
    return values[max(values)] if values else math.nan


def _last_layer(group: Runs) -> Panel:
    lines = by_label(group, lambda run: {run.depth: _last(run)}, dash=lambda label: dash(group.labels, label))
    return Panel("Last decoder layer", "layers a side", "gradient norm (L2)", lines, log_x=True, ticks=group.depths)


def _finding(group: Runs) -> str:
    gain = next((gain for gain in WORDS if any(_pairs(group, depth, gain) for depth in group.depths)), None)
    if gain is None:
        return "Post-LN-init against Post-LN needs runs of both."
    found = {depth: own for depth in group.depths if (own := _pairs(group, depth, gain))}
    ratios = {depth: [_last(b) / _last(a) for _, a, b in own] for depth, own in found.items()}
    middle = {depth: math.exp(np.mean(np.log(values))) for depth, values in ratios.items()}
    above = sum(value > 1 for value in middle.values())
    seeds = counted(max(map(len, ratios.values())))
    said = f", both of {WORDS[gain]}," if gain == OWN else ""
    return (
        f"At initialisation the last decoder layer's gradient is larger in Post-LN-init than in Post-LN{said} at "
        f"{above} of {len(middle)} depths (ratio {min(middle.values()):.2f} to {max(middle.values()):.2f}, {seeds})."
    )


def _pairs(group: Runs, depth: int, gain: str) -> list[tuple[int, Record, Record]]:
    own = group.where(depth=depth)
    return pairs(own.where(label=BOTH[0] + gain), own.where(label=BOTH[1] + gain))


@claim(
    "C11",
    figure="deepnet:3",
    stage="initialisation",
    paper="DeepNet",
    sentence="Post-LN-init has a larger gradient in the last decoder layer than Post-LN, at all depths",
    source="DeepNet, Figs. 3a and 3b",
    statistic="ratio of the last decoder layer's gradient norm at step 0, geometric mean over N from 6 to 24, both of "
    "Xavier gain 1; beside it each N, the same at step 100, and all of it with fairseq's gain (which decides where "
    "there are no runs of gain 1)",
    threshold="R: > 1; X: < 1",
    sweep="deepnet:3",
    after=NAMED_LATER,
)
@by_gain
def larger_last_gradient(runs: Runs, gain: str) -> list[Effect]:
    labels = [label + gain for label in BOTH]
    fit = runs.where(even, label=labels, table="grad_norm")
    first = _ratios("at initialisation", fit, 0, gain)
    if len(first) < 2:
        raise MissingRuns(f"needs {' and '.join(labels)} at two depths from 6 to 24 layers a side, with the same seeds")
    later = _ratios(f"at step {LATER}", fit.where(_reached_later, kind="train"), LATER, gain)
    mean = together("ratio at initialisation, mean over depths", first, _geometric, Region(low=1), Region(high=1))
    return [mean, *first, *later]


def _geometric(values: list[float]) -> float:
    return math.exp(np.mean(np.log(values)))


def _reached_later(record: Record) -> bool:
    """True if a probed step lies within 5 % of the later step."""
    data = record.at("grad_norm", LATER, ["value"])
    return len(data) > 0 and abs(data["step"].iloc[0] - LATER) <= 0.05 * LATER


def _ratios(when: str, runs: Runs, step: int, gain: str) -> list[Effect]:
    """Return the ratios of last gradients at each depth, by seed, for the comparable runs of most depths."""
    best: dict[int, list[tuple[int, Record, Record]]] = {}
    for group in runs.groups(*LAYERS):
        found = {depth: own for depth in group.depths if 6 <= depth <= 24 and (own := _pairs(group, depth, gain))}
        best = max(best, found, key=lambda one: (len(one), sum(map(len, one.values()))))
    return [
        Effect(
            f"ratio {when}, {depth}L", {seed: _last(b, step) / _last(a, step) for seed, a, b in own}, log=True,
            of=both(own),
        )
        for depth, own in best.items()
    ]  # fmt: skip


@claim(
    "C12",
    figure="deepnet:3",
    stage="after training",
    must_read=False,
    paper="DeepNet",
    sentence="Post-LN-init converges where Post-LN does not (18L-18L)",
    source="DeepNet, Fig. 3c",
    statistic="share of seeds at which, after 3,000 updates or more at width 512, Post-LN diverged or is stuck and "
    "Post-LN-init is not, both of Xavier gain 1 (or, without such runs, of fairseq's); beside it each one's share",
    threshold="R: more than half; X: less than half",
    sweep="deepnet:3",
    after=NAMED_LATER,
)
@by_gain
def converges_where_postln_does_not(runs: Runs, gain: str) -> list[Share]:
    def fit(run: Record) -> bool:
        return run.updates >= 3000 and run.width >= 512

    labels = [label + gain for label in BOTH]
    long = runs.where(fit, kind="train", label=labels, layers=(DEPTH, DEPTH)).groups()
    groups = [group for group in long if len(group.labels) == len(BOTH)]
    if not groups:
        raise MissingRuns(
            "needs 18L-18L runs of 3,000 updates at width 512, six of each arch, which take a GPU",
            command("deepnet:3", "paper") + " --seeds 3..8",
        )
    arms = [decided(groups[0].where(label=label)) for label in labels]
    found = pairs(*arms)
    only = {seed: (int(failed(postln) and not failed(init)), 1) for seed, postln, init in found}
    name = "Post-LN failed and Post-LN-init did not"
    return [
        Share(name, only, Region(low=0.5), Region(high=0.5), of=both(found)),
        *(
            Share(f"{style.title(label)} that failed", lost_by_seed(arm), of=arm)
            for label, arm in zip(BOTH, arms, strict=True)
        ),
    ]


@sweep("deepnet:3", minutes=20)
def shallow_post_lns(ask: Recipe) -> Iterator[Experiment]:
    """Trains Post-LN with and without the smaller initialisation, 6 to 24 layers a side, as DeepNet defines it
    (Xavier gain 1 for every matrix) and as fairseq draws it."""
    archs, depths = (*one_step.GAIN_1, "postln", "postln-init"), (6, 12, 18, 24)
    if ask.tiny:
        yield from ask.runs(archs, depths, EARLY, probing("grad_norm", every=10), {"train": {"steps": 101}})
        converging = {"train": {"lr": 3e-4, "warmup": 40, "steps": 160}}
        yield from ask.runs(archs, [18], converging, probing("grad_norm"), tag="warmup40")
    else:
        yield from ask.runs(archs, depths, DEEPNET, probing("grad_norm"))
