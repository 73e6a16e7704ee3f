"""The labels of a run of the second corpus: event, collapse, too fast to learn well. They are never mixed.

All are made of the kept columns of the run and of its twin, by numbers alone, so that labels can be made again.

- **Event**: a loss or gradient norm that is not finite; a rise of the training loss that stays; a spike of at least
  three rows. The level of a row is the median of the last 10 training losses. A rise begins at the first row whose
  level is more than b = max(0.5 nats, 3 s) above the lowest level so far (from row 20 on; s: the robust standard
  deviation of one row over the 100 rows before). It stays if in the 50 rows from there on no level comes back to the
  lowest level + b / 2. A rise that comes back is not an event; its rows are kept. A rise that has fewer than 50 rows
  left, or a number that is not finite behind it, is decided there: not finite makes it stay, the end leaves it open.
  A spike is a stretch of rows whose own losses are more than max(1 nat, 7 s) above the lowest level so far; a stretch
  of one or two rows is a blip, which is no event. Stretches with fewer than three lower rows between them are one. A
  spike in a rise, or one that goes over into it, is one event with it, a rise.
- **Full-blown**: the first row of a rise at which its level is at half of its height over the lowest level, or 1 nat,
  whichever is less; the first row of a spike; the row that is not finite. Leads are counted to this row.
- **Collapse**: a state that holds at every evaluation up to the last, in at least five of them (50 rows), and that the
  twin does not have at its last evaluation. ``attention``: the entropy of at least half of the attention modules is
  below .05 of its ceiling, and the held-out loss is at least .1 nats above the twin's at the last evaluation (heads
  that look at one token are usual, and no harm by themselves). ``rank``: the mean cosine of a token with the others of
  its sentence is at least .99 in the last layer of a stack. ``dead``: at least a quarter of the sub-layers of a stack
  have a gradient of at most 1e-6 of the stack's median, or at least a quarter of the ReLU blocks have less than one
  active entry in a thousand. ``source``: another sentence's source costs less than .1 nats a token, and the twin's
  costs .1 or more.
- **Too fast to learn well**: the held-out loss is at least .25 nats above the twin's at every evaluation up to the
  last, in at least five of them, without an event and without a collapse. Docs and code do not call it a failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stabilitylab.diagnose.detectors.losses import NOISE_ROWS
from stabilitylab.diagnose.series import LEVEL_ROWS, level, noise

FIRST = 20  # rows before this one have no level to rise over
RISE_NATS, RISE_SD = 0.5, 3.0  # a rise: the level over the lowest level
SPIKE_NATS, SPIKE_SD = 1.0, 7.0  # a spike: a row over the lowest level
SPIKE_ROWS = 3  # rows of a spike that is an event; shorter ones are blips
STAYS = 50  # rows in which a rise that is none comes back
FULL_NATS = 1.0  # nats over the lowest level at which an event is full-blown at the latest
LASTS = 5  # evaluations up to the last in which a state holds
BEHIND_NATS = 0.25  # nats a token above the twin's held-out loss
COST_NATS = 0.1  # nats a token above the twin's held-out loss, which a collapse of attention costs
SOURCE_NATS = 0.1  # nats a token that the source of a decoder that reads it is worth
STATES = {"attention": ("attention_spent", 0.5), "rank": ("tokens_alike", 0.99), "dead": ("dead", 0.25)}
Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Happened:
    """An event: ``kind``, the row at which it began, the row at which it was full-blown, its ``height`` in nats over
    the lowest level (inf: not finite), and its ``length`` in rows (None: it lasted to the end)."""

    kind: str
    began: int
    full: int
    height: float
    length: int | None = None


@dataclass(frozen=True)
class Labels:
    """The labels of a run. ``event``: the first; ``collapse``: (kind, row) of the first that lasts; ``slow``: the row
    from which the run is behind its twin to the end, whatever else it has; ``passing``: rows of blips and of rises that
    came back; ``undecided``: the first row of what the end of the run leaves open."""

    event: Happened | None = None
    collapse: tuple[str, int] | None = None
    slow: int | None = None
    passing: tuple[int, ...] = ()
    undecided: int | None = None

    @property
    def failed(self) -> int | None:
        """The first row of a failure, which is an event (full-blown) or a collapse; None without either."""
        rows = [] if self.event is None else [self.event.full]
        return min([*rows, *([] if self.collapse is None else [self.collapse[1]])], default=None)

    @property
    def outcome(self) -> str:
        """``event``, ``collapse``, ``both``, ``slow`` (too fast to learn well), ``open`` or ``healthy``."""
        if self.event and self.collapse:
            return "both"
        if self.event or self.collapse:
            return "event" if self.event else "collapse"
        if self.slow is not None:
            return "slow"
        return "healthy" if self.undecided is None else "open"


def labels(own: Columns, twin: Columns | None) -> Labels:
    """Return the labels of a run with columns (rows,): ``nll``, ``gradient``, and where there was an evaluation
    ``held_out``, ``attention_spent``, ``tokens_alike``, ``dead``, ``silent``, ``source_worth`` (NaN elsewhere).
    ``twin``: those of its twin, None for a twin, which is behind nothing and collapses beside nothing."""
    loss, gradient = own["nll"], own["gradient"]
    broken = np.flatnonzero(~(np.isfinite(loss) & np.isfinite(gradient)))
    end = int(broken[0]) if len(broken) else None
    rise, back, undecided = risen(loss[:end], end is not None)
    spike, blips = spiked(loss[:end], end is not None)
    known = _joined(rise, spike)
    if end is not None:
        known.append(Happened("not finite", end, end, float("inf")))
    event = min(known, key=lambda one: (one.began, one.full), default=None)
    passing = tuple(sorted({*back, *blips}))
    if event is not None:
        passing, undecided = tuple(row for row in passing if row < event.began), None
    collapse = None if twin is None else collapsed(own, twin)
    slow = None if twin is None else behind(own, twin)
    return Labels(event, collapse, slow, passing, undecided)


def risen(loss: np.ndarray, breaks: bool = False) -> tuple[Happened | None, tuple[int, ...], int | None]:
    """Return the first rise that stays, the first rows of those that came back before, and that of one that is open.
    ``breaks``: a number that is not finite follows the last loss."""
    levels, back = level(loss), list[int]()
    row = FIRST
    while row < len(loss):
        lowest = float(levels[LEVEL_ROWS - 1 : row].min())
        bound = RISE_NATS
        if levels[row] > lowest + bound:
            bound = max(bound, RISE_SD * noise(loss[max(0, row - NOISE_ROWS) : row]))
        if levels[row] <= lowest + bound:
            row += 1
            continue
        after = np.flatnonzero(levels[row : row + STAYS] <= lowest + bound / 2)
        if len(after):
            back.append(row)
            row += int(after[0]) + 1
        elif len(loss) - row < STAYS and not breaks:
            return None, tuple(back), row
        else:
            return _event("rise", loss, row, len(loss), lowest, levels), tuple(back), None
    return None, tuple(back), None


def spiked(loss: np.ndarray, breaks: bool = False) -> tuple[Happened | None, tuple[int, ...]]:
    """Return the first spike of three rows or more, and the first rows of shorter ones before it. One that reaches the
    end of the run is a spike if it has three rows, or if a number that is not finite follows it (``breaks``)."""
    levels, blips = level(loss), list[int]()
    row = FIRST
    while row < len(loss):
        lowest = float(levels[LEVEL_ROWS - 1 : row].min())
        bound = SPIKE_NATS
        if loss[row] > lowest + bound:
            bound = max(bound, SPIKE_SD * noise(loss[max(0, row - NOISE_ROWS) : row]))
        if loss[row] <= lowest + bound:
            row += 1
            continue
        end, low = row + 1, 0
        for at in range(row + 1, len(loss)):
            low = low + 1 if loss[at] <= lowest + bound else 0
            if low == SPIKE_ROWS:
                break
            end = at + 1 if not low else end
        lasted = end == len(loss)
        if end - row >= SPIKE_ROWS or (lasted and breaks):
            return _event("spike", loss, row, end, lowest, loss, None if lasted else end - row), tuple(blips)
        blips.append(row)
        row = end
    return None, tuple(blips)


def _joined(rise: Happened | None, spike: Happened | None) -> list[Happened]:
    """Return both, as one rise if the spike goes over into the rise."""
    if rise is None or spike is None:
        return [one for one in (rise, spike) if one is not None]
    end = spike.began + (spike.length if spike.length is not None else rise.began)
    if rise.began <= end + LEVEL_ROWS:
        began, full = min(rise.began, spike.began), min(rise.full, spike.full)
        return [Happened("rise", began, full, max(rise.height, spike.height))]
    return [rise, spike]


def _event(
    kind: str, loss: np.ndarray, began: int, end: int, lowest: float, of: np.ndarray, length: int | None = None
) -> Happened:
    """Return the event that lasts from ``began`` to before ``end``; its height is the largest of ``of`` there."""
    height = float(of[began:end].max()) - lowest
    high = np.flatnonzero(of[began:end] >= lowest + min(height / 2, FULL_NATS))
    return Happened(kind, began, began + int(high[0]), height, length)


def collapsed(own: Columns, twin: Columns) -> tuple[str, int] | None:
    """Return the kind and the first row of the collapse that began first; None without one."""
    found = []
    for kind, (column, bound) in STATES.items():
        if kind == "attention" and not _last(_more(own, twin)) >= COST_NATS:
            continue
        columns = (column, "silent") if kind == "dead" else (column,)
        above = [name for name in columns if not _last(twin[name]) >= bound]
        rows = [row for name in above if (row := _lasting(own[name], own[name] >= bound)) is not None]
        found += [(min(rows), kind)] if rows else []
    if _last(twin["source_worth"]) >= SOURCE_NATS:
        worth = own["source_worth"]
        if (row := _lasting(worth, worth < SOURCE_NATS)) is not None:
            found.append((row, "source"))
    return (min(found)[1], min(found)[0]) if found else None


def behind(own: Columns, twin: Columns) -> int | None:
    """Return the row from which the held-out loss is behind the twin's to the end; None if it is not."""
    more = _more(own, twin)
    return _lasting(more, more >= BEHIND_NATS)


def _more(own: Columns, twin: Columns) -> np.ndarray:
    """Return by how much the held-out loss is above the twin's, in the rows that both have."""
    rows = min(len(own["held_out"]), len(twin["held_out"]))
    return own["held_out"][:rows] - twin["held_out"][:rows]


def _lasting(values: np.ndarray, holds: np.ndarray) -> int | None:
    """Return the first row of the unbroken stretch of evaluations (rows with a number) in which it holds up to the
    last one; None if the stretch has fewer than five evaluations."""
    at = np.flatnonzero(~np.isnan(values))
    no = np.flatnonzero(~holds[at])
    stretch = at[int(no[-1]) + 1 :] if len(no) else at
    return int(stretch[0]) if len(stretch) >= LASTS else None


def _last(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known[-1]) if len(known) else float("nan")
