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


def asked(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The last line that the script prints."""
    monkeypatch.setattr("sys.argv", ["make.py", "--runs", "nowhere", *flags])
    script.main()
    return capsys.readouterr().out.splitlines()[-1]


def test_a_candidate_ends_at_its_first_run_that_does_not_read(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 160 updates DeepNorm's second seed ignores its source; at 240 and 3e-4 every run reads."""
    known: dict[tuple, float] = {(script.Candidate(160, 3e-4), "branchnorm", 100): 0.3}
    made: list[tuple] = []

    def make(self: object, arch: str, seed: int, runs: Path) -> None:
        made.append((self, arch, seed))
        known[made[-1]] = 0.1 if (self.updates, arch, seed) == (160, "deepnorm", 101) else 0.3

    monkeypatch.setattr(script.Candidate, "make", make)
    monkeypatch.setattr(script.Candidate, "worth", lambda *run: known.get(run))
    assert asked(script, monkeypatch, capsys) == "the default: 240 updates at 0.0003, warm-up of 40"
    assert len(made) == len(set(made)) == 3 + 4 + 6  # one run was known
    assert (script.Candidate(160, 3e-4), "branchnorm", 102) not in made


def test_what_the_ledger_has_is_read(script: ModuleType) -> None:
    found = script.Candidate(160, 3e-4).worth("branchnorm", 100)
    assert found is not None
    assert found < 0.1
    assert script.Candidate(161, 3e-4).worth("branchnorm", 100) is None
    assert script.Candidate(160, 3e-4, warmup=80).worth("branchnorm", 100) is None
    assert script.Candidate(160, 3e-4, 36).worth("branchnorm", 100) != found


@pytest.mark.parametrize(
    ("flags", "reads", "answer", "recipe"),
    [
        (["--depth", "36"], (160, 1e-3), "36 layers: 160 updates at 0.001, warm-up of 40", (36, 40)),
        (["--slow"], (240, 6e-4), "the default: 240 updates at 0.0006, warm-up of 120", (200, 120)),
    ],
)
def test_each_rule_has_candidates_of_its_own(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    reads: tuple[int, float],
    answer: str,
    recipe: tuple[int, int],
) -> None:
    """Runs of 36 layers are not those of 200, and DeepNorm, which begins to read later, comes first with --slow."""
    seen: list[tuple] = []

    def worth(self: object, arch: str, seed: int) -> float:
        seen.append((self.depth, self.warmup, arch))
        return 0.3 * ((self.updates, self.rate) == reads)

    monkeypatch.setattr(script.Candidate, "worth", worth)
    assert asked(script, monkeypatch, capsys, *flags) == answer
    assert {run[:2] for run in seen} == {recipe}
    assert seen[0][2] == ("deepnorm" if flags == ["--slow"] else "branchnorm")


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        ([], "no candidate: the default stays"),
        (["--depth", "36"], "36 layers: 600 updates at 0.0003, warm-up of 40"),
        (["--slow"], "the default: 240 updates at 0.0003, warm-up of 120"),
    ],
)
def test_the_answer_is_that_of_the_committed_ledger(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    answer: str,
) -> None:
    """No run is left to be made, and the page says what the six runs of an answer were worth."""
    monkeypatch.setattr(script.Candidate, "make", lambda *run: pytest.fail(f"{run} is not in the ledger"))
    assert asked(script, monkeypatch, capsys, *flags) == answer
    page = script.LEDGER.with_name("README.md").read_text(encoding="utf-8")
    for recipe in (script.Candidate(600, 3e-4, 36), script.Candidate(240, 3e-4, warmup=120)):
        for arch in script.ARCHS:
            worth = [recipe.worth(arch, seed) for seed in script.SEEDS]
            first, second, third = (f"{one:.2f}".removeprefix("0") for one in worth)
            assert f"{first}, {second} and {third}" in page
