"""results/default: the first candidate of which every run reads its source, and no run twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from loose_scripts import scripts_of


@pytest.fixture
def script() -> Iterator[ModuleType]:
    with scripts_of("results/default") as load:
        yield load("make")


def test_a_candidate_ends_at_its_first_run_that_does_not_read(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 160 updates DeepNorm's second seed ignores its source; at 240 and 3e-4 every run reads."""
    known: dict[tuple, float] = {("branchnorm", 100, 160, 3e-4): 0.3}
    made: list[tuple] = []

    def make(*run: object) -> None:
        made.append(run[:4])
        known[run[:4]] = 0.1 if run[:3] == ("deepnorm", 101, 160) else 0.3

    monkeypatch.setattr(script, "make", make)
    monkeypatch.setattr(script, "worth", lambda *run: known.get(run[:4]))
    monkeypatch.setattr("sys.argv", ["make.py", "--runs", str(tmp_path)])
    script.main()
    assert capsys.readouterr().out.splitlines()[-1] == "the default: 240 updates at 0.0003"
    assert len(made) == len(set(made)) == 3 + 4 + 6  # one run was known
    assert ("branchnorm", 102, 160, 3e-4) not in made


def test_what_the_ledger_has_is_read(script: ModuleType) -> None:
    found = script.worth("branchnorm", 100, 160, 3e-4)
    assert found is not None
    assert found < 0.1
    assert script.worth("branchnorm", 100, 161, 3e-4) is None


def test_other_depths_have_candidates_of_their_own(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of 36 layers are not those of 200, and the answer names the depth."""
    asked: list[tuple] = []
    monkeypatch.setattr(script, "worth", lambda *run: asked.append(run) or 0.3 * (run[3] == 1e-3))
    monkeypatch.setattr("sys.argv", ["make.py", "--runs", str(tmp_path), "--depth", "36"])
    script.main()
    assert capsys.readouterr().out.splitlines()[-1] == "36 layers: 160 updates at 0.001"
    assert {run[-1] for run in asked} == {36}
    monkeypatch.undo()
    assert script.worth("branchnorm", 100, 160, 3e-4, 36) != script.worth("branchnorm", 100, 160, 3e-4)


@pytest.mark.parametrize(
    ("depth", "answer"), [("200", "no candidate: the default stays"), ("36", "36 layers: 600 updates at 0.0003")]
)
def test_the_answer_is_that_of_the_committed_ledger(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], depth: str, answer: str
) -> None:
    """No run is left to be made, and the page says what the six runs of the answer were worth."""
    monkeypatch.setattr(script, "make", lambda *run: pytest.fail(f"{run} is not in the ledger"))
    monkeypatch.setattr("sys.argv", ["make.py", "--runs", "nowhere", "--depth", depth])
    script.main()
    assert capsys.readouterr().out.splitlines()[-1] == answer
    page = script.LEDGER.with_name("README.md").read_text(encoding="utf-8")
    for arch in script.ARCHS:
        worth = [script.worth(arch, seed, 600, 3e-4, 36) for seed in script.SEEDS]
        first, second, third = (f"{one:.2f}".removeprefix("0") for one in worth)
        assert f"{first}, {second} and {third}" in page
