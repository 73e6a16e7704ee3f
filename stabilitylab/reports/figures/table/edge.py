"""The highest stable learning rate of an architecture, against depth, with warm-up and without."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from ....experiments import Experiment, Recipe, command, probing, sweep
from ... import style
from ...arrange import alike
from ...base import Figure, MissingRuns, Panel, Picture, Series, figure
from ...collection import LAYERS, Record, Runs
from ...measures.comparison import counted, failed, judged
from ...measures.provenance import provenance

FREE = ("train.lr", "train.steps", "train.warmup", *LAYERS)
Edges = Mapping[tuple[str, int, int], Mapping[int, tuple[float, float]]]  # (label, layers in all, warm-up) -> by seed


@figure("table:edge", title="The edge of the learning rate", source="stabilitylab; results/forecast")
class EdgeTable(Figure):
    r"""The highest stable learning rate, between the largest rate that trained and the smallest rate above it that
    failed (geometric mean), against encoder and decoder layers together: the mean over seeds of its logarithm, and the
    range. Each warm-up has its own panel.

    Trained: 0.25 nats below the unigram baseline at the run's end. Failed: stuck or diverged. An architecture that
    trains at a rate is assumed to train at every smaller rate that was not tried, so the highest stable rate lies below
    the smallest rate that did not train. Schedules differ in the meaning of their peak, so all runs of one figure share
    a schedule.
    """

    def picture(self, runs: Runs) -> Picture:
        found = [(group, edges) for group in judged(runs).groups(*FREE) if (edges := edges_of(group))]
        if not found:
            raise MissingRuns("no runs alike but for the rate, of which some trained and some failed", command(self.id))
        group, edges = max(found, key=lambda one: (len(one[1]), len(one[0])))
        warmups = sorted({warmup for _, _, warmup in edges}, reverse=True)
        panels = [Panel(_title(warmup), "encoder and decoder layers together", "edge of the learning rate",
                        _lines(edges, warmup), log_x=True, log_y=True,
                        ticks=sorted({layers for _, layers, _ in edges})) for warmup in warmups]  # fmt: skip
        widest = max(high / low for own in edges.values() for low, high in own.values())
        notes = [
            f"Drawn: {group.describe()}. The rates between which an edge lies are at most a factor of {widest:.2g} "
            "apart.",
            *_open(group, edges),
        ]
        return Picture(alike(panels), _finding(edges), notes, provenance=provenance(group), band="range over seeds")


def edges_of(runs: Runs) -> Edges:
    """Return (largest rate that trained, smallest above it that failed) of each seed that has both."""
    tried: dict[tuple[str, int, int], dict[int, list[Record]]] = {}
    for run in runs:
        key = run.label, sum(run.layers), int(run.settings["train.warmup"])
        tried.setdefault(key, {}).setdefault(run.seed, []).append(run)
    found = {}
    for key, seeds in tried.items():
        own = {seed: edge for seed, mine in seeds.items() if (edge := _edge(mine)) is not None}
        if own:
            found[key] = own
    return found


def _edge(runs: list[Record]) -> tuple[float, float] | None:
    own = [(float(run.settings["train.lr"]), run) for run in runs] if len(runs) > 1 else []
    rates = sorted(own, key=lambda one: one[0])
    stop = min((rate for rate, run in rates if run.verdict != "trained"), default=math.inf)
    low = max((rate for rate, _ in rates if rate < stop), default=None)
    high = min((rate for rate, run in rates if failed(run) and low is not None and rate > low), default=None)
    return None if low is None or high is None else (low, high)


def _middles(own: Mapping[int, tuple[float, float]]) -> np.ndarray:
    return np.array([math.sqrt(low * high) for low, high in own.values()])


def _lines(edges: Edges, warmup: int) -> list[Series]:
    lines = []
    for label in dict.fromkeys(label for label, _, _ in edges):
        own = sorted(
            (layers, _middles(found)) for (name, layers, w), found in edges.items() if (name, w) == (label, warmup)
        )
        if own:
            layers, values = zip(*own, strict=True)
            mean = [float(np.exp(np.log(one).mean())) for one in values]
            ends = [[float(pick(one)) for one in values] for pick in (np.min, np.max)]
            counts = [len(one) for one in values]
            lines.append(Series(style.title(label), layers, mean, *ends, arch=label, seeds=counts))
    return lines


def _title(warmup: int) -> str:
    return f"warm-up of {warmup} updates" if warmup else "no warm-up"


def _open(group: Runs, edges: Edges) -> list[str]:
    cells = {(run.label, sum(run.layers), int(run.settings["train.warmup"])) for run in group}
    lacking = sorted({f"{style.title(label)} at {layers}" for label, layers, warmup in cells - {*edges}})
    return [f"Without an edge, as all rates tried ended alike: {', '.join(lacking)}."] if lacking else []


def _finding(edges: Edges) -> str:
    """Say which architectures have the highest and the lowest edge at the deepest depth, with the longest warm-up."""
    depth = max(layers for _, layers, _ in edges)
    warmup = max(warmup for _, layers, warmup in edges if layers == depth)
    deep = {label: own for (label, layers, w), own in edges.items() if (layers, w) == (depth, warmup)}
    order = sorted(deep, key=lambda label: float(np.log(_middles(deep[label])).mean()))
    told = [f"{style.title(label)} trains up to {np.exp(np.log(_middles(deep[label])).mean()):.2g}" for label in order]
    shown = told if len(told) < 5 else [told[0], "...", told[-1]]
    seeds = counted(sorted({len(own) for own in deep.values()}))
    return f"At {depth} layers with {'a ' if warmup else ''}{_title(warmup)} {', '.join(shown)} ({seeds})."


ARCHS = ("postln", "preln", "deepnorm", "branchnorm")
RATES = tuple(1e-3 * 2**power for power in range(6))
UPDATES = 600


@sweep("table:edge", scales=("tiny",), minutes=200)
def rates_to_the_edge(ask: Recipe) -> Iterator[Experiment]:
    """Trains four architectures, 6 and 18 layers a side, with a warm-up of 40 updates and without, at six rates from
    1e-3 to .032 that stay constant; 600 updates, three seeds. `results/forecast` bisects them, which takes fewer
    runs."""
    for warmup in (40, 0):
        for rate in RATES:
            axes = {"train": {"warmup": warmup, "lr": rate}}
            common = {"train": {"steps": UPDATES, "schedule": "constant"}, "model": {"T": 40}}
            tag = f"warmup{warmup}-lr{rate:g}"
            seeds = (3, 4, 5)
            yield from ask.runs(ARCHS, (6, 18), common, probing(), axes=axes, tag=tag, seeds=seeds)
