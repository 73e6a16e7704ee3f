"""Values that the model shows by :func:`stabilitylab.tap`: places that come to the tables in its first pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import UsageError
from .._engine.row import RowRecord
from .._engine.selection import chosen
from .._engine.tap_places import Tapped
from .._engine.watchable import compiled_modules
from .._engine.watched import Watched
from ..base import PROBES
from ..places.sites import Sites
from .instrument import Instrument
from .reference_rows import ReferenceRows
from .training_pass import TrainingRows

STAGE = "is in a stage of a pipeline, whose tables are laid out with those of all"


class Taps(Instrument):
    """Brings the values that the model shows to the passes and the tables. From the first row on no place is added."""

    talks = True

    def __init__(self, training: TrainingRows, reference: ReferenceRows | None) -> None:
        self._training, self._reference = training, reference

    def open(self, watched: Watched) -> None:
        self._watched, options = watched, watched.options
        probes = chosen(options.probes)
        self._named = {name for name, named in probes.items() if named and watched.stages is None}
        why_not = STAGE if watched.stages is not None else ""
        kinds = [PROBES[name] for name in probes]
        self._tapped = Tapped(
            watched.model, watched.sites, watched.boards, kinds, self._extend, options.tapped, why_not
        )
        self._training.passes.tapped = self._tapped
        if self._reference is not None:
            self._reference.tap(self._tapped)

    def settle(self, t: int) -> None:
        watched, expected = self._watched, self._tapped.expected
        if self._tapped.settle():
            watched.ranks.check_alike(list(watched.tables.values()))
            watched.declare()
        if expected and (missing := [(name, why) for name, why in watched.dropped if name in self._named]):
            raise UsageError(f"probe {missing[0][0]!r} {missing[0][1]}.")

    def after_backward(self, row: RowRecord) -> None:
        self._tapped.say(row.step)

    def close(self) -> None:
        self._tapped.close(bool(compiled_modules(self._watched.model)))

    def state_dict(self) -> dict[str, Any]:
        return {"tapped": self._tapped.places}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what an earlier attempt of the run knew of the values that the model shows."""
        if (known := state.get("tapped")) is not None:
            if self._tapped.recall(self._watched.boards, known):
                self._watched.declare()
            self._tapped.settle()

    def _extend(self, sites: Sites) -> None:
        """Add places to the tables that the model shows in its first pass."""
        for board in self._watched.extend(sites):
            home = self._reference if board.probe.on == "reference" else self._training.passes
            assert home is not None
            home.add(board)
        self._watched.make_room()
