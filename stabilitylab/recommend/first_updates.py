"""What the first updates tell: the recipe's own, and those of a learning-rate range test."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean as mean
from statistics import median
from typing import Any

import torch

from ..config import Config, ProbesConfig, Section
from ..data import Dataset
from ..schema import Cells, Row, Table
from ..store import AbsentRun
from ..train.loop import Trainer
from .columns import BELOW, BREAK, EPS_SHARE, PER_DECADE, RATES, UPDATES
from .initialisation import worst

Recorded = dict[str, tuple[Table, Cells]]


class Kept(AbsentRun):
    """Takes what a run directory takes, and keeps the rows at hand."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.rows: dict[int, tuple[Mapping[str, float | None], Mapping[str, Cells]]] = {}

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None:
        self.rows[step] = (metrics, tables)

    def metric(self, step: int, name: str) -> float:
        """NaN where it was not recorded."""
        value = self.rows[step][0].get(name)
        return math.nan if value is None else value


def first_updates(
    config: Config, dataset: Dataset, device: torch.device, has_norms: bool
) -> tuple[dict[str, float], dict[str, Any]]:
    """(numbers by column, evidence) of ``UPDATES`` updates of the recipe, its warm-up shortened to them."""
    last = UPDATES - 1
    names = ["residual_norm"] + ["ln_input"] * has_norms + ["adam"] * (config.train.optimizer == "adamw")
    probes = ProbesConfig(names=tuple(names), every=last, update_every=last)
    train = _with(config.train, warmup=min(config.train.warmup, UPDATES))
    run = Kept()
    trainer = Trainer(_with(config, train=train, probes=probes), dataset, run, device)
    try:
        seconds = [_timed(trainer, device) for _ in range(UPDATES)]
        trainer.model.set_row(UPDATES)
        trainer.watcher.finish()
    finally:
        trainer.watcher.close()
    tables = trainer.watcher.tables
    at = {row: {name: (tables[name], cells) for name, cells in run.rows[row][1].items()} for row in (0, last)}
    losses = [run.metric(row, name) for row in range(UPDATES) for name in ("loss", "grad_norm_total")]
    held_out = [run.metric(row, "held_out_nll") for row in (0, UPDATES)]
    numbers = {
        "growth_start": worst(growth(at[0])),
        "growth": worst(growth(at[last])),
        "progress": (held_out[0] - held_out[1]) / UPDATES,
        "seconds": median(seconds[1:last]),  # the others are probed
        "parameters": float(sum(parameter.numel() for parameter in trainer.model.parameters())),
    }
    floor = at_the_floor(at[last]["adam"]) if "adam" in at[last] else {}
    finite = all(map(math.isfinite, [*losses, *held_out]))
    return numbers, {"held_out_nll": held_out, "finite_losses": finite, "at_adams_floor": floor}


def _timed(trainer: Trainer, device: torch.device) -> float:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    began = clock()
    trainer.update()
    trainer.row += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - began


def growth(tables: Recorded) -> dict[str, float]:
    """Stack -> log10 of the last over the first layer's mean norm input; of the stream where no norm stands on it."""
    by_layer: dict[str, dict[int, list[float]]] = {}
    for row, value in _on_the_stream(tables):
        by_layer.setdefault(row.stack, {}).setdefault(row.layer, []).append(value)
    found = {}
    for stack, layers in by_layer.items():
        first, last = (mean(layers[layer]) for layer in (min(layers), max(layers)))
        usable = 0 < first < math.inf and 0 < last < math.inf
        found[stack] = math.log10(last / first) if usable else math.nan
    return found


def _on_the_stream(tables: Recorded) -> list[tuple[Row, float]]:
    """Norms on the residual stream have a shortcut; those inside a branch, of other widths, have none."""
    for name in ("ln_input", "residual_norm"):
        table, cells = tables.get(name, (None, None))
        if table is None or cells is None:
            continue
        tap = table.columns.index("shortcut") if "shortcut" in table.columns else 0
        own = [
            (row, float(values[0]))
            for row, values in zip(table.rows, cells.values, strict=True)
            if row.layer and (name == "residual_norm" or (tap and not math.isnan(values[tap])))
        ]
        if own:
            return own
    return []


def at_the_floor(table: tuple[Table, Cells]) -> dict[str, float]:
    """Layer ("decoder 1") -> the largest share of entries of a sub-layer at Adam's floor, where over the bound."""
    layout, cells = table
    shares: dict[str, float] = {}
    for row, value in zip(layout.rows, cells.values[:, layout.columns.index("eps_floor")].tolist(), strict=True):
        if row.layer and value > EPS_SHARE:
            place = f"{row.stack} {row.layer}"
            shares[place] = max(value, shares.get(place, 0.0))
    return shares


class Ramp(Trainer):
    """Trains at a rate that grows tenfold in ``PER_DECADE`` updates, from lr / ``BELOW`` on."""

    def rate(self, row: int) -> float:
        return self.config.train.lr * ramp(row)


def range_test(config: Config, dataset: Dataset, device: torch.device) -> tuple[dict[str, float], dict[str, Any]]:
    """(headroom, evidence) of a fresh model at growing rates. Smith 2017 (arXiv:1506.01186)."""
    probes = ProbesConfig(names=("none",), every=1, update_every=1)
    run = Kept()
    trainer = Ramp(_with(config, probes=probes), dataset, run, device)
    try:
        losses, broke = until_it_breaks(_held_out(trainer, run))
    finally:
        trainer.watcher.close()
    return {"headroom": headroom(losses)}, {"headroom_broke": broke, "range_test": losses}


def _held_out(trainer: Ramp, run: Kept) -> Iterator[float]:
    """The held-out loss at the start and after each update."""
    for row in range(RATES):
        trainer.update()
        trainer.row += 1
        trainer.watcher.flush()
        yield run.metric(row, "held_out_nll")
    trainer.model.set_row(RATES)
    trainer.watcher.finish()
    yield run.metric(RATES, "held_out_nll")


def until_it_breaks(losses: Iterable[float]) -> tuple[list[float], bool]:
    """The losses up to the first that is not finite or lies ``BREAK`` over the lowest before it; whether one did."""
    seen: list[float] = []
    for loss in losses:
        seen.append(loss)
        if not math.isfinite(loss) or loss > min(seen) + BREAK:
            return seen, True
    return seen, False


def ramp(row: int) -> float:
    """The rate of update ``row`` of a range test, over lr."""
    return 10 ** (row / PER_DECADE) / BELOW


def headroom(losses: Sequence[float]) -> float:
    """The rate, over lr, of the update that led to the last of these losses, the first being that of the start."""
    return ramp(max(len(losses) - 2, 0))


def _with(section: Section, **changes: Any) -> Any:
    return section.model_copy(update=changes)
