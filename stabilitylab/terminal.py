"""What a run shows while it trains: a live panel on a terminal, one plain line now and then elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

if TYPE_CHECKING:
    from .probes import Watcher
    from .store import Run
    from .train.loop import Report

BARS = "▁▂▃▄▅▆▇█"
PLAIN_LINES = 16  # lines of a whole run where stderr is not a terminal


def sparkline(values: list[float], width: int = 32) -> str:
    """The last ``width`` values as block characters between their minimum and maximum; non-finite ones as ``x``."""
    shown = values[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    low, span = (min(finite), max(finite) - min(finite)) if finite else (0.0, 0.0)
    return "".join(
        "x" if not math.isfinite(value) else BARS[int((value - low) / span * (len(BARS) - 1) + 0.5) if span else 0]
        for value in shown
    )


def number(value: float | None) -> str:
    """Three decimals where they hold the number, scientific notation elsewhere; an exact zero is a plain 0."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if not math.isfinite(value) or 0.1 <= abs(value) < 1000:
        return f"{value:.3f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e5 else f"{value:.2e}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class LiveDisplay:
    """Progress of a run on ``console``; a context manager, so that the terminal is left as it was found."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self.console, self.quiet = console, quiet
        self.header, self.steps, self.unigram_nll = "", 1, math.nan
        self.history: dict[str, deque[float]] = {}
        self.held_out: float | None = None
        self.worst: str | None = None
        self.seconds: deque[float] = deque(maxlen=20)
        self.started = time.perf_counter()
        self._live: Live | None = None

    def __enter__(self) -> LiveDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()

    def opened(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """The run directory exists: what is being trained, and the unigram baseline that it has to beat."""
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
        if self.console.is_terminal:
            self._live = Live(Text(self.header), console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
        else:
            self._print(self.header)

    def _print(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)

    def show(self, report: Report) -> None:
        """Take in one update."""
        for name in ("loss", "nll", "grad_norm_total"):
            value = report.metrics.get(name)
            if value is not None:
                self.history.setdefault(name, deque(maxlen=64)).append(value)
        self.held_out = report.metrics.get("held_out_nll") or self.held_out
        self.worst = worst_ln_input(report.watcher) or self.worst
        self.seconds.append(report.seconds)
        if self.quiet:
            return
        with suppress(OSError):  # the terminal went away; the run need not
            if self._live is not None:
                self._live.update(self.panel(report))
            elif report.row % max(1, self.steps // PLAIN_LINES) == 0 or report.row + 1 == self.steps:
                self._print(self.line(report))

    def line(self, report: Report) -> str:
        metrics = report.metrics
        parts = [f"step {report.row + 1:>{len(str(self.steps))}}/{self.steps}"]
        parts += [f"loss {number(metrics.get('loss'))}", f"nll {number(metrics.get('nll'))}"]
        if self.held_out is not None:
            parts.append(f"held-out {number(self.held_out)} ({self.held_out - self.unigram_nll:+.3f} unigram)")
        parts.append(f"grad norm {number(metrics.get('grad_norm_total'))}")
        if self.worst is not None:
            parts.append(f"worst LN input {self.worst}")
        return "  ".join([*parts, f"left {duration(self.time_left(report))}"])

    def panel(self, report: Report) -> Group:
        metrics, tokens = report.metrics, report.metrics.get("tokens") or 0.0
        grid = RichTable.grid(padding=(0, 2))
        for name, key in (("loss", "loss"), ("nll", "nll"), ("gradient norm", "grad_norm_total")):
            value = metrics.get(key)
            extra = "" if key != "nll" or value is None else f"{value - self.unigram_nll:+.3f} to unigram"
            values = list(self.history.get(key, ()))
            grid.add_row(name, number(value), Text(sparkline(values), style="cyan"), extra)
        if self.held_out is not None:
            grid.add_row(
                "held-out nll", number(self.held_out), "", f"{self.held_out - self.unigram_nll:+.3f} to unigram"
            )
        if self.worst is not None:
            grid.add_row("worst LN input", self.worst)
        alpha = metrics.get("alpha")
        grid.add_row("learning rate", number(metrics.get("lr")), "" if alpha is None else f"alpha {alpha:.3f}")
        cost = report.watcher.cost
        elapsed = time.perf_counter() - self.started
        status = RichTable.grid(padding=(0, 2))
        status.add_row(
            f"step {report.row + 1}/{self.steps}",
            ProgressBar(total=self.steps, completed=report.row + 1, width=32),
            f"{duration(self.time_left(report))} left",
            f"{tokens / report.seconds:,.0f} tokens/s",
            f"probes {100 * (cost.hooks + cost.step) / elapsed:.1f} %",
            f"held-out passes {100 * cost.reference / elapsed:.1f} %",
        )
        return Group(Text(self.header, style="bold"), status, grid)

    def time_left(self, report: Report) -> float:
        return (self.steps - report.row - 1) * sum(self.seconds) / len(self.seconds)


def worst_ln_input(watcher: Watcher) -> str | None:
    """The LayerNorm input that is largest relative to its shortcut, in the row recorded last; None if not recorded.

    Relative, since DeepNorm's shortcut is alpha sqrt(d) by construction; absolute where the model shows no shortcut.
    """
    cells = watcher.last[2].get("ln_input") if watcher.last else None
    if cells is None:
        return None
    table = watcher.tables["ln_input"]
    value, shortcut = (cells.values[:, table.columns.index(name)] for name in ("value", "shortcut"))
    excess = np.nan_to_num(np.where(np.isnan(shortcut), value, value / shortcut), nan=np.inf)
    worst = int(excess.argmax())
    row = table.rows[worst]
    return f"{row.stack} {row.layer} {row.sublayer}: {number(float(value[worst]))}"


def summary(run: Run) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table by depth: first, middle, last layer of each stack; first and last recorded row.

    Rows of a layer are combined by the table's own rule (root sum of squares of norms), or averaged where it has none;
    what is measured at a stack's output stands under its last layer.
    """
    model = run.config["model"]
    places = [
        (stack, layer)
        for stack in ("encoder", "decoder")
        if (layers := model[f"{stack}_layers"])
        for layer in sorted({1, (layers + 1) // 2, layers})
    ]
    tops = dict(places)  # the last place of a stack wins
    body: list[list[str]] = []
    for name in run.tables:
        table = run.table(name)
        column = table.main
        frame = run.frame(name, columns=[column], by="layer" if table.total else None)
        if not frame["layer"].to_numpy().any():
            frame["layer"] = [tops.get(str(stack), 0) for stack in frame["stack_name"]]
        inside = frame[(frame["layer"] > 0) & frame[column].notna()]
        grid = inside.pivot_table(column, "step", ["stack_name", "layer"], aggfunc="mean", observed=True)
        for step in dict.fromkeys([*grid.index[:1], *grid.index[-1:]]):  # one line where there is one step
            at = grid.loc[step]
            body.append([name, str(step), *(number(at.get(place)) for place in places)])
    return ["probe", "step", *(f"{stack[:3]} {layer}" for stack, layer in places)], body
