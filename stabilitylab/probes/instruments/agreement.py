"""Ranks that should have the same gradient: compared once, at the first row."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...errors import listed
from .._engine.row import RowRecord
from .._engine.watched import Watched
from .instrument import Instrument

log = logging.getLogger("stabilitylab")


class Agreement(Instrument):
    """The check that ranks agree. If copies of a parameter have different gradients, the tables that are added up over
    ranks end. A warning names parameters that tensor-parallel ranks train differently."""

    talks = True

    def open(self, watched: Watched) -> None:
        self._watched = watched
        self._compared = self._warned = False

    def after_backward(self, row: RowRecord) -> None:
        if self._watched.ranks.alone:
            return
        if not self._compared:
            self._compare(row.step)
        if not self._warned and self._watched.due(row.step):
            self._warn(row.step)

    def _compare(self, t: int) -> None:
        self._compared = True
        watched, ranks = self._watched, self._watched.ranks
        names = watched.parameters.unlike()
        watched.audit.facts |= {"ranks": ranks.size, "gradients_unlike": len(names)}
        if names:
            watched.total = False
            boards = watched.on("step", "update", "backward", "curvature")
            watched.guard.disagree(boards, unlike(t, names), ranks.rank == 0)

    def _warn(self, t: int) -> None:
        self._warned = True
        if (names := self._watched.parameters.apart()) and self._watched.first:
            log.warning(
                "row %d: the gradient of %s differs between tensor-parallel ranks, each of which has all of it, so "
                "they train apart: give it a place in the plan of parallelize_module.",
                t,
                listed(names, 1),
            )


def unlike(row: int, names: Sequence[str]) -> str:
    """Return the reason why gradients of copies cannot be added up over ranks."""
    return (
        f"row {row}: the gradient of {listed(names, 2)} differs between ranks that should have the same, so no norm of "
        "parameters or gradients is that of one model: call step() after gradients are averaged over ranks; if "
        "parameters are split over ranks, give share=, a function that returns their process group"
    )
