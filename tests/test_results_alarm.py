"""The scripts of results/alarm and benchmarks/faults: definitions against cases with known answers."""

from __future__ import annotations

import csv
import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def scripts() -> Any:
    """Imports a module of either folder by its name, whatever else is called so."""
    folders = [ROOT / "results/alarm", ROOT / "benchmarks/faults"]
    names = [path.stem for folder in folders for path in folder.glob("*.py")]
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path[:0] = map(str, folders)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for folder in folders:
        sys.path.remove(str(folder))
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(others)


def corpus_run(scripts: Any, rows: int = 400, **facts: Any) -> Any:
    told = {"name": "r", "subject": "postln-d4", "family": "rate", "kind": "endogenous", "seed": 1, "rows": rows}
    told |= {"fault": None, "failed": None, "benign": (), "open": False}
    return scripts("corpus").CorpusRun(**{**told, **facts})


def spikes(rows: int, *at: int) -> np.ndarray:
    score = np.zeros(rows)
    score[list(at)] = 1.0
    return score


# t*


def noisy(rows: int = 400, seed: int = 0) -> np.ndarray:
    return 4.0 + 0.1 * np.random.default_rng(seed).standard_normal(rows)


def failure_of(scripts: Any, loss: np.ndarray, **options: Any) -> Any:
    gradient = options.pop("gradient", np.ones_like(loss))
    return scripts("failure").failure(loss, gradient, options.pop("held_out", []), options.pop("twin", None))


@pytest.mark.parametrize("seed", range(5))
def test_a_steady_or_falling_loss_is_no_failure(scripts: Any, seed: int) -> None:
    assert failure_of(scripts, noisy(seed=seed)).step is None
    assert failure_of(scripts, noisy(seed=seed) + np.linspace(4, 0, 400)).step is None


def test_a_rise_that_stays_is_a_failure_at_its_first_row(scripts: Any) -> None:
    loss = noisy()
    loss[200:] += 2.0
    assert failure_of(scripts, loss)[:2] == (200, "rise")


def test_a_rise_that_heals_is_benign(scripts: Any) -> None:
    loss = noisy()
    loss[200:230] += 2.0
    found = failure_of(scripts, loss)
    assert (found.step, found.benign, found.open) == (None, (200,), None)


def test_a_rise_at_the_end_is_undecided(scripts: Any) -> None:
    loss = noisy()
    loss[380:] += 2.0
    found = failure_of(scripts, loss)
    assert (found.step, found.open) == (None, 380)


def test_a_slow_rise_is_one_over_the_lowest_level(scripts: Any) -> None:
    loss = noisy() + np.maximum(np.arange(400) - 200, 0) * 0.01
    step = failure_of(scripts, loss).step
    assert 240 < step < 300  # .7 above the level, 70 rows at .01 each


def test_what_is_not_finite_is_a_failure(scripts: Any) -> None:
    loss = noisy()
    loss[300] = math.nan
    assert failure_of(scripts, loss)[:2] == (300, "not finite")
    gradient = np.ones(400)
    gradient[150] = math.inf
    assert failure_of(scripts, noisy(), gradient=gradient)[:2] == (150, "not finite")


def test_a_rise_that_ends_in_nan_began_with_the_rise(scripts: Any) -> None:
    loss = noisy()
    loss[290:300] += 3.0
    loss[300:] = math.nan
    assert failure_of(scripts, loss)[:2] == (290, "rise")


def test_behind_the_twin_for_good(scripts: Any) -> None:
    twin = [(step, 4.0) for step in range(0, 400, 5)]
    worse = [(step, 4.3 if step >= 250 else 4.2) for step, _ in twin]
    assert failure_of(scripts, noisy(), held_out=worse, twin=twin)[:2] == (250, "behind its twin")
    back = [*worse[:-1], (395, 4.0)]
    assert failure_of(scripts, noisy(), held_out=back, twin=twin).step is None
    late = [(step, 4.3 if step >= 390 else 4.0) for step, _ in twin]
    assert failure_of(scripts, noisy(), held_out=late, twin=twin).step is None  # two evaluations decide nothing


# alarms


def test_alarms_keep_quiet(scripts: Any) -> None:
    alarms = scripts("events").alarms
    assert alarms(np.ones(160), 1.0) == [0, 50, 100, 150]
    assert alarms(spikes(200, 10, 30, 61, 111), 0.5) == [10, 61, 111]
    assert alarms(spikes(200, 10), 1.5) == []


def test_hits_leads_and_what_comes_before(scripts: Any) -> None:
    outcome = scripts("events").outcome
    run = corpus_run(scripts, failed=300)
    assert outcome(run, spikes(400, 290), 1.0).lead == 10
    assert outcome(run, spikes(400, 305), 1.0).lead == -5
    assert outcome(run, spikes(400, 306), 1.0).lead is None
    found = outcome(run, spikes(400, 50, 100, 280), 1.0)
    assert (found.lead, found.before, found.false) == (200, 1, 0)


def test_healthy_rows_and_false_alarms(scripts: Any) -> None:
    events = scripts("events")
    healthy = corpus_run(scripts, family="twin", kind="healthy", benign=(200,))
    assert healthy.healthy.sum() == 400 - 20 - 50
    found = events.outcome(healthy, spikes(400, 5, 100, 210, 300), 1.0)
    assert (found.false, found.benign) == (2, 1)
    struck = corpus_run(scripts, kind="exogenous", fault=250)
    assert struck.healthy.sum() == 230
    found = events.outcome(struck, spikes(400, 100, 260), 1.0)
    assert (found.false, found.delay) == (1, 10)
    assert events.false_rate([found]) == pytest.approx(1000 / 230)
    assert events.outcome(struck, spikes(400, 300), 1.0).delay is None


def test_outcomes_follow_from_what_happened(scripts: Any) -> None:
    kinds = {
        "failure": {"failed": 51},
        "early": {"failed": 50},
        "healthy": {"family": "rate"},
        "open": {"open": True},
        "fault": {"fault": 200, "failed": 210, "kind": "exogenous"},
    }
    for name, facts in kinds.items():
        assert corpus_run(scripts, **facts).outcome == name
    assert corpus_run(scripts, fault=200, failed=100).outcome == "early"  # it failed before it was struck
    assert corpus_run(scripts, family="fast", kind="healthy", failed=90).outcome == "failure"


def test_a_threshold_has_the_rate_that_was_asked_for(scripts: Any) -> None:
    events = scripts("events")
    random = np.random.default_rng(0)
    runs = [corpus_run(scripts, name=f"r{n}", family="twin", kind="healthy") for n in range(50)]
    scores = [random.standard_normal(400) for _ in runs]
    for rate in (0.5, 1.0, 5.0):
        threshold = events.threshold_at(runs, scores, rate)
        assert events.false_rate(events.outcomes(runs, scores, threshold)) <= rate
        lower = max(s for score in scores for s in score[20:] if s < threshold)
        assert events.false_rate(events.outcomes(runs, scores, lower)) > rate


def test_recall_and_leads(scripts: Any) -> None:
    events = scripts("events")
    runs = [corpus_run(scripts, name=str(n), failed=300) for n in range(4)]
    found = events.outcomes(runs, [spikes(400, at) for at in (200, 285, 302, 350)], 1.0)
    assert events.recall(found) == 0.75
    assert events.recall(found, 5) == 0.5
    assert events.recall(found, 20) == 0.25
    assert events.median_lead(found) == 15
    value, low, high = events.interval(found, events.recall)
    assert low <= value <= high


def test_clusters_are_drawn_whole(scripts: Any) -> None:
    """Runs that share a twin say the same thing once: ten of one cluster are no more sure than one."""
    events = scripts("events")
    few = [corpus_run(scripts, name=str(n), seed=n, failed=300) for n in range(8)]
    many = [corpus_run(scripts, name=f"{n}-{k}", seed=n, failed=300) for n in range(8) for k in range(10)]
    widths = []
    for runs in (few, many):
        scores = [spikes(400, 250) if run.seed % 2 else np.zeros(400) for run in runs]
        _, low, high = events.interval(events.outcomes(runs, scores, 1.0), events.recall)
        widths.append(high - low)
    assert widths[1] == pytest.approx(widths[0], abs=0.06)


def test_auc_compares_runs_at_one_row(scripts: Any) -> None:
    auc = scripts("score").auc
    runs = [corpus_run(scripts, name="f", failed=200), corpus_run(scripts, name="h", family="twin", kind="healthy")]
    clock = [np.arange(400.0), np.arange(400.0)]  # time itself says nothing
    assert auc(runs, clock, 100) == 0.5
    assert auc(runs, [np.ones(400), np.zeros(400)], 100) == 1.0
    near = [np.where(np.arange(400) >= 150, 1.0, 0.0), np.full(400, 0.5)]
    assert auc(runs, near, 50) == 1.0
    assert auc(runs, near, 100) == pytest.approx(0.5, abs=0.1)


def test_precision_at_a_base_rate(scripts: Any) -> None:
    events, score = scripts("events"), scripts("score")
    runs = [corpus_run(scripts, name=str(n), failed=300) for n in range(2)]
    runs += [corpus_run(scripts, name=f"h{n}", family="twin", kind="healthy") for n in range(4)]
    scores = [spikes(400, 290), np.zeros(400), spikes(400, 100), *[np.zeros(400)] * 3]
    found = events.outcomes(runs, scores, 1.0)
    assert score.precision(found, 0.1) == pytest.approx(0.05 / (0.05 + 0.9 * 0.25))


# rules


def test_compressed_is_the_package_s(scripts: Any) -> None:
    rivals = scripts("rivals")
    from stabilitylab.alarm import names

    for name in names():
        rivals.check(name)


def test_the_combination_scores_as_the_alarm_does(scripts: Any) -> None:
    """The same row through ``AlarmRule`` and through the script."""
    from stabilitylab.alarm import AlarmRule, Reading

    combine = scripts("combine")
    random = np.random.default_rng(0)
    weights = {name: float(random.uniform(0, 2)) for name in combine.COMBINED}
    centres = {name: float(random.standard_normal()) for name in combine.COMBINED}
    fit = combine.Fit(weights, centres, 0.1)
    columns = {name: random.uniform(0.1, 3.0, 5) for name in combine.COMBINED}
    columns[combine.COMBINED[0]][2] = math.nan
    run = corpus_run(scripts, rows=5, columns=columns)
    rule = AlarmRule("c", weights, 1.0, centres=centres)
    for row, score in enumerate(fit.score()(run)):
        readings = {name: Reading(float(own[row])) for name, own in columns.items() if not math.isnan(own[row])}
        assert score == pytest.approx(rule.score(readings)[0])


def made_corpus(scripts: Any, seeds: range, told: bool = True) -> list[Any]:
    """Runs in which one signal (``told``) climbs a hundred rows before each failure, and all else is noise."""
    from stabilitylab.alarm import names

    runs = []
    for seed in seeds:
        for number, arch in enumerate(("postln", "preln", "gpt2")):
            for family in ("rate", "ramp", "twin", "corrupt_batch"):
                random = np.random.default_rng([seed, number, len(family)])
                rows = 400
                columns = {name: np.abs(random.standard_normal(rows)) for name in names()}
                columns |= {"nll": 4 + 0.1 * random.standard_normal(rows), "gradient": 1 + 0.1 * random.random(rows)}
                columns |= {"lr": np.full(rows, 1e-3), "guard": random.random(rows)}
                columns |= {f"vigil_{name}": random.random(rows) for name in ("moved", "gradient", "curved")}
                failed = int(random.integers(150, 350)) if family in ("rate", "ramp") else None
                if failed is not None and told:
                    columns["update.drift"][failed - 100 :] += 4.0
                runs.append(
                    corpus_run(
                        scripts,
                        name=f"{arch}-{family}-{seed}",
                        subject=f"{arch}-d4",
                        family=family,
                        kind={"twin": "healthy", "corrupt_batch": "exogenous"}.get(family, "endogenous"),
                        seed=seed,
                        failed=failed,
                        fault=200 if family == "corrupt_batch" else None,
                        columns=columns,
                    )
                )
    return runs


@pytest.fixture(scope="module")
def judged(scripts: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tables of two made-up corpora: one in which a signal announces failures, one in which nothing does."""
    freeze, score = scripts("freeze"), scripts("score")

    def make(told: bool) -> Path:
        folder = tmp_path_factory.mktemp("told" if told else "untold")
        train, test = made_corpus(scripts, range(0, 4, 2), told), made_corpus(scripts, range(1, 5, 2), told)
        (folder / "frozen.json").write_text(json.dumps(freeze.frozen(train)))
        score.tables(train, test, folder)
        return folder

    return {told: make(told) for told in (True, False)}


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_what_is_announced_is_found(judged: Any) -> None:
    for by in ("family", "arch"):
        own = [
            line
            for line in lines(judged[True] / "left_out.csv")
            if (line["left_out"], line["target"], line["rule"]) == (by, "0.5", "combination")
        ]
        assert float(own[0]["recall"]) > 0.9
        assert float(own[0]["lead"]) > 60
    told = {line["rule"]: line for line in lines(judged[True] / "auc.csv")}
    assert float(told["update.drift"]["auc_50"]) > 0.99
    assert abs(float(told["learning rate"]["auc_50"]) - 0.5) < 1e-9


def test_what_is_not_announced_is_not_found(judged: Any) -> None:
    own = [line for line in lines(judged[False] / "recall.csv") if line["target"] == "0.5"]
    told = {line["rule"]: float(line["recall"]) for line in own}
    assert told["combination"] < 0.4
    assert abs(float(lines(judged[False] / "auc.csv")[0]["auc_100"]) - 0.5) < 0.15


def test_lightning_s_rule_is_its_class(scripts: Any) -> None:
    spike = pytest.importorskip("lightning.fabric.utilities.spike")
    import torch

    random = np.random.default_rng(0)
    loss = 1 + 0.2 * random.random(200)
    loss[[50, 90, 91, 150]] = [5.0, 7.0, math.nan, 4.0]
    detector = spike.SpikeDetection(warmup=20)
    fires = []
    for row, value in enumerate(loss):
        value = torch.tensor(float(value))
        bad = row >= 20 and detector._is_spike(value)
        fires.append(bool(bad))
        if not bad:
            detector._update_stats(value)
    score = scripts("rivals").lightning(corpus_run(scripts, rows=200, columns={"nll": loss}))
    assert (score >= 2.0).tolist() == fires
    assert sum(fires) == 4


# recipes


def test_recipes_are_whole_and_balanced(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes, families = scripts("recipes"), scripts("families")
    inside = [name for name, own in families.FAMILIES.items() if own.kind == "endogenous"]
    archs = {own.arch for own in scripts("subjects").SUBJECTS.values()}
    monkeypatch.setattr(recipes, "middles", lambda: {(arch, name): 1.0 for arch in archs for name in inside})
    made = list(recipes.recipes())
    assert len({recipe.name for recipe in made}) == len(made) == 768
    kinds = [families.FAMILIES[recipe.family].kind for recipe in made]
    assert kinds.count("healthy") / len(made) >= 1 / 3
    for half in ("train", "test"):
        own = [recipe for recipe in made if recipes.half(recipe.seed) == half]
        assert {recipe.family for recipe in own} == set(families.FAMILIES)
        for family in inside:
            assert sum(recipe.family == family for recipe in own) >= 16
    seen: set[tuple[str, int]] = set()
    for recipe in made:  # a twin comes before what is compared with it
        assert recipe.family == "twin" or (recipe.subject, recipe.seed) in seen
        seen.add((recipe.subject, recipe.seed))


def test_the_middle_lies_where_the_pilot_placed_failure(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pilot, families = scripts("pilot"), scripts("families")
    inside = [name for name, own in families.FAMILIES.items() if own.kind == "endogenous"]
    lines = ["arch,family,strength,failed,step,why"]
    told = {"rate": ["0.7,1,60,x", "0.35,0,,"], "ramp": ["1.0,1,400,x", "0.5,1,450,x"], "no_decay": ["0.7,1,50,x"]}
    for name in inside:
        lines += [f"postln,{name},{line}" for line in told.get(name, ["2.8,0,,"])]
    lines.append("preln,rate,0.7,1,60,x")  # its pilot has only begun
    (tmp_path / "pilot.csv").write_text("\n".join(lines))
    monkeypatch.setattr(pilot, "HERE", tmp_path)
    assert pilot.middles() == {("postln", "rate"): pytest.approx(0.35 * 2**0.5), ("postln", "ramp"): 0.25}


def test_every_family_changes_what_it_says(scripts: Any) -> None:
    families = scripts("families")
    usual = families.plan("twin", 1.0, 1.0, 3)
    for name, family in families.FAMILIES.items():
        plan = families.plan(name, 1.0, family.levels[-1], 3)
        changed = {
            "rate": [plan.rate(row) for row in range(600)] != [usual.rate(row) for row in range(600)],
            "settings": any(
                getattr(plan, own) != getattr(usual, own)
                for own in ("betas", "eps", "decay", "query_key", "embedding", "half", "loss_scale", "order")
            ),
            "hooks": any(
                getattr(plan, own) is not families.Plan.__dataclass_fields__[own].default
                for own in ("accumulate", "batch", "which", "gradients", "zero")
            ),
        }
        assert any(changed.values()) == (name != "twin"), name
        assert (plan.at is not None) == (family.kind == "exogenous")
        if family.kind == "exogenous":
            assert families.FAULT[0] <= plan.at < families.FAULT[1]
        assert all(plan.rate(row) > 0 for row in (0, 19, 20, 300, 599))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["postln-d4", "branchnorm-ed6", "gpt2-d4", "llama-d4"])
def test_a_run_of_the_synthetic_task(scripts: Any, tmp_path: Path, name: str) -> None:
    """The whole way of a run: made twice, kept, read, scored; and a corrupt shard is seen where it lies."""
    make, keep, corpus = scripts("make"), scripts("keep"), scripts("corpus")
    training = scripts("training")
    for family in ("twin", "corrupt_batch", "missing_zero_grad"):
        make.make(training.Recipe(name, 3, family), tmp_path, None, updates=30)
    again = training.train(training.Recipe(name, 3, "twin"), make.edges()[name], None, updates=30)
    (tmp_path / "out").mkdir()
    keep.keep(tmp_path, tmp_path / "out", ("train", "test"))
    runs = corpus.read("test", tmp_path / "out")
    assert [run.family for run in runs] == ["corrupt_batch", "missing_zero_grad", "twin"]
    twin = runs[-1]
    assert twin.rows == 30
    at = training.COLUMNS.index("nll")
    np.testing.assert_allclose(twin.columns["nll"], again.rows[:, at], rtol=1e-6)
    assert np.isfinite(twin.columns["grad_norm.z"][20:]).all()
    assert np.isfinite(twin.columns["headroom.level"]).all()


# what diagnose and preflight say


def diagnosed_run(family: str, first: list[str], verdict: str = "failure", **facts: str) -> dict[str, str]:
    told = {"family": family, "half": "test", "at": "", "failed": "100", "open": "", **facts}
    return {**told, "diagnosis": json.dumps({"verdict": verdict, "first": first}), "preflight": '{"fail": []}'}


def test_what_is_named_first_is_held_against_what_was_put_in(scripts: Any) -> None:
    right = scripts("diagnosed").is_right
    assert right("rate_jump", {"first": ["lr_jump"]})
    assert right("rate_jump", {"first": ["lr_jump", "loss_spike"]})
    assert not right("rate_jump", {"first": ["update_jump"]})
    assert not right("rate_jump", {"first": []})
    assert right("corrupt_shard", {"first": ["loss_spike"]})  # it names no cause, and none can be named
    assert not right("corrupt_shard", {"first": ["lr_jump"]})


def test_every_way_to_fail_has_a_label_or_none(scripts: Any) -> None:
    from stabilitylab.diagnose.events import DETECTORS

    nameable, families = scripts("diagnosed").NAMEABLE, scripts("families").FAMILIES
    assert set(nameable) == {name for name, own in families.items() if own.kind != "healthy"}
    assert {kind for kinds in nameable.values() for kind in kinds} <= set(DETECTORS)


def test_shares_of_a_made_up_corpus(scripts: Any) -> None:
    runs = [
        diagnosed_run("rate_jump", ["lr_jump"], at="200"),
        diagnosed_run("rate_jump", ["update_jump"], at="200"),
        diagnosed_run("corrupt_shard", [], "healthy", at="200", failed=""),
        diagnosed_run("twin", [], "healthy", failed=""),
        diagnosed_run("fast", ["loss_spike"], "warning", failed=""),
        diagnosed_run("fast", ["loss_spike"], "warning", failed="", open="1"),
    ]
    told = {line["measure"]: line for line in scripts("diagnosed").judged(runs, "test")}
    assert told["right cause, of what was wrong"]["share"] == "0.667"
    assert told["right cause, of what can be named"]["share"] == "0.500"
    assert told["always the most frequent cause (lr_jump)"]["share"] == "0.667"
    assert told["said to be ill, of what was"]["of"] == "3"
    assert (told["accused, of healthy runs"]["share"], told["accused, of healthy runs"]["of"]) == ("0.500", "2")
    table = {line["put in"]: line for line in scripts("diagnosed").confusion(runs)}
    assert table["rate_jump"]["lr_jump"] == 1
    assert table["healthy"]["nothing"] == 1
