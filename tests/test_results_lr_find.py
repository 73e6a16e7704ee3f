"""results/lr-find: the rules of its page as code, on made-up ledgers; and its script, resumed, on a tiny size."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from loose_scripts import scripts_of
from rest_slow import complete
from scipy import stats

TORCH = torch.get_num_threads()


@pytest.fixture
def make() -> Iterator[ModuleType]:
    with scripts_of("results/lr-find") as load:
        yield load("make")


@pytest.fixture
def score() -> Iterator[ModuleType]:
    with scripts_of("results/lr-find", "results") as load:
        yield load("score")


@pytest.mark.parametrize(
    ("named", "own"),
    [([1e-3], [1e-3, 2e-3]), ([1e-4, 3e-2], [1e-3, 4e-3]), ([3e-4], [0.1, 0.2]), ([1.0], [1e-3, 1e-3])],
)
def test_the_rates_of_a_truth_are_evenly_spaced_around_the_answers(make: ModuleType, named, own) -> None:
    rates = make.true_rates(named, own)
    nine = rates[:9]
    steps = np.array(nine[1:]) / np.array(nine[:-1])
    assert steps == pytest.approx(steps[0], rel=2e-3)
    assert math.sqrt(2) * 0.998 <= steps[0] <= 2 * 1.002
    assert nine[0] < min(own)
    assert nine[-1] > max(own)
    for rate in named:
        assert nine[0] * 0.999 <= rate <= nine[-1] * 1.001 or any(abs(one / rate - 1) < 1e-3 for one in rates[9:])


def test_the_failure_of_a_run_is_what_the_page_says(make: ModuleType) -> None:
    fine = [(t, 5 - t / 100) for t in range(0, 101, 5)]
    assert make.fault(fine) == ""
    assert "above its start" in make.fault([*fine[:-1], (100, 5.1)])
    assert "stays up" in make.fault([(t, 5.0 if t == 0 else 2.0 if t < 80 else 4.0) for t in range(0, 101, 5)])
    assert make.fault([(t, 5.0 if t == 0 else 4.0 if t == 50 else 2.0) for t in range(0, 101, 5)]) == ""


def test_range_tests_choose_by_their_rules(make: ModuleType) -> None:
    falls = [5.0] * 60 + [5.0 - 0.1 * n for n in range(30)] + [2.0] * 60
    assert make.smooth([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])
    own = [0.0, 0.0]
    for n, loss in enumerate(falls[:2]):
        own[n] = loss
    assert 60 <= round(149 * math.log(make.steepest(falls) / 1e-6) / math.log(1e6)) <= 95
    at = round(149 * math.log(make.fall_of(falls) / 1e-6) / math.log(1e6))
    assert 60 < at < 149
    assert make.best_reached({1e-3: (150, 1.0), 1e-2: (450, 3.0), 2e-2: (450, 2.0)}) == 2e-2


def test_regret_is_read_from_the_smoothed_curve(score: ModuleType) -> None:
    raw = [4.0, 3.0, 2.0, 3.0, math.nan]
    curve = score.Curve([1.0, 2.0, 4.0, 8.0, 16.0], raw, score.smoothed(raw))
    assert curve.smoothed[:4] == pytest.approx([(0.5 * 4 + 0.25 * 3) / 0.75, 3.0, 2.5, (1.5 + 0.5) / 0.75])
    assert math.isnan(curve.smoothed[4])
    assert curve.best == 4.0
    assert curve.regret(4.0) == 0.0
    assert curve.regret(2.0) == pytest.approx(0.5)
    assert curve.regret(math.sqrt(8.0)) == pytest.approx(0.25)
    assert curve.regret(16.0) == math.inf
    assert curve.regret(12.0) == math.inf
    assert math.isnan(curve.regret(32.0))
    assert score.true_safe(curve, 0.2) == (8.0, 16.0)
    assert score.true_safe(curve, 0.05) == (4.0, 8.0)


def test_the_tests_are_those_of_scipy(score: ModuleType) -> None:
    own, other = [0.01, 0.02, 0.0, 0.05, 0.01, 0.03], [0.11, 0.22, 0.04, math.inf, 0.02, 0.01]
    difference, p = score.wilcoxon(own, other)
    assert difference < 0
    assert p == pytest.approx(stats.wilcoxon([-0.10, -0.20, -0.04, -9.0, -0.01, 0.02], method="exact").pvalue)
    assert score.wilcoxon([math.inf, 0.1], [math.inf, 0.1]) == (0.0, 1.0)
    assert score.holm({"a": 0.02, "b": 0.04}) == {"a": True, "b": True}
    assert score.holm({"a": 0.03, "b": 0.04}) == {"a": False, "b": False}
    low, high = score.statistics.share_interval(0, 12)
    assert (low, round(high, 2)) == (0.0, 0.26)
    interval = stats.binomtest(5, 12).proportion_ci(method="exact")
    assert score.statistics.share_interval(5, 12) == pytest.approx((interval.low, interval.high))


def written(folder: Path, name: str, rows: list[dict]) -> None:
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def ledgers(tmp_path: Path) -> None:
    """Write the ledgers of three models with bowls around 1e-3."""
    rates = [1e-3 * 2.0**power for power in range(-4, 5)]
    searches, rivals, truths = [], [], []
    for number, name in enumerate(("lstm", "vit", "gpt2")):
        cost = 14_000 if number < 2 else 16_000
        searches.append({
            "model": name, "best": 1e-3, "best_low": 7e-4, "best_high": "", "safe": 2e-3, "safe_low": 2e-3,
            "safe_high": 4e-3, "warmup": 0, "delta": 0.05, "horizon": 1500, "cost": cost, "cost_failed": 300,
            "cost_seeds": 6000,
        })  # fmt: skip
        rivals += [
            {"model": name, "rival": rival, "rate": rate} for rival, rate in (("best of 150", 4e-3), ("3e-4", 2.5e-4))
        ]
        for seed in (11, 12, 13):
            for rate in rates:
                loss = 2 + 0.04 * math.log2(rate / 1e-3) ** 2
                truths.append({"model": name, "kind": "grid", "rate": rate, "seed": seed, "warmup": 60, "loss": loss,
                               "failed": "nan" if rate > 1e-2 else ""})  # fmt: skip
            truths.append({"model": name, "kind": "safe", "rate": 2e-3, "seed": seed, "warmup": 60, "loss": 2.04,
                           "failed": "rose" if (name, seed) == ("vit", 12) else ""})  # fmt: skip
            truths.append({"model": name, "kind": "warmup", "rate": 2e-3, "seed": seed, "warmup": 0, "loss": 2.5,
                           "failed": ""})  # fmt: skip
    for file, rows in (("searches.csv", searches), ("rivals.csv", rivals), ("truths.csv", truths)):
        written(tmp_path, file, rows)


def test_the_pages_show_the_scores_of_the_ledgers(score: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert score.main(["--folder", str(score.HERE)]) == 0
    written = (score.HERE / "scores.md").read_text(encoding="utf-8")
    assert written == score.text_of(score.HERE), "run python results/lr-find/score.py --write"
    assert score.page_blocks.differing(score.DOCS, score.anew) == [], "run python results/lr-find/score.py --write"
    monkeypatch.setattr(score, "GOAL_EACH", 1.0)
    assert score.page_blocks.differing(score.DOCS, score.anew) == ["lr-find.md"], "it cannot fail"


def test_the_sentences_of_the_page_follow_from_the_ledgers(score: ModuleType) -> None:
    scores, page = score.Scores(score.HERE), " ".join(score.DOCS[0].read_text(encoding="utf-8").split())
    above, rises, over = [], [], []
    for name in ("postln", "deepnorm", "branchnorm"):
        curve, own = scores.curves[name], scores.searches[name]
        assert own["best"] == own["safe"], "the rate at which the three other seeds ran"
        losses = [float(row["loss"]) for row in scores.truths[name] if row["kind"] == "safe"]
        above.append(sum(losses) / 3 - min(curve.raw))
        best = curve.rates.index(curve.best)
        rises.append(curve.raw[best + 2] - curve.raw[best])
        over.append(float(own["best"]) / curve.best)
    assert [round(one, 2) for one in above] == [-0.02, 0.09, 0.02]
    assert "lies -.02, .09 and .02 nats above the lowest mean loss" in page
    assert (round(min(rises), 1), round(max(rises), 1)) == (1.8, 3.2)
    assert "costs 1.8 to 3.2 nats" in page
    assert (round(min(over), 1), round(max(over), 1)) == (1.1, 1.9)
    assert "recommended rates are 1.1 to 1.9 times the smoothed best rate" in page
    rivals = [own["Hyperband"] for own in scores.regrets.values()]
    assert round(score.median(rivals), 3) == 0.016
    assert "has a median regret of .016 nats" in page


def test_the_regrets_are_drawn(tmp_path: Path) -> None:
    ledgers(tmp_path)
    with scripts_of("results/lr-find", "results") as load:
        draw, own = load("draw"), load("score")
        (panel,) = draw.picture(own.Scores(tmp_path)).panels
        assert panel.map.y_names == ["lstm", "vit", "gpt2"]
        assert list(panel.map.text[0]) == ["0.000", "0.160", "0.160", "", "", ""]
        with pytest.raises(ValueError, match="no truth"):
            draw.picture(own.Scores(tmp_path / "absent"))


def test_the_page_of_made_ledgers_has_every_word(score: ModuleType, tmp_path: Path) -> None:
    ledgers(tmp_path)
    text = "\n".join(score.Scores(tmp_path).page())
    assert "Median regret 0.0000 nats (goal 0.02): **reached**" in text
    assert "3 of 3 models below 0.05 nats" in text
    assert "2 of 3 searches cost at most 10 horizons, median 9.3: **missed**" in text
    assert "1 of 3 unsafe" in text
    assert "seed 12 fails" in text
    assert "0, wrong: loses" in text
    assert "**not shown to differ**" in text  # three models cannot show more
    assert "Without gpt2, deepnorm, branchnorm" in text
    assert score.Scores(tmp_path / "absent").page() == ["No truth is made yet."]


@pytest.mark.slow
def test_a_run_of_the_truth_is_that_of_a_trial(make: ModuleType, tmp_path: Path) -> None:
    from stabilitylab.lr_find.find import plan_of
    from stabilitylab.lr_find.search import RateTrial
    from stabilitylab.lr_find.trial import RateRun

    case = make.models.CASES["convnet"]
    subject = case.subject((11, 12, 13), 20)
    plan = plan_of(subject, 20, (11, 12, 13), None)
    end = RateRun(subject, plan, tmp_path, RateTrial(0.05, 11, 20)).run()
    loss, start, failed = make.run(subject, 0.05, 11, 20)
    assert (loss, start, failed) == (end.marks[20].loss, end.start, "")


def test_the_data_of_the_search_are_not_those_of_the_truth(make: ModuleType) -> None:
    for name in ("gpt2", "bert", "t5", "vit"):
        case = make.models.CASES[name]
        one, other = (case.batch(False, (seed, 3))["x"] for seed in (0, 11))
        assert not torch.equal(one, other)
        assert torch.equal(one, case.batch(False, (0, 3))["x"])


@pytest.mark.slow
@complete
def test_the_script_goes_on_where_it_was(make: ModuleType, tmp_path: Path) -> None:
    arguments = ["convnet", "--out", str(tmp_path), "--runs", str(tmp_path / "runs"), "--horizon", "20"]
    assert make.main([*arguments, "--stage", "search", "rivals"]) == 0
    searches = (tmp_path / "searches.csv").read_text()
    assert make.main(arguments) == 0
    assert (tmp_path / "searches.csv").read_text() == searches
    with (tmp_path / "truths.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    cells = [(row["kind"], row["rate"], row["seed"], row["warmup"]) for row in rows]
    assert len(cells) == len(set(cells)) >= 3 * 10
    whole = (tmp_path / "truths.csv").read_text()
    lines = whole.splitlines(keepends=True)
    (tmp_path / "truths.csv").write_text("".join(lines[:-4]))
    assert make.main(arguments) == 0
    assert (tmp_path / "truths.csv").read_text() == whole
