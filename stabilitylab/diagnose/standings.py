"""Runs side by side: the loss of each at the last step that all of them reached, and the state of its layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..config import complete, neutral_settings
from ..errors import DamagedError, InputError, listed
from ..inputs import shown
from ..labels import label_of
from ..store import Run
from ..store.layout import flat
from ..store.reader import of_snapshots
from .diagnosis import diagnose
from .evidence import Evidence, Grid

LOSSES = ("held_out_nll", "nll", "loss")  # the first that all runs have
TAIL = 0.1  # share of the steps over which a loss of single training batches is averaged
NOT_DRAWN = ("train.seed", "data.seed")  # settings that are not listed, since they differ between most runs
# entries of run.json's data that identify what a loss is measured on: of the held-out batch, else of training batches
HELD_OUT = {"held_out_sha256": "the held-out text", "tokenizer_sha256": "the tokenizer"}
TRAINING = {"train_sha256": "the training text", "tokenizer_sha256": "the tokenizer"}
UNKNOWN_TASK = "a task that is not known"  # of a run of somebody's own loop
TASKS = {"encoder-decoder": "translation", "encoder": "masked tokens", "decoder": "next tokens"}  # by stack


@dataclass(frozen=True)
class Standing:
    """One run of the comparison. A number that it has not recorded is NaN; a text that it has not recorded is empty.

    - ``updates``: the number of updates so far; the last row of a watched run is of the last update, that of a run of
      ``probe`` of the weights after it.
    - ``loss``: nats a token. If a loss is compared, a NaN was measured.
    - ``gap``: the loss minus the unigram baseline of its data.
    - ``gradient_decades``: log10 of the largest over the smallest gradient norm of a layer at the last probed step, of
      the worse stack (inf: the gradient of a layer is 0).
    - ``norm_growth``: the largest norm input at the last probed step over the largest at the first.
    - ``moved``: ||dF|| since the start, of the stack that moved most.
    - ``trouble``: the event that came first, by ``diagnose``.
    """

    run: str
    kind: str
    label: str
    layers: str
    seed: int | None
    updates: int
    state: str
    loss: float
    gap: float
    gradient_decades: float
    norm_growth: float
    moved: float
    tokens_per_second: float
    trouble: str


@dataclass(frozen=True)
class Standings:
    """Runs side by side. ``loss``: the name of the loss that is compared. ``step``: the last step that all runs have
    reached. ``settings``: the settings that differ, with the value of each run (None: not set). ``unlike``: a clause
    that says why the losses cannot be ranked; "" if they can."""

    loss: str
    step: int | None
    rows: tuple[Standing, ...]
    settings: Mapping[str, tuple[Any, ...]]
    unlike: str = ""

    @property
    def paragraph(self) -> str:
        """The runs with the lowest and the highest loss, as far as single runs can be ranked."""
        ranked = sorted((row for row in self.rows if math.isfinite(row.loss)), key=lambda row: row.loss)
        lost = [row.run for row in self.rows if self.loss and not math.isfinite(row.loss)]
        if lost:
            return f"{', '.join(lost)}: {self.loss} is not finite at step {self.step}, so there is no order."
        if len(ranked) < 2:
            return "No two of these runs have a loss in common: their numbers stand side by side, without an order."
        first, last = ranked[0], ranked[-1]
        is_same = first.loss == last.loss
        digits = next((own for own in range(4, 16) if f"{first.loss:.{own}f}" != f"{last.loss:.{own}f}"), 4)
        order = (
            f"At step {self.step} all have the same {self.loss}, {first.loss:.4f}."
            if is_same
            else f"At step {self.step} {first.run} has the lowest {self.loss}, {first.loss:.{digits}f}, and {last.run} "
            f"the highest, {last.loss:.{digits}f}."
        )
        if self.unlike:
            return f"{order} {self.unlike}, so this is no ranking."
        if is_same:
            return order
        if any(row.kind != "train" for row in self.rows):  # no sweep can train somebody's own model
            return f"{order} One run is one seed: another seed may give another order."
        return (
            f"{order} One run is one seed: 'stabilitylab sweep' makes several, and 'stabilitylab report' puts "
            "intervals on their difference."
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"rows": [asdict(row) for row in self.rows], "paragraph": self.paragraph}


def side_by_side(runs: Sequence[Run]) -> Standings:
    """Put ``runs`` side by side; they may still be going. Raises InputError if one of them has recorded nothing yet."""
    return of_snapshots(_standings, *runs)


def _standings(*runs: Run) -> Standings:
    read = [Evidence(run) for run in runs]
    for one in read:
        if not len(one.steps):
            raise InputError(f"{one.run.path} has recorded nothing yet: compare it after its first steps.")
    name, losses = _common_loss(read)
    step = min((int(loss.steps[-1]) for loss in losses), default=None)
    if step is not None and any(loss.steps[0] > step for loss in losses):  # no step is common
        name, step = "", None
    found = [_loss_at(loss, step) for loss in losses] if step is not None else [math.nan] * len(read)
    rows = tuple(_standing(one, loss) for one, loss in zip(read, found, strict=True))
    differing = _differing(runs)
    return Standings(name, step, rows, differing, _unlike(runs, name, differing))


def _common_loss(read: Sequence[Evidence]) -> tuple[str, list[Grid]]:
    for name in LOSSES:
        found = [loss for one in read if (loss := one.metric(name)) is not None]
        if len(found) == len(read):
            return name, found
    return "", []


def _loss_at(loss: Grid, step: int) -> float:
    """Return the loss at ``step``: the last held-out evaluation, or the mean of the last tenth of a training loss."""
    upto = loss.steps <= step
    tail = 1 if loss.column.startswith("held_out") else max(1, math.ceil(TAIL * int(upto.sum())))
    return float(loss.values[upto, 0][-tail:].mean()) if upto.any() else math.nan


def _standing(one: Evidence, loss: float) -> Standing:
    run = one.run
    model, train = (run.config.get(name) if run.kind != "watched" else None for name in ("model", "train"))
    model, train = model or {}, train or {}
    judged = run.verdict
    speed, seed = one.metric("tokens_per_second"), train.get("seed")
    if seed is not None and type(seed) is not int:
        told = f"{run.path} has a damaged configuration (train.seed = {shown(seed)}): restore run.json from a copy."
        raise DamagedError(told, run.path)
    layers = [model[key] for key in ("encoder_layers", "decoder_layers") if model.get(key)]
    first = diagnose(run).cause.together
    return Standing(
        run=str(run.path),
        kind=run.kind,
        label=label_of(run.manifest),
        layers="-".join(f"{count}L" for count in layers),
        seed=None if seed is None else int(seed),
        updates=max(int(one.steps[-1]) + (one.status.state == "running"), one.status.step),
        state=judged.state if judged else one.status.state,
        loss=loss,
        gap=judged.nll_gap if judged else math.nan,
        gradient_decades=_decades(one.grid("grad_norm", "", True)),
        norm_growth=_growth(one.grid("ln_input")),
        moved=_largest(one.grid("model_update", "cumulative")),
        tokens_per_second=float(np.median(speed.values)) if speed is not None else math.nan,
        trouble=f"{' and '.join(event.title for event in first)}, step {first[0].step}" if first else "",
    )


def _decades(grid: Grid | None) -> float:
    if grid is None:
        return math.nan
    found = []
    for stack in grid.stacks():
        last = stack.values[-1][~stack.absent[-1]]
        if len(last) and np.isfinite(last).all() and last.max() > 0:
            found.append(math.log10(last.max() / last.min()) if last.min() > 0 else math.inf)
    return max(found, default=math.nan)


def _growth(grid: Grid | None) -> float:
    if grid is None:
        return math.nan
    first, last = (grid.values[row][~grid.absent[row]].max(initial=-math.inf) for row in (0, -1))
    return float(last / first) if first > 0 and last > -math.inf else math.nan


def _largest(grid: Grid | None) -> float:
    """Return the largest number of the last step; NaN if none was measured."""
    if grid is None or not np.isfinite(grid.values[-1]).any():
        return math.nan
    return float(np.nanmax(grid.values[-1]))


def _differing(runs: Sequence[Run]) -> dict[str, tuple[Any, ...]]:
    settings = [dict(flat(run.config if run.kind == "watched" else complete(run.config))) for run in runs]
    names = {name: None for one in settings for name in one}
    values = {name: tuple(one.get(name) for one in settings) for name in names if name not in NOT_DRAWN}
    return {name: each for name, each in values.items() if any(value != each[0] for value in each)}


def _unlike(runs: Sequence[Run], loss: str, differing: Mapping[str, tuple[Any, ...]]) -> str:
    """Return a clause that says why losses of ``runs`` are not comparable: other tasks, or other data; "" if they are.

    The data are compared by their digests in run.json. If a run has none, such as a run of somebody's own loop, the
    settings of the data decide.
    """
    tasks: dict[str, list[str]] = {}
    for run in runs:
        model = {} if run.kind == "watched" else complete(run.config).get("model") or {}
        stack = model.get("stack")
        task = UNKNOWN_TASK if stack is None else TASKS.get(str(stack), shown(stack))
        tasks.setdefault(task, []).append(str(run.path))
    if len(tasks.keys() - {UNKNOWN_TASK}) > 1:
        each = "; ".join(f"{task}: {listed(paths)}" for task, paths in tasks.items())
        return f"They are losses of different tasks ({each})"
    names = [name for name in differing if name.startswith("data.") and name not in neutral_settings()]
    facts = [_data_facts(run) for run in runs]
    first, *others = facts
    identifying = HELD_OUT if loss.startswith("held_out") else TRAINING
    if not all(next(iter(identifying)) in one for one in facts):
        return f"They were not measured on the same data ({listed(names)})" if names else ""
    what = [text for key, text in identifying.items() if any(one.get(key) != first.get(key) for one in others)]
    if not what:
        return ""
    why = [f"settings that differ: {listed(names)}"] if names else []
    files = [one.get("files_sha256") or {} for one in facts]
    if changed := [path for path in files[0] if len({each[path] for each in files if path in each}) > 1]:
        why.append(f"files whose content differs: {listed(changed)}")
    where = f" ({'; '.join(why)})" if why else ""
    return f"They were not measured on the same data: {' and '.join(what)} differ{'s' * (len(what) == 1)}{where}"


def _data_facts(run: Run) -> Mapping[str, Any]:
    """Return the facts about its data that a run of this package's trainer has recorded; {} for another run."""
    facts = run.manifest.get("data") if run.kind != "watched" else None
    return facts if isinstance(facts, Mapping) else {}
