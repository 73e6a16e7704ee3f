"""The harm of a trouble: a score after a replay, against the healthy level; and the window that is replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..probes import evaluation
from .batches import restored
from .flight import Flight, Level
from .replay import DeclaredLoop, ReplayChange, UpdateReplay, loss_of

SCORED = 6  # batches before the trouble that a score is the mean of
SPREADS, SHARE = 4.0, 0.05  # margin above the healthy score: robust deviations of the loss before, or a share of it


Progress = Callable[[str], object]


def unheard(sentence: str) -> None:
    """Ignore a sentence about the progress."""


@dataclass(frozen=True)
class Window:
    """Updates that are replayed: from the snapshot ``start`` to ``stop``. ``onset``: the update before which weights
    count as healthy; ``trouble``: the row whose loss left its level. ``scored``: numbers of the healthy batches that
    scores are taken on, in eval mode."""

    start: int
    onset: int
    trouble: int
    stop: int
    scored: tuple[int, ...]


def window_of(flight: Flight, onsets: Sequence[int]) -> Window | None:
    """Return the window of the flight's trouble; ``onsets``: updates at which findings begin. None without a trouble
    that can be replayed: a snapshot before it, its batches, and healthy batches to score."""
    if flight.trouble is None:
        return None
    trouble = int(flight.trouble["step"])
    first = min(flight.snapshots)
    onset = min([trouble, *(step for step in onsets if first <= step < trouble)])
    starts = [step for step in flight.snapshots if step <= onset]
    if not starts:
        return None
    start = max(starts)
    if start == onset and len(starts) > 1:
        start = sorted(starts)[-2]  # some healthy updates, so that controls have room
    known = [update.step for update in flight.replayable(start)]
    if not known or known[-1] < trouble:
        return None
    before = [update for step, update in sorted(flight.updates.items()) if step < onset]
    scored = [number for update in before for number in update.batches][-SCORED:]
    if not scored:
        scored = flight.updates[start].batches
    return Window(start, onset, trouble, known[-1] + 1, tuple(scored))


@dataclass
class Healthy:
    """The healthy level: the score of the weights before the onset, and the margin above it that is no harm."""

    score: float
    margin: float

    def is_harmed(self, score: float) -> bool:
        return not math.isfinite(score) or score > self.score + self.margin


class Bench:
    """Runs replays of one window and scores the weights that they end with; counts the updates that this took.
    ``progress`` gets the sentences that a reader may wait for."""

    def __init__(self, flight: Flight, loop: DeclaredLoop, window: Window, progress: Progress = unheard) -> None:
        self.flight, self.loop, self.window, self.progress = flight, loop, window, progress
        self.updates = 0

    def score_after(self, change: ReplayChange | None = None, stop: int | None = None) -> float:
        """Replay the window with one change; return the score at its end. A run that is not finite ends early."""
        replay, window = UpdateReplay(self.flight, self.loop, change), self.window
        try:
            for one in replay.run(window.start, window.stop if stop is None else stop):
                if not math.isfinite(one.loss):
                    return math.inf
        finally:
            self.updates += replay.updates
        return self.score()

    def score(self) -> float:
        """Return the mean loss of the scored batches of all processes, in eval mode."""
        with evaluation(self.loop.model), torch.no_grad():
            losses = [
                float(loss_of(self.loop, restored(self.flight.batches[number], self.loop.device), self.loop.replica))
                for number in self.window.scored
            ]
        return self.loop.mean(float(np.mean(losses)))

    def healthy(self) -> Healthy:
        """Return the healthy level of the window."""
        level = self.flight.level(self.window.onset)
        if level is None:
            known = [loss for at, loss in self.flight.losses if at < self.window.onset and math.isfinite(loss)]
            level = Level(float(np.median(known)) if known else 0.0, 0.0)
        score = self.score_after(stop=self.window.onset)
        return Healthy(score, max(SPREADS * level.spread, SHARE * abs(level.median)))
