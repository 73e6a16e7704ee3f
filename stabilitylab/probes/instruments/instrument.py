"""The base of instruments, and the list of them that a watcher calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, get_args

from ...errors import StabilityLabError
from .._engine.board import Board
from .._engine.row import Metrics, RowRecord
from .._engine.watched import Watched

Moment = Literal[
    "settle",
    "before_forward",
    "batch",
    "after_backward",
    "host",
    "row_begun",
    "after_step",
    "after_update",
    "host_after_update",
    "skipped",
    "row_read",
    "row_sent",
    "finish",
    "abort",
    "close",
]


class Instrument:
    """An observer of one thing of training, with a state of its own; every method is optional.

    Row t describes theta_t. ``after_backward`` and ``after_update`` ask for device work alone, so that they can be
    recorded and replayed; passes of an instrument's own and reads by the host belong into ``host`` and
    ``host_after_update``, which come for each row, never while an update is recorded. An instrument that has numbers
    to come after the optimizers' steps says so by :meth:`RowRecord.owe`. ``talks``: its methods exchange messages with
    other ranks, so that one rank cannot go on without it.
    """

    talks = False

    @property
    def boards(self) -> Sequence[Board]:
        """The tables that this instrument fills."""
        return ()

    def open(self, watched: Watched) -> None:
        """Prepare for the model: its places, parameters, optimizers and tables are known."""

    def settle(self, t: int) -> None:
        """Learn that the model has run in training for the first time: called at the first ``step``."""

    def before_forward(self, t: int) -> None:
        """Begin row t, before its first forward: called at the end of ``step`` of row t - 1, so before the optimizers'
        steps of that row, and again when a state is loaded."""

    def batch(self, t: int, batch: Any) -> None:
        """Take the batch of the next forward pass of row t, which the loop has given by ``batch`` or ``batches``."""

    def after_backward(self, row: RowRecord) -> None:
        """Look at the gradients of theta_t: ``step`` was called."""

    def host(self, row: RowRecord) -> None:
        """Run passes of its own before the optimizers' steps, or before the replay of an update."""

    def row_begun(self, row: RowRecord, metrics: Metrics) -> None:
        """Look at the numbers that are on the host before the optimizers step: on a CPU, in one process."""

    def after_step(self, number: int) -> None:
        """Learn that the optimizer of this number has stepped."""

    def after_update(self, row: RowRecord) -> None:
        """Look at the update: all optimizers have stepped, or never will. Called if :meth:`RowRecord.owe` was."""

    def host_after_update(self, row: RowRecord) -> None:
        """Run passes of its own between the optimizers' steps and the next forward. Called if :meth:`RowRecord.owe`
        was."""

    def skipped(self, row: RowRecord) -> None:
        """Drop what waits for the update: training was interrupted before an optimizer stepped."""

    def row_read(self, row: RowRecord) -> None:
        """Read the row: all numbers are on the host, and the sink gets them next."""

    def row_sent(self, row: RowRecord) -> None:
        """Look at a row that the sink has got."""

    def finish(self, row: RowRecord) -> None:
        """Add to row N, "after training"."""

    def abort(self) -> None:
        """End without a message to other ranks, which may be elsewhere: training ended with an error."""

    def close(self) -> None:
        """Take away all hooks."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, by names that no other instrument uses."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` returned, among what those of others did."""

    def share(self, moment: Moment, row: RowRecord) -> Sequence[Board]:
        """Return the tables that this moment adds to the row: where the instrument failed they are shipped empty, since
        other ranks wait for them."""
        return ()


class Instruments:
    """The instruments of a watcher, called in order. If one raises, its tables end, and training goes on.

    A StabilityLabError, which says what to do, is raised. So is any other error if the watcher is strict, while an
    update is recorded, and if other ranks would wait for the instrument.
    """

    def __init__(self, instruments: Iterable[Instrument], watched: Watched) -> None:
        self._all, self._watched = tuple(instruments), watched
        self._failed: set[Instrument] = set()
        self._having = {
            moment: tuple(each for each in self._all if getattr(type(each), moment) is not getattr(Instrument, moment))
            for moment in get_args(Moment)
        }
        with ExitStack() as opened:  # where one cannot open, those before it leave no hooks
            for each in self._all:
                each.open(watched)
                opened.callback(each.close)
            opened.pop_all()

    def call(self, moment: Moment, *given: Any) -> None:
        """Call a method of each instrument that has it."""
        for each in self._having[moment]:
            if each not in self._failed:
                try:
                    getattr(each, moment)(*given)
                except Exception as error:
                    self._fail(each, error)
            if self._failed and each in self._failed:
                self._ship(each, moment, *given)

    def close(self) -> None:
        """Close all instruments, the last one first; an error of one is raised once the others are closed."""
        with ExitStack() as closing:
            for each in self._having["close"]:
                closing.callback(each.close)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for each in self._all for name, value in each.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for each in self._all:
            each.load_state_dict(state)

    def _fail(self, failed: Instrument, error: Exception) -> None:
        ranks, guard = self._watched.ranks, self._watched.guard
        if isinstance(error, StabilityLabError) or (failed.talks and not ranks.alone):
            raise error
        guard.instrument(type(failed).__name__, failed.boards, error)
        self._failed.add(failed)

    def _ship(self, failed: Instrument, moment: Moment, *given: Any) -> None:
        for row in given:
            if not isinstance(row, RowRecord):
                continue
            for board in failed.share(moment, row):
                if not row.has(board):
                    row.table(board)
            if moment == "after_backward" and failed.share("after_update", row):
                row.owe()  # other ranks send this row once all optimizers have stepped
