"""The parts of a watcher that are no instruments yet: taps, the report of a NaN."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import UsageError
from .._engine.selection import chosen
from .._engine.tapped import Place, Tapped
from .._engine.watchable import compiled_modules
from .._engine.watched import Watched
from ..base import PROBES
from ..incidents.report import Forensics
from ..instruments.reference_rows import ReferenceRows
from ..instruments.training_pass import TrainingRows
from ..places.sites import Sites


class Assembly:
    """Made from the model as it is watched, and from the rows of its two passes."""

    def __init__(self, watched: Watched, training: TrainingRows, reference: ReferenceRows | None) -> None:
        self._watched, self._training, self.reference = watched, training, reference
        self._named = {
            name for name, named in chosen(watched.options.probes).items() if named and watched.stages is None
        }
        self.tapped = self._taps()
        training.passes.tapped = self.tapped
        if self.reference is not None:
            self.reference.tap(self.tapped)
        self.forensics = Forensics(watched.boards, watched.parameters, self._order, watched.sink, watched.scaled)

    def settle_places(self, t: int) -> None:
        """At the first row: the tables are as they will be, with what the model showed in its first pass."""
        watched, expected = self._watched, self.tapped.expected
        if self.tapped.settle():
            if watched.ranks is not None:
                watched.ranks.check_alike(list(watched.tables.values()))
            watched.declare()
        if expected and (missing := [(name, why) for name, why in watched.dropped if name in self._named]):
            raise UsageError(f"probe {missing[0][0]!r} {missing[0][1]}.")
        self.tapped.say(t)

    def recall_places(self, known: Sequence[Place]) -> None:
        """What an earlier attempt of the run knew of the values that the model shows."""
        if self.tapped.recall(self._watched.boards, known):
            self._watched.declare()
        self.tapped.settle()

    def close(self) -> None:
        self.tapped.close(bool(compiled_modules(self._watched.model)))

    def _taps(self) -> Tapped:
        why_not = ""
        if self._watched.stages is not None:
            why_not = "is in a stage of a pipeline, whose tables are laid out with those of all"
        options = self._watched.options
        kinds = [PROBES[name] for name in chosen(options.probes)]
        model, sites, boards = self._watched.model, self._watched.sites, self._watched.boards
        return Tapped(model, sites, boards, kinds, self._extend, options.tapped, why_not)

    def _extend(self, sites: Sites) -> None:
        """Places come to the tables, which the model shows in its first pass."""
        for board in self._watched.extend(sites):
            home = self.reference if board.probe.on == "reference" else self._training.passes
            assert home is not None
            home.add(board)
        self._watched.make_room()

    def _order(self) -> dict[tuple[str, int], int]:
        """When each place is called in a forward pass; the held-out pass comes after."""
        held_out, called = self.reference.order if self.reference is not None else {}, self._training.passes.order
        return {**called, **{key: len(called) + n for key, n in held_out.items()}}
