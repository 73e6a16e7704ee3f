"""Figures of these tests are printed in their own process, where matplotlib is imported once and not once a report."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from stabilitylab.reports.base import Picture
from stabilitylab.reports.files import paths
from stabilitylab.reports.page import press


class Inline(Executor):
    """An executor that has run what it is given when ``submit`` returns."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture(autouse=True)
def printed_inline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it where a test is marked ``printing_processes``."""
    if request.node.get_closest_marker("printing_processes") is None:
        monkeypatch.setattr(press, "ProcessPoolExecutor", lambda *_: Inline())


@pytest.fixture
def unprinted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of figures are empty: for tests of the page and the ledger, since matplotlib takes most of a report's
    time."""

    def touch(picture: Picture, folder: Path, name: str, title: str, source: str) -> None:
        for path in paths(folder, name, picture).values():
            path.touch()

    monkeypatch.setattr(press, "quietly", touch)
