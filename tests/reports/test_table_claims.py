"""Claims C34 and C35 on divergence, against made-up runs in which they are true, false and open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from making import load, make_run
from rest_slow import slow

from stabilitylab.reports import figures
from stabilitylab.reports.claims import CLAIMS, Finding, judge

assert figures


def verdict(id: str, folder: Path) -> Finding:
    return judge(CLAIMS[id], load(folder))


def long_runs(folder: Path, arch: str, layers: int, failed: int, trained: int, steps: int = 3000, **more: Any) -> None:
    for number in range(failed + trained):
        make_run(
            folder, f"{arch}-{layers}-{number}", arch=arch, seed=3 + number, layers=layers,
            settings={"train": {"steps": steps}, **more}, verdict=("stuck" if number % 2 else "diverged")
            if number < failed else "trained",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("postln", "deepnorm", "expected"),
    [((6, 0), (0, 6), "reproduced"), ((0, 6), (0, 6), "contradicted"),
     slow((6, 0), (6, 0), "contradicted"), ((6, 0), (3, 3), "inconclusive"),
     slow((5, 0), (0, 5), "inconclusive")],
)  # fmt: skip
def test_deep_postln_diverges(
    tmp_path: Path, postln: tuple[int, int], deepnorm: tuple[int, int], expected: str
) -> None:
    long_runs(tmp_path, "deepnorm", 50, *deepnorm)
    long_runs(tmp_path, "branchnorm", 50, 0, 6)
    long_runs(tmp_path, "admin", 18, 0, 6)
    long_runs(tmp_path, "admin", 50, 6, 0)  # is another claim's
    assert "postln" in verdict("C34", tmp_path).why
    long_runs(tmp_path, "postln", 50, *postln)
    finding = verdict("C34", tmp_path)
    assert finding.verdict == expected
    alone, *arms = finding.effects
    assert [effect["mean"] for effect in arms] == pytest.approx(
        [postln[0] / sum(postln), deepnorm[0] / sum(deepnorm), 0, 0]
    )
    seeds = min(sum(postln), sum(deepnorm))
    assert alone["mean"] == pytest.approx(sum(s < postln[0] and s >= deepnorm[0] for s in range(seeds)) / seeds)
    assert {effect["role"] for effect in arms} == {"descriptive"}
    if expected == "reproduced":  # six of six, where one half would give each
        assert alone["p"] == pytest.approx(0.5**6)


def test_deepnets_own_postln_decides(tmp_path: Path) -> None:
    for arch, layers in (("deepnorm", 50), ("branchnorm", 50), ("admin", 18), ("postln", 50)):
        long_runs(tmp_path / "a", arch, layers, 0, 6)
    long_runs(tmp_path / "b", "postln", 50, 6, 0, model={"init": "xavier-1"})
    finding = verdict("C34", tmp_path)
    assert finding.verdict == "reproduced"
    assert [(e["effect"].rpartition(", ")[2], e["mean"]) for e in finding.effects if "none" in e["effect"]] == [
        ("gain 1", 1.0),
        ("fairseq's gain", 0.0),
    ]


def test_another_ramp_is_refused(tmp_path: Path) -> None:
    for arch, layers in (("deepnorm", 50), ("admin", 18), ("postln", 50)):
        long_runs(tmp_path, arch, layers, 0, 6)
    long_runs(tmp_path, "branchnorm", 50, 0, 6, model={"T": 1500})
    assert verdict("C34", tmp_path).why.startswith("BranchNorm ramped for 1500 of 3,000 updates")


@pytest.mark.parametrize(
    ("failed", "trained", "expected"),
    [(6, 0, "reproduced"), (0, 6, "contradicted"), (3, 3, "inconclusive"), (5, 0, "inconclusive")],
)
def test_admin_diverges(tmp_path: Path, failed: int, trained: int, expected: str) -> None:
    long_runs(tmp_path, "admin", 18, trained, failed)
    long_runs(tmp_path, "admin", 50, failed, trained)
    assert verdict("C35", tmp_path).verdict == expected


def test_a_seed_counts_once_at_the_shallowest_depth_and_a_run_without_a_verdict_not_at_all(tmp_path: Path) -> None:
    for layers in (50, 75, 100):
        long_runs(tmp_path, "admin", layers, 3, 0)
    finding = verdict("C35", tmp_path)
    assert (finding.verdict, finding.effects[0]["n"]) == ("inconclusive", 3)
    for seed in range(6, 9):
        make_run(tmp_path, f"open-{seed}", arch="admin", seed=seed, layers=50, settings={"train": {"steps": 3000}},
                 verdict="")  # fmt: skip
    assert verdict("C35", tmp_path).effects[0]["n"] == 3


def test_short_runs_do_not_show_who_diverges(tmp_path: Path) -> None:
    long_runs(tmp_path, "admin", 50, 1, 0, steps=2999)
    finding = verdict("C35", tmp_path)
    assert finding.verdict == "not testable"
    assert finding.command.endswith("depth=36,100 seed=3..8 steps=3000")


def test_they_stand_beside_the_table() -> None:
    assert {(CLAIMS[id].figure, CLAIMS[id].sweep) for id in ("C34", "C35")} == {("table:stability", "table:stability")}
