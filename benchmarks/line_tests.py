"""A plug-in of pytest that notes which tests reach which lines: ``-p line_tests``, with benchmarks/ on the path.

``LINE_TESTS`` in the environment names a JSON file, {"lines": {file: [line, ...]}}; at the end of the session it has
"reached" beside it, {"file:line": [test, ...]}, and "passed", {test: seconds}. A line that is reached while a test is
set up counts for all tests of its file, since a fixture may serve several. Other processes are not seen.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest


class LineTests:
    """Notes, for each wanted line, the tests that reach it; and which tests passed."""

    def __init__(self, path: Path) -> None:
        self.path, self.asked = path, json.loads(path.read_text(encoding="utf-8"))
        self.wanted = {file: {*lines} for file, lines in self.asked["lines"].items()}
        self.reached: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        self.passed: dict[str, float] = {}
        self.lines: dict[CodeType, frozenset[int]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        with self._noted(item.nodeid.partition("::")[0]):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        with self._noted(item.nodeid):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed[report.nodeid] = report.duration
        elif report.failed:
            self.passed.pop(report.nodeid, None)

    def pytest_sessionfinish(self) -> None:
        reached = {f"{file}:{line}": sorted(tests) for (file, line), tests in self.reached.items()}
        self.path.write_text(json.dumps({**self.asked, "reached": reached, "passed": self.passed}), encoding="utf-8")

    @contextmanager
    def _noted(self, test: str) -> Iterator[None]:
        def line(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line" and frame.f_lineno in self.lines[frame.f_code]:
                self.reached[frame.f_code.co_filename, frame.f_lineno].add(test)
            return line

        def call(frame: FrameType, event: str, _: Any) -> Any:
            return line if self._own_lines(frame.f_code) else None

        before = sys.gettrace()
        threading.settrace(call)
        sys.settrace(call)
        try:
            yield
        finally:
            sys.settrace(before)
            threading.settrace(before)  # type: ignore[arg-type]

    def _own_lines(self, code: CodeType) -> frozenset[int]:
        """Return the wanted lines of a function."""
        if code not in self.lines:
            wanted = self.wanted.get(code.co_filename, set())
            self.lines[code] = frozenset(wanted & {number for *_, number in code.co_lines() if number is not None})
        return self.lines[code]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LineTests(Path(os.environ["LINE_TESTS"])), "line-tests")
