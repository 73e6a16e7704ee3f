"""The display of a run while it trains: a live panel on a terminal, elsewhere a plain line from time to time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

from ..verdict import LEVEL_NATS, RISE
from .strips import lines, told
from .words import duration, number, signed, sparkline, state_style

if TYPE_CHECKING:
    from ..probes import Watcher
    from ..schema import Cells, Table
    from ..train.loop import Report

PLAIN_LINES = 16  # lines of a whole run where stderr is not a terminal
SHOWN = "grad_norm"  # the probe whose layers the panel shows by default
NAMES, NUMBERS = 14, 9  # letters of the panel's columns
COURSES = {"loss": "loss", "nll": "nll", "gradient norm": "grad_norm_total", "held-out nll": "held_out_nll"}
RECENT = 400  # values of a metric that are kept: more than a terminal is wide


class LiveDisplay:
    """The progress of a run on ``console``; a context manager, which restores the terminal at its end."""

    def __init__(self, console: Console, quiet: bool = False, shown: str = SHOWN) -> None:
        self.console, self.quiet, self.shown = console, quiet, shown
        self.header, self.steps, self.unigram_nll = "", 1, math.nan
        self.history: dict[str, deque[float]] = {}  # metric -> its latest values
        self.held_out: float | None = None
        self.broken = ""  # the first number that was not finite, and its place
        self.worst: str | None = None
        self.cells: tuple[int, Cells] | None = None  # (row, cells) of the probe that is shown
        self.seconds: deque[float] = deque(maxlen=20)
        self.started = time.perf_counter()
        self._live: Live | None = None

    def __enter__(self) -> LiveDisplay:
        if self.console.is_terminal and not self.quiet:  # show a panel at once, since model and data take seconds
            waiting = Text("making the model and reading the data", style="dim")
            self._live = Live(waiting, console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()

    def opened(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Print what is being trained, and the unigram baseline that it has to beat, once the run directory exists."""
        config = manifest["config"]
        model, self.steps = config["model"], config["train"]["steps"]
        self.unigram_nll = manifest["unigram"]["cross_entropy"]
        layers = [f"{model[f'{stack}_layers']}L" for stack in ("encoder", "decoder") if model[f"{stack}_layers"]]
        self.header = (
            f"{manifest['label']} {'-'.join(layers)}, {model['d_model']}-{model['d_ffn']}-{model['heads']}, "
            f"{manifest['parameters']:,} parameters, {config['data']['source'].split(':')[0]} data, "
            f"seed {config['train']['seed']}: {path}"
        )
        if self.quiet:
            return
        if self._live is not None:
            self._live.update(Text(self.header, style="bold"))
        elif not self.console.is_terminal:
            self._print(self.header)

    def _print(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)

    def show(self, report: Report) -> None:
        """Take in one update."""
        for name in COURSES.values():
            value = report.metrics.get(name)
            if value is not None:
                self.history.setdefault(name, deque(maxlen=RECENT)).append(value)
                if not math.isfinite(value) and not self.broken:
                    self.broken = f"{name.replace('_', ' ')} is {value} at step {report.row}"
        held_out = report.metrics.get("held_out_nll")
        self.held_out = self.held_out if held_out is None else held_out
        self.worst = worst_ln_input(report.watcher) or self.worst
        if report.watcher.last and (cells := report.watcher.last[2].get(self.shown)) is not None:
            self.cells = report.watcher.last[0], cells  # kept: not every row is probed
        self.seconds.append(report.seconds)
        if self.quiet:
            return
        with suppress(OSError):  # the run goes on if the terminal is gone
            if self._live is not None:
                self._live.update(self.panel(report))
            elif report.row % max(1, self.steps // PLAIN_LINES) == 0 or report.row + 1 == self.steps:
                self._print(self.line(report))

    def line(self, report: Report) -> str:
        metrics = report.metrics
        parts = [f"step {report.row + 1:>{len(str(self.steps))}}/{self.steps}"]
        parts += [f"loss {number(metrics.get('loss'))}", f"nll {number(metrics.get('nll'))}"]
        if self.held_out is not None:
            parts.append(f"held-out {number(self.held_out)} ({signed(self.held_out - self.unigram_nll)} unigram)")
        parts.append(f"grad norm {number(metrics.get('grad_norm_total'))}")
        if self.worst is not None:
            parts.append(f"worst LN input {self.worst}")
        return "  ".join([*parts, f"left {duration(self.time_left(report))}"])

    def panel(self, report: Report) -> Group:
        metrics, width = report.metrics, self.console.width
        course = max(8, min(64, width - NAMES - NUMBERS - 4))
        grid = RichTable.grid(padding=(0, 2, 0, 0))
        grid.add_column(width=NAMES, no_wrap=True)
        grid.add_column(min_width=NUMBERS, no_wrap=True)
        grid.add_column(no_wrap=True)
        for name, key in COURSES.items():
            values = self.history.get(key)
            if values:
                grid.add_row(name, number(values[-1]), Text(sparkline(values, course), style="cyan"))
        alpha = metrics.get("alpha")
        grid.add_row("learning rate", number(metrics.get("lr")), "" if alpha is None else f"alpha {alpha:.3f}")
        return Group(
            Text(self.header, style="bold"), self._progress(report, width), self._state(), grid, *self._layers(report)
        )

    def _progress(self, report: Report, width: int) -> Group:
        cost, elapsed = report.watcher.cost, time.perf_counter() - self.started
        first, left = f"step {report.row + 1}/{self.steps}", f"{duration(self.time_left(report))} left"
        line = RichTable.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(
            total=self.steps, completed=report.row + 1, width=max(8, min(40, width - len(first + left) - 6))
        )
        line.add_row(first, bar, left)
        tokens = report.metrics.get("tokens") or 0.0
        speed = (
            f"{tokens / report.seconds:,.0f} tokens/s, probes {100 * (cost.hooks + cost.step) / elapsed:.1f} %, "
            f"held-out passes {100 * cost.reference / elapsed:.1f} %"
            + (f", curvature {100 * cost.curvature / elapsed:.1f} %" if cost.curvature else "")
        )
        return Group(line, Text(speed, style="dim"))

    def _state(self) -> Text:
        """Return the held-out loss beside the unigram baseline, in the colour of its state; red if a number broke."""
        if self.broken:
            return Text(self.broken, style=state_style("failed"))
        if self.held_out is None:
            return Text("no held-out loss yet", style="dim")
        gap, lowest = self.held_out - self.unigram_nll, min(self.history["held_out_nll"])
        told = f"held-out loss {abs(gap):.3f} nats {'above' if gap > 0 else 'below'} the unigram baseline"
        if self.held_out > lowest + RISE:
            return Text(f"{told}, {self.held_out - lowest:.2f} above its lowest", style=state_style("diverged"))
        return Text(told, style=state_style("descending" if gap > -LEVEL_NATS else "learning"))

    def _layers(self, report: Report) -> list[Text | RichTable]:
        """Return a strip of cells for each stack, of the probe that is shown, in the last recorded row."""
        found: list[Text | RichTable] = []
        if self.cells is not None:
            row, cells = self.cells
            table = report.watcher.tables[self.shown]
            by = " by layer" if any(place.layer > 0 for place in table.rows) else ""
            found.append(Text(f"{self.shown.replace('_', ' ')} [{table.unit}]{by}, step {row}", style="bold"))
            found += self._strips(table, cells) if by else [Text(told(table, cells) or "nothing measured")]
        if self.worst:
            found.append(Text(f"{'worst LN input':<{NAMES}}  {self.worst}"))
        return found

    def _strips(self, table: Table, cells: Cells) -> Iterator[Text]:
        for stack, strip, said in lines(table, cells, max(10, self.console.width - NAMES - 2)):
            yield Text(f"{stack:<{NAMES}}  ").append_text(strip)
            yield Text(f"{'':<{NAMES}}  {said}", style=state_style("failed") if "not finite" in said else "dim")

    def time_left(self, report: Report) -> float:
        return (self.steps - report.row - 1) * sum(self.seconds) / len(self.seconds)


def worst_ln_input(watcher: Watcher) -> str | None:
    """Name the LayerNorm input that is largest relative to its shortcut in the last recorded row; None if no row has
    one.

    Inputs are relative, since DeepNorm's shortcut is alpha sqrt(d) by construction. They are absolute if the model
    shows no shortcut.
    """
    cells = watcher.last[2].get("ln_input") if watcher.last else None
    if cells is None:
        return None
    table = watcher.tables["ln_input"]
    value, shortcut = (cells.values[:, table.columns.index(name)] for name in ("value", "shortcut"))
    excess = np.nan_to_num(np.where(np.isnan(shortcut), value, value / shortcut), nan=np.inf)
    worst = int(excess.argmax())
    row = table.rows[worst]
    place = f"{row.stack} {row.layer} {row.sublayer}" if row.layer else row.site
    return f"{place}: {number(float(value[worst]))}"
