"""When a run failed: t*, by its training loss and by its held-out loss beside its twin's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stabilitylab.diagnose.series import noise

RISE = 7.0  # robust standard deviations of one row's loss
UNDONE, ENOUGH = 50, 10  # a rise is undone where, within 50 rows, 10 in a row have their median near the old level
PAST = 100  # rows of the noise
LEVEL = 20  # rows of a median; the lowest so far is the level
BEHIND = 0.25  # nats behind the twin
LEAST = 10  # evaluations that say so, up to the last: fifty rows


class Failure(NamedTuple):
    """``step``: t*, None for a run that did not fail; ``why``; ``benign``: rows of rises that were undone;
    ``open``: the first row of a rise, or of a stay behind the twin, that the end of the run left undecided."""

    step: int | None
    why: str
    benign: tuple[int, ...] = ()
    open: int | None = None


def failure(
    loss: np.ndarray,
    gradient: np.ndarray,
    held_out: Sequence[tuple[int, float]],
    twin: Sequence[tuple[int, float]] | None,
) -> Failure:
    """The first of: a loss or gradient norm that is not finite; a rise of the training loss by 7 robust standard
    deviations over its level, the lowest median of 20 rows so far, that is not undone in 50 rows; a held-out loss .25
    nats above the twin's up to the end, in at least ten evaluations.

    ``loss``, ``gradient`` (rows,); ``held_out``, ``twin``: (row, nats a token).
    """
    found: list[tuple[int, str]] = []
    broken = np.flatnonzero(~(np.isfinite(loss) & np.isfinite(gradient)))
    if len(broken):
        found.append((int(broken[0]), "not finite"))
    risen, benign, undecided = rises(loss[: broken[0]] if len(broken) else loss)
    if risen is not None:
        found.append((risen, "rise"))
    elif undecided is not None and len(broken):
        found.append((undecided, "rise"))  # which ended in numbers that are not finite
        undecided = None
    behind, evaluations = _behind(held_out, twin)
    if evaluations >= LEAST:
        found.append((behind, "behind its twin"))
    elif evaluations and undecided is None:
        undecided = behind
    if not found:
        return Failure(None, "", benign, undecided)
    step, why = min(found)
    return Failure(step, why, tuple(row for row in benign if row < step), None)


def rises(loss: np.ndarray) -> tuple[int | None, tuple[int, ...], int | None]:
    """(first row of a rise that was not undone, first rows of those that were, that of one that is undecided)."""
    if len(loss) <= LEVEL:
        return None, (), None
    benign: list[int] = []
    levels = np.minimum.accumulate(np.median(np.lib.stride_tricks.sliding_window_view(loss, LEVEL), axis=1))
    row, free = LEVEL, 0  # nothing is compared before there is a level
    while row < len(loss):
        level, deviation = levels[row - LEVEL], noise(loss[max(0, row - PAST) : row])
        if row < free or loss[row] <= level + RISE * deviation:
            row += 1
            continue
        after = loss[row + 1 : row + 1 + UNDONE]
        low = level + RISE / 2 * deviation
        healed = next((at for at in range(len(after) - ENOUGH + 1) if np.median(after[at : at + ENOUGH]) <= low), None)
        if healed is not None:
            benign.append(row)
            row, free = row + 1, row + 1 + healed + ENOUGH
        elif len(after) < UNDONE:
            return None, tuple(benign), row
        else:
            return row, tuple(benign), None
    return None, tuple(benign), None


def _behind(held_out: Sequence[tuple[int, float]], twin: Sequence[tuple[int, float]] | None) -> tuple[int, int]:
    """(row from which it is behind its twin up to the end, in how many evaluations)."""
    if twin is None:
        return 0, 0
    other = dict(twin)
    both = [(step, nll - other[step]) for step, nll in held_out if step in other]
    worse = 0
    for _, more in reversed(both):
        if more < BEHIND:
            break
        worse += 1
    return (both[-worse][0], worse) if worse else (0, 0)
