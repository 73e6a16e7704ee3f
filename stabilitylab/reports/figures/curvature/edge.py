"""The edge of stability, on runs small enough for two cores: full-batch Adam, the curvature along its gradient, and
warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ....config import merge
from ....decisive import decisive
from ....experiments import Experiment, Recipe, command, protocol, sweep
from ... import style
from ...base import Figure, MissingRuns, Panel, Picture, Reference, Series, Spread, figure
from ...claims import Effect, claim
from ...collection import Record, Runs
from ...measures.provenance import provenance
from ...statistics import Region

PAPER = "Curvature"
RATES = (1e-3, 3e-4)  # the first decides
# .004 of the synthetic text is 33 pairs: one batch, the same in each update
FULL_BATCH = {
    "model": {"d_model": 32, "d_ffn": 64, "heads": 2},
    "data": {"sentences": 33, "fraction": 0.004, "max_length": 12, "held_out": 16, "validation": 0, "vocab_size": 200},
    "train": {"steps": 3000, "warmup": 500, "schedule": "constant", "weight_decay": 0.0, "evaluations": 5,
              "beta1": 0.9, "beta2": 0.99, "final_checkpoint": False, "checkpoint_minutes": 0},
}  # fmt: skip
ON_IT = {"every": 3000, "update_every": 3000, "curvature_batch": "training"}


@sweep("curvature:edge", scales=("tiny",), minutes=60)
def full_batch(ask: Recipe) -> Iterator[Experiment]:
    """Trains a Pre-LN model of 2 layers a side, 32 wide, on 33 sentences in one batch: Adam at two rates with a warm-up
    of 500 of 3,000 updates, curvature every 100; and without momentum (beta1 = 0), 1,500 updates, curvature every
    10th."""
    names = ("preconditioned_sharpness", "sharpness", "critical_sharpness")
    for rate in RATES:
        own = {"train": {"lr": rate}, "probes": {**ON_IT, "names": names, "curvature_every": 100}}
        yield from ask.runs(["preln"], [2], merge(FULL_BATCH, own), seeds=protocol.SEEDS, tag=f"adam-{rate:g}")
    alone = {
        "train": {"lr": RATES[0], "beta1": 0.0, "steps": 1500, "warmup": 100},
        "probes": {**ON_IT, "names": names[:1], "curvature_every": 10},
    }
    yield from ask.runs(["preln"], [2], merge(FULL_BATCH, alone), seeds=protocol.SEEDS, tag="no-momentum")


def full_batch_runs(runs: Runs, table: str, beta1: float, rate: float = RATES[0]) -> Runs:
    """Return the ended full-batch runs of one momentum and rate that differ in their seed alone; of several such groups
    the largest."""
    found = runs.where(
        lambda run: run.ended and _is_full_batch(run), kind="train", table=table, probes__curvature_batch="training",
        train__beta1=beta1, train__lr=rate,
    )  # fmt: skip
    if not found:
        raise MissingRuns(f"needs full-batch runs with {table}", command("curvature:edge"))
    return max((group.where(label=label) for group in found.groups() for label in group.labels), key=len)


def _is_full_batch(run: Record) -> bool:
    """True if one batch has the whole training text, or if it is not recorded how many batches have it."""
    return (run.run.manifest.get("data") or {}).get("batches_per_epoch", 1) == 1


def rows(record: Record, table: str, column: str) -> Any:
    """Return step and a column of the decisive rows: for an eigenvalue, those with a residual of 5 % or less."""
    known = [name for name in ("residual", "converged") if name in record.run.table(table).columns]
    data = record.frame(table, list(dict.fromkeys((column, *known))))
    chosen = decisive(table, column, lambda name: data[name].to_numpy(float) if name in known else None)
    return (data if chosen is None else data[chosen]).dropna(subset=[column])


@figure("curvature:edge", title="The edge of stability", source="2207.14484, 2506.04805, 2406.09405")
class Edge(Figure):
    """Curvature over the edge of stability: Adam's preconditioned sharpness over its edge, (2 + 2 beta1) / ((1 - beta1)
    lr); the curvature along the gradient over 2 / lr, which is the edge without momentum; and the Hessian's own
    sharpness over that of step 0. lr is the learning rate of the update that follows."""

    def picture(self, runs: Runs) -> Picture:
        panels: list[Panel] = []
        drawn: dict[Record, None] = {}
        for title, y, (table, column), shown, beta1, rate in PANELS:
            try:
                found = full_batch_runs(runs, table, beta1, rate)
            except MissingRuns:
                continue
            panels.append(_panel(found, title, y, table, column, shown))
            drawn |= dict.fromkeys(found)
        if not panels:
            raise MissingRuns("no full-batch runs with curvature", command("curvature:edge"))
        notes = [
            "Geometric means over seeds; faint, each of them. Curvature is that of the training batch. Eigenvalues "
            "whose residual is above 5 % have not converged and are left out."
        ]
        return Picture(panels, _finding(runs), notes, columns=2, provenance=provenance(Runs(drawn)))


Shown = Callable[[np.ndarray, np.ndarray, Record], np.ndarray]  # of steps, numbers and their run


def _as_it_is(steps: np.ndarray, numbers: np.ndarray, record: Record) -> np.ndarray:
    return numbers


def _over_its_edge(steps: np.ndarray, numbers: np.ndarray, record: Record) -> np.ndarray:
    """Divide by 2 / lr, with the learning rate of each row."""
    rates = record.metrics.set_index("step")["lr"]
    return numbers * rates.reindex(steps).to_numpy(float) / 2


def _over_the_first(steps: np.ndarray, numbers: np.ndarray, record: Record) -> np.ndarray:
    """Divide by the number at step 0; NaN if it is not known."""
    return numbers / (numbers[0] if steps[0] == 0 else math.nan)


ADAMS = ("preconditioned_sharpness", "to_edge")
PANELS: tuple[tuple[str, str, tuple[str, str], Shown, float, float], ...] = (
    *((f"Full-batch Adam, lr {rate:g}", "preconditioned sharpness / edge", ADAMS, _as_it_is, 0.9, rate)
      for rate in RATES),
    ("Without momentum", "curvature along the gradient / (2 / lr)", (ADAMS[0], "along_gradient"), _over_its_edge, 0.0,
     RATES[0]),
    (f"Sharpness itself, lr {RATES[0]:g}", "sharpness / that of step 0", ("sharpness", "value"), _over_the_first, 0.9,
     RATES[0]),
)  # fmt: skip


def _panel(found: Runs, title: str, y: str, table: str, column: str, shown: Shown) -> Panel:
    name, arch = style.title(found[0].label), found[0].label
    spread, lines = Spread(log=True), []
    for record in found:
        data = rows(record, table, column)
        if data.empty:
            continue
        steps = data["step"].to_numpy(float)
        values = shown(steps, data[column].to_numpy(float), record)
        fine = values > 0
        if not fine.any():
            continue
        lines.append(Series(name, steps[fine].tolist(), values[fine].tolist(), arch=arch, faint=True))
        spread.add(steps[fine].tolist(), values[fine].tolist())
    lines.append(spread.series(name, arch=arch))
    return Panel(title, "update", y, lines, [Reference(1, "1")], log_y=True)


def _finding(runs: Runs) -> str:
    parts = []
    told = "{:.0%} of rising and of other updates are told by the curvature along the gradient"
    for said, entry in (
        ("preconditioned sharpness lies at {:.2f} of its edge", adam_at_its_edge),
        (told, rises_beyond_two_over_lr),
        ("sharpness grows {:.2g}-fold in warm-up", sharpens_in_warm_up),
    ):
        try:
            (first, *_) = entry.measure(runs)
        except MissingRuns:
            continue
        parts.append(said.format(first.judge()["mean"]))
    return f"In full-batch training {', '.join(parts)}." if parts else "No run is long enough to say anything."


@claim(
    "C56",
    figure="curvature:edge",
    stage="after training",
    must_read=False,
    paper=PAPER,
    sentence="Full-batch Adam trains at its edge of stability: preconditioned sharpness settles at 38 / lr",
    source="Cohen et al. 2022 (2207.14484), Fig. 1",
    statistic="median over the second half of a run of preconditioned sharpness over (2 + 2 beta1) / ((1 - beta1) lr), "
    "rows with a residual of 5 % or less, lr 1e-3; beside it lr 3e-4",
    threshold="R: within .8 to 1.25; X: < .5 (the paper names none: ours)",
    sweep="curvature:edge",
)
def adam_at_its_edge(runs: Runs) -> list[Effect]:
    """Return the median of to_edge over the second half of a run."""
    found = []
    for rate in RATES:
        try:
            own = full_batch_runs(runs, "preconditioned_sharpness", 0.9, rate)
        except MissingRuns:
            if rate == RATES[0]:
                raise
            continue
        values = {}
        for run in own:
            data = rows(run, "preconditioned_sharpness", "to_edge")
            late = data[data["step"] >= run.updates / 2]
            if len(late):
                values[run.seed] = float(late["to_edge"].median())
        regions = (Region(0.8, 1.25), Region(high=0.5)) if rate == RATES[0] else ()
        found.append(Effect(f"sharpness over its edge, lr {rate:g}", values, *regions, log=True, of=own))
    return found


@claim(
    "C57",
    figure="curvature:edge",
    stage="after training",
    must_read=False,
    paper=PAPER,
    sentence="Adam's loss rises precisely where the curvature along the gradient exceeds 2 / lr",
    source="2506.04805, abstract",
    statistic="without momentum (beta1 = 0): balanced share of rows of which g'Hg / g'g > 2 / lr, preconditioned, says "
    "whether the next training loss is higher",
    threshold="R: > .8; X: < .6 (the paper names none: ours)",
    sweep="curvature:edge",
)
def rises_beyond_two_over_lr(runs: Runs) -> list[Effect]:
    """Return the mean of two shares of a run's rows: of the rows whose update raised the training loss, the share with
    a curvature along the gradient above 2 / lr; of the others, the share without."""
    own = full_batch_runs(runs, "preconditioned_sharpness", 0.0)
    values, rising = {}, {}
    for run in own:
        data = rows(run, "preconditioned_sharpness", "along_gradient")
        loss = dict(zip(run.metrics["step"], run.metrics["loss"], strict=True))
        rate = dict(zip(run.metrics["step"], run.metrics["lr"], strict=True))
        known = [(t, v) for t, v in zip(data["step"], data["along_gradient"], strict=True) if t + 1 in loss]
        rose = np.array([loss[t + 1] > loss[t] for t, _ in known], bool)
        above = np.array([v * rate[t] > 2 for t, v in known], bool)
        if min(rose.sum(), (~rose).sum()) >= 5:
            values[run.seed] = float((above[rose].mean() + (~above[~rose]).mean()) / 2)
            rising[run.seed] = float(rose.mean())
    return [
        Effect("balanced share", values, Region(low=0.8), Region(high=0.6), of=own),
        Effect("share of rows that rise", rising, of=own),
    ]


@claim(
    "C58",
    figure="curvature:edge",
    stage="first updates",
    paper=PAPER,
    sentence="From a flat initialisation sharpness rises during warm-up (progressive sharpening)",
    source="Kalra and Barkeshli 2024 (2406.09405)",
    statistic="largest eigenvalue of the Hessian at the end of warm-up over that of row 0, full-batch Adam, lr 1e-3, "
    "both with a residual of 5 % or less",
    threshold="R: > 1.5; X: < 1 (the paper names none: ours)",
    sweep="curvature:edge",
    after="the bound on residuals came after the runs",
)
def sharpens_in_warm_up(runs: Runs) -> list[Effect]:
    """Return sharpness in the last row of warm-up over that of row 0, for runs in which both have converged."""
    own = full_batch_runs(runs, "sharpness", 0.9)
    values = {}
    for run in own:
        measured = run.frame("sharpness", ["value"])["step"]
        inside = measured[measured <= int(run.settings["train.warmup"])]
        data = rows(run, "sharpness", "value").set_index("step")["value"]
        ends = [data.get(step, math.nan) for step in (inside.min(), inside.max())] if inside.nunique() > 1 else []
        if ends and all(end > 0 for end in ends):
            values[run.seed] = float(ends[1] / ends[0])
    return [Effect("sharpness, end of warm-up over start", values, Region(low=1.5), Region(high=1), log=True, of=own)]
