"""The learning rates at which KEEL and its predecessors train as decoders, by depth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ....experiments import Experiment, Recipe, command, probing, sweep
from ... import style
from ...arrange import signs
from ...base import Figure, Map, MissingRuns, Panel, Picture, figure
from ...collection import LAYERS, Record, Runs
from ...measures.comparison import counted, judged, left_out, states
from ...measures.outcomes import mark
from ...measures.provenance import provenance

if TYPE_CHECKING:
    import pandas as pd

FREE = ("train.lr", "train.steps", "train.warmup", *LAYERS)
TRAINS = ("trained", "learning")  # the verdicts of a loss below the unigram baseline


@dataclass(frozen=True)
class RateEnd:
    """The end of one run: the ``arm`` as it is drawn, decoder layers, planned updates, learning rate, seed, verdict."""

    arm: str
    layers: int
    updates: int
    rate: float
    seed: int
    verdict: str

    @property
    def trains(self) -> bool:
        return self.verdict in TRAINS


Place = tuple[int, int]  # layers, updates


@figure("table:keel", title="The learning rates at which decoders train", source="stabilitylab; KEEL, 2601.19895")
class KeelTable(Figure):
    """The share of seeds that train, for each architecture as a decoder alone, over the learning rate, at each depth.

    A run trains if its verdict is "trained" or "learning": it ends more than .05 nats a token below the unigram
    baseline. Under the share stand the verdicts of the other seeds; a cell without runs is empty. ``table.csv`` has the
    largest of the tried rates at which all seeds train, and the smallest at which one of them does not.
    """

    def picture(self, runs: Runs) -> Picture:
        known = judged(runs).where(lambda run: run.layers[0] == 0)
        group = max(known.groups(*FREE), key=lambda own: (_rates(own), len(own.labels), len(own)), default=Runs([]))
        if _rates(group) < 2:
            raise MissingRuns("no runs of decoders at several learning rates", command(self.id))
        names = own_names(group.labels)
        trials = [_of(run, name) for label, name in names.items() for run in group.where(label=label)]
        picture = drawn(trials, group.describe(), provenance(group))
        return replace(picture, notes=[*picture.notes, *states(group), *left_out(known, group)])


def own_names(labels: Sequence[str]) -> dict[str, str]:
    """Return the name of each label without the words that all of them share."""
    words = {label: style.title(label).split() for label in labels}
    shared = set.intersection(*map(set, words.values())) if len(words) > 1 else set()
    return {label: " ".join(word for word in own if word not in shared) or label for label, own in words.items()}


def _rates(runs: Runs) -> int:
    return len({run.settings["train.lr"] for run in runs})


def _of(run: Record, name: str) -> RateEnd:
    return RateEnd(name, run.layers[1], run.updates, float(run.settings["train.lr"]), run.seed, run.verdict)


def drawn(trials: Sequence[RateEnd], described: str, told: str) -> Picture:
    """Return the table: a panel for each depth and length of run. ``described``, ``told``: which runs they are, in the
    notes and as provenance."""
    places = sorted({(one.layers, one.updates) for one in trials})
    panels = [_panel([one for one in trials if (one.layers, one.updates) == place], place) for place in places]
    means = {"/": "a/b: a of b seeds train; they end below the loss of word frequencies"}
    return Picture(
        panels, _finding(trials, places), [f"Drawn: {described}."], columns=min(2, len(panels)),
        extra={"table.csv": table(trials).to_csv(index=False)}, provenance=told, key=" · ".join(signs(panels, means)),
    )  # fmt: skip


def table(trials: Iterable[RateEnd]) -> pd.DataFrame:
    """Make a row for each arm at each depth: the largest rate at which all seeds train, the smallest at which one does
    not."""
    import pandas as pd  # here, as whoever lists the table's runs reads this module too

    rows = []
    for (layers, updates), arms in _by_place(trials).items():
        for arm, own in arms.items():
            failing = [rate for rate, ends in own.items() if not all(end.trains for end in ends)]
            seeds = counted([len(ends) for ends in own.values()])
            largest = largest_rate(own)
            told = "none" if largest is None else f"{largest:g}"
            rows.append((layers, updates, arm, seeds, told, f"{min(failing):g}" if failing else "none tried"))
    ends = ("largest rate at which all seeds train", "smallest rate at which one does not")
    return pd.DataFrame(rows, columns=["layers", "updates", "arm", "seeds", *ends])


def largest_rate(ends: Mapping[float, Sequence[RateEnd]]) -> float | None:
    """Return the largest rate at which every run trains; None if there is none."""
    return max((rate for rate, own in ends.items() if own and all(one.trains for one in own)), default=None)


def _largest(ends: Mapping[float, Sequence[RateEnd]]) -> str:
    """Return :func:`largest_rate` in words: "at least" that rate if no higher one was tried."""
    rate = largest_rate(ends)
    if rate is None:
        return "none"
    return f"{'at least ' if rate == max(ends) else ''}{rate:g}"


def _by_place(trials: Iterable[RateEnd]) -> dict[Place, dict[str, dict[float, list[RateEnd]]]]:
    """Return place -> arm -> rate -> trials, arms in the order in which they come."""
    found: dict[Place, dict[str, dict[float, list[RateEnd]]]] = {}
    for one in sorted(trials, key=lambda one: (one.layers, one.updates)):
        arms = found.setdefault((one.layers, one.updates), {})
        arms.setdefault(one.arm, {}).setdefault(one.rate, []).append(one)
    return found


def _panel(trials: Sequence[RateEnd], place: Place) -> Panel:
    layers, updates = place
    arms, rates = _by_place(trials)[place], sorted({one.rate for one in trials})
    cells = [[own.get(rate, []) for rate in rates] for own in arms.values()]
    heat = Map(
        x=range(len(rates)),
        y=range(len(arms)),
        z=np.array([[_share(own) for own in line] for line in cells]),
        finding=np.array([[_mark(own) for own in line] for line in cells], np.int8),
        unit="share of seeds that train",
        log=False,
        x_names=[f"{rate:g}" for rate in rates],
        y_names=[*arms],
        text=np.array([[_text(own) for own in line] for line in cells], dtype=object),
        colours=(0.0, 1.0),
        seeds=np.array([[len(own) for own in line] for line in cells]),
    )
    return Panel(f"{layers} layers, {updates:,} updates", "learning rate", "", map=heat)


def _share(ends: Sequence[RateEnd]) -> float:
    return sum(one.trains for one in ends) / len(ends) if ends else math.nan


def _mark(ends: Sequence[RateEnd]) -> int:
    verdicts = [one.verdict for one in ends]
    return mark(verdicts.count("diverged"), verdicts.count("stuck"), len(ends))


def _text(ends: Sequence[RateEnd]) -> str:
    """Return the words of a cell: ``3/3``, or ``1/3`` above ``2 stuck``."""
    if not ends:
        return ""
    other = [one.verdict for one in ends if not one.trains]
    lines = [f"{other.count(state)} {state}" for state in dict.fromkeys(other)]
    return "\n".join([f"{len(ends) - len(other)}/{len(ends)}", *lines])


def _finding(trials: Sequence[RateEnd], places: Sequence[Place]) -> str:
    """Say the largest rate at which all seeds train, for each arm at the deepest place."""
    layers, updates = places[-1]
    arms = _by_place(trials)[places[-1]]
    where = f"{layers} layers, {updates:,} updates: largest" if len(places) > 1 else "Largest"
    said = ", ".join(f"{arm} {_largest(own)}" for arm, own in arms.items())
    seeds = counted([len(ends) for own in arms.values() for ends in own.values()])
    return f"{where} rate at which all seeds train: {said} ({seeds})."


ARMS = ("keel", "deepnorm", "branchnorm", "keel inner=False")
DEPTHS: Mapping[int, Sequence[float]] = {12: (1e-3, 4e-3, 1.6e-2), 36: (1e-3, 4e-3, 1.6e-2), 200: (3e-4, 1e-3)}
UPDATES = 300


@sweep("table:keel", scales=("tiny",), minutes=160)
def rates_by_depth(ask: Recipe) -> Iterator[Experiment]:
    """Trains KEEL, DeepNorm and BranchNorm (T = 4 % of the run) as decoders of LLaMA's design, 300 updates, three
    seeds: 12 and 36 layers at three rates, also KEEL without its inner norm, and 200 layers at two."""
    common = {
        "model": {"stack": "decoder", "design": "llama", "T": round(0.04 * UPDATES)},
        "train": {"steps": UPDATES, "warmup": 30},
    }
    for layers, rates in DEPTHS.items():
        for rate in rates:
            given = (ARMS[:3] if layers == 200 else ARMS, (layers,), common, probing())
            yield from ask.runs(*given, axes={"train": {"lr": rate}}, tag=f"lr{rate:g}", seeds=(3, 4, 5))
