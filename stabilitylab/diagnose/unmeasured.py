"""Probes and tables that a run was to record and did not. The verdict "healthy" does not cover them."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import listed
from ..store import Run

NAMED = 3  # places that are named
CALLED = ("forward", "backward", "reference")  # phases whose numbers come from calls of modules


def unmeasured(run: Run) -> dict[str, str]:
    """Map each probe or table without numbers, or without numbers at some places, to the reason: it was dropped when
    the run began, it ended, some of its places have no numbers, or every cell is absent."""
    found: dict[str, str] = {}
    facts = run.manifest
    dropped, ended, unseen = (_texts(facts.get(key)) for key in ("probes_dropped", "tables_ended", "places_unseen"))
    for name, why in dropped.items():
        found[name] = str(why)
    for name, places in unseen.items():
        named = [str(place) for place in places] if isinstance(places, (list, tuple)) else [str(places)]
        named = [place for place in named if place not in _measured(run, name)]
        if not named:
            continue
        before = f"{found[name]}; " if name in found else ""
        found[name] = f"{before}no number at {listed(named, NAMED)}"
    for name, why in ended.items():
        found[name] = f"it ended: {why}"
    for name in run.tables:
        if name not in found and run.table(name).phase in CALLED:
            absent = run.arrow(name, columns=[run.table(name).main]).column("absent")
            if len(absent) and absent.to_numpy().all():
                found[name] = "all its cells are absent"
    return found


def _measured(run: Run, name: str) -> set[str]:
    """Return the places that have a number in some row, such as a layer that only the first row skipped."""
    if name not in run.tables:
        return set()
    cells = run.cells(name)
    return {row.site for row, absent in zip(cells.rows, cells.absent.T, strict=True) if not absent.all()}


def _texts(given: object) -> Mapping[str, object]:
    return given if isinstance(given, Mapping) else {}


def not_measured(found: Mapping[str, str]) -> str:
    """All of them in one sentence; "" for none."""
    return f"Not measured: {'; '.join(f'{name} ({why})' for name, why in found.items())}." if found else ""
