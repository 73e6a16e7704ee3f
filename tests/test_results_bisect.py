"""results/bisect: the runner on one mutant and one clean pair, resumed; the mutants' places; the tables by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from loose_scripts import scripts_of


@pytest.fixture
def scripts() -> Iterator[dict[str, ModuleType]]:
    with scripts_of("results/bisect") as load:
        yield {name: load(name) for name in ("make", "mutants", "models", "score")}


@pytest.mark.slow
def test_one_mutant_and_one_clean_pair_are_made_once(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    make = scripts["make"]
    for _ in range(2):  # the second goes on where the first ended
        make.main(["--out", str(tmp_path), "--only", "scale: none gpt", "--stage", "effects", "--stage", "mutants"])
        make.main(["--out", str(tmp_path), "--only", "gpt float64 0", "--stage", "clean"])
    rows = {name: scripts["score"].read(tmp_path, name) for name in make.COLUMNS}
    assert [row["setting"] for row in rows["mutants"]] == ["fp32", "bf16"]
    assert {(row["verdict"], row["where"]) for row in rows["mutants"]} == {("different", "layers.1.attn")}
    assert {row["l1"] for row in rows["mutants"]} == {"layers.1.attn.out"}, "the rival names the next module"
    assert float(rows["effects"][0]["effect"]) > 0.1
    assert [(row["verdict"], row["kind"]) for row in rows["clean"]] == [("rounding", "float64")]
    text = "\n".join(scripts["score"].tables(tmp_path, scripts["score"].homes()))
    share = scripts["score"].share  # whose interval has a test of its own; 2.5 % is rounded either way
    assert f"| fp32 | 1 of 1 run | {share(1, 1)} | {share(1, 1)} |" in text
    assert f"Clean pairs flagged: {share(0, 1)}." in text


def test_the_pages_show_the_scores_of_the_ledgers(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    score = scripts["score"]
    assert len(score.read(score.HERE, "clean")) == 50
    assert score.differing(score.PAGES, score.anew) == [], "run python results/bisect/score.py --write"
    monkeypatch.setattr(score, "TIMES", 1e4)
    assert score.differing(score.PAGES, score.anew) == ["README.md", "bisect.md"], "it cannot fail"


def test_forty_mutants_each_with_a_place_in_its_models(scripts: dict[str, ModuleType]) -> None:
    mutants = scripts["mutants"].MUTANTS
    assert len({mutant.name for mutant in mutants}) == 40
    for mutant in mutants:
        for name in mutant.models:
            modules = dict(scripts["models"].made(name, 0).named_modules())
            assert mutant.where in modules, (mutant.name, name)
    assert len(scripts["make"].clean_pairs()) == 50


def test_a_share_has_the_interval_of_clopper_and_pearson(scripts: dict[str, ModuleType]) -> None:
    share = scripts["score"].share
    high, low = 100 * (1 - 0.025 ** (1 / 50)), 100 * 0.025 ** (1 / 50)
    assert share(0, 50) == f"0 of 50 (0 % [0, {high:.0f}])"
    assert share(50, 50) == f"50 of 50 (100 % [{low:.0f}, 100])"
    assert share(0, 0) == "-"
