"""The script of results/h200 as modules, in an empty folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "results" / "h200"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Its modules and ``at(...)``, a Place in a folder that is the current one."""
    names = ("place", "parts", "collect")
    monkeypatch.syspath_prepend(str(SCRIPT))
    import collect
    import parts
    import place

    def at(out: Path = tmp_path, smoke: bool = True, total: float = 1620.0) -> place.Place:
        out.mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(out)
        state = place.State.read(Path("state.json"))
        return place.Place(Path.cwd(), place.Log(Path("log.txt")), state, total, smoke)

    made: Callable[..., place.Place] = at
    path = os.pathsep.join((str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")))
    monkeypatch.setenv("PYTHONPATH", path)
    yield SimpleNamespace(place=place, parts=parts, collect=collect, at=made)
    for name in names:
        sys.modules.pop(name, None)
