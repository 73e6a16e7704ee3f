"""The tables of README.md and of pages in docs are those that docs/tables.py makes of the registries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from loose_scripts import scripts_of

from stabilitylab.commands import COMMANDS
from stabilitylab.diagnose import DETECTORS
from stabilitylab.models import ARCHS
from stabilitylab.probes import PROBES


@pytest.fixture(autouse=True)
def scripts() -> Iterator[None]:
    with scripts_of("docs"):
        yield


def test_the_pages_hold_what_the_registries_know(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    import tables

    monkeypatch.setattr(sys, "argv", ["tables.py"])
    assert tables.main() == 0, capsys.readouterr().err


def test_every_entry_of_this_package_is_listed() -> None:
    import tables

    commands, nouns, detectors = (" ".join(make()) for make in (tables.commands, tables.nouns, tables.detectors))
    assert [name for name in COMMANDS if f"`{name}`" not in commands] == []
    brought = {name for probe in PROBES.values() for name in probe.brings}  # which come with one that is listed
    assert [name for name in (*PROBES, *ARCHS) if f"`{name}`" not in nouns and name not in brought] == []
    for detector in DETECTORS.values():
        assert detector.title in detectors, f"docs/tables.py leaves out the detector {detector.kind}"
        assert detector.rule, f"the detector {detector.kind} has no rule="
        assert detector.remedy, f"the detector {detector.kind} has no remedy="


def test_a_changed_cell_is_found_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    import tables

    page = tmp_path / "page.md"
    monkeypatch.setattr(tables, "PAGES", (page,))
    right = tables.renewed("before\n<!-- table:thresholds -->\n<!-- end -->\nafter\n")
    page.write_text(right.replace("| `PAST` | 50 |", "| `PAST` | 51 |"))
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    assert tables.main() == 1
    assert "page.md: the page differs" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["tables.py", "--write"])
    assert tables.main() == 0
    assert page.read_text() == right
    with pytest.raises(KeyError):
        tables.renewed("<!-- table:nothing -->\n<!-- end -->\n")


def test_a_threshold_says_of_what_it_is() -> None:
    import tables

    source = "PAST = 5  # rows before\n_OWN = 3\nWORDS = 'a'\ndef f():\n    LOCAL = 2\nLOW = -1e-3  # nats # more\n"
    assert [*tables.constants(source)] == [("PAST", 5.0, "rows before"), ("LOW", -1e-3, "nats # more")]
    with pytest.raises(ValueError, match="HIGH = 20 has no comment that says of what it is: write one behind it"):
        [*tables.constants("HIGH = 20\n")]
