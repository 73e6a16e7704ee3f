"""docs/detectors.md gives every threshold with the value that decides, docs/compare.md the levels of compare."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from stabilitylab import verdict
from stabilitylab.diagnose import series
from stabilitylab.diagnose.compare import LEVELS
from stabilitylab.diagnose.diagnosis import DETECTORS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "detectors.md").read_text(encoding="utf-8")


def test_the_table_of_thresholds_is_that_of_the_code() -> None:
    homes = [series, *(sys.modules[detector.find.__module__] for detector in DETECTORS.values())]
    written = {name: float(value) for name, value in re.findall(r"^\| `([A-Z_]+)` \| (\S+) \|", PAGE, re.MULTILINE)}
    values = [(name, value) for module in homes for name, value in vars(module).items() if name not in vars(verdict)]
    assert written == {name: float(value) for name, value in values if _is_threshold(name, value)}


def _is_threshold(name: str, value: object) -> bool:
    return name.isupper() and not name.startswith("_") and isinstance(value, int | float)


def test_every_kind_of_event_has_its_line() -> None:
    lines = set(re.findall(r"^\| ([a-z -]+) \|", PAGE, re.MULTILINE))
    assert {detector.title for detector in DETECTORS.values()} <= lines


def test_the_levels_of_compare_are_those_of_the_page() -> None:
    *first, last = (f"{100 * level:g}" for level in LEVELS)
    page = (DOCS / "compare.md").read_text(encoding="utf-8")
    assert f"{', '.join(first)} and {last} %" in page.replace("\n", " ")
