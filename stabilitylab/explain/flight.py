"""A flight: what a recorder holds of the last updates, so that they can be replayed; and the rule for trouble."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from .states import State, bytes_of

VERSION = 1
WINDOW, LEAST = 20, 8  # losses before a row that make its level: so many, at least so many
SPREADS, SHARE = 6.0, 0.1  # trouble: a loss so many robust standard deviations, and this share, above its level
LASTING, LASTING_SHARE = 4.0, 0.05  # lasting: the same of the median of the last losses
LAST = 5  # losses that this median is taken of
HELD_LOSSES = 4096  # the newest losses, which a flight holds


@dataclass(frozen=True)
class Level:
    """The level of a loss before a row: where its falling line ends, and the robust standard deviation around the line.

    The line's slope is the median of the slopes between all pairs of rows (Theil 1950, Sen 1968), 0 if that is above 0:
    a loss that creeps up has no claim to go on. The level is the median of the losses moved along the line to the last
    row, the deviation 1.4826 times the median distance from it.
    """

    median: float
    spread: float

    @classmethod
    def of(cls, losses: Sequence[float]) -> Level | None:
        """Return the level of the last :data:`WINDOW` finite losses; None for fewer than :data:`LEAST`."""
        known = np.array([one for one in losses if math.isfinite(one)][-WINDOW:])
        if len(known) < LEAST:
            return None
        at = np.arange(len(known))
        first, second = np.triu_indices(len(known), 1)
        slope = min(0.0, float(np.median((known[second] - known[first]) / (second - first))))
        moved = known + slope * (at[-1] - at)
        median = float(np.median(moved))
        return cls(median, 1.4826 * float(np.median(np.abs(moved - median))))

    def left_by(self, loss: float, spreads: float = SPREADS, share: float = SHARE) -> bool:
        """Return True if a loss is above the level by so many spreads and by that share of the median."""
        return not math.isfinite(loss) or loss > self.median + max(spreads * self.spread, share * abs(self.median))


@dataclass
class RecordedUpdate:
    """One recorded update. ``batches``: numbers of its micro-batches, one at least. ``random``: torch's
    random states before the forward pass of each, on the host and on GPUs. ``settings``: those of each optimizer's
    groups as it stepped. ``full``: sketches of gradients and parameters, and digests of the modules' outputs; None for
    most updates. ``stepped``: False if no optimizer stepped (a scaler skipped it). ``synced``: for each micro-batch
    True if DistributedDataParallel averaged its gradients."""

    step: int
    batches: list[int]
    random: list[list[Any]] = field(default_factory=list)
    loss: float | None = None
    settings: list[list[State]] | None = None
    full: dict[str, Any] | None = None
    stepped: bool = False
    synced: list[bool] = field(default_factory=list)


@dataclass
class Flight:
    """Snapshots, the updates since the oldest one with their batches, and the facts of the ledger.

    ``snapshots``: step -> the state before this update. ``losses``: (step, loss) of the run's last rows.
    ``trouble``: {"step", "why", "level"} or None. ``declared``: the declared parts of the update, in words and numbers.
    ``parameters``: names of parameters, in the order of sketches. ``start``: facts of the run: device, versions.
    ``heard``: the facts of all processes that recorded, and ``partly``: (step, name) of those that only some have ->
    which (:func:`.replicas.agreed`); of one process ``facts``, and none.
    """

    parameters: list[str]
    declared: dict[str, Any]
    snapshots: dict[int, State] = field(default_factory=dict)
    updates: dict[int, RecordedUpdate] = field(default_factory=dict)
    batches: dict[int, dict[str, Any]] = field(default_factory=dict)
    facts: list[dict[str, Any]] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    trouble: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    start: dict[str, Any] = field(default_factory=dict)
    event: int | None = None  # the snapshot that the last event has of its own
    heard: list[dict[str, Any]] = field(default_factory=list, init=False, repr=False)
    partly: dict[tuple[int, str], str] = field(default_factory=dict, init=False, repr=False)
    _held: int = field(default=0, init=False, repr=False)  # bytes of batches

    def __post_init__(self) -> None:
        self.heard = self.facts

    def add(self, number: int, batch: dict[str, Any]) -> None:
        """Hold a batch."""
        self.batches[number] = batch
        self._held += bytes_of(batch["content"])

    def as_dict(self) -> State:
        """Return the flight in types that ``torch.load(weights_only=True)`` reads."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
        updates = {step: dict(vars(update)) for step, update in self.updates.items()}
        return {"version": VERSION, **own, "updates": updates}

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Flight:
        """Return the flight in :meth:`as_dict`. Raises ValueError for another version."""
        if kept.get("version") != VERSION:
            raise ValueError(f"version {kept.get('version')!r} of a black box, this package reads {VERSION}")
        own = {key: value for key, value in kept.items() if key != "version"}
        own["updates"] = {step: RecordedUpdate(**update) for step, update in own["updates"].items()}
        own["losses"] = [(int(step), float(loss)) for step, loss in own["losses"]]
        return cls(**own)

    @property
    def last(self) -> int:
        """Return the last recorded update; -1 for none."""
        return max(self.updates, default=-1)

    def replayable(self, start: int) -> Iterator[RecordedUpdate]:
        """Yield the updates from a snapshot on whose batches are known, without a gap."""
        step = start
        while (update := self.updates.get(step)) is not None:
            yield update
            step += 1

    def level(self, step: int) -> Level | None:
        """Return the level of the loss before a row."""
        return Level.of([loss for at, loss in self.losses if at < step])

    @property
    def levelled(self) -> float:
        """Return the first row whose loss had a level to be compared with; inf if no row had one, 0 if that is not
        known any more."""
        if len(self.losses) >= HELD_LOSSES:
            return 0
        known = [step for step, loss in self.losses if math.isfinite(loss)][:LEAST]
        return known[-1] + 1 if len(known) == LEAST else math.inf

    def lasting(self) -> bool:
        """Return True if the loss has not come back to its level: the median of its last rows is above it."""
        if self.trouble is None:
            return False
        level, step = self.level(self.trouble["step"]), self.trouble["step"]
        after = [loss for at, loss in self.losses if at >= step][-LAST:]
        if level is None or not after:
            return bool(after) and not all(map(math.isfinite, after))
        median = float(np.median([loss if math.isfinite(loss) else math.inf for loss in after]))
        return level.left_by(median, LASTING, LASTING_SHARE)

    def prune(self, keep: Sequence[int], every: int, cap: int) -> str:
        """Drop snapshots so that ages stay spaced as ``keep`` says, and batches that no snapshot needs or that exceed
        ``cap`` bytes. Return a sentence if batches exceeded it, else ""."""
        newest = max(self.snapshots, default=0)
        kept = {newest}
        for low, high in zip((0, *keep), keep, strict=False):
            ages = {step: (newest - step) / every for step in self.snapshots}
            if inside := [step for step, age in ages.items() if low < age <= high]:
                kept.add(min(inside))
        if self.event is not None and newest - self.event <= keep[-1] * every:
            kept.add(self.event)
        self.snapshots = {step: state for step, state in self.snapshots.items() if step in kept}
        told = ""
        self._drop_old()
        while self.is_over(cap) and len(self.snapshots) > 1:
            told = "batches exceeded the size cap, so that older snapshots were dropped"
            del self.snapshots[min(self.snapshots)]
            self._drop_old()
        return told

    def is_over(self, cap: int) -> bool:
        """Return True if batches take more than ``cap`` bytes."""
        return self._held > cap

    def _drop_old(self) -> None:
        oldest = min(self.snapshots, default=0)
        self.updates = {step: update for step, update in self.updates.items() if step >= oldest}
        needed = {number for update in self.updates.values() for number in update.batches}
        first = min(needed, default=max(self.batches, default=0))
        self.batches = {number: batch for number, batch in self.batches.items() if number >= first}
        self._held = sum(bytes_of(batch["content"]) for batch in self.batches.values())
