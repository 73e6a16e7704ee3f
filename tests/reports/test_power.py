"""The power of planned runs against simulation, closed forms and the ledger itself."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from in_memory import remembered
from making import make_run
from rest_slow import rest_slow
from scipy import stats

from stabilitylab.errors import InputError
from stabilitylab.reports import figures, power
from stabilitylab.reports.build import write_ledger
from stabilitylab.reports.claims import CLAIMS, Claim, Effect, Share, judge
from stabilitylab.reports.collection import Runs
from stabilitylab.reports.power import Pilot, design_effect, from_ledger, from_runs, of_mean, of_share, planned_seeds
from stabilitylab.reports.statistics import Region, decide, effective, share_interval, t_interval

assert figures
ABOVE, BELOW = Region(low=0), Region(high=-1)


@pytest.mark.parametrize(
    ("mean", "reproduced", "contradicted"),
    [(0.5, ABOVE, BELOW), (0.05, Region(-1.2, 1.2), None), (-0.6, ABOVE, BELOW), (0.0, Region(0.5, 3), Region(high=0))],
)
@pytest.mark.parametrize("n", rest_slow([3, 6], [3]))
def test_power_of_a_mean_is_what_simulation_finds(
    n: int, mean: float, reproduced: Region, contradicted: Region | None
) -> None:
    draw = np.random.default_rng(n)
    found = [t_interval(sample) for sample in draw.normal(mean, 0.6, (3000, n))]
    verdicts = np.array([decide(one.low, one.high, reproduced, contradicted) for one in found])
    any_, right = of_mean(n, mean, 0.6, reproduced, contradicted)
    error = 3.5 * 0.5 / math.sqrt(3000)
    assert any_ == pytest.approx(np.mean(verdicts != "inconclusive"), abs=error)
    assert right == pytest.approx(np.mean(verdicts == "reproduced"), abs=error)


@pytest.mark.parametrize(("n", "mean"), [(3, 0.4), (6, 0.4), (6, 2.0), (4, -0.1)])
def test_with_one_end_it_is_the_noncentral_t(n: int, mean: float) -> None:
    shift = mean * math.sqrt(n) / 0.7
    quantile = stats.t.ppf(0.975, n - 1)
    above, below = stats.nct.sf(quantile, n - 1, shift), stats.nct.cdf(-quantile, n - 1, shift)
    assert of_mean(n, mean, 0.7, ABOVE) == pytest.approx((above + below, above), abs=1e-3)


def test_without_a_spread_it_is_certain_and_without_an_interval_unknown() -> None:
    assert of_mean(6, 0.5, 0.0, ABOVE) == (1, 1)
    assert of_mean(6, -0.5, 0.0, ABOVE) == (1, 0)
    assert all(map(math.isnan, of_mean(1, 0.5, 0.1, ABOVE)))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_power_of_one_run_a_seed_is_binomial(share: float) -> None:
    verdicts = [decide(*share_interval(k, 8), Region(low=0.5), Region(high=0.5)) for k in range(9)]
    weights = stats.binom.pmf(range(9), 8, share)
    decided = sum(w for w, v in zip(weights, verdicts, strict=True) if v != "inconclusive")
    right = sum(w for w, v in zip(weights, verdicts, strict=True) if v == "reproduced")
    assert of_share(8, 1, share, Region(low=0.5), Region(high=0.5)) == pytest.approx((decided, right))


@pytest.mark.parametrize(("seeds", "runs", "share"), [(6, 16, 0.8), (6, 10, 0.5), (4, 15, 0.7)])
def test_power_of_several_runs_a_seed_is_what_simulation_finds(seeds: int, runs: int, share: float) -> None:
    """Beta-binomial counts with a correlation of .1 within a seed: a design effect of 1 + .1 (runs - 1)."""
    draw = np.random.default_rng(seeds)
    counts = draw.binomial(runs, draw.beta(9 * share, 9 * (1 - share), size=(3000, seeds)))
    region, other = Region(low=0.5), Region(high=0.5)
    found = [decide(*share_interval(*effective([(int(k), runs) for k in own])), region, other) for own in counts]
    any_, _ = of_share(seeds, runs, share, region, other, 1 + 0.1 * (runs - 1))
    assert any_ == pytest.approx(np.mean(np.array(found) != "inconclusive"), abs=0.06)


def test_the_design_effect_of_a_pilot() -> None:
    assert design_effect([(1, 1), (0, 1), (1, 1)]) == design_effect([(3, 5)]) == 1
    assert design_effect([(10, 10), (0, 10), (10, 10), (0, 10)]) > 5  # a seed's runs share its fate
    assert design_effect([(7, 15), (8, 15), (7, 15)]) == 1  # more even than chance


def claim_of(effect: Effect | Share, sweep: str = "branchnorm:8") -> Claim:
    return replace(CLAIMS["C41"], id="T01", sweep=sweep, measure=lambda runs: [effect])


def test_planned_seeds_are_those_of_the_sweep() -> None:
    assert planned_seeds(CLAIMS["C18"]) == 10
    assert planned_seeds(CLAIMS["C18"], ["postln"]) == 10
    assert planned_seeds(CLAIMS["C18"], ["postln", "postln-init"]) == 5
    assert planned_seeds(CLAIMS["C18"], ["no such thing"]) == 10


def test_a_claim_says_what_its_seeds_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "planned_seeds", lambda entry, labels=(): 6)
    pilot = Pilot("ratio", Region(low=1), Region(high=0.5), [2.0, 2.2, 2.4], log=True)
    found = power.power(CLAIMS["C41"], pilot)
    logs = np.log([2.0, 2.2, 2.4])
    assert found.mean == pytest.approx(math.exp(logs.mean()))
    assert found.half_width == pytest.approx(stats.t.ppf(0.975, 5) * logs.std(ddof=1) / math.sqrt(6))
    assert (found.decides, found.reproduces) == of_mean(
        6, logs.mean(), logs.std(ddof=1), ABOVE, Region(high=math.log(0.5))
    )
    assert (found.reachable, found.note, found.planned) == (True, "", 6)
    wide = power.power(CLAIMS["C41"], Pilot("gap", Region(-0.05, 0.05), None, [0.0, 0.3, -0.2]))
    assert wide.note == "cannot be reproduced: its interval is wider than R"
    assert power.power(CLAIMS["C41"], None).note == "no pilot"
    assert "two seeds or more" in power.power(CLAIMS["C41"], Pilot("gap", ABOVE, None, [1.0])).note
    assert "two seeds or more" in power.power(CLAIMS["C41"], Pilot("gap", ABOVE, None, [1.0, math.nan])).note


@pytest.mark.parametrize(
    ("seeds", "region", "reachable"),
    [
        (5, Region(low=0.5), False),
        (6, Region(low=0.5), True),
        (10, Region(low=0.8), True),
        (17, Region(low=0.8), True),
    ],
)
def test_where_even_agreement_decides_nothing_no_verdict_can_be_reached(
    monkeypatch: pytest.MonkeyPatch, seeds: int, region: Region, reachable: bool
) -> None:
    """Ten seeds that all agree leave the interval from .69, which does not show "more than .8"; that none does would
    exclude it."""
    monkeypatch.setattr(power, "planned_seeds", lambda entry, labels=(): seeds)
    found = power.power(CLAIMS["C18"], Pilot("share", region, None, counts=[(1, 1)] * 5))
    assert found.reachable == reachable
    assert found.reproduces == float(reachable and seeds != 10)
    assert ("cannot be judged" in found.note) != reachable


def test_one_seed_cannot_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "planned_seeds", lambda entry, labels=(): 1)
    found = power.power(CLAIMS["C41"], Pilot("gap", ABOVE, None, [1.0, 1.1]))
    assert (found.reachable, found.note) == (False, "cannot be judged: one seed has no interval")


def pilots() -> Runs:
    """Of seeds that are no evidence."""
    return Runs(
        remembered(f"{arch}-{seed}", arch=arch, seed=seed, nll=5.0 - (0.1 + seed / 100) * (arch == "branchnorm"))
        for arch in ("branchnorm", "deepnorm")
        for seed in (0, 1, 2)
    )


def test_pilots_are_runs_of_any_seed() -> None:
    assert judge(CLAIMS["C37"], pilots()).verdict == "not testable"
    found = from_runs(pilots())
    assert found["C37"].numbers == pytest.approx([-0.1, -0.11, -0.12])
    assert found["C37"].labels == {"branchnorm", "deepnorm"}
    assert "C41" not in found


def test_the_same_from_a_ledger(tmp_path: Path) -> None:
    effect = Effect("gap", {3: 0.1, 4: 0.2, 5: math.inf}, Region(-0.05, 0.05), Region(low=0.05), log=True)
    share = Share("lost", {3: (1, 4), 4: (2, 4)}, Region(high=1 / 16))
    entries = {"C41": claim_of(effect), "C50": claim_of(share)}
    write_ledger([judge(replace(one, id=id), Runs([])) for id, one in entries.items()], tmp_path)
    found = from_ledger(tmp_path / "claims.csv")
    gap, lost = found["C41"], found["C50"]
    assert (gap.name, gap.reproduced, gap.contradicted, gap.log) == ("gap", Region(-0.05, 0.05), Region(low=0.05), True)
    assert gap.numbers[:2] == [0.1, 0.2]
    assert math.isnan(gap.numbers[2])
    assert (lost.counts, lost.reproduced, lost.contradicted) == ([(1, 4), (2, 4)], Region(high=1 / 16), None)


@pytest.mark.parametrize(
    "region", [Region(high=0.5), Region(low=-1e-3), Region(-0.15, 0.15), Region(1 / 3, 3), Region(low=0.95 - 1e-9)]
)
def test_a_region_is_read_as_it_prints_itself(region: Region) -> None:
    found = power.region_of(str(region))
    assert found is not None
    assert (found.low, found.high) == pytest.approx((region.low, region.high), rel=1e-5)
    assert power.region_of("") is None


def test_a_ledger_without_primary_effects_is_refused(tmp_path: Path) -> None:
    pd.DataFrame({"id": ["C01"], "effect_mean": [1.0]}).to_csv(tmp_path / "old.csv")
    with pytest.raises(InputError, match="no primary effects"):
        from_ledger(tmp_path / "old.csv")
    with pytest.raises(InputError, match="cannot be read"):
        from_ledger(tmp_path / "none.csv")


def test_the_command_prints_a_line_a_claim(run, tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        for arch, nll in (("branchnorm", 4.9 - seed / 100), ("deepnorm", 5.0)):
            make_run(tmp_path / "runs", f"{arch}-{seed}", arch=arch, seed=seed, layers=1,
                     metrics={"held_out_nll": [8.0, nll], "held_out_accuracy": [0.1, 0.2]})  # fmt: skip
    code, out, _ = run("claims", "--power", "--claim", "C37", "--claim", "C41")
    assert code == 0
    assert "1 of 2 claims have a pilot" in out
    assert "difference, mean over depths" in out
    assert "no pilot" in out
    code, out, _ = run("claims", "--power", "--claim", "C37", "--json")
    (only,) = json.loads(out)["power"]
    assert (only["id"], only["pilot_seeds"], only["reachable"]) == ("C37", 3, True)
    assert only["mean"] == pytest.approx(-0.11)
    code, _, err = run("claims", "--pilot", "claims.csv")
    assert (code, "add --power" in err) == (2, True)
