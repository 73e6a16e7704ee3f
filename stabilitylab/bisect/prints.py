"""The fingerprint of one row: read from a run, from a watcher's rows, or from a JSON file that a repository keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, UsageError
from ..schema import Cells, Table
from ..store import Run

DIRECTIONS = "directions"  # no pass with places of its own: from it judging takes the control of "update"
# The passes of a row in the order of the data, and the table of each. "update" is the change of the parameters up to
# the next row, whose fingerprint must be there.
TABLES = {
    "weights": "fingerprint_weight",
    "forward": "fingerprint",
    "backward": "fingerprint_gradient",
    "gradients": "fingerprint_weight_gradient",
    DIRECTIONS: "fingerprint_weight_direction",
}
PASSES = (*TABLES, "update")
FORMAT = "stabilitylab fingerprint 1"
HOW = "record it with probes='default,fingerprint' (on the command line --probes default,fingerprint)"


@dataclass(frozen=True)
class PlacePrint:
    """The sums of one place, (k,). ``order``: the number of its call in the pass. ``ulp``: the spacing of its dtype at
    1. ``norm``: the norm of its value. ``absent``: True if it has no value, such as a parameter without a gradient."""

    name: str
    order: float
    norm: float
    ulp: float
    sums: np.ndarray
    stack: str = ""
    layer: int = 0
    sublayer: str = ""
    absent: bool = False
    eps: float = 0.0  # of a direction


Places = Mapping[str, PlacePrint]


def module_of(name: str) -> str:
    """Return the module of a place or of a parameter."""
    return name.rpartition(":")[0] if name.endswith((":in", ":out")) else name.rpartition(".")[0]


@dataclass(frozen=True)
class Fingerprint:
    """The places of one row by pass and name, each pass in the order of the data. ``label`` names the run or model."""

    label: str
    step: int
    passes: Mapping[str, Places]
    facts: Mapping[str, Any] = field(default_factory=dict)  # the versions that made it

    @property
    def count(self) -> int:
        """The number of places in all passes."""
        return sum(len(places) for name, places in self.passes.items() if name != DIRECTIONS)

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "label": self.label,
            "step": self.step,
            "facts": dict(self.facts),
            "passes": {
                name: [
                    [p.name, p.stack, p.layer, p.sublayer, p.absent, p.order, p.norm.hex(), p.ulp]
                    + [float(number).hex() for number in p.sums]
                    for p in places.values()
                ]
                for name, places in self.passes.items()
            },
            "eps": {place.name: place.eps for place in self.passes.get(DIRECTIONS, {}).values()},
        }

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Fingerprint:
    """Read a fingerprint that :meth:`Fingerprint.save` wrote. Raises InputError for any other file."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        if read["format"] != FORMAT:
            raise InputError(f"{path} has the format {read['format']!r}, not {FORMAT!r}: write the file again.")
        passes = {name: dict(map(_place, rows)) for name, rows in read["passes"].items() if name in PASSES}
        for name, eps in read.get("eps", {}).items():
            passes[DIRECTIONS][name] = replace(passes[DIRECTIONS][name], eps=float(eps))
        return Fingerprint(str(path), int(read["step"]), passes, read["facts"])
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}): check the path.") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(f"{path} is no fingerprint: make one with 'stabilitylab fingerprint RUN --out {path}'.") from (
            error
        )


def _place(row: Sequence[Any]) -> tuple[str, PlacePrint]:
    name, stack, layer, sublayer, absent, order, norm, ulp, *sums = row
    numbers = np.array([float.fromhex(number) for number in sums])
    place = PlacePrint(name, float(order), float.fromhex(norm), float(ulp), numbers, stack, layer, sublayer, absent)
    return name, place


def of_tables(
    label: str,
    step: int,
    tables: Mapping[str, Table],
    cells: Mapping[str, Cells],
    after: Mapping[str, Cells] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Fingerprint:
    """Return the fingerprint of one row of tables; ``after``: the next row, for the update."""
    passes = {
        name: _places(tables[table], cells[table])
        for name, table in TABLES.items()
        if table in tables and table in cells
    }
    later = (after or {}).get(TABLES["weights"])
    if "weights" in passes and later is not None:
        moved = _places(tables[TABLES["weights"]], later)
        passes["update"] = {name: _change(p, moved[name]) for name, p in passes["weights"].items() if name in moved}
    return Fingerprint(label, step, passes, dict(facts or {}))


def _places(table: Table, cells: Cells) -> dict[str, PlacePrint]:
    at = {column: number for number, column in enumerate(table.columns)}
    sums = [number for column, number in at.items() if column[0] == "s" and column[1:].isdigit()]
    found = []
    for number, row in enumerate(table.rows):
        values = cells.values[number]
        absent = bool(cells.absent[number])
        order = float(values[at["call"]]) if "call" in at and not absent else float(number)
        norm, ulp = (0.0, 0.0) if absent else (float(values[at["norm"]]), float(values[at["ulp"]]))
        if not absent and ulp == 0:  # the place was reached, and its value could not be read
            continue
        own = np.zeros(len(sums)) if absent else np.asarray(values[sums], dtype=np.float64)
        eps = float(values[at["eps"]]) if "eps" in at and not absent else 0.0
        found.append(PlacePrint(row.site, order, norm, ulp, own, row.stack, row.layer, row.sublayer, absent, eps))
    found.sort(key=lambda place: (place.absent, place.order))
    return {place.name: place for place in found}


def _change(before: PlacePrint, after: PlacePrint) -> PlacePrint:
    """The sums of a parameter's update; its norm is estimated by them."""
    moved = after.sums - before.sums
    return replace(before, sums=moved, norm=norm_of_sums(moved))


def norm_of_sums(sums: np.ndarray) -> float:
    """Return the norm of a value as its sums estimate it."""
    return float(np.sqrt(np.mean(sums**2)))


def steps_of(run: Run) -> list[int]:
    """Return the steps of a run that have a fingerprint. Raises UsageError without any."""
    if TABLES["forward"] not in run.tables:
        raise UsageError(f"{run.path} has no fingerprint: {HOW}.")
    found = run.steps(TABLES["forward"])
    if not len(found):
        raise UsageError(f"{run.path} has no row with a fingerprint yet: wait for its first row.")
    return [int(step) for step in found]


class RunPrints:
    """The fingerprints of a run, whose tables are read once. Raises UsageError for a run without any."""

    def __init__(self, run: Run) -> None:
        self._run, self.steps = run, steps_of(run)
        self._tables = {name: run.table(name) for name in TABLES.values() if name in run.tables}
        self._data = {name: run.arrow(name) for name in self._tables}

    def at(self, step: int) -> Fingerprint:
        """Return the fingerprint of a row. Raises UsageError if the run has none there."""
        run = self._run
        if step not in self.steps:
            known = ", ".join(map(str, self.steps[:12]))
            raise UsageError(f"{run.path} has no fingerprint at step {step}: give one of {known}.")
        facts = {key: run.manifest[key] for key in ("torch", "version", "device") if key in run.manifest}
        return of_tables(str(run.path), step, self._tables, self._cells(step), self._cells(step + 1), facts)

    def _cells(self, step: int) -> dict[str, Cells]:
        found = {}
        for name, table in self._tables.items():
            part = self._data[name]
            part = part.take(np.flatnonzero(part["step"].to_numpy() == step))
            if part.num_rows == len(table.rows):
                values = np.stack([part[column].to_numpy(zero_copy_only=False) for column in table.columns], axis=1)
                absent = part["absent"].to_numpy(zero_copy_only=False)
                found[name] = Cells(values.astype(np.float64), absent.astype(bool))
        return found


def of_run(run: Run, step: int) -> Fingerprint:
    """Return the fingerprint of a run's row. Raises UsageError if the run has none there."""
    return RunPrints(run).at(step)
