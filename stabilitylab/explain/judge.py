"""A fixed judge: the weights of a healthy snapshot score all recorded batches, so that batches can be compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import StabilityLabError
from ..probes import evaluation
from .batches import changed, restored, tensors
from .findings import AuditFinding
from .flight import Flight
from .replay import DeclaredLoop, loss_of
from .replicas import joined

SPREADS, SHARE = 8.0, 0.25  # a bad batch: so many robust standard deviations and this share above the median score
ROLLS = (-1, 0, 1)
# Labels are shifted if rolling them back lowers the score by this share, and by as much more than in the other batches:
# a model that has learned little may predict its input, which a roll makes the label of every batch.
ROLLED = 0.15
USUAL = 0.5  # and if rolling does not do so in at least this share of the other batches
MASKED = 8.0, 0.2  # a mask: robust standard deviations, and difference of its share of true entries
FEWEST = 8  # batches


@dataclass(frozen=True)
class Scores:
    """The judge's loss of each batch, by number of the batch: at each roll of the labels (None without labels), and
    the share of true entries of each mask. ``steps``: the update of each batch."""

    numbers: list[int]
    steps: list[int]
    rolled: dict[int, list[float]]
    masks: dict[str, list[float]]


class Judge:
    """Scores batches with the model of snapshot ``start``, in eval mode, without gradients. By default it is the newest
    one before the trouble, or of all: the best trained."""

    def __init__(self, flight: Flight, loop: DeclaredLoop, start: int | None = None) -> None:
        self.flight, self.loop = flight, loop
        latest = flight.last if flight.trouble is None else flight.trouble["step"] - 1
        healthy = [step for step in flight.snapshots if step <= latest]
        self.start = start if start is not None else max(healthy, default=min(flight.snapshots))

    def scores(self) -> Scores:
        """Return the scores of all recorded batches; the loop's objects are left as they were."""
        flight, loop = self.flight, self.loop
        wheres = [(n, u.step) for u in flight.updates.values() for n in u.batches if n in flight.batches]
        labels, masks = flight.declared["labels"], flight.declared["masks"]
        rolls = ROLLS if labels and self._has_sequences(labels) else (0,)
        rolled: dict[int, list[float]] = {roll: [] for roll in rolls}
        shares: dict[str, list[float]] = {name: [] for name in masks}
        with loop.kept():
            loop.restore(flight.snapshots[self.start])
            with evaluation(loop.model), torch.no_grad():
                for number, _ in wheres:
                    for roll in rolls:
                        batch = changed(flight.batches[number], roller(labels, roll))
                        rolled[roll].append(float(loss_of(loop, restored(batch, loop.device), loop.replica)))
                    for name, share in _true_shares(flight.batches[number], masks).items():
                        shares[name].append(share)
        return Scores([n for n, _ in wheres], [s for _, s in wheres], rolled, shares)

    def findings(self) -> tuple[list[AuditFinding], list[str]]:
        """Return the findings about the data, and what could not be judged, with the reason. Each of several processes
        judges its own batches; the findings are those of all."""
        found, unjudged = self._own_findings()
        processes = self.loop.processes
        reasons = [why for own in processes.gathered(unjudged) for why in own]
        return joined(found, processes), list(dict.fromkeys(reasons))

    def _own_findings(self) -> tuple[list[AuditFinding], list[str]]:
        if len(self.flight.batches) < FEWEST:
            return [], [f"the data were not judged: {len(self.flight.batches)} batches are recorded, of {FEWEST}"]
        try:
            scores = self.scores()
        except StabilityLabError as error:
            return [], [f"the data were not judged: {str(error).rstrip('.')}"]
        found = [*_shifted(scores), *_bad(scores), *_masked(scores)]
        shifted = {step for one in found if one.kind == "labels" for step in range(one.step, one.last + 1)}
        own = [one for one in found if one.kind != "bad batch" or one.step not in shifted]
        unjudged = [] if 1 in scores.rolled else ["shifts of labels were not judged: declare labels="]
        return own, unjudged

    def _has_sequences(self, labels: Sequence[str]) -> bool:
        """True if labels are sequences: (B, T) or more; a roll along a batch of classes would shift nothing."""
        first = next(iter(self.flight.batches.values()))
        found = [tensor.dim() for name, tensor in tensors(first).items() if name in labels]
        return bool(found) and min(found) >= 2


def roller(labels: Sequence[str], by: int) -> Callable[[str, Tensor], Tensor]:
    """Return a change that rolls the labels along dimension 1, the places of a sequence."""

    def roll(name: str, tensor: Tensor) -> Tensor:
        return tensor.roll(by, 1) if name in labels and by else tensor

    return roll


def _shifted(scores: Scores) -> list[AuditFinding]:
    """Find batches whose labels fit the judge better when they are rolled, while the labels of other batches do not."""
    if 1 not in scores.rolled:
        return []
    plain, found = np.array(scores.rolled[0]), []
    for roll in (-1, 1):
        rolled = np.array(scores.rolled[roll])
        better = rolled < (1 - ROLLED) * plain
        if not better.any() or (better.mean() > USUAL and not _is_run(better)):
            continue
        others = ~better & np.isfinite(rolled) & np.isfinite(plain) & (plain > 0)
        usual = float(np.median(rolled[others] / plain[others])) if others.any() else 1.0
        better &= rolled < (1 - ROLLED) * usual * plain
        for first, last in _runs(better):
            steps = scores.steps[first], scores.steps[last]
            gain = float(1 - np.mean(rolled[first : last + 1] / plain[first : last + 1]))
            where = updates_in_words(*steps)
            said = f"the labels of {where} are shifted by {-roll:+d} against those of the other batches"
            evidence = f"rolled back, their score under the weights of an earlier snapshot is {gain:.0%} lower"
            found.append(
                AuditFinding("labels", f"batches of {where}", steps[0], said, evidence, until=steps[1], factor=-roll)
            )
    return found


def _bad(scores: Scores) -> list[AuditFinding]:
    plain = np.array([one if math.isfinite(one) else math.inf for one in scores.rolled[0]])
    limit = _limit(plain[np.isfinite(plain)])
    found = []
    for first, last in _runs(plain > limit):
        steps = scores.steps[first], scores.steps[last]
        where = updates_in_words(*steps)
        worst, usual = float(plain[first : last + 1].max()), float(np.median(plain))
        said = f"the data of {where} do not fit those of the other batches"
        evidence = (
            f"their score under the weights of an earlier snapshot is up to {worst:.3g}, the median is {usual:.3g}"
        )
        found.append(AuditFinding("bad batch", f"batches of {where}", steps[0], said, evidence, until=steps[1]))
    return found


def _masked(scores: Scores) -> list[AuditFinding]:
    found = []
    for name, shares in scores.masks.items():
        values = np.array(shares)
        if len(values) != len(scores.numbers) or not len(values):
            continue
        middle, spread = _middle_and_spread(values)
        away = np.abs(values - middle) > max(MASKED[0] * spread, MASKED[1])
        for first, last in _runs(away):
            steps = scores.steps[first], scores.steps[last]
            where = updates_in_words(*steps)
            said = f"{name} is true for {values[first]:.0%} of the entries in {where}, and usually for {middle:.0%}"
            found.append(AuditFinding("mask", name, steps[0], said, "shares of all recorded batches", until=steps[1]))
    return found


def _limit(values: np.ndarray) -> float:
    """Return the score from which on a batch is a bad one."""
    if not len(values):
        return math.inf
    middle, spread = _middle_and_spread(values)
    return middle + max(SPREADS * spread, SHARE * abs(middle))


def _middle_and_spread(values: np.ndarray) -> tuple[float, float]:
    """Return the median and the robust standard deviation."""
    middle = float(np.median(values))
    return middle, 1.4826 * float(np.median(np.abs(values - middle)))


def _runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """Return (first, last) of each row of true flags; two rows that one false flag parts are one."""
    runs: list[tuple[int, int]] = []
    for at in np.flatnonzero(flags):
        if runs and at - runs[-1][1] <= 2:
            runs[-1] = runs[-1][0], int(at)
        else:
            runs.append((int(at), int(at)))
    return runs


def _is_run(flags: np.ndarray) -> bool:
    """Return True if the true flags are one row at the end, before which others were false: a change in time."""
    runs = _runs(flags)
    return len(runs) == 1 and runs[0][0] >= FEWEST // 2


def updates_in_words(first: int, last: int) -> str:
    return f"update {first}" if first == last else f"updates {first} to {last}"


def _true_shares(batch: dict[str, Any], masks: Sequence[str]) -> dict[str, float]:
    return {name: float((one != 0).double().mean()) for name, one in tensors(batch).items() if name in masks}
