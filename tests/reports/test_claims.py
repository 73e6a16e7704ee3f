"""The ledger: what runs count, how several effects become one verdict, and what is registered."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from in_memory import rejudge, remembered
from making import load, make_run
from scipy import stats

from stabilitylab import experiments
from stabilitylab.reports import FIGURES, MissingRuns, figures
from stabilitylab.reports.claims import (
    CLAIMS,
    NAMED_LATER,
    STAGES,
    VERDICTS,
    Claim,
    Effect,
    Kind,
    Measure,
    Share,
    corrected,
    described,
    judge,
    ledger,
    together,
)
from stabilitylab.reports.collection import Runs, pairs
from stabilitylab.reports.headline import Tally, headline, tallies
from stabilitylab.reports.measures.comparison import both
from stabilitylab.reports.statistics import Region
from stabilitylab.store.documents import plain
from stabilitylab.verdict import UNREAD

NO_RUNS = Runs([])
ABOVE, BELOW = Region(low=1), Region(high=0)
TRUE = Effect("true", {3: 2.0, 4: 2.1, 5: 2.2}, ABOVE, BELOW)
FALSE = Effect("false", {3: -2.0, 4: -2.1, 5: -2.2}, ABOVE, BELOW)
OPEN = Effect("open", {3: 0.5, 4: 1.5, 5: 0.4}, ABOVE, BELOW)
BETWEEN = Effect("between", {3: 0.5, 4: 0.6, 5: 0.4}, ABOVE, BELOW)


def entry(measure: Measure, id: str = "T01", paper: str = "Admin", sweep: str = "claims:fast") -> Claim:
    return Claim(id, "admin:3", paper, "a sentence", "a source", "a statistic", "R: > 1; X: < 0", sweep, "", measure)


def of(*effects: Effect | Share) -> Claim:
    return entry(lambda runs: effects)


@pytest.mark.parametrize(
    ("effects", "verdict"),
    [
        ([TRUE], "reproduced"),
        ([FALSE], "contradicted"),
        ([BETWEEN], "not reproduced"),
        ([OPEN], "inconclusive"),
        ([TRUE, FALSE], "reproduced"),
        ([OPEN, FALSE, TRUE], "inconclusive"),
        ([FALSE, TRUE], "contradicted"),
    ],
)
def test_the_first_effect_decides_and_the_others_describe(effects: Sequence[Effect], verdict: str) -> None:
    finding = judge(of(*effects), NO_RUNS)
    assert finding.verdict == verdict
    assert [effect["effect"] for effect in finding.effects] == [effect.name for effect in effects]
    first, *others = finding.effects
    assert (first["role"], first["verdict"]) == ("primary", verdict)
    for other in others:
        assert (other["role"], other["verdict"], other["needed"]) == ("descriptive", "", None)
        assert math.isnan(other["p"])


def test_p_is_of_leaving_the_region_that_is_decided() -> None:
    """t of the mean's distance to the region's end: 1.1 sqrt(3) / .1 at 2 degrees of freedom, one-sided."""
    (first,) = judge(of(TRUE), NO_RUNS).effects
    assert first["p"] == pytest.approx(stats.t.sf(1.1 * math.sqrt(3) / 0.1, 2))
    (between,) = judge(of(BETWEEN), NO_RUNS).effects  # beyond R's end, which is at 1
    assert between["p"] == pytest.approx(stats.t.sf(0.5 * math.sqrt(3) / 0.1, 2))
    (share,) = judge(of(Share("lost", dict.fromkeys(range(6), (1, 1)), Region(low=0.5))), NO_RUNS).effects
    assert share["p"] == pytest.approx(0.5**6)


def test_a_description_has_no_regions() -> None:
    for effect in (described(TRUE, "another"), described(Share("lost", {3: (1, 1)}, ABOVE, BELOW))):
        assert (effect.reproduced, effect.contradicted) == (None, None)
        (judged,) = judge(of(effect), NO_RUNS).effects
        assert (judged["verdict"], math.isnan(judged["p"])) == ("", True)
    assert described(TRUE, "another").name == "another"
    assert described(TRUE).values == TRUE.values


def test_effects_together_are_taken_seed_by_seed() -> None:
    one, other = Effect("a", {3: 1.0, 4: 2.0, 5: 9.0}, log=True), Effect("b", {3: 3.0, 4: 4.0}, log=True)
    found = together("the larger", [one, other], max, ABOVE, BELOW)
    assert found.values == {3: 3.0, 4: 4.0}
    assert (found.log, found.reproduced, found.contradicted) == (True, ABOVE, BELOW)
    assert together("mean", [one, Effect("b", {4: 4.0})], np.mean).values == {4: 3.0}
    assert together("none", [], max).values == {}


def test_an_effect_comes_with_its_interval() -> None:
    finding = judge(of(BETWEEN), NO_RUNS)
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
    counts = {seed: (int(seed < count), 1) for seed in range(n)}
    finding = judge(of(Share("lost", counts, Region(low=0.5), Region(high=0.5))), NO_RUNS)
    assert finding.verdict == verdict
    assert finding.effects[0]["needed"] == (None if n >= 6 else 6)


@pytest.mark.parametrize(("seeds", "verdict"), [(6, "reproduced"), (4, "inconclusive"), (2, "inconclusive")])
def test_many_runs_of_few_seeds_count_as_seeds(seeds: int, verdict: str) -> None:
    """The interval of "all of two runs a seed" begins at .66 with six seeds, and at .43 with four, whose eight runs
    would have it at .63; two seeds decide nothing."""
    found = judge(of(Share("lost", dict.fromkeys(range(seeds), (2, 2)), Region(low=0.5))), NO_RUNS)
    assert found.verdict == verdict


def test_the_seed_is_the_unit_of_a_share() -> None:
    share = Share("lost", {3: (6, 15), 4: (9, 15), 5: (9, 15), 6: (0, 0)}, Region(low=0.25), Region(high=0.25))
    (found,) = judge(of(share), NO_RUNS).effects
    assert (found["n"], found["seeds"], found["values"]) == (3, [3, 4, 5], {"3": "6/15", "4": "9/15", "5": "9/15"})
    assert (found["mean"], found["low"], found["high"]) == pytest.approx((24 / 45, 0.24, 0.81), abs=0.002)
    assert found["verdict"] == "inconclusive"  # counted over runs: from .38, "reproduced"


def test_one_seed_has_no_interval_whatever_its_runs() -> None:
    (found,) = judge(of(Share("lost", {3: (2, 2)}, Region(low=0.1))), NO_RUNS).effects
    assert (found["mean"], math.isnan(found["low"]), found["verdict"]) == (1, True, "inconclusive")


def with_p(id: str, mean: float, paper: str = "DeepNet", kind: Kind = "published") -> Claim:
    """A claim whose first effect lies ``mean`` standard errors above R's end, of three seeds."""
    effect = Effect("e", {3: 1 + mean - 3**0.5, 4: 1 + mean, 5: 1 + mean + 3**0.5}, ABOVE, BELOW)
    return replace(entry(lambda runs: [effect], id, paper), kind=kind)


def p_of(mean: float) -> float:
    return float(stats.t.sf(mean, 2))


def test_holm_is_over_the_fixed_list_of_a_papers_published_claims() -> None:
    def lacking(runs: Runs) -> list[Effect]:
        raise MissingRuns("needs more")

    known = [
        with_p("C01", 20),
        with_p("C02", 6),
        with_p("C03", 0.5),
        entry(lacking, "C04", "DeepNet"),  # not tested: p = 1, and on the list all the same
        with_p("C05", 9, kind="control"),
        with_p("C06", 9, "Admin"),
    ]
    first, second, third, fourth, control, alone = corrected([judge(one, NO_RUNS) for one in known])
    assert first.holm == pytest.approx(4 * p_of(20))
    assert second.holm == pytest.approx(3 * p_of(6))
    assert third.holm == pytest.approx(2 * p_of(0.5))
    assert fourth.holm == 1
    assert math.isnan(control.holm)
    assert alone.holm == pytest.approx(p_of(9))
    assert [one.verdict for one in (first, second, third, fourth)] == [
        *("reproduced", "reproduced", "inconclusive", "not testable")
    ]
    found = [one.survives for one in (first, second, third, fourth, control, alone)]
    assert found == [True, False, None, None, None, True]
    assert second.as_dict()["survives"] is False


def test_the_headline_counts_kinds_apart() -> None:
    known = [with_p("C01", 20), with_p("C02", 5), with_p("C03", 0.5), with_p("C04", 9, kind="implied")]
    found = headline(corrected([judge(one, NO_RUNS) for one in known]))
    none = dict.fromkeys(VERDICTS, 0)
    assert found == {
        "published": none | {"reproduced": 2, "inconclusive": 1, "survive": 1},
        "implied": none | {"reproduced": 1, "survive": 0},
    }


def test_a_tally_says_over_what_holm_goes() -> None:
    known = [with_p("C01", 20), with_p("C02", 5), with_p("C03", 0.5), with_p("C04", 9, kind="implied")]
    everything = corrected([judge(one, NO_RUNS) for one in known])
    assert [str(tally) for tally in tallies(everything)] == [
        "DeepNet: 2 reproduced, 1 inconclusive, of which 1 survives Holm over the 3 published claims of that paper",
        "implied: 1 reproduced",
    ]
    assert [str(tally) for tally in tallies(everything[1:2], everything)] == [
        "DeepNet: 1 reproduced, of which 0 survive Holm over the 3 published claims of that paper"
    ]
    assert tallies([]) == []
    assert str(Tally("DeepNet", {"not testable": 3}, 0, 3)) == "DeepNet: 3 not testable"


def test_every_claim_of_the_plan_is_registered() -> None:
    assert figures
    missing = sorted({f"C{number:02d}" for number in range(1, 47)} - set(CLAIMS))
    assert not missing, f"not registered yet: {', '.join(missing)}"


def test_every_claim_says_what_it_is() -> None:
    for id in CLAIMS:
        claim = CLAIMS[id]
        assert claim.id == id
        assert claim.figure in FIGURES, f"{id} names a figure that does not exist: {claim.figure}"
        assert claim.sweep in experiments.SWEEPS, f"{id} names a sweep that does not exist: {claim.sweep}"
        assert claim.paper in ("BranchNorm", "DeepNet", "Admin", "Curvature"), id
        assert claim.threshold.startswith("R:"), f"{id} has a threshold without its first region"
        assert all((claim.sentence, claim.source, claim.statistic)), id
        assert claim.kind in get_args(Kind), id


def test_kinds_are_told_apart() -> None:
    found = {kind: [id for id in sorted(CLAIMS) if CLAIMS[id].kind == kind] for kind in get_args(Kind)}
    assert found["control"] == ["C08", "C42"]
    assert found["implied"] == ["C10", "C21", "C22", "C44", "C47", "C48"]
    assert len(found["published"]) == len(CLAIMS) - 8


def test_what_was_set_after_a_look_says_so() -> None:
    """Of the claims of the first ledger whose thresholds were, and of those with a new primary effect."""
    moved = {"C33", "C38", "C42", "C47", "C58"}
    new = {"C05", "C06", "C07", "C11", "C12", "C15", "C16", "C22", "C23", "C26", "C28", "C34", "C36", "C37", "C38"}
    new |= {"C40", "C43", "C45", "C46", "C47", "C48", "C51"}
    assert {id for id in CLAIMS if CLAIMS[id].after} == moved | new
    assert {id for id in CLAIMS if NAMED_LATER in CLAIMS[id].after} == new
    said = [CLAIMS[id].statistic + CLAIMS[id].threshold for id in CLAIMS]
    assert not [text for text in said if "after a look" in text or "after runs" in text or "came after" in text]


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
    decided = [f for f in ledger(load(tmp_path)) if f.verdict in VERDICTS[:3]]
    assert not decided, [finding.claim.id for finding in decided]


def trained_pairs(unread: Sequence[tuple[str, int]]) -> Runs:
    """DeepNorm at a loss of 5 and BranchNorm at 4.9 less a hundredth of the seed, seeds 3 to 8; ``unread``: models that
    ignore their source, whose loss is 6."""
    records = []
    for seed in range(3, 9):
        for arch, nll in (("deepnorm", 5.0), ("branchnorm", 4.9 - 0.01 * seed)):
            lost = (arch, seed) in unread
            record = remembered(f"{arch}-{seed}", arch=arch, seed=seed, nll=6.0 if lost else nll)
            rejudge(record, UNREAD if lost else "trained", source_worth=0.002 if lost else 0.5)
            records.append(record)
    return Runs(records)


def difference(runs: Runs) -> list[Effect]:
    found = pairs(runs.where(label="branchnorm"), runs.where(label="deepnorm"))
    if not found:
        raise MissingRuns("no pairs")
    values = {seed: one.last_nll - other.last_nll for seed, one, other in found}
    return [Effect("difference", values, Region(high=-0.01), Region(low=0.01), of=both(found))]


def test_a_claim_about_trained_models_is_judged_where_all_read_their_source() -> None:
    assert judge(entry(difference), trained_pairs([])).verdict == "reproduced"


def test_models_that_ignore_their_source_leave_it_untestable_and_are_counted() -> None:
    finding = judge(entry(difference), trained_pairs([("deepnorm", 3), ("deepnorm", 4), ("branchnorm", 4)]))
    assert (finding.verdict, finding.why) == ("not testable", "3 of 12 models ignore their source")
    shares = {effect["effect"].rpartition(", ")[2]: effect for effect in finding.effects[:2]}
    assert shares["deepnorm"]["mean"] == pytest.approx(2 / 6)
    assert shares["branchnorm"]["mean"] == pytest.approx(1 / 6)
    assert shares["deepnorm"]["low"] < 2 / 6 < shares["deepnorm"]["high"]
    conditional = finding.effects[2]
    assert conditional["effect"] == "difference, among seeds in which all models read"
    assert conditional["seeds"] == [5, 6, 7, 8]
    assert conditional["mean"] == pytest.approx(-0.165)  # of seeds 3 and 4 nothing is averaged in
    assert [effect["verdict"] for effect in finding.effects] == [""] * 3
    json.dumps(plain(finding.as_dict()))


def test_without_a_seed_in_which_all_read_the_shares_alone_are_said() -> None:
    finding = judge(entry(difference), trained_pairs([("deepnorm", seed) for seed in range(3, 9)]))
    assert [effect["mean"] for effect in finding.effects] == [0.0, 1.0]


@pytest.mark.parametrize("own", [{"stage": "initialisation"}, {"stage": "first updates"}, {"must_read": False}])
def test_other_claims_are_judged_on_all_models(own: dict[str, object]) -> None:
    finding = judge(replace(entry(difference), **own), trained_pairs([("branchnorm", 4)]))  # type: ignore[arg-type]
    assert finding.verdict != "not testable"
    assert finding.effects[0]["n"] == 6


def test_what_the_source_is_worth_is_unknown_for_a_decoder_alone() -> None:
    record = remembered("alone")
    assert record.reads is None
    assert judge(entry(difference), trained_pairs([])).effects[0]["limits"].count("source worth") == 0


def test_every_claim_has_a_stage_and_each_stage_has_claims() -> None:
    assert {claim.stage for claim in CLAIMS.values()} == {*STAGES}
    trained = [claim for claim in CLAIMS.values() if claim.stage == "after training"]
    assert {claim.id for claim in trained if not claim.must_read} == {
        *("C05", "C12", "C34", "C35", "C40", "C50", "C54"),  # which runs fail
        *("C56", "C57"),  # the optimizer
    }
