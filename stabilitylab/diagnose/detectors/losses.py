"""Spikes, divergence and plateaus of the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ...verdict import LEVEL_NATS, RECOVERY, RISE, TOO_EARLY, Evaluation, divergence
from ..events import Event, detector
from ..evidence import Evidence, Grid
from ..series import LEVEL_ROWS, level, noise, until_broken
from .beginning import EXPLODED_LOSS, explosion, start, uniform

RECORD = "w.step(loss=loss)"
# A loss spike: the literature's 7 standard deviations (OLMo 2; AdaGC), robust ones here. The level is a median of
# the last rows, the noise that of first differences, so that a falling loss hides nothing. The floors keep the tiny
# noise of a flat or memorised loss from counting: shares of the level, and of the loss at the start.
SPIKE_SD = 7.0  # robust standard deviations
NOISE_ROWS = 100  # rows whose first differences are the noise
LEAST_ROWS = 10  # rows before a spike can be told
SPIKE_OF_LEVEL = 0.10  # of the level
SPIKE_OF_START = 0.02  # of the loss at the start
# Divergence of held-out or training nll is the verdict's (2 nats over the minimum, not undone within 5 %); of a loss
# whose unit is unknown: ending above its start (beginning.py) by this share of it.
DIVERGED_SHARE = 0.10  # of the first loss, above it
# A plateau at the unigram baseline is the verdict's "stuck" (stabilitylab/verdict.py).
# A plateau without a baseline: all rows together gained less than this share of the first level (of a loss that
# exploded at once, of what it was before; where the number of classes is known, of a uniform guess), ...
PLATEAU_GAIN = 0.02  # of the first level
# ... or the end gave back more than this share of all that had been gained; judged from this number of rows on.
PLATEAU_RELAPSE = 0.5  # of what had been gained
PLATEAU_ROWS = 20  # rows before a plateau can be told
# Without a baseline a loss that stands still early cannot be told from one that is stuck: the unigram entropy of
# natural text lies 30 to 40 % below the loss of a uniform guess, log V, where models start. Levels of the last half
# that differ by no more than so many robust standard deviations of a row stand still (a median of ten rows has .4 of
# them, and 500 such medians span 2.4).
FLAT_SD = 2.5  # robust standard deviations of a row, within which the last half of the rows stands still
MAY_BE_STUCK = 0.4  # of the loss at the start: a loss that fell by less and stands still leaves open if it is stuck
_MOST_SPIKES = 20  # one event each; more are a noisy loss


@detector(
    "loss_spike",
    "loss spike",
    reads={"loss": RECORD},
    least_rows=LEAST_ROWS,
    rule=(
        "Reads `nll`, else `loss`: more than `SPIKE_SD` robust standard deviations over the level, and over both floors"
    ),
    remedy=(
        "Look at the batch of its step and at the update before it; lower `lr` or clip gradients if spikes come again."
    ),
)
def loss_spike(evidence: Evidence) -> Iterator[Event]:
    grid = evidence.loss()
    if grid is None:
        return
    values, steps = until_broken(grid)
    if len(values) <= LEAST_ROWS:
        return
    levels = level(values)
    floor = np.maximum(SPIKE_OF_LEVEL * np.abs(levels), SPIKE_OF_START * abs(levels[LEVEL_ROWS - 1]))
    # only rows above the floor can be spikes, so the noise is computed for these rows alone
    high = np.flatnonzero(values[LEAST_ROWS:] > (levels + floor)[LEAST_ROWS - 1 : -1]) + LEAST_ROWS
    over_by, count = 0, 0
    for at in high.tolist():
        if at < over_by:  # still the spike before
            continue
        usual, sd = float(levels[at - 1]), noise(values[max(0, at - NOISE_ROWS) : at])
        bound = max(SPIKE_SD * sd, float(floor[at - 1]))
        if not values[at] > usual + bound:
            continue
        over = np.flatnonzero(values[at:] <= usual + bound / 2)
        end = at + int(over[0]) if len(over) else None
        peak = float(values[at:end].max())
        score = f"{(values[at] - usual) / sd:.3g} robust standard deviations" if sd else "no noise before"
        ended = "it did not come back" if end is None else f"it was back by step {steps[end]}, highest {peak:.3g}"
        yield Event(
            "loss_spike",
            "loss spike",
            **grid.first_seen(at),
            evidence=f"{grid.column} rose from its level of {usual:.3g} to {values[at]:.3g} at step {steps[at]} "
            f"({score}); {ended}",
            until=None if end is None else int(steps[end]),
            stands=end is None,
            strength=float(values[at] - usual) / bound,
            numbers={"value": float(values[at]), "level": usual, "sd": sd, "peak": peak},
        )
        count += 1
        if end is None or count == _MOST_SPIKES:
            return
        over_by = end + 1


@detector(
    "divergence",
    "divergence",
    reads={"loss": RECORD, "held_out_nll": "stabilitylab probe"},
    role="outcome",
    rule=(
        "Reads `held_out_nll`, else `nll`: 2 nats over the minimum, and not undone within 5 % of the run. For a "
        "`loss` of unknown unit: its end is over its start. It is a note below 50 updates, unless the loss is "
        "`EXPLODED_LOSS` over its start (`DIVERGED_SHARE`)"
    ),
    remedy="Lower `lr`, or add warm-up steps, unless an earlier event names another cause.",
)
def loss_divergence(evidence: Evidence) -> Iterator[Event]:
    """Apply the verdict's rule to an nll, the held-out one first. For a loss of unknown unit, compare its end with its
    start."""
    held_out, grid = evidence.metric("held_out_nll"), evidence.loss()
    for nll in (held_out, grid if grid is not None and grid.column == "nll" else None):
        if nll is not None:
            evaluations = [Evaluation(int(s), float(v), 0.0) for s, v in zip(*reversed(until_broken(nll)), strict=True)]
            if not evaluations:
                continue
            last = evaluations[-1].step
            found = divergence(evaluations, _total(evidence, last), last)
            if found is not None:
                yield _diverged(nll, found[0], found[1], _peak(nll) / RISE)
                return
    if grid is None or grid.column == "nll":
        return
    values, steps = until_broken(grid)
    if len(values) < LEAST_ROWS:
        return
    smooth, rows = level(values, 5), max(3, int(RECOVERY * len(values)))
    first = uniform(evidence, grid) or start(values)
    high = smooth > first + DIVERGED_SHARE * abs(first)
    if high[-rows:].all():
        at = last_stretch(high)
        text = (
            f"from step {steps[at]} on {grid.column} stays above its starting level of {first:.3g}; at the end it is "
            f"{smooth[-1]:.3g} (median of 5 rows)"
        )
        far = smooth[-1] - first > EXPLODED_LOSS * abs(first)
        event = _diverged(grid, int(steps[at]), text, (smooth[-1] - first) / abs(DIVERGED_SHARE * first or 1.0))
        yield event if far else replace(event, judged_from=TOO_EARLY)


def _diverged(grid: Grid, step: int, text: str, strength: float) -> Event:
    return Event(
        "divergence",
        "divergence",
        step,
        grid.phase,
        text,
        "failure",
        after=grid.last_before(step),
        probe=grid.column,
        strength=float(strength),
    )


@detector(
    "plateau",
    "plateau",
    reads={"loss": RECORD, "held_out_nll": "stabilitylab probe"},
    role="outcome",
    least_rows=PLATEAU_ROWS,
    rule=(
        "The state is `stuck`, if the unigram baseline is known ([States](states.md)). Else the loss never fell, or "
        "fell and came back, or stays at ln(classes), if the number of classes is known (`PLATEAU_GAIN`, "
        "`PLATEAU_RELAPSE`). It is a note that leaves the run open if the loss stays near its start, and below 50 "
        "updates"
    ),
    remedy="Try `lr` ten times lower and, if the loss fell at no rate, ten times higher; check the labels.",
)
def plateau(evidence: Evidence) -> Iterator[Event]:
    """Find a run that is stuck at the unigram baseline, if the baseline is known; else a loss that never fell, or that
    lost again what it had gained."""
    if len(evidence.steps) < PLATEAU_ROWS or next(loss_divergence(evidence), None) is not None:
        return
    if (held_out := evidence.metric("held_out_nll")) is not None and evidence.unigram is not None:
        yield from _at_unigram(evidence, held_out)
    elif (grid := evidence.loss()) is not None:
        yield from _without_baseline(evidence, grid)


def _at_unigram(evidence: Evidence, held_out: Grid) -> Iterator[Event]:
    """Yield a plateau if the verdict of the run is stuck, by the rule that every page and table uses."""
    verdict = evidence.verdict
    if verdict is None or verdict.state != "stuck":
        return
    gaps = held_out.values[:, 0] - float((evidence.unigram or {})["cross_entropy"])
    best = int(np.nanargmin(gaps))
    lowest = f"{-gaps[best]:.2f} nats below it at step {held_out.steps[best]}"
    before = f"its best was {lowest}" if gaps[best] < -LEVEL_NATS else "it was never below it"
    yield Event(
        "plateau",
        "plateau",
        verdict.step,
        held_out.phase,
        f"the validation loss is stuck since step {verdict.step}: {verdict.reason}; {before}",
        "failure",
        after=held_out.last_before(verdict.step),
        probe="held_out_nll",
        numbers={"nll_minus_unigram": verdict.nll_gap},
    )


def _without_baseline(evidence: Evidence, grid: Grid) -> Iterator[Event]:
    values, steps = until_broken(grid)
    if len(values) < PLATEAU_ROWS:
        return
    smooth = level(values)[LEVEL_ROWS // 2 :]
    steps, judged_from = steps[LEVEL_ROWS // 2 :], 0
    guess = uniform(evidence, grid)
    began = float(smooth[0]) if explosion(values) is None else start(values)
    first, lowest, last = began if guess is None else min(began, guess), float(smooth.min()), float(smooth[-1])
    gain, back = first - lowest, last - lowest
    if gain < PLATEAU_GAIN * abs(first):
        of = f"its first level of {first:.3g}"
        of = of if first == began else f"that of a uniform guess over {evidence.classes} classes, {first:.3g}"
        at, text = 0, f"{grid.column} never fell by more than {PLATEAU_GAIN:.0%} below {of}"
        judged_from = TOO_EARLY
    elif back > PLATEAU_RELAPSE * gain and back > SPIKE_OF_LEVEL * abs(lowest) and back > 3 * noise(values):
        at = last_stretch(smooth > lowest + PLATEAU_RELAPSE * gain)
        text = (
            f"{grid.column} fell to {lowest:.3g} at step {steps[int(smooth.argmin())]} and went {back / gain:.0%} of "
            f"the way back: it stays near {last:.3g} from step {steps[at]} on"
        )
    else:
        yield from _may_be_stuck(grid, smooth, steps, noise(values), evidence.classes)
        return
    step = int(steps[at]) if at else int(grid.steps[0])
    yield Event(
        "plateau",
        "plateau",
        step,
        grid.phase,
        text,
        "failure",
        after=grid.last_before(step),
        probe=grid.column,
        numbers={"first": first, "lowest": lowest, "last": last},
        judged_from=judged_from,
    )


def _may_be_stuck(grid: Grid, smooth: np.ndarray, steps: np.ndarray, sd: float, classes: int | None) -> Iterator[Event]:
    """Yield a note if the loss stands still so near its start that the model may have learned only the frequencies of
    the tokens. Yield a failure if the loss stands still at that of a uniform guess over the classes."""
    first, last = float(smooth[0]), float(smooth[-1])
    highest, lowest = np.maximum.accumulate(smooth[::-1])[::-1], np.minimum.accumulate(smooth[::-1])[::-1]
    at = last_stretch(highest - lowest <= FLAT_SD * sd)
    if len(smooth) - at < max(len(smooth) // 2, PLATEAU_ROWS):
        return
    guess = math.log(classes) if classes else math.nan
    if abs(last - guess) <= PLATEAU_GAIN * guess:
        yield Event(
            "plateau",
            "plateau",
            int(steps[at]),
            grid.phase,
            f"{grid.column} does not move from {last:.3g} since step {steps[at]}: the loss of a uniform guess over "
            f"{classes} classes is {guess:.3g}",
            "failure",
            after=int(steps[at - 1]) if at else None,
            probe=grid.column,
            numbers={"first": first, "last": last, "uniform": guess},
        )
        return
    if not 0 < first - last < MAY_BE_STUCK * first:
        return
    yield Event(
        "plateau",
        "plateau",
        int(steps[at]),
        grid.phase,
        f"{grid.column} does not move from {last:.3g} since step {steps[at]}, {(first - last) / first:.0%} below its "
        "first level; compare it with a baseline, such as the entropy of the labels' frequencies",
        "note",
        after=int(steps[at - 1]) if at else None,
        probe=grid.column,
        numbers={"first": first, "last": last},
        open="the model may be stuck on its plateau",
    )


def last_stretch(holds: np.ndarray) -> int:
    """Return the first row of the unbroken stretch that reaches to the end."""
    no = np.flatnonzero(~holds)
    return int(no[-1]) + 1 if len(no) else 0


def _peak(grid: Grid) -> float:
    values, _ = until_broken(grid)
    return float((values - np.minimum.accumulate(values)).max())


def _total(evidence: Evidence, last: int) -> int:
    """Return the number of updates that the run was meant to have, or else ``last``."""
    train = evidence.run.config.get("train")
    return int(train["steps"]) if isinstance(train, dict) and isinstance(train.get("steps"), int) else last
