"""The map of collapse: the rates, ramps and warm-ups at which an encoder-decoder reads its source."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ....experiments import Experiment, Recipe, command, probing, protocol, sweep
from ....verdict import READS_NATS
from ... import style
from ...base import Figure, Map, MissingRuns, Panel, Picture, figure
from ...collection import Record, Runs
from ...measures.comparison import counted
from ...measures.provenance import provenance

if TYPE_CHECKING:
    import pandas as pd

State = Literal["reads", "constant", "unread", "failed"]
JUDGED = 600  # a model is judged so many updates after its warm-up; some read later
CONSTANT = 1e-4  # an encoder that is not read is a constant function if 1 - cosine between sentences is below this
LATER = 3000  # updates of the one run of each cell that goes on
READS_LATER = "later"  # the word for a run that did not read when it was judged, and reads at 3,000 updates
COURSE = ("step", "source_worth", "encoder_distance_between")
AXES = ("train.lr", "train.warmup", "train.steps", "model.encoder_layers", "model.decoder_layers")


@dataclass(frozen=True)
class MapTrial:
    """One run of the map. ``row``: BranchNorm and its T, or the label and 0 for an architecture without a ramp.
    ``state``: when it is judged, 600 updates after its warm-up. ``later``: at 3,000 updates; None if it ended before.
    """

    layers: int
    warmup: int
    row: tuple[str, int]
    rate: float
    seed: int
    state: State
    later: State | None

    @property
    def place(self) -> tuple[int, int]:
        """Layers a side and warm-up: the panel that it belongs to."""
        return self.layers, self.warmup


def state_at(course: pd.DataFrame, update: int) -> State | None:
    """Return the state of a run at the measurement nearest to ``update``, at most a tenth away; None without one.

    ``course`` has the columns ``step``, ``source_worth`` and ``encoder_distance_between``. ``reads``: the source is
    worth at least .1 nats a token. ``constant``: it is not, and 1 - cosine between sentences is below 1e-4. ``unread``:
    neither. ``failed``: the numbers are not finite.
    """
    if not {*COURSE} <= {*course}:
        return None
    data = course.dropna(subset=["source_worth"])
    if data.empty:
        return None
    at = data.iloc[int((data["step"] - update).abs().argmin())]
    if abs(float(at["step"]) - update) > 0.1 * update:
        return None
    worth, between = float(at["source_worth"]), float(at["encoder_distance_between"])
    if not math.isfinite(worth):
        return "failed"
    return "reads" if worth >= READS_NATS else "constant" if between < CONSTANT else "unread"


def trial(
    course: pd.DataFrame, *, label: str, layers: int, warmup: int, T: int, rate: float, seed: int, diverged: bool
) -> MapTrial | None:
    """Return the trial with this course; None if it was not measured when it is judged. A run that ``diverged``, and
    whose numbers end before it is judged, has failed."""
    judged = warmup + JUDGED
    state, later = state_at(course, judged), state_at(course, LATER)
    if diverged and {*COURSE} <= {*course}:
        measured = course["source_worth"].notna().to_numpy()
        if not (course["step"].to_numpy()[measured] >= judged).any():
            state = later = "failed"
    row = (protocol.BRANCH, T) if label.partition(" ")[0] == protocol.BRANCH else (label, 0)
    return None if state is None else MapTrial(layers, warmup, row, rate, seed, state, later)


def of_record(record: Record) -> MapTrial | None:
    """Return a run as a trial of the map; None if its source was not measured."""
    settings = record.settings
    return trial(
        record.metrics,
        label=record.label,
        layers=int(settings["model.encoder_layers"]),
        warmup=int(settings["train.warmup"]),
        T=int(settings["model.T"]),
        rate=float(settings["train.lr"]),
        seed=record.seed,
        diverged=record.verdict == "diverged",
    )


def largest_reading_rate(trials: Iterable[MapTrial]) -> dict[int, float]:
    """Return, for each seed, the largest rate below which every rate that was tried reads; seeds without one are left
    out. ``trials`` differ in nothing but rate and seed."""
    found: dict[int, float] = {}
    ended = set()
    for one in sorted(trials, key=lambda one: one.rate):
        if one.state != "reads":
            ended.add(one.seed)
        elif one.seed not in ended:
            found[one.seed] = one.rate
    return found


def drawn(trials: Sequence[MapTrial], described: str, told: str) -> Picture:
    """Return the map: a panel for each depth and warm-up. ``described``, ``told``: which runs they are, in the notes
    and as provenance."""
    panels = [_panel(own, place) for place, own in _by(trials, lambda one: one.place).items()]
    notes = [
        f"Drawn: {described}.",
        f"Colour and number: the seeds of which the model reads its source {JUDGED} updates after warm-up.",
    ]
    key = "c: constant encoder, +: read later"
    return Picture(panels, _finding(trials), notes, columns=min(2, len(panels)), provenance=told, key=key)


@figure("collapse:map", title="Where an encoder-decoder reads its source", source="ours")
class MapOfCollapse(Figure):
    """The share of seeds whose model reads its source 600 updates after warm-up, over the learning rate and the length
    T of BranchNorm's ramp, at each depth and warm-up. Beside it is DeepNorm, which has no ramp.

    A model reads its source if the loss grows by at least .1 nats a token with another sentence's source. The encoder
    is constant if the model does not read and 1 - cosine between the encoder's outputs at tokens of different sentences
    is below 1e-4. A + marks cells of which the one run that went on to 3,000 updates reads by then.

    Rank collapse of attention at initialisation is in Dong et al. 2021 (2103.03404) and, with its vanishing gradients
    of queries and keys, in Noci et al. 2022 (2206.03126). The finding that rate and ramp decide whether it passes is
    ours.
    """

    def picture(self, runs: Runs) -> Picture:
        group = _group(runs)
        return drawn([one for run in group if (one := of_record(run))], group.describe(), provenance(group))


def _group(runs: Runs) -> Runs:
    """Pick the runs that can be judged, of the settings that most of them share."""
    fit = runs.where(lambda run: of_record(run) is not None, kind="train")
    groups = fit.groups(*AXES)
    found = max(groups, key=len, default=None)
    if found is None or len({run.settings["train.lr"] for run in found}) < 2:
        raise MissingRuns("no runs at several learning rates whose source was measured", command("collapse:map"))
    return found


def _by(trials: Iterable[MapTrial], key: Callable[[MapTrial], Any]) -> dict[Any, list[MapTrial]]:
    """Return the trials by a key of theirs, in its order."""
    return {value: [*own] for value, own in groupby(sorted(trials, key=key), key=key)}


def _row_order(row: tuple[str, int]) -> tuple[bool, int]:
    """BranchNorm by its T, and DeepNorm last."""
    return row[0] == protocol.DEEP, row[1]


def _panel(trials: Sequence[MapTrial], place: tuple[int, int]) -> Panel:
    rates = sorted({one.rate for one in trials})
    rows = sorted({one.row for one in trials}, key=_row_order)
    cells = _by(trials, lambda one: (one.row, one.rate))
    places = [[(row, rate) for rate in rates] for row in rows]
    heat = Map(
        x=range(len(rates)),
        y=range(len(rows)),
        z=np.array([[_share(cells.get(at, ())) for at in line] for line in places]),
        finding=np.zeros((len(rows), len(rates)), np.int8),
        unit="share of seeds that read",
        log=False,
        x_names=[f"{rate:g}" for rate in rates],
        y_names=[row_title(row) for row in rows],
        text=np.array([[_text(outcome(cells.get(at, ()))) for at in line] for line in places], dtype=object),
        colours=(0.0, 1.0),
        seeds=np.array([[len(cells.get(at, ())) for at in line] for line in places]),
    )
    layers, warmup = place
    return Panel(f"{layers}L-{layers}L, warm-up of {warmup} updates", "learning rate", "", map=heat)


def _text(words: Sequence[str]) -> str:
    """Return the words of a cell on two lines at most, with a + for "later": ``5/6 +``, or ``0/6`` above ``2 c +``."""
    return "\n".join(words).replace("\n" + READS_LATER, " +")


def _share(trials: Sequence[MapTrial]) -> float:
    return [one.state for one in trials].count("reads") / len(trials) if trials else math.nan


def row_title(row: tuple[str, int]) -> str:
    """Return the name of a row: ``BranchNorm, T = 12``, or ``DeepNorm``."""
    label, T = row
    return f"{style.title(label)}, T = {T}" if T else style.title(label)


def outcome(trials: Sequence[MapTrial]) -> list[str]:
    """Return the words of a cell: ``4/6`` models that read, ``2 c`` encoders that are constant, and ``later`` if a run
    that did not read when it was judged reads at 3,000 updates."""
    if not trials:
        return []
    states = [one.state for one in trials]
    words = [f"{states.count('reads')}/{len(states)}"]
    if constant := states.count("constant"):
        words.append(f"{constant} c")
    if any(one.later == "reads" for one in trials if one.state != "reads"):
        words.append(READS_LATER)
    return words


def _finding(trials: Sequence[MapTrial]) -> str:
    """Say the largest rate at which every seed reads, for each row of the deepest place with the longest warm-up."""
    (layers, warmup), own = [*_by(trials, lambda one: one.place).items()][-1]
    seeds = {one.seed for one in own}
    said = []
    for row in sorted({one.row for one in own}, key=_row_order):
        rates = largest_reading_rate(one for one in own if one.row == row)
        least = f"{min(rates.values()):g}" if len(rates) == len(seeds) else "none tried"
        said.append(f"{row_title(row)} {least}")
    return (
        f"{layers}L-{layers}L, warm-up {warmup}: largest learning rate up to which every seed reads: {', '.join(said)} "
        f"({counted(len(seeds))})."
    )


# Protocol 3, rule 7: both in updates; the schedule is that of the comparison, of 6,000 updates, stopped early.
GRID: Mapping[int, tuple[Sequence[float], Sequence[int], Sequence[int], int]] = {
    6: ((5e-4, 1e-3, 2e-3, 4e-3, 8e-3), (1, 12, 60, 240), (60, 240), 6),
    18: ((5e-4, 1e-3, 2e-3, 4e-3), (1, 12, 240), (240,), 4),
}  # layers a side -> rates, T, warm-ups, seeds


@sweep("collapse:map", scales=("tiny",), minutes=655)
def rates_and_ramps(ask: Recipe) -> Iterator[Experiment]:
    """Crosses rate, T and warm-up for BranchNorm, and rate and warm-up for DeepNorm, 6 and 18 layers a side; the first
    seed of each cell goes on to 3,000 updates."""
    for layers, (rates, ramps, warmups, count) in GRID.items():
        seeds = tuple(ask.seeds or protocol.SEEDS[:count])
        arms = [(protocol.SMALL if T == 1 else protocol.BRANCH, T) for T in ramps] + [(protocol.DEEP, 0)]
        for seed in seeds:
            for warmup in warmups:
                for arm, T in arms:
                    for rate in rates:
                        updates = LATER if seed == seeds[0] else warmup + JUDGED
                        own = {
                            "model": {"T": T} if T else {},
                            "train": {
                                "warmup": warmup,
                                "steps": updates,
                                "horizon": protocol.UPDATES,
                                "evaluations": 100,
                                "final_checkpoint": False,
                            },
                        }
                        tags = [f"warmup{warmup}", *([f"T{T}"] if T > 1 else [])]
                        given = (arm, layers, seed, rate, protocol.UPDATES)
                        yield protocol.run(*given, probing(), ask.settings, own, tags=tags)
