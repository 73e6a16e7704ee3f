"""The guard around a pass of our own, which must leave the model as it was: a copy at the first pass, samples later."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...errors import StabilityLabError, listed
from ..parameters.processes import Processes
from ..places.naming import named
from ..state import Found, StateSnapshot, TensorChange, merged
from .board import Board
from .guard import Guard
from .row import RowRecord

log = logging.getLogger("stabilitylab")

NAMED = 3  # tensors that a message names
KEPT = 20  # names that run.json lists
RESTORE = "restore=True keeps a copy during each pass and puts the model back after it"


@dataclass
class Audit:
    """The facts that were checked of a run, for run.json. ``facts``: any part of the watcher adds entries of its own.
    ``not_neutral``: why training is not that of an unwatched run. ``changed`` is called when that becomes known."""

    facts: dict[str, Any] = field(default_factory=dict)
    not_neutral: list[str] = field(default_factory=list)
    changed: Callable[[], None] = lambda: None


class NeutralPass:
    """The guard around one kind of pass, ``what``: "reference" or "curvature".

    At the first pass all tensors of the model are copied, compared bit by bit, and restored where they differ; the copy
    is gone when the pass is over. Later passes compare each tensor's version, place and a sample of its words
    (:class:`~..state.StateSnapshot`). A change ends the pass for good: :attr:`over` says why. One that comes at a later
    pass cannot be undone, and the run is not neutral. ``restore``: each pass is the first, and none ends.
    ``stateless``: later passes are not looked at.

    On several ranks all of them end the pass if it changed the model of one. What DistributedDataParallel broadcasts
    to its ranks before a forward, the buffers, is put back after each pass and ends none.
    """

    def __init__(
        self,
        what: str,
        model: nn.Module,
        boards: Callable[[], Sequence[Board]],
        guard: Guard,
        audit: Audit,
        ranks: Processes,
        restore: bool,
        stateless: bool,
    ) -> None:
        self.over = ""  # why no pass is to come any more
        self.changed: list[str] = []  # tensors that the last pass changed, on any rank, where that is known at once
        self._settled = False
        self._what, self._model, self._boards, self._guard = what, model, boards, guard
        self._audit, self._ranks, self._restore, self._stateless = audit, ranks, restore, stateless
        self._passes = 0
        self._often: set[str] = set()  # tensors that each pass writes, to what they are or by broadcast: always copied
        self._broadcast = _broadcast(model)
        self._looked: list[Found] = []  # of passes of the present row
        self._told: dict[int, list[Found]] = {}  # of rows that are under way

    @contextmanager
    def around(self, row: int, by_caller: Collection[str] = (), at_once: bool = True) -> Iterator[None]:
        """Compare the model before and after a pass. ``by_caller``: kinds of tensors that the caller restores later,
        since a backward may come before that, which needs the buffers as they were broadcast. Without ``at_once`` the
        numbers about the pass travel with the row, by :meth:`ship` and :meth:`tell`, so that the host does not wait for
        a device once more, nor ranks for each other."""
        self._ranks.reshard()
        if self._stateless and self._passes and not self._restore:
            try:
                yield
            finally:
                self._ranks.reshard()
            return
        first = self._restore or not self._passes
        apart = self._broadcast if "buffer" in by_caller else ()
        snapshot = StateSnapshot(self._model, True if first else self._often | self._broadcast, self._passes, apart)
        failed = True
        try:
            yield
            failed = False
        finally:
            self._ranks.reshard()
            found = snapshot.compare()
            if first:
                self._often |= set(found.rewritten)
            self._judge(row, found, by_caller, at_once)
            if not self._passes and not failed:
                self._write_down(found, snapshot.complete)
            self._passes += not failed

    def ship(self, record: RowRecord, device: torch.device) -> None:
        """Send what is known of the passes of a row with the row; on several ranks one number, which they add up."""
        if self._looked and not self._ranks.alone:
            sums = [look.flags.sum().to(device) for look in self._looked if look.flags is not None]
            known = torch.tensor(float(any(look.changes for look in self._looked)), dtype=torch.float64, device=device)
            record.share_aside(self._what, torch.stack([known, *sums]).sum())
            self._told[record.step] = self._looked
        elif flags := [look.flags for look in self._looked if look.flags is not None]:
            record.set_aside("neutral", self._what, torch.cat(flags).to(device))
            self._told[record.step] = self._looked
        self._looked = []

    def tell(self, record: RowRecord) -> None:
        """End the passes if one of a row that was read changed the model."""
        looked = self._told.pop(record.step, [])
        flags = record.aside["neutral"].get(self._what)
        if flags is None or not flags.any() or self.over:
            return
        changes = merged(change for look in looked for change in look.read())
        if changes := self._gathered(changes):
            self._changed(record.step, changes)
            self.settle()

    def end(self, why: str) -> None:
        """End the passes for good."""
        self.over = self.over or why

    def settle(self) -> None:
        """End the tables of a pass that is over, once the row that it was in has its numbers, and say so once."""
        if self.over and not self._settled:
            self._settled = True
            if not self._guard.stop(self._boards(), self.over):
                log.warning("no more %s passes: %s. Training goes on.", self._what, self.over)

    def _judge(self, row: int, found: Found, by_caller: Collection[str], at_once: bool) -> None:
        kept = [change for change in found.changes if change.name not in self._broadcast]
        found = replace(found, changes=kept)
        if at_once:
            changes = [TensorChange(c.name, c.kind, c.undone or c.kind in by_caller) for c in found.read()]
            changes = self._of_all_ranks(changes)
            self.changed = [change.name for change in changes]
            if changes:
                self._changed(row, changes)
            return
        self._looked.append(found)
        if kept and self._ranks.alone:
            self._changed(row, kept)

    def _of_all_ranks(self, changes: list[TensorChange]) -> list[TensorChange]:
        return self._gathered(changes) if self._ranks.any(bool(changes), self._device) else []

    def _gathered(self, changes: list[TensorChange]) -> list[TensorChange]:
        return merged(change for own in self._ranks.gathered(changes) for change in own)

    @property
    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self._model.parameters()), torch.device("cpu"))

    def _changed(self, row: int, changes: Sequence[TensorChange]) -> None:
        lasting = [change.name for change in changes if not change.undone]
        if self._restore and not lasting:
            return
        names = lasting or [change.name for change in changes]
        said = f"row {row}: the {self._what} pass changed {listed(names, NAMED)}"
        if lasting:
            said += ", of which no copy was kept: this cannot be undone, and the run is not neutral from here on"
            self._audit.not_neutral.append(said)
            self._audit.changed()
        else:
            said += f", and {'they were' if len(names) > 1 else 'it was'} put back"
        self.end(f"{said} ({RESTORE})")
        if lasting and self._guard.strict:
            raise StabilityLabError(f"{self.over}.")

    def _write_down(self, found: Found, complete: bool) -> None:
        changed = [change.name for change in found.changes]
        facts: dict[str, Any] = {f"tensors_unchanged_by_{self._what}": found.tensors - len(changed)}
        if changed:
            facts[f"tensors_changed_by_{self._what}"] = changed[:KEPT]
        if found.rebound:
            facts[f"rebound_by_{self._what}"] = [*found.rebound[:KEPT]]
        if found.unseen:
            facts["state_not_looked_into"] = [*found.unseen[:KEPT]]
        if not complete:
            facts[f"sampled_at_first_{self._what}"] = True  # memory was short
        self._audit.facts |= facts


def _broadcast(model: nn.Module) -> frozenset[str]:
    """Return the names of buffers that DistributedDataParallel overwrites with the first rank's before each forward."""
    wrappers = [
        each
        for each in named(model)
        if isinstance(each.module, nn.parallel.DistributedDataParallel) and each.module.broadcast_buffers
    ]
    return frozenset(
        ".".join(filter(None, (wrapper.path, inner.path, key)))
        for wrapper in wrappers
        for inner in named(wrapper.module)
        for key, buffer in inner.module._buffers.items()
        if buffer is not None
    )
