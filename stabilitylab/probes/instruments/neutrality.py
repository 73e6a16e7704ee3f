"""The changes of the model by watching that could not be undone: a resumed run still says them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._engine.watched import Watched
from .instrument import Instrument


class NeutralityRecord(Instrument):
    """Keeps the reasons why training is not that of an unwatched run; the passes of our own find them
    (:class:`~.._engine.neutral_pass.NeutralPass`)."""

    def open(self, watched: Watched) -> None:
        self._found = watched.audit.not_neutral

    def state_dict(self) -> dict[str, Any]:
        return {"not_neutral": [*self._found]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._found += state.get("not_neutral", ())
