"""Places that a probe was to look at and that no forward pass reached: said once, by name, instead of silence."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from ...errors import listed
from .board import Board

log = logging.getLogger("stabilitylab")

NAMED = 6  # places that the log names; all of them stand in the run


def unseen(boards: Iterable[Board], called: Mapping[tuple[str, int], int]) -> dict[str, dict[int, str]]:
    """Return the places whose module was not called in a pass, by table and row. ``called``: (table, row) of places
    that were."""
    found: dict[str, dict[int, str]] = {}
    for board in boards:
        missed = {row: site.name for row, site in enumerate(board.sites) if (board.table.name, row) not in called}
        if missed:
            found[board.table.name] = missed
    return found


def missed(boards: Iterable[Board]) -> dict[str, dict[str, str]]:
    """Return the places that were called and have no number, by table, each with the reason."""
    return {board.table.name: dict(board.probe.missed) for board in boards if board.probe.missed}


def say_missed(row: int | None, found: Mapping[str, Mapping[str, str]]) -> None:
    """Write one line to the log for each reason, with the tables that it holds for. ``row``: None before the first
    row."""
    said: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for table, places in found.items():
        for why in dict.fromkeys(places.values()):
            names = tuple(name for name, reason in places.items() if reason == why)
            said.setdefault((why, names), []).append(table)
    for (why, names), tables in said.items():
        when = "" if row is None else f"row {row}: "
        log.warning("%sno number of %s for %s: each %s.", when, ", ".join(tables), listed(names, NAMED), why)


def say(row: int, which: str, found: Mapping[str, list[str]]) -> None:
    """Write one line to the log: the places, and the tables in which they have no number."""
    names = list(dict.fromkeys(name for missed in found.values() for name in missed))
    log.warning(
        "row %d: %s %s not called in the %s pass of this row, so %s no number of %s in it. If they are never called "
        "and other modules take their place, name those with sites= or output_site=.",
        row,
        listed(names, NAMED),
        "were" if len(names) > 1 else "was",
        which,
        "they have" if len(names) > 1 else "it has",
        ", ".join(found),
    )
