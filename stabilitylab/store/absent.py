"""A run that another process records: the ranks beside the first hold it in place of a :class:`RunWriter`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..schema import Cells, Table
from .writer import State


class AbsentRun:
    """A sink with the interface of RunWriter that touches no file."""

    run_id = ""  # the first rank's checkpoint names the run

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __enter__(self) -> AbsentRun:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def open(self, tables: Sequence[Table]) -> None: ...

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None: ...

    def begin(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None: ...

    def incident(self, facts: Mapping[str, Any], rows: Sequence[Any]) -> None: ...

    def ledger(self, facts: Sequence[Mapping[str, Any]]) -> None: ...

    def flush(self) -> None: ...

    def seal(self) -> int:
        return 0  # no part; the first rank's number is the one that a checkpoint stores

    def record(self, **facts: Any) -> None: ...

    def set_status(self, state: State, step: int, reason: str = "", **facts: Any) -> None: ...

    def close(self) -> None: ...
