"""The first number that is not finite, by what numbers depend on, and how closely the recorded rows enclose it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import listed
from ...kernels import suspected
from ...schema import EVERY_ROW, Row
from ..events import Event, detector
from ..evidence import Evidence, Grid
from ..order import depends_on, describe, first_place, rank

TITLE = "non-finite numbers"
FORWARD = ("reference", "forward")  # passes that run the same parameters


@dataclass(frozen=True)
class Loss:
    """The first row of a source with a number that is not finite, and the places of such numbers."""

    grid: Grid
    at: int  # position of the row
    bad: np.ndarray  # places

    @property
    def step(self) -> int:
        return int(self.grid.steps[self.at])

    @property
    def moment(self) -> tuple[int, int]:
        return self.step, rank(self.grid.phase)

    @property
    def place(self) -> int:
        return first_place(self.bad, self.grid.phase)

    @property
    def way(self) -> tuple[bool, float]:
        """(True if its place is outside the layers, its distance from the input as a share of the rows). In a backward
        pass the distance is that from the output. A place outside the layers is less informative."""
        share = self.place / len(self.bad)
        return self.grid.rows[self.place].layer < 1, 1 - share if self.grid.phase == "backward" else share

    @property
    def depth(self) -> tuple[bool, int, int, int]:
        """The order of places of forward passes: outside the layers last, then by stack as the model runs them, and by
        layer. In one layer the table with more places comes first."""
        row = self.grid.rows[self.place]
        stacks = [*dict.fromkeys(own.stack for own in self.grid.rows if own.layer > 0), row.stack]
        return row.layer < 1, stacks.index(row.stack), row.layer, -len(self.bad)


def sources(evidence: Evidence) -> list[Grid]:
    """Return every metric and one column of every table: the main one, or a column whose NaN no division by 0 makes."""
    metrics = [evidence.metric(name) for name in evidence.metrics.column_names if name != "step"]
    tables = [evidence.grid(name, evidence.run.table(name).sound) for name in evidence.run.tables]
    return [grid for grid in (*metrics, *tables) if grid is not None]


def first_lost(grid: Grid) -> Loss | None:
    bad = ~np.isfinite(grid.values) & ~grid.absent
    rows = np.flatnonzero(bad.any(axis=1))
    return Loss(grid, int(rows[0]), bad[rows[0]]) if len(rows) else None


@detector(
    "non_finite",
    TITLE,
    reads={"loss": "w.step(loss=loss)", "ln_input": "probe ln_input", "grad_norm": "probe grad_norm"},
    rule=(
        "Reads every metric, the main column of every table and `incident.json`: the first NaN or inf, in the order "
        "in which numbers depend on each other"
    ),
    remedy=(
        "Look at the named place and at the numbers before it; lower `lr`, or compute that place in float32; if an "
        "attention kernel is named, switch the kernel off."
    ),
)
def non_finite(evidence: Evidence) -> Iterator[Event]:
    if evidence.incident is not None and evidence.incident.get("name"):
        event = from_incident(evidence.incident)
        for kernel in _kernel(evidence, event.step, event.phase):
            event = replace(event, evidence=f"{event.evidence.rstrip('.')}; {kernel}")
        yield event
        return  # an incident without a place says less than the rows around it
    grids = sources(evidence)
    lost = sorted(
        (loss for grid in grids if (loss := first_lost(grid)) is not None),
        key=lambda loss: (*loss.moment, loss.grid.is_metric, *loss.way),
    )
    # a column in which 0 / 0 of a zero vector gives NaN is no evidence of a broken number
    lost = [loss for loss in lost if loss.grid.is_metric or evidence.run.table(loss.grid.table).sound]
    if not lost:
        return
    first = lost[0]
    place, words = (_placed if first.grid.is_metric else _beside)(first, lost[1:])
    text = [_sentence(first), *words, *_enclosed(grids, first), *_kernel(evidence, first.step, first.grid.phase)]
    value = first.grid.values[first.at, first.place]
    row = place.grid.rows[place.place] if not place.grid.is_metric else None
    yield Event(
        "non_finite",
        TITLE,
        first.step,
        first.grid.phase,
        "; ".join(text),
        "failure",
        after=_last_sound(grids, first),
        place=row,
        places=1,
        probe=first.grid.name,
        numbers={"value": "nan" if np.isnan(value) else "inf", "places": int(first.bad.sum())},
    )


def _placed(first: Loss, others: Sequence[Loss]) -> tuple[Loss, list[str]]:
    """Find the place at which a metric's number broke, by the tables of the same row or of the next row with tables.

    Numbers that depend on the metric are not its cause: if the loss broke first, every gradient breaks after it.
    """
    tables = [loss for loss in others if not loss.grid.is_metric]
    if not tables:
        return first, []
    row = [loss for loss in tables if loss.step == tables[0].step]
    before = [loss for loss in row if rank(loss.grid.phase) <= rank(first.grid.phase)]
    if row[0].step == first.step:
        if before:
            nearest = _nearest(before)
            return nearest, [f"in the same step {_sentence(nearest)}"]
        return first, [f"numbers that depend on it broke after it in the same step: {_sentence(row[0])}"]
    # one update breaks every gradient and every weight, and a table may have a single place
    if telling := [loss for loss in before if not loss.bad.all()]:
        nearest = _nearest(telling)
        return nearest, [f"the next recorded row with tables names the place: {_sentence(nearest)}"]
    how = "every place" if all(loss.bad.all() for loss in row) else "a place"
    broken = listed([loss.grid.table for loss in row])
    return first, [f"by the next recorded row with tables, {row[0].step}, {how} of {broken} is broken"]


def _beside(first: Loss, others: Sequence[Loss]) -> tuple[Loss, list[str]]:
    """Read the other tables of the same row: those that broke as early as the first, and the training pass.

    The training pass comes after the reference pass and runs the same parameters. It may name the layer if the first
    table does not.
    """
    tables = [loss for loss in others if not loss.grid.is_metric and loss.step == first.step]
    place, text = first, []
    if rivals := [loss for loss in tables if loss.moment == first.moment]:
        why = f"equally early, also from {depends_on(first.grid.phase)}"
        text.append(f"{why}: {listed([_sentence(loss) for loss in rivals])}")
    if first.grid.phase in ("step", "reference"):
        for training in [loss for loss in tables if loss.grid.phase == "forward"][:1]:
            text.append(f"after it, in the training pass of that row: {_sentence(training)}")
            place = training if first.way[0] else _nearest([first, training])
    return place, text


def _nearest(losses: Sequence[Loss]) -> Loss:
    """Return the first of ``losses``, or if it is of a forward pass, the one of these nearest to the input."""
    if losses[0].grid.phase not in FORWARD:
        return losses[0]
    return min((loss for loss in losses if loss.grid.phase in FORWARD), key=lambda loss: loss.depth)


def _kernel(evidence: Evidence, step: int, phase: str) -> list[str]:
    """Name the kernel, known for such numbers, that a backward pass up to this moment may have used."""
    if not step and phase != "backward":
        return []
    config = evidence.run.config
    settings = config.get("train")
    precision = settings.get("precision") if evidence.run.kind == "train" and isinstance(settings, Mapping) else None
    ours = "leave train.attention at auto" if precision else "call torch.backends.cuda.enable_cudnn_sdp(False)"
    found = suspected(evidence.run.manifest.get("numerics"), [precision] if precision else None, ours)
    return [found] if found else []


def from_incident(incident: dict[str, Any]) -> Event:
    """Make an event of incident.json, which the run wrote when the number broke."""
    step = incident["step"]
    # a row starts from the values of the parameters; runs before schema 2 call an update "optimizer"
    phase = "step" if incident["kind"] == "parameter" else {"optimizer": "update"}.get(incident["phase"])
    return Event(
        "non_finite",
        TITLE,
        step,
        phase or incident["phase"],
        incident["paragraph"],
        "failure",
        after=step - 1 if step else None,
        place=Row(incident["name"], incident["stack"], incident["layer"], incident["sublayer"]),
        probe="incident.json",
        numbers={"value": incident["value"], "kind": incident["kind"]},
    )


def _sentence(loss: Loss) -> str:
    value = "nan" if np.isnan(loss.grid.values[loss.at, loss.place]) else "inf"
    if loss.grid.is_metric:
        return f"{loss.grid.column} is {value} at step {loss.step}"
    way = "highest" if loss.grid.phase == "backward" else "lowest"
    count = int(loss.bad.sum())
    of = f", the {way} of {count} places" if count > 1 else ""
    return f"{loss.grid.name} of {describe(loss.grid.rows[loss.place])} is {value} at step {loss.step}{of}"


def _enclosed(grids: list[Grid], first: Loss) -> list[str]:
    """Say which numbers were finite just before, and which were not recorded at that step."""
    text = []
    step, phase = first.moment
    tables = [grid for grid in grids if not grid.is_metric]
    if not first.grid.is_metric:
        order = np.arange(len(first.bad))
        before = order[order > first.place] if first.grid.phase == "backward" else order[order < first.place]
        if len(before):
            nearest = before[0] if first.grid.phase == "backward" else before[-1]
            text.append(f"{describe(first.grid.rows[nearest])} before it is finite")
    sound = [g for g in tables if step in g.steps and rank(g.phase) <= phase and g is not first.grid]
    if first.grid.is_metric and sound and all(_sound_at(grid, step) for grid in sound):
        text.append(f"every number of {', '.join(sorted(g.table for g in sound))} is finite in that step before it")
    return text + _open_questions(tables, step, phase)


def _open_questions(tables: list[Grid], step: int, phase: int) -> list[str]:
    """Name what may have broken earlier but was not recorded: the earlier passes of this step, the update before."""
    # a gradient that broke first had a finite loss, so the forward pass is not in question
    least = rank("backward") if phase >= rank("backward") else 0
    passes = [g for g in tables if step not in g.steps and least <= rank(g.phase) <= phase and g.phase != "reference"]
    updates = [g for g in tables if g.phase == "update" and step and step - 1 not in g.steps]
    text = []
    if passes:
        names = ", ".join(sorted({g.table for g in passes}))
        text.append(f"{names} recorded {_neighbours(passes[0].steps, step)}")
    if updates and phase <= rank("loss"):
        text.append(f"{updates[0].table} recorded {_neighbours(updates[0].steps, step - 1)}")
    if not text:
        return []
    if updates and phase <= rank("loss"):
        open_question = f"does not decide between the update of step {step - 1} and the passes of step {step}"
    else:
        open_question = f"does not decide which place of step {step} came first"
    return [*text, f"the evidence {open_question}: record with {EVERY_ROW}"]


def _neighbours(steps: np.ndarray, step: int) -> str:
    near = [str(s) for s in (*steps[steps < step][-1:], *steps[steps > step][:1])]
    return f"{' and '.join(f'step {s}' for s in near) or 'nothing'} but not step {step}"


def _sound_at(grid: Grid, step: int) -> bool:
    at = int(np.flatnonzero(grid.steps == step)[0])
    return bool((np.isfinite(grid.values[at]) | grid.absent[at]).all())


def _last_sound(grids: list[Grid], first: Loss) -> int | None:
    """Return the last earlier step at which a source was recorded, and so was finite. The phases "between"
    and "setting" do not count."""
    steps = [g.steps[g.steps < first.step] for g in grids if g.phase not in ("between", "setting")]
    return max((int(each[-1]) for each in steps if len(each)), default=None)
