"""The ledger: what runs count, how several effects become one verdict, and what is registered."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from making import load, make_run

from stabilitylab import experiments
from stabilitylab.reports import FIGURES, MissingRuns, figures
from stabilitylab.reports import claims as ledger_module
from stabilitylab.reports.claims import CLAIMS, Claim, Effect, Measure, Share, judge, ledger
from stabilitylab.reports.collection import Runs
from stabilitylab.reports.statistics import Region
from stabilitylab.store.layout import plain

NO_RUNS = Runs([])
ABOVE, BELOW = Region(low=1), Region(high=0)
TRUE = Effect("true", {3: 2.0, 4: 2.1, 5: 2.2}, ABOVE, BELOW)
FALSE = Effect("false", {3: -2.0, 4: -2.1, 5: -2.2}, ABOVE, BELOW)
OPEN = Effect("open", {3: 0.5, 4: 0.6, 5: 0.4}, ABOVE, BELOW)


def entry(measure: Measure, id: str = "T01", paper: str = "Admin", sweep: str = "claims:fast") -> Claim:
    return Claim(id, "admin:3", paper, "a sentence", "a source", "a statistic", "R: > 1; X: < 0", sweep, "", measure)


def of(*effects: Effect | Share) -> Claim:
    return entry(lambda runs: effects)


@pytest.mark.parametrize(
    ("effects", "verdict"),
    [
        ([TRUE], "reproduced"),
        ([FALSE], "contradicted"),
        ([OPEN], "inconclusive"),
        ([TRUE, TRUE], "reproduced"),
        ([TRUE, OPEN], "inconclusive"),
        ([TRUE, FALSE], "contradicted"),
        ([OPEN, FALSE], "contradicted"),
    ],
)
def test_several_effects_mean_all_of_them(effects: Sequence[Effect], verdict: str) -> None:
    finding = judge(of(*effects), NO_RUNS)
    assert finding.verdict == verdict
    assert [effect["effect"] for effect in finding.effects] == [effect.name for effect in effects]


def test_an_effect_comes_with_its_interval() -> None:
    finding = judge(of(OPEN), NO_RUNS)
    (effect,) = finding.effects
    assert effect["mean"] == pytest.approx(0.5)
    assert effect["high"] - effect["mean"] == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)
    assert (effect["n"], effect["seeds"]) == (3, [3, 4, 5])
    assert effect["needed"] is None
    (printed,) = finding.as_dict()["effects"]
    assert (printed["reproduced"], printed["contradicted"]) == (str(ABOVE), "< 0")


def test_one_seed_decides_nothing() -> None:
    assert judge(of(Effect("one", {3: 9.0}, ABOVE)), NO_RUNS).verdict == "inconclusive"


def test_what_is_missing_makes_a_claim_not_testable() -> None:
    def lacking(command: str) -> Measure:
        def measure(runs: Runs) -> list[Effect]:
            raise MissingRuns("needs more", command)

        return measure

    finding = judge(entry(lacking("")), NO_RUNS)
    assert (finding.verdict, finding.why, finding.effects) == ("not testable", "needs more", [])
    assert finding.command == experiments.command("claims:fast")
    assert judge(entry(lacking("do this")), NO_RUNS).command == "do this"
    nothing = judge(of(), NO_RUNS)
    assert nothing.verdict == "not testable"
    assert nothing.why
    assert nothing.command


def test_pilots_and_runs_that_did_not_end_are_no_evidence(tmp_path: Path) -> None:
    for seed in (0, 1, 2, 3):
        make_run(tmp_path, f"tiny-{seed}", seed=seed, layers=1)
    make_run(tmp_path, "wide", seed=2, layers=1, settings={"model": {"d_model": 128}})
    make_run(tmp_path, "cut", seed=4, layers=1, state="interrupted")
    make_run(tmp_path, "lost", seed=5, layers=1, state="diverged")
    seen: list[str] = []

    def measure(runs: Runs) -> list[Effect]:
        seen.extend(run.name for run in runs)
        return [TRUE]

    judge(entry(measure), load(tmp_path))
    assert seen == ["lost", "tiny-3", "wide"]


@pytest.mark.parametrize(
    ("count", "n", "verdict"),
    [
        (6, 6, "reproduced"),  # Clopper-Pearson from .541
        (0, 6, "contradicted"),  # up to .459
        (3, 6, "inconclusive"),
        (5, 6, "inconclusive"),  # from .359
        (5, 5, "inconclusive"),  # five runs are too few, whatever they say
        (0, 0, "inconclusive"),
    ],
)
def test_counts_need_six_runs(count: int, n: int, verdict: str) -> None:
    finding = judge(of(Share("lost", count, n, Region(low=0.5), Region(high=0.5))), NO_RUNS)
    assert finding.verdict == verdict
    assert finding.effects[0]["needed"] == (None if n >= 6 else 6)


def test_holm_corrects_within_a_paper_and_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_p(*values: float) -> Measure:
        effects = [Effect("e", {3: 2.0, 4: 2.1, 5: 2.2}, ABOVE, BELOW, p=p) for p in values]
        return lambda runs: effects

    known = {
        "C02": entry(with_p(0.04, math.nan), "C02", "DeepNet"),
        "C01": entry(with_p(0.01), "C01", "DeepNet"),
        "C03": entry(with_p(0.9), "C03", "Admin"),
    }
    monkeypatch.setattr(ledger_module, "CLAIMS", known)
    first, second, third = ledger(NO_RUNS)
    assert [finding.claim.id for finding in (first, second, third)] == ["C01", "C02", "C03"]
    assert first.effects[0]["holm"] == pytest.approx(0.02)
    assert second.effects[0]["holm"] == pytest.approx(0.04)
    assert math.isnan(second.effects[1]["holm"])
    assert third.effects[0]["holm"] == pytest.approx(0.9)
    assert {finding.verdict for finding in (first, second, third)} == {"reproduced"}


def test_every_claim_of_the_plan_is_registered() -> None:
    assert figures
    missing = sorted({f"C{number:02d}" for number in range(1, 47)} - set(CLAIMS))
    assert not missing, f"not registered yet: {', '.join(missing)}"


def test_every_claim_says_what_it_is() -> None:
    for id in CLAIMS:
        claim = CLAIMS[id]
        assert claim.id == id
        assert claim.figure in FIGURES, f"{id} names a figure that does not exist: {claim.figure}"
        assert claim.sweep in experiments.FIGURES, f"{id} names a sweep that does not exist: {claim.sweep}"
        assert claim.paper in ("BranchNorm", "DeepNet", "Admin"), id
        assert claim.threshold.startswith("R:"), f"{id} has a threshold without its first region"
        assert all((claim.sentence, claim.source, claim.statistic)), id


def test_without_runs_no_claim_is_testable_and_each_says_what_to_do() -> None:
    for finding in ledger(NO_RUNS):
        assert finding.verdict == "not testable", finding.claim.id
        assert finding.why, finding.claim.id
        assert finding.command.startswith("stabilitylab "), finding.claim.id
        facts = json.loads(json.dumps(plain(finding.as_dict())))
        assert (facts["id"], facts["verdict"], "measure" in facts) == (finding.claim.id, "not testable", False)


def test_a_claim_that_the_runs_do_not_fit_is_not_testable(tmp_path: Path) -> None:
    """Runs without tables, of one seed and one layer: nothing may fail, and nothing may be decided."""
    make_run(tmp_path, "a", arch="postln", layers=1)
    make_run(tmp_path, "b", arch="deepnorm", layers=1, kind="onestep")
    decided = [f for f in ledger(load(tmp_path)) if f.verdict in ("reproduced", "contradicted")]
    assert not decided, [finding.claim.id for finding in decided]


@pytest.mark.parametrize(("seeds", "verdict"), [(None, "reproduced"), (3, "reproduced"), (2, "inconclusive")])
def test_many_runs_of_two_seeds_decide_nothing(seeds: int | None, verdict: str) -> None:
    assert judge(of(Share("lost", 20, 20, Region(low=0.5), seeds=seeds)), NO_RUNS).verdict == verdict
