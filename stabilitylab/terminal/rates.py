"""The progress of a search for a learning rate: a live table on a terminal, a plain line for each trial elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..lr_find.search import PLANNED
from .words import duration, state_style

if TYPE_CHECKING:
    from ..lr_find import RateResult, RateTrial

NARROW, COLUMNS, MORE = 100, 5, 8  # the table shows the latest 5 rungs on a terminal below 100 columns, else 8


class RateDisplay:
    """The trials of a search by rate and rung; a context manager, which restores the terminal at its end."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self.console, self.quiet = console, quiet
        self.rungs: Sequence[int] = ()
        self.scores = "loss"
        self._now: dict[tuple[float, int, int], tuple[int, int, float]] = {}  # rate, warm-up, seed -> update, of, loss
        self._results: dict[tuple[float, int], dict[int, dict[int, RateResult]]] = {}  # rate, warm-up -> rung -> seed
        self._began = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> RateDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()

    def said(self, sentence: str) -> None:
        """Print a sentence above the table."""
        if not self.quiet:
            (self._live.console if self._live is not None else self.console).print(
                sentence, highlight=False, markup=False, soft_wrap=not self.console.is_terminal
            )

    def planned(self, rungs: Sequence[int], scores: str) -> None:
        """Begin the table of a search; a former table stays on the screen above it."""
        self.rungs, self.scores = rungs, scores
        self._results, self._now = {}, {}
        if self._live is None and self.console.is_terminal and not self.quiet:
            self._live = Live(self.table(), console=self.console, refresh_per_second=4, transient=True)
            self._live.start()

    def moved(self, trial: RateTrial, update: int, loss: float) -> None:
        """Take in an update of a trial."""
        self._now[trial.rate, trial.warmup, trial.seed] = update, trial.updates, loss
        self._update()

    def ended(self, trial: RateTrial, result: RateResult) -> None:
        """Take in the end of a trial."""
        self._now.pop((trial.rate, trial.warmup, trial.seed), None)
        self.known(trial, result)
        if not self.quiet and self._live is None:
            self.said(line(trial, result))

    def known(self, trial: RateTrial, result: RateResult) -> None:
        """Take in a trial that ended before."""
        seeds = self._results.setdefault((trial.rate, trial.warmup), {}).setdefault(trial.updates, {})
        seeds[trial.seed] = result
        self._update()

    def table(self) -> Group:
        """Return the table: a row for each rate, a column for each rung, and the update of the running trial."""
        rungs = list(self.rungs)[-(COLUMNS if self.console.width < NARROW else MORE) :]
        rows = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
        rows.add_column("rate", justify="right", no_wrap=True, min_width=10)
        for rung in rungs:
            rows.add_column(f"{rung:,}", justify="right", no_wrap=True, min_width=max(7, len(f"{rung:,}")))
        rows.add_column("now", no_wrap=True, overflow="ellipsis")
        keys = sorted({*self._results, *((rate, warmup) for rate, warmup, _ in self._now)})
        lowest = {rung: self._lowest(rung) for rung in rungs}
        for key in keys:
            rate, warmup = key
            name = f"{rate:.3g}" if warmup == PLANNED else f"{rate:.3g} w{warmup}"
            cells = [self._cell(self._results.get(key, {}).get(rung, {}), lowest[rung]) for rung in rungs]
            rows.add_row(name, *cells, self._running(key))
        spent = duration(time.monotonic() - self._began)
        return Group(Text(f"{self.scores} by rate and updates, {spent} so far", style="bold"), rows)

    def _lowest(self, rung: int) -> float:
        means = [_mean(own.get(rung, {})) for (_, warmup), own in self._results.items() if warmup == PLANNED]
        return min((mean for mean in means if math.isfinite(mean)), default=math.nan)

    def _cell(self, seeds: dict[int, RateResult], lowest: float) -> Text:
        if not seeds:
            return Text("")
        mean = _mean(seeds)
        if not math.isfinite(mean):
            return Text("failed", style=state_style("failed"))
        return Text(f"{mean:.3f}", style="bold green" if mean == lowest else "")

    def _running(self, key: tuple[float, int]) -> Text:
        own = [(seed, now) for (rate, warmup, seed), now in self._now.items() if (rate, warmup) == key]
        told = [f"{update}/{of} {loss:.3f}" + (f" seed {seed}" if seed else "") for seed, (update, of, loss) in own]
        return Text(", ".join(told), style="cyan")

    def _update(self) -> None:
        if self._live is not None:
            with suppress(OSError):  # the search goes on if the terminal is gone
                self._live.update(self.table())


def line(trial: RateTrial, result: RateResult) -> str:
    """Return the end of a trial in a line."""
    own = "" if trial.warmup == PLANNED else f", warm-up {trial.warmup}"
    seed = f", seed {trial.seed}" if trial.seed else ""
    loss = f"failed: {result.failed}" if result.failed else f"loss {result.loss:.4f}"
    return f"rate {trial.rate:.3g}{own}{seed}, {trial.updates:,} updates: {loss}"


def _mean(seeds: dict[int, RateResult]) -> float:
    if not seeds:
        return math.nan
    losses = [math.inf if one.failed else one.loss for one in seeds.values()]
    return sum(losses) / len(losses)
