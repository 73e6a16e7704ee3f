"""The map of collapse: the rates, ramps and warm-ups at which an encoder-decoder reads its source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from ....experiments import Experiment, Recipe, command, probing, protocol, sweep
from ....verdict import READS_NATS
from ... import style
from ...base import Figure, Map, MissingRuns, Panel, Picture, figure
from ...collection import Record, Runs
from ...measures.comparison import counted
from ...measures.provenance import provenance

State = Literal["reads", "constant", "unread", "failed"]
JUDGED = 600  # a model is judged so many updates after its warm-up; some read later
CONSTANT = 1e-4  # an encoder that is not read is a constant function if 1 - cosine between sentences is below this
LATER = 3000  # updates of the one run of each cell that goes on
PLACE = ("model.encoder_layers", "train.warmup")
AXES = ("train.lr", "train.warmup", "train.steps", "model.encoder_layers", "model.decoder_layers")


def state_at(record: Record, update: int) -> State | None:
    """Return the state of a run at the measurement nearest to ``update``, at most a tenth away; None without one.

    ``reads``: the source is worth at least .1 nats a token. ``constant``: it is not, and 1 - cosine between sentences
    is below 1e-4. ``unread``: neither. ``failed``: the numbers are not finite.
    """
    columns = ["step", "source_worth", "encoder_distance_between"]
    if not set(columns) <= set(record.metrics):
        return None
    data = record.metrics[columns].dropna(subset=["source_worth"])
    if data.empty:
        return None
    at = data.iloc[int((data["step"] - update).abs().argmin())]
    if abs(float(at["step"]) - update) > 0.1 * update:
        return None
    worth, between = float(at["source_worth"]), float(at["encoder_distance_between"])
    if not math.isfinite(worth):
        return "failed"
    return "reads" if worth >= READS_NATS else "constant" if between < CONSTANT else "unread"


def judged_at(record: Record) -> int:
    """Return the update at which a run of the map is judged: 600 behind its warm-up."""
    return int(record.settings["train.warmup"]) + JUDGED


def row_of(record: Record) -> tuple[str, int]:
    """Return the row of the map: BranchNorm and T, or the label and 0 for an architecture without a ramp."""
    if record.settings.get("model.arch") == protocol.BRANCH:
        return protocol.BRANCH, int(record.settings["model.T"])
    return record.label, 0


def largest_reading_rate(runs: Runs) -> dict[int, float]:
    """Return, for each seed, the largest rate below which every rate that was tried reads; seeds without one are left
    out. ``runs`` differ in nothing but rate and seed."""
    found: dict[int, float] = {}
    for seed in runs.seeds:
        for record in sorted(runs.where(lambda run, s=seed: run.seed == s), key=_rate):
            if state_at(record, judged_at(record)) != "reads":
                break
            found[seed] = _rate(record)
    return found


@figure("collapse:map", title="Where an encoder-decoder reads its source", source="ours")
class MapOfCollapse(Figure):
    """The share of seeds whose model reads its source 600 updates after warm-up, over the learning rate and the length
    T of BranchNorm's ramp, at each depth and warm-up. Beside it is DeepNorm, which has no ramp.

    A model reads its source if the loss grows by at least .1 nats a token with another sentence's source. The encoder
    is constant if the model does not read and 1 - cosine between the encoder's outputs at tokens of different sentences
    is below 1e-4. "later": the one run of the cell that went on to 3,000 updates reads by then.

    Rank collapse of attention at initialisation is in Dong et al. 2021 (2103.03404) and, with its vanishing gradients
    of queries and keys, in Noci et al. 2022 (2206.03126). The finding that rate and ramp decide whether it passes is
    ours.
    """

    def picture(self, runs: Runs) -> Picture:
        group = _group(runs)
        places = sorted({_place(run) for run in group})
        panels = [_panel(group.where(lambda run, p=place: _place(run) == p), place) for place in places]
        notes = [
            f"Drawn: {group.describe()}.",
            f"Colour and number: the seeds of which the model reads its source {JUDGED} updates behind warm-up.",
        ]
        return Picture(
            panels, _finding(group), notes, columns=min(2, len(panels)), provenance=provenance(group), key="c: constant"
        )


def _group(runs: Runs) -> Runs:
    """Pick the runs that can be judged, of the settings that most of them share."""
    fit = runs.where(lambda run: state_at(run, judged_at(run)) is not None, kind="train")
    groups = fit.groups(*AXES)
    found = max(groups, key=len, default=None)
    if found is None or len({_rate(run) for run in found}) < 2:
        raise MissingRuns("no runs at several learning rates whose source was measured", command("collapse:map"))
    return found


def _place(record: Record) -> tuple[int, int]:
    layers, warmup = (int(record.settings[key]) for key in PLACE)
    return layers, warmup


def _rate(record: Record) -> float:
    return float(record.settings["train.lr"])


def _panel(runs: Runs, place: tuple[int, int]) -> Panel:
    rates = sorted({_rate(run) for run in runs})
    rows = sorted({row_of(run) for run in runs}, key=lambda row: (row[0] == "deepnorm", row[1]))
    cells: dict[tuple[tuple[str, int], float], list[Record]] = {}
    for run in runs:
        cells.setdefault((row_of(run), _rate(run)), []).append(run)
    places = [[(row, rate) for rate in rates] for row in rows]
    heat = Map(
        x=range(len(rates)),
        y=range(len(rows)),
        z=np.array([[_share(cells.get(at, ())) for at in line] for line in places]),
        finding=np.zeros((len(rows), len(rates)), np.int8),
        unit="share of seeds that read",
        log=False,
        x_names=[f"{rate:g}" for rate in rates],
        y_names=[f"{style.title(label)}, T = {T}" if T else style.title(label) for label, T in rows],
        text=np.array([[_words(cells.get(at, ())) for at in line] for line in places], dtype=object),
        colours=(0.0, 1.0),
        seeds=np.array([[len(cells.get(at, ())) for at in line] for line in places]),
    )
    layers, warmup = place
    return Panel(f"{layers}L-{layers}L, warm-up of {warmup} updates", "learning rate", "", map=heat)


def _share(runs: Sequence[Record]) -> float:
    states = [state_at(run, judged_at(run)) for run in runs]
    return states.count("reads") / len(states) if states else math.nan


def _words(runs: Sequence[Record]) -> str:
    """Return ``4/6``, the constant encoders, and a word if the run that went on reads later."""
    if not runs:
        return ""
    states = [state_at(run, judged_at(run)) for run in runs]
    words = [f"{states.count('reads')}/{len(states)}"]
    if constant := states.count("constant"):
        words.append(f"{constant} c")
    late = [run for run in runs if run.updates >= LATER and state_at(run, judged_at(run)) != "reads"]
    if any(state_at(run, LATER) == "reads" for run in late):
        words.append("later")
    return "\n".join(words)


def _finding(group: Runs) -> str:
    """Say the largest rate at which every seed reads, for each row of the deepest place with the longest warm-up."""
    place = max({_place(run) for run in group})
    own = group.where(lambda run: _place(run) == place)
    said = []
    for row in sorted({row_of(run) for run in own}, key=lambda row: (row[0] == "deepnorm", row[1])):
        runs = own.where(lambda run, r=row: row_of(run) == r)
        rates = largest_reading_rate(runs)
        name = f"{style.title(row[0])}, T = {row[1]}" if row[1] else style.title(row[0])
        least = f"{min(rates.values()):g}" if len(rates) == len(runs.seeds) else "none tried"
        said.append(f"{name} {least}")
    layers, warmup = place
    return (
        f"{layers}L-{layers}L, warm-up {warmup}: largest learning rate up to which every seed reads: {', '.join(said)} "
        f"({counted(len(own.seeds))})."
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
