"""The questions of Protocol 3 in results/tiny: paired t-tests over models that read their source, and nothing else."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from loose_scripts import scripts_of
from scipy import stats

from stabilitylab.experiments import Recipe, protocol
from stabilitylab.reports.figures.collapse.map import JUDGED

HERE = Path(__file__).parents[1] / "results" / "tiny"
SEEDS = protocol.JUDGED_SEEDS


@pytest.fixture(autouse=True)
def scripts() -> Iterator[None]:
    with scripts_of("results/tiny"):
        yield


def made(spread: float = 0.02):
    """A model of every arm, depth and seed that reads: a seed's own level, an arm's own place, noise."""
    import judge

    rng = np.random.default_rng(7)
    level = dict(zip(SEEDS, rng.normal(2, 0.5, len(SEEDS)), strict=True))
    return {
        (arm, layers): {
            seed: judge.Model(level[seed] + 0.3 * k * layers / 18 + rng.normal(0, spread), 1.5, 0.2) for seed in SEEDS
        }
        for k, arm in enumerate(protocol.SEARCHED_ARMS)
        for layers in protocol.LAYERS
    }


def test_an_answer_is_a_paired_t_test_with_holm_over_the_four() -> None:
    import judge

    models = made()
    found = judge.table(models).set_index("id")
    raw = {}
    for id, first, second in (("P1", protocol.DEEP, protocol.SMALL), ("P2", protocol.BRANCH, protocol.DEEP)):
        test = stats.ttest_rel(*([models[arm, 18][seed].loss for seed in SEEDS] for arm in (first, second)))
        interval = test.confidence_interval(0.95)
        row = found.loc[id]
        assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high))
        assert row["half_width"] == pytest.approx((interval.high - interval.low) / 2)
        assert (row["n"], row["answer"]) == (8, "matters")
        raw[id] = test.pvalue
    assert all(found.loc[id, "p_holm"] >= p for id, p in raw.items())
    deep, shallow = (
        [models[protocol.DEEP, n][seed].loss - models[protocol.SMALL, n][seed].loss for seed in SEEDS] for n in (18, 6)
    )
    assert found.loc["P4", "mean"] == pytest.approx(np.mean(deep) - np.mean(shallow))


def test_a_model_that_ignores_its_source_is_averaged_into_nothing() -> None:
    import judge

    models = made()
    whole = judge.answer(judge.QUESTIONS[0], models)
    worst = replace(models[protocol.DEEP, 18][3], loss=9.0, worth=0.02, between=1e-6)
    models[protocol.DEEP, 18][3] = worst
    found = judge.answer(judge.QUESTIONS[0], models)
    assert found.said() == "not testable: 1 of 16 models ignore their source"
    asked = judge.table(models).set_index("id")
    assert asked["conditional"].to_dict() == {"P1": True, "P2": True, "P3": False, "P4": True}
    assert asked.loc["P3", "p_holm"] == pytest.approx(4 * judge.answer(judge.QUESTIONS[2], models).p)
    assert math.isnan(asked.loc["P1", "p_holm"])  # it has no answer, and counts in the correction of the others
    assert found.found.n == 7
    assert found.found.mean == pytest.approx(whole.found.mean, abs=0.05)
    count, n, (low, high) = judge.constant(models[protocol.DEEP, 18])
    exact = stats.binomtest(1, 8).proportion_ci(0.95, "exact")
    assert (count, n, low, high) == (1, 8, pytest.approx(exact.low), pytest.approx(exact.high))
    models[protocol.DEEP, 18][3] = replace(worst, between=0.1)  # it does not read, and is no constant
    assert judge.constant(models[protocol.DEEP, 18])[0] == 0
    with pytest.raises(ValueError, match="ignores its source: their losses are not to be compared"):
        judge.apart(models, protocol.BRANCH, protocol.DEEP, 18)
    two = ([models[arm, 6][seed].loss for seed in SEEDS] for arm in (protocol.BRANCH, protocol.DEEP))
    interval = stats.ttest_rel(*two).confidence_interval(0.95)
    gap = judge.apart(models, protocol.BRANCH, protocol.DEEP, 6)
    assert (gap.low, gap.high) == pytest.approx((interval.low, interval.high))
    del models[protocol.SMALL, 18][10]
    assert judge.answer(judge.QUESTIONS[0], models).said() == "open: 15 of 16 models"


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (-0.04, 0.04, "equivalent"),
        (0.01, 0.04, "equivalent"),
        (0.01, 0.06, "differs"),
        (-0.01, 0.06, "cannot tell"),
        (0.06, 0.3, "matters"),
        (-0.3, -0.06, "matters"),
        (0.02, 0.3, "undecidable at this n"),
        (-0.2, 0.2, "undecidable at this n"),
    ],
)
def test_the_words_for_an_interval(low: float, high: float, word: str) -> None:
    import judge

    assert judge.decided(judge.Interval((low + high) / 2, low, high, 8)) == word


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (0.0, "not contradicted at half the rate (n = 4)"),
        (0.3, "depends on the rate"),
        (-0.9, "depends on the rate"),
    ],
)
def test_an_answer_depends_on_the_rate_only_where_its_change_excludes_0(change: float, word: str) -> None:
    import judge

    rng, models = np.random.default_rng(3), made()
    halved = {
        (arm, layers): {
            seed: replace(runs[seed], loss=runs[seed].loss + change * (arm == protocol.DEEP) + rng.normal(0, 0.02))
            for seed in protocol.HALVED_SEEDS
        }
        for (arm, layers), runs in models.items()
    }
    question = judge.QUESTIONS[0]
    found = judge.robustness(question, models, halved)
    gaps = [
        [each[protocol.DEEP, 18][n].loss - each[protocol.SMALL, 18][n].loss for n in range(3, 7)]
        for each in (halved, models)
    ]
    interval = stats.ttest_rel(*gaps).confidence_interval(0.95)
    assert (found.change.low, found.change.high) == pytest.approx((interval.low, interval.high))
    assert found.said() == word
    assert judge.robustness(question, models, {}).said() == "open: 8 of 16 models"
    halved[protocol.DEEP, 18][3] = replace(halved[protocol.DEEP, 18][3], worth=0.05)
    assert judge.robustness(question, models, halved).said() == "not testable: 1 of 16 models ignore their source"


def test_a_sign_that_turns_depends_on_the_rate() -> None:
    import judge

    wide, beside = judge.Interval(0.1, -0.5, 0.7, 4), judge.Interval(-0.2, -0.3, -0.1, 4)
    change = judge.Interval(-0.3, -0.9, 0.3, 4)
    found = judge.Robustness(judge.QUESTIONS[0], wide, beside, change, 16, 0)
    assert found.said() == "depends on the rate"
    assert replace(found, at=judge.Interval(-0.1, -0.7, 0.5, 4)).said() == "not contradicted at half the rate (n = 4)"


def test_half_the_rates_and_the_ramps_are_planned_from_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    import make

    monkeypatch.setattr(protocol, "SEARCH", {arm: {6: 1e-3, 18: 4e-4} for arm in protocol.SEARCHED_ARMS})
    ask = make.recipe(Path(), make.FLICKR)
    halves = [*make.PARTS["half"].experiments(ask, protocol.LAYERS, protocol.SEARCHED_ARMS)]
    assert len(halves) == 4 * 5 * 2
    assert {(one.config.model.encoder_layers, one.config.train.lr) for one in halves} == {(6, 5e-4), (18, 2e-4)}
    ramps = [*make.PARTS["searched-ramps"].experiments(ask, protocol.LAYERS, ())]
    assert {(one.config.train.lr, one.config.model.T) for one in ramps} == {
        (rate, T) for rate in (4e-4, 2e-4, 1e-3) for T in (3, 12, 120, 600)
    }
    assert len({one.name for one in ramps}) == len(ramps) == 6 * 3 * 4
    monkeypatch.setattr(protocol, "SEARCH", {arm: {6: 1e-3} for arm in protocol.SEARCHED_ARMS})
    for part in ("judged", "half", "searched-ramps"):
        with pytest.raises(SystemExit, match="no rate at 18 layers a side yet"):
            make.PARTS[part].experiments(ask, protocol.LAYERS, protocol.SEARCHED_ARMS)


def test_p5_is_of_ratios_of_rates_by_seed() -> None:
    import judge

    largest = {protocol.BRANCH: {3: 4e-3, 4: 2e-3, 5: 4e-3}, protocol.DEEP: {3: 1e-3, 4: 1e-3, 5: 2e-3, 6: 1e-3}}
    found = judge.largest_rates(largest, (5e-4, 1e-3, 2e-3, 4e-3, 8e-3))
    assert (found.found.mean, found.found.n, found.beyond, found.rates) == (pytest.approx(4 / 3), 3, 0, 6)
    assert found.said().startswith("cannot tell (log2 of the ratio +1.33 [")
    largest = {protocol.BRANCH: {3: 0.0, 4: 1e-3}, protocol.DEEP: {3: 8e-3, 4: 8e-3}}
    found = judge.largest_rates(largest, (5e-4, 1e-3, 8e-3))  # 0: at none of them, and 8e-3 is the last
    test = stats.t.interval(0.95, 1, -4, 1 / np.sqrt(1))  # of -5 and -3
    assert (found.found.low, found.found.high) == pytest.approx(test)
    assert found.said().endswith("n = 2; 3 of 4 rates lie beyond the grid)")


@pytest.mark.slow
def test_p5_is_asked_of_the_map_at_one_ramp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import collapse_map
    import keep

    lines = [",".join((*keep.WHICH[:-1], "updates", "warmup", "step", "source_worth", "encoder_distance_between"))]
    reading = {("branchnorm", 240): 1e-3, ("branchnorm T=1", 1): 8e-3, ("deepnorm", 240): 4e-3}  # up to this rate
    for (arm, T), highest in reading.items():
        for rate in collapse_map.GRID[6][0]:
            for seed in (3, 4):
                for warmup in (60, 240):
                    worth = 0.5 if rate <= highest * (2 if seed == 4 else 1) else 0.01
                    updates = warmup + JUDGED
                    lost = (arm, rate, seed, warmup) == ("deepnorm", 8e-3, 3, 240)  # its numbers end early
                    lines += [
                        f"{arm},6,{seed},{rate},{T},{updates},{warmup},{step},{worth},{0.1 if worth > 0.1 else 1e-7}"
                        for step in ((0,) if lost else (0, updates))
                    ]
    (tmp_path / "reading_course.csv").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(collapse_map, "TABLE", tmp_path / "reading_course.csv")
    monkeypatch.setattr(collapse_map, "LEDGER", tmp_path / "ledger.csv")
    columns = "label,layers,warmup,T,lr,seed,verdict\ndeepnorm,12,240,240,0.008,"
    (tmp_path / "ledger.csv").write_text(f"{columns}4,trained\n")
    with pytest.raises(SystemExit, match=r"deepnorm at 0\.008, seed 3, was not measured when it is judged"):
        collapse_map.trials()
    (tmp_path / "ledger.csv").write_text(f"{columns}3,diverged\n")
    known = collapse_map.trials()
    assert len(known) == 3 * 5 * 2 * 2
    assert {one.row for one in known} == {("branchnorm", 240), ("branchnorm", 1), ("deepnorm", 0)}
    assert {one.state for one in known} == {"reads", "constant", "failed"}
    assert collapse_map.largest(known, 6) == {"branchnorm": {3: 1e-3, 4: 2e-3}, "deepnorm": {3: 4e-3, 4: 8e-3}}
    found = collapse_map.question(known, 6)
    assert (found.found.mean, found.beyond) == (-2, 1)
    assert [*map(collapse_map.planned, collapse_map.GRID)] == [300, 64]
    monkeypatch.setattr(collapse_map, "HERE", tmp_path)
    collapse_map.main()
    assert "P5 at 6 layers a side: open: 60 of 300 runs are in" in capsys.readouterr().out
    assert not (tmp_path / "figures").exists()  # nothing is drawn of a part
    assert collapse_map.answers()[2:] == ["| 6 | 60 of 300 | open |", "| 18 | 0 of 64 | open |"]
    assert collapse_map.outcomes() == ["No depth is complete yet."]
    monkeypatch.setattr(collapse_map, "planned", lambda layers: 60)
    collapse_map.main()
    assert "P5 at 6 layers a side: BranchNorm reads up to a lower rate than DeepNorm" in capsys.readouterr().out
    assert (tmp_path / "figures" / "collapse-map.png").exists()
    assert collapse_map.answers()[2].startswith("| 6 | 60 of 60 | BranchNorm reads up to a lower rate than DeepNorm (")
    cells = ["2/2", "2/2", "1/2, 1 c", "0/2, 2 c", "0/2, 2 c"]
    assert f"| 6 | 240 | BranchNorm, T = 240 | {' | '.join(cells)} |" in collapse_map.outcomes()


def test_the_judged_runs_are_at_the_rates_of_the_search_and_on_another_set(tmp_path: Path) -> None:
    import judge
    import make

    with (HERE / "rungs-choice.csv").open(newline="") as file:
        chosen = {
            (row["arm"], int(row["layers"])): float(row["lr"]) for row in csv.DictReader(file) if row["chosen"] == "1"
        }
    planned = {(arm, layers): rate for arm, own in protocol.SEARCH.items() for layers, rate in own.items()}
    assert {cell: chosen.get(cell) for cell in planned} == planned
    small = {"data": {"sentences": 4, "held_out": 6, "validation": 20}}
    experiments = list(protocol.judged(Recipe("tiny", small), 6))
    assert len(experiments) == len(SEEDS) * len(protocol.SEARCHED_ARMS)
    assert {one.config.train.steps for one in experiments} == {6000}
    assert {one.config.model.T for one in experiments if one.config.model.arch == "branchnorm"} == {1, 240}
    assert "test_2016_flickr" in str(make.recipe(tmp_path, "test_2016_flickr").settings["data"]["valid"])
    assert not judge.models_of(tmp_path)
