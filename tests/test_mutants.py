"""benchmarks/mutants.py on a toy package: which changes there are, which tests reach them, what survives."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from loose_scripts import scripts_of

SOURCE = '''"""A toy: is 3 < 4?"""

LIMIT = 5 + 1


def near(x: int = 7, words: "list[int] | None" = None) -> bool:
    """True if x < 9 + 1."""
    kept = {}
    kept["x"] = x
    if not (x < LIMIT or words is not None):
        raise ValueError(f"{x + 1} is far")
    return len(kept) == 1 and x * 2 >= 0.5
'''
TESTS = """
from toy.room import far


def test_far() -> None:
    assert far(6)
    assert not far(2)


def test_nothing() -> None:
    pass
"""


@pytest.fixture
def mutants() -> Iterator[ModuleType]:
    with scripts_of("benchmarks") as load:
        yield load("mutants")


def test_every_kind_of_change_within_functions_alone(mutants: ModuleType) -> None:
    source = SOURCE.encode()
    made = [*mutants.mutants_of(source, "toy.py")]
    assert all(mutants.is_another(mutant, source) for mutant in made)
    told = {(mutant.line, mutant.kind, mutant.before, mutant.after) for mutant in made}
    inside = "(x < LIMIT or words is not None)"
    assert told == {
        (9, "statement", 'kept["x"] = x', "pass"),
        (10, "not", f"not {inside}", inside),
        (10, "connective", "or", "and"),
        (10, "comparison", "<", ">="),
        (10, "comparison", "is not", "is"),
        (11, "statement", 'raise ValueError(f"{x + 1} is far")', "pass"),
        (12, "comparison", "==", "!="),
        (12, "constant", "1", "2"),
        (12, "connective", "and", "or"),
        (12, "operator", "*", "/"),
        (12, "constant", "2", "3"),
        (12, "comparison", ">=", "<"),
        (12, "constant", "0.5", "1.5"),
    }
    (changed,) = [one for one in made if (one.line, one.before) == (10, "or")]
    assert changed.put_in(source).decode() == SOURCE.replace("LIMIT or", "LIMIT and")
    assert changed.text == f"if not {inside}:"


def test_a_seed_draws_the_same_mutants_from_all_rooms_and_no_line_twice(mutants: ModuleType, tmp_path: Path) -> None:
    found = {}
    for room in ("one", "other"):
        (tmp_path / f"{room}.py").write_text(SOURCE)
        found[room] = [*mutants.mutants_of(SOURCE.encode(), f"{room}.py")]
    drawn = mutants.chosen(tmp_path, found, 6, 3)
    assert drawn == mutants.chosen(tmp_path, found, 6, 3)
    assert drawn != mutants.chosen(tmp_path, found, 6, 4)
    assert [mutant.file for mutant in drawn] == ["one.py", "other.py"] * 3
    assert len({(mutant.file, mutant.line) for mutant in drawn}) == 6
    assert len(mutants.chosen(tmp_path, found, 99, 3)) == 8, "four lines of each room can change"


@pytest.mark.slow
def test_mutants_are_killed_survive_or_are_not_reached(
    mutants: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the toy needs none, and they take a second each time
    root = tmp_path / "toy"
    (root / "toy").mkdir(parents=True)
    (root / "tests" / "room").mkdir(parents=True)
    (root / "toy" / "__init__.py").write_text("")
    code = "def far(x):\n    y = x - 0\n    return x > 5\n\n\ndef unused(x):\n    return not x\n"
    (root / "toy" / "room.py").write_text(code)
    (root / "tests" / "room" / "test_room.py").write_text(TESTS)
    (root / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    out = tmp_path / "out.csv"
    given = ["--root", str(root), "--package", "toy", "--rooms", "room", "--seed", "1", "--out", str(out)]
    assert mutants.main(given) == 0
    with out.open(newline="") as file:
        rows = {int(row["line"]): row for row in csv.DictReader(file)}
    assert {line: row["result"] for line, row in rows.items()} == {2: "survived", 3: "killed", 7: "not reached"}
    assert (rows[3]["by"], rows[3]["tests"]) == ("tests/room/test_room.py::test_far", "1")
    assert (root / "toy" / "room.py").read_text() == code, "the tree itself is never touched"
    said = capsys.readouterr().out
    assert "1 killed, 1 survived, 1 not reached" in said
    with pytest.raises(SystemExit):
        mutants.main([*given, "--only", "4"])
    assert "give numbers from 1 to 3" in capsys.readouterr().err
    (root / "tests" / "room" / "test_room.py").write_text("def test_far() -> None:\n    assert False\n")
    with pytest.raises(SystemExit, match=r"no test of tests/room passes without a mutant"):
        mutants.main(given)
