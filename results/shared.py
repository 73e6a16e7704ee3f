"""What the scripts of several folders share: CSV files that grow line by line, ledgers of sweeps, texts of Multi30k."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Line = Mapping[str, object] | Sequence[object]  # by column, or in the order of the columns


@dataclass(frozen=True)
class Lines:
    """A CSV file to which lines are added, so that a stopped call finds what it has made. ``end``: of a line."""

    path: Path
    columns: Sequence[str]
    end: str = "\n"

    def rows(self) -> list[dict[str, str]]:
        """Return all lines; none where there is no file yet."""
        return rows_of(self.path)

    def has(self, *key: object) -> bool:
        """Say whether a line begins with these cells."""
        names = self.columns[: len(key)]
        return any([row[name] for name in names] == [*map(str, key)] for row in self.rows())

    def add(self, *lines: Line) -> None:
        """Write lines, and the columns above the first; they are on the disk when this returns.

        Ends the process if the file has other columns. Raises ValueError for a line with a cell too many or too few.
        """
        made = [self._cells(line) for line in lines]
        is_new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+", newline="", encoding="utf-8") as file:
            file.seek(0)
            known = self.columns if is_new else next(csv.reader(file), [])
            if [*known] != [*self.columns]:
                told = f"{self.path} has the columns {','.join(known)}, not {','.join(self.columns)}"
                raise SystemExit(f"{told}: move it away first.")
            writer = csv.writer(file, lineterminator=self.end)
            if is_new:
                writer.writerow(self.columns)
            writer.writerows(made)
            file.flush()
            os.fsync(file.fileno())

    def _cells(self, line: Line) -> Sequence[object]:
        if isinstance(line, Mapping):
            if unknown := line.keys() - {*self.columns}:
                raise ValueError(f"{self.path.name} has no column {', '.join(sorted(unknown))}")
            return [line.get(name) for name in self.columns]
        if len(line) != len(self.columns):
            cells, columns = len(line), len(self.columns)
            raise ValueError(f"a row of {self.path.name} has {cells} cells, and its header {columns}: {line}")
        return line


def rows_of(path: Path) -> list[dict[str, str]]:
    """Return the lines of a CSV file by column; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def metrics_of(cell: Mapping[str, str]) -> dict[str, str]:
    """Return the metrics of a run from its line in the ledger of a sweep."""
    return dict(word.split("=", 1) for word in cell["metrics"].split())


def multi30k(folder: Path, judged_on: str = "val") -> dict[str, str]:
    """Return the settings of ``data`` for German to English, with the text that losses are judged on."""
    source, valid = (f"{folder / name}.de.gz,{folder / name}.en.gz" for name in ("train", judged_on))
    return {"source": f"text:{source}", "valid": valid}
