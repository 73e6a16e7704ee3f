"""The end of a probe that raises: its table ends, and training goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ...errors import UsageError, first_line
from .board import Board

log = logging.getLogger("stabilitylab")


class Guard:
    """The handler of errors of probes: it ends the table of a probe that raised, and says so once, in the log and in
    ``ended``.

    ``strict``: every error is raised. An error that says what to give instead (UsageError) is raised while ``trying``,
    at the first probed row, where nothing is lost yet, and so is any error of the caller's own ``reference``.
    """

    def __init__(self, strict: bool) -> None:
        self.strict, self.trying = strict, True
        self.recording = False  # True while device work is recorded: after an error the work runs directly instead
        self.ended: dict[str, str] = {}  # table -> why
        self._heard: Exception | None = None  # an error of the caller's function, which must reach the caller

    def __call__(self, board: Board, error: Exception) -> None:
        if self.strict or self.recording or (self.trying and isinstance(error, UsageError)):
            raise error
        self._end([board], f"its probe raised {said(error)}", error)

    def instrument(self, name: str, boards: Iterable[Board], error: Exception) -> None:
        """End the tables of an instrument that raised."""
        heard, self._heard = self._heard, None
        if self.strict or self.recording or error is heard:
            raise error
        if not self._end(boards, f"{name} raised {said(error)}", error):
            log.warning("no more of %s, which raised %s. Training goes on.", name, said(error))

    def reference(self, boards: Iterable[Board], error: Exception, own: bool) -> None:
        """End the tables of a held-out pass that raised. ``own``: True if it runs the caller's own function."""
        if self.strict or self.recording or (self.trying and own):
            self._heard = error
            raise error
        self._end(boards, f"the held-out pass raised {said(error)}", error)

    def elsewhere(self, board: Board) -> None:
        """End a table that has ended on another rank."""
        if not board.ended:
            self._end([board], "its probe raised on another rank, whose log says what", None)

    def stop(self, boards: Iterable[Board], why: str) -> bool:
        """End tables for another reason than an error; return False if none was left to end."""
        return self._end(boards, why, None)

    def disagree(self, boards: Iterable[Board], why: str, first: bool) -> None:
        """End tables whose numbers ranks cannot add up, on all ranks. ``first``: True on the rank that says so."""
        if self.strict:
            raise UsageError(f"{why}.")
        self._end(boards, why, None, first)

    def _end(self, boards: Iterable[Board], why: str, error: Exception | None, aloud: bool = True) -> bool:
        boards = list(boards)
        names = [board.table.name for board in boards if not board.ended]
        for board in boards:
            board.end(why)
            self.ended.setdefault(board.table.name, why)
        if names and aloud:
            log.warning("no more rows of %s: %s. Training goes on.", ", ".join(names), why)
            log.debug("what was raised", exc_info=error)
        return bool(names)


def said(error: Exception) -> str:
    """Return the error in one line."""
    return f"{type(error).__name__} ({first_line(error, 200, otherwise='without a message').rstrip('.')})"
