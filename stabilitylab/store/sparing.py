"""A writer whose refused writes end the record of a run, and never the training that it records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ResourceError
from ..schema import Cells, Table
from .incident import Kept
from .writer import RunWriter, State

log = logging.getLogger("stabilitylab.store")


class SparingWriter(RunWriter):
    """A :class:`RunWriter` for somebody else's training.

    :meth:`create` and :meth:`resume` raise as those of RunWriter do, before the training. From then on, where the
    operating system refuses a write (a full disk, a folder that was removed), a warning says so once, and nothing more
    is recorded. The rows before it stay in the run. At its end the run becomes "interrupted", with the reason, if that
    can be written by then.
    """

    _spares = False  # True once create or resume has succeeded
    _refused = ""  # why nothing is recorded any more

    def _begin(self, argv: Sequence[str], **facts: Any) -> None:
        super()._begin(argv, **facts)
        self._spares = True

    def open(self, tables: Sequence[Table]) -> None:
        self._spare(lambda: super(SparingWriter, self).open(tables))

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None:
        self._spare(lambda: super(SparingWriter, self).append(step, metrics, tables))

    def begin(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None:
        self._spare(lambda: super(SparingWriter, self).begin(step, metrics, tables))

    def flush(self) -> None:
        self._spare(super().flush)

    def seal(self) -> int:
        """End the current part and return the number of the next part. After a refusal, return the number of the part
        that could not be ended: a run that is resumed there lacks the rows of this part and all later rows."""
        self._spare(lambda: super(SparingWriter, self).seal())
        return self._number

    def record(self, **facts: Any) -> None:
        self._spare(lambda: super(SparingWriter, self).record(**facts))

    def incident(self, facts: Mapping[str, Any], rows: Sequence[Kept]) -> None:
        self._spare(lambda: super(SparingWriter, self).incident(facts, rows))

    def ledger(self, facts: Sequence[Mapping[str, Any]]) -> None:
        self._spare(lambda: super(SparingWriter, self).ledger(facts))

    def set_status(self, state: State, step: int, reason: str = "", **facts: Any) -> None:
        if self._refused:
            state, step, reason = "interrupted", self._last_step or 0, f"nothing more was recorded: {self._refused}"
        self._spare(lambda: super(SparingWriter, self).set_status(state, step, reason, **facts), again=True)

    def close(self) -> None:
        self._spare(super().close, again=True)

    def _spare(self, write: Callable[[], object], again: bool = False) -> None:
        """Call ``write``. After a refusal, call it only if ``again`` is True."""
        if self._refused and not again:
            return
        try:
            write()
        except ResourceError as error:
            if not self._spares:
                raise
            if not self._refused:
                self._refused = str(error).rpartition(": ")[0]  # the advice is for a training that ended
                log.warning(
                    "%s: what was recorded before is safe. Nothing more is recorded; the training goes on.",
                    self._refused,
                )
