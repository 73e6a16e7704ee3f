"""Scoring the second corpus: made-up runs whose answers are known."""

from __future__ import annotations

import csv
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROWS = 300
ARCHS = ("postln", "preln", "gpt2", "llama")


@pytest.fixture
def run_of(scripts: Any) -> Any:
    """``run_of("event", at=200, signal={190: 5.0})``: a run of the second corpus with a label, and a signal that is 0
    but for some rows and random noise."""
    corpus, labels, alarm = scripts("second_corpus"), scripts("second_labels"), scripts("second_training")

    def made(label: str = "healthy", at: int = 200, signal: Any = None, **facts: Any) -> Any:
        number = facts.pop("number", 0)
        random = np.random.default_rng([number, len(label)])
        columns = {name: np.full(ROWS, np.nan) for name in alarm.COLUMNS}
        columns["nll"], columns["gradient"] = np.full(ROWS, 4.0), np.ones(ROWS)
        columns["lr"] = np.full(ROWS, facts.pop("rate", 0.01))
        columns["grad_norm.drift"] = random.normal(0, 0.03, ROWS)
        columns["loss.drift"] = random.normal(0, 0.03, ROWS)
        for row, value in (signal or {}).items():
            columns["grad_norm.drift"][row:] = value
        event = labels.Happened("rise", at, at, 2.0) if label in ("event", "both") else None
        collapse = ("rank", at) if label in ("collapse", "both") else None
        told = labels.Labels(event, collapse, at if label == "slow" else None, (), at if label == "open" else None)
        verdict = facts.pop("verdict", "healthy")
        diagnosis = {"verdict": verdict, "first": [], "cause": [], "chain": [], "events": []}
        diagnosis |= {name: facts.pop(name) for name in ("first", "cause", "events") if name in facts}
        usual = {"subject": "postln-d4", "family": "climb", "kind": "endogenous", "seed": 9, "half": "test"}
        usual |= {"fault": None, "edge": 0.04} | facts
        name = f"{usual['subject']}-{label}-{number}"
        failed = None if event is None else event.full
        return corpus.SecondRun(
            name, usual["subject"], usual["family"], usual["kind"], usual["seed"], ROWS, usual["fault"], failed, (),
            False, columns, labels=told, edge=usual["edge"], half=usual["half"], diagnosis=diagnosis,
        )  # fmt: skip

    return made


def test_labels_are_never_mixed(run_of: Any) -> None:
    words = {label: run_of(label).outcome for label in ("healthy", "event", "collapse", "both", "slow", "open")}
    assert words == {
        **{name: name for name in ("healthy", "collapse", "slow", "open")},
        **dict.fromkeys(("event", "both"), "failure"),
    }
    assert run_of("event", at=50).outcome == "early"
    assert (run_of("event", fault=120).outcome, run_of("event", fault=210).outcome) == ("fault", "early")
    assert [run_of(label).is_failure for label in ("event", "collapse", "both", "slow", "open", "healthy")] == [
        *(True, True, True, False, False, False)
    ]
    assert run_of("slow").healthy.sum() == run_of("open").healthy.sum() == 0
    assert run_of().healthy.sum() == ROWS - 20


def test_a_threshold_by_run_lets_so_many_runs_through(scripts: Any) -> None:
    rules = scripts("second_rules")
    maxima = [float(value) for value in np.random.default_rng(0).permutation(100)]
    for alpha in (0.03, 0.2, 0.0):
        limit = rules.by_run(maxima, alpha)
        assert sum(value > limit for value in maxima) == round(100 * alpha)
        assert sum(value > limit - 1 for value in maxima) == round(100 * alpha) + 1  # no lower one would do
    accused = [value in (99.0, 3.0) for value in maxima]  # one of them has the largest score anyway
    limit = rules.by_run(maxima, 0.03, accused)
    assert sum(value > limit or own for value, own in zip(maxima, accused, strict=True)) == 3
    assert limit == 97.0
    assert rules.by_run(maxima, 0.03, [value < 4 for value in maxima]) == np.inf  # four are accused already
    assert rules.by_run([], 0.2) == np.inf


def test_an_alarm_that_lasts_is_one_when_latched(scripts: Any) -> None:
    rules, score = scripts("second_rules"), np.zeros(ROWS)
    score[30:150] = 1.0
    score[[190, 260]] = 1.0  # forty rows after the end, and seventy
    assert rules.latched(score, 0.5) == [30, 260]
    assert scripts("events").alarms(score, 0.5) == [30, 80, 130, 190, 260]


def test_a_lead_is_counted_to_where_the_event_is_full_blown(scripts: Any, run_of: Any) -> None:
    rules, score = scripts("second_rules"), np.zeros(ROWS)
    run = run_of("event", at=250)
    for row, lead in ((249, 1), (50, 200), (49, None), (250, None)):
        score[:] = 0.0
        score[row] = 1.0
        assert rules.announced(run, score, 0.5) == lead
    assert rules.announced(run_of(), score, 0.5) is None


def test_levels_are_not_admitted(scripts: Any) -> None:
    admitted = scripts("second_rules").admitted()
    assert not [name for name in admitted if name.endswith(".level")]
    assert {"loss.z", "loss.drift", "loss.rise", "loss.stall", "grad_norm.drift", "rms_t.drift"} <= {*admitted}


def corpus_of(run_of: Any, half: str = "choose") -> list[Any]:
    """Of four architectures twenty healthy runs each, and ten with an event that a drift announces thirty rows before
    or, in one of five, does not; the rate is the same in all."""
    made = []
    for place, arch in enumerate(ARCHS):
        common = {"subject": f"{arch}-d4", "half": half}
        made += [run_of(number=100 * place + own, **common) for own in range(20)]
        for own in range(10):
            signal = {} if own % 5 == 0 else {170: 0.5 + 0.1 * own}
            made.append(run_of("event", signal=signal, number=100 * place + 20 + own, **common))
    return made


@pytest.mark.slow
def test_what_is_frozen_finds_the_signal_and_not_the_rate(scripts: Any, run_of: Any) -> None:
    """The combination is fitted, its thresholds let 3 and 20 % of healthy runs through, and on new runs it announces
    the events that have a sign; the rate announces none, and has .5 of the pairs."""
    freeze, score, rules = scripts("second_freeze"), scripts("second_score"), scripts("second_rules")
    made = freeze.frozen(corpus_of(run_of))
    assert (made["healthy"], made["events"], made["accused"]) == (80, 40, 0)
    assert {*made["left_out"]} == {*ARCHS}
    weights = made["fit"]["weights"]
    assert max(weights, key=lambda name: abs(weights[name])) == "grad_norm.drift"
    own = scripts("combine").Fit(**json.loads(json.dumps(made["fit"])))
    test = corpus_of(run_of, "test")
    few = {name: made["thresholds"][name] for name in ("combination", "rate over edge")}
    assert {*made["thresholds"]} == {*rules.known(own)}
    lines = {
        (name, at): look.line()
        for name, at, look in score.looks(test, made | {"thresholds": few}, own)
        if name in ("combination", "rate over edge")
    }
    ours = lines["combination", rules.UNION]
    assert float(ours["announced"]) == pytest.approx(0.8)
    assert float(ours["announced_20"]) == pytest.approx(0.8)
    assert float(ours["lead"]) == 30
    assert float(ours["healthy_accused"]) <= 0.03
    assert float(lines["combination", "0.2"]["healthy_accused"]) == pytest.approx(0.2, abs=0.06)
    assert float(lines["rate over edge", rules.UNION]["announced"]) == 0
    looked = {key: score.Look(test, score.scored(test, rules.known(own)[key[0]]), few[key[0]][key[1]]) for key in lines}
    families = {(line["rule"], line["threshold"]): line for line in score.by_family(looked)}
    assert {*families} == {(name, at) for name in few for at in (rules.UNION, "0.2")}
    assert float(families["combination", rules.UNION]["announced"]) == pytest.approx(0.8)
    told = {line["rule"]: line for line in score.pairs(test, rules.known(own))}
    assert int(told["combination"]["first_of"]) == 4 * 10 * 20
    assert float(told["rate"]["first"]) == float(told["rate over edge"]["first"]) == 0.5
    assert float(told["combination"]["first"]) > 0.75
    left = list(score.archs(test, made))
    assert {line["left_out"] for line in left} == {*ARCHS}
    assert all(float(line["announced"]) == pytest.approx(0.8) for line in left if line["threshold"] == "0.03")
    with pytest.raises(SystemExit, match="nothing to fit"):
        freeze.frozen([run_of()])


def test_a_pair_has_one_schedule_up_to_the_event(scripts: Any, run_of: Any) -> None:
    score, rules = scripts("second_score"), scripts("second_rules")
    event, known = run_of("event", at=200), {"rate": rules.known(scripts("combine").Fit({}, {}, 1.0))["rate"]}
    later, sooner = run_of(number=1), run_of(number=2)
    later.columns["lr"][200:] = 1.0
    sooner.columns["lr"][199:] = 1.0
    near, far = run_of(number=3, rate=0.0109), run_of(number=4, rate=0.0111)
    other = run_of(number=5, subject="preln-d4")
    for run, count in ((later, 1), (sooner, 0), (near, 1), (far, 0), (other, 0)):
        [line] = score.pairs([event, run], known)
        assert int(line["first_of"]) == count, run.name


def test_sets_of_the_calibration_are_disjoint_and_the_bound_is_a_binomial(scripts: Any, run_of: Any) -> None:
    score = scripts("second_score")
    fit = scripts("combine").Fit({"grad_norm.drift": 1.0}, {"grad_norm.drift": 0.0}, 1.0)
    runs = [
        run_of(
            subject=f"{arch}-d4",
            seed=1000 + seed,
            half="calibrate",
            family="twin",
            kind="healthy",
            number=seed + 60 * at,
        )
        for at, arch in enumerate(ARCHS)
        for seed in range(50)
    ]
    lines = list(score.sets(runs, fit))
    assert [sum(line["k"] == k for line in lines) for k in (4, 9)] == [40, 20]
    assert len({line["new"] for line in lines if line["k"] == 4}) == 40
    alarms, count, p = score.holds(lines, 4)
    assert count == 40
    assert p > 0.05  # exchangeable runs: the bound holds
    every = [{"k": "4", "alarm": 1}] * 40
    assert score.holds(every, 4)[2] == pytest.approx(0.2**40)
    assert alarms < 20


def test_findings_and_goals(scripts: Any, run_of: Any) -> None:
    score = scripts("second_score")
    runs = [run_of(number=own, verdict="warning" if own < 3 else "healthy") for own in range(60)]
    runs += [run_of("slow", number=70, verdict="warning"), run_of("open", number=71, verdict="warning")]
    runs += [run_of("collapse", number=own, verdict="failure" if own % 10 else "healthy") for own in range(100, 120)]
    fault = {"kind": "exogenous", "fault": 120, "family": "state_zeroed"}
    runs += [
        run_of("event", number=200, **fault, verdict="warning", first=["optimizer_state"]),
        run_of("event", number=201, **fault, verdict="warning", first=["loss_spike"]),  # a sign, and no cause
        # it failed, so that a note is not enough
        run_of("event", number=202, **fault, events=[["optimizer_state", 120, "note", None]]),
        run_of(number=203, **fault, events=[["optimizer_state", 120, "note", None]]),  # it did no harm
        run_of("event", number=204, **{**fault, "family": "labels_shuffled"}, verdict="warning", cause="unknown"),
        run_of("event", number=205, **{**fault, "family": "labels_shuffled"}, verdict="warning", cause=["lr_jump"]),
    ]
    told = {line["measure"]: line for line in score.findings(runs, None)}
    assert float(told["healthy runs accused by diagnose"]["share"]) == pytest.approx(3 / 60)
    assert float(told["failures said to be ill by diagnose"]["share"]) == pytest.approx((18 + 4) / (20 + 5), rel=1e-3)
    assert float(told["right cause first, of what can be known"]["share"]) == pytest.approx(2 / 4)
    unknown = told["no wrong cause, of what cannot be known"]
    assert (
        int(unknown["share_of"]) == 22
    )  # the collapses by climb, of which no cause can be known, and the shuffled labels
    assert score.within(runs) == (0, 20, 1)


def test_an_interval_over_subjects_is_wider_than_over_runs(scripts: Any, run_of: Any) -> None:
    """Half of the subjects have every alarm: over runs the interval would be .4 to .6."""
    score = scripts("second_score")
    runs = [run_of(number=own, subject=f"{'ab'[own % 2]}{own % 10}-d4") for own in range(100)]
    found = score.share(runs, lambda run: run.subject.startswith("a"))
    assert (found.value, found.of) == (0.5, 100)
    assert found.low <= 0.2
    assert found.high >= 0.8
    none = score.share(runs, lambda run: False)
    assert (none.value, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(1 - 0.025 ** (1 / 10))  # Clopper and Pearson, ten subjects
    assert np.isnan(score.share([], lambda run: True).value)


def test_the_protocol_says_what_the_code_has(scripts: Any) -> None:
    page = " ".join((Path(__file__).resolve().parents[2] / "results/alarm/second/README.md").read_text().split())
    families, recipes = scripts("second_families"), scripts("second_recipes")
    assert all(name in page for name in families.FAMILIES)
    made = list(recipes.recipes())
    assert f"{len(made):,} runs, {len(made) * families.ROWS:,} updates" in page
    assert not [word for word in ("PLANNED", "COST") if word in page]


FEW_SEEDS = {"choose": (8, 10), "test": (9, 11)}


def written(scripts: Any, folder: Path) -> None:
    """Write made-up runs as the maker leaves them: of two subjects and each seed a twin, a healthy run, an event with a
    sign before it, a collapse, and an optimizer state that was set to zero; and ten runs of one recipe."""
    make, recipes = scripts("second_make"), scripts("second_recipes")
    training = scripts("second_training")
    folder.mkdir()

    def one(subject: str, seed: int, family: str, **facts: Any) -> None:
        random = np.random.default_rng([seed, len(family), len(subject)])
        columns = {name: random.normal(0, 0.03, ROWS) for name in training.COLUMNS}
        columns["nll"] = np.interp(np.arange(ROWS), [0, 100], [6.0, 4.0]) + random.normal(0, 0.05, ROWS)
        columns |= {"gradient": np.ones(ROWS), "lr": np.full(ROWS, 0.01)}
        states = {"held_out": 4.0, "tokens_alike": 0.5, "attention_spent": 0.0, "dead": 0.0, "silent": 0.0}
        for name in ("source_worth", *states):
            columns[name] = np.full(ROWS, np.nan)
        for name, value in states.items():
            columns[name][::10] = value
        if family == "climb":
            columns["nll"][200:] += 2.0
            columns["grad_norm.drift"][160:] += 1.0
        if family == "attention_scale":
            columns["tokens_alike"][150::10] = 1.0
        first = facts.get("first", [])
        diagnosis = {
            "verdict": facts.get("verdict", "healthy"),
            "first": first,
            "cause": first,
            "chain": [],
            "events": [],
        }
        kept = training.Kept(columns, facts.get("at"), diagnosis, 1.0)
        recipe = recipes.of(subject, seed, family)
        path = make.path_of(recipe, folder)
        scripts("make").store(columns, make.facts(recipe, kept, 0.04), path)

    for seeds in FEW_SEEDS.values():
        for seed in seeds:
            for subject in ("postln-d4", "gpt2-d4"):
                one(subject, seed, "twin")
                one(subject, seed, "fast", verdict="warning" if (seed, subject) == (9, "gpt2-d4") else "healthy")
                one(subject, seed, "climb", verdict="failure")
                one(subject, seed, "attention_scale", verdict="warning", first=["attention_logits"])
                one(subject, seed, "state_zeroed", at=120, verdict="warning", first=["optimizer_state"])
    for seed in range(1000, 1010):
        one("postln-d4", seed, "twin")


@pytest.mark.slow
def test_the_whole_way_from_runs_to_the_verdict(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered, frozen, committed, gathered and scored as the protocol has it; each table says what was put in."""
    gather, freeze, score = scripts("gather"), scripts("second_freeze"), scripts("second_score")
    corpus = scripts("second_corpus")
    written(scripts, tmp_path / "runs")
    home = tmp_path / "home"
    home.mkdir()
    gather.gather(tmp_path / "runs", home, ("choose",))
    freeze.main(home)
    with pytest.raises(SystemExit, match="is not committed"):
        score.tables(home)
    with pytest.raises(SystemExit, match="is not committed"):
        gather.gather(tmp_path / "runs", home, ("test", "calibrate"))
    git(home, "init")
    git(home, "add", corpus.FROZEN)
    git(home, "commit", "-m", "frozen")
    gather.gather(tmp_path / "runs", home, ("choose", "test", "calibrate"))
    for run in corpus.read(("choose", "test", "calibrate"), home):  # labels are made again from what is kept
        [line] = [line for line in corpus.lines(home) if line["run"] == run.name]
        assert line["outcome"] == run.labels.outcome
        assert line["full"] == ("" if run.failed is None else str(run.failed))
        assert run.rows == len(run.columns["nll"]) == ROWS
    score.tables(home)
    made = {(one["half"], one["family"], one["label"]): int(one["runs"]) for one in corpus.lines(home, "made.csv")}
    assert made["test", "climb", "event"] == made["choose", "attention_scale", "collapse"] == 4
    assert made["calibrate", "twin", "healthy"] == 10
    goals = {one["goal"]: (one["measured"], one["reached"]) for one in corpus.lines(home, "verdict.csv")}
    enough = "events and collapses from within, of six families"
    assert goals[enough] == ("8, 8, 2", "0")
    assert goals["half of the events announced"] == ("1", "")  # too few failures: not judged
    assert goals["healthy runs accused"][1] == "0"  # too few healthy runs
    for name, value in (("EVENTS", 8), ("COLLAPSES", 8), ("FEWEST_FAMILIES", 2)):
        monkeypatch.setattr(score, name, value)
    score.tables(home)
    goals = {one["goal"]: (one["measured"], one["reached"]) for one in corpus.lines(home, "verdict.csv")}
    assert goals[enough] == ("8, 8, 2", "1")
    assert goals["half of the events announced"] == ("1", "1")
    assert goals["median lead of 20 rows"][1] == "1"
    assert goals["above rate over edge"][0].startswith("+1 [")
    assert goals["right cause first"][1] == goals["failures said to be ill"][1] == "1"
    found = {one["measure"]: one for one in corpus.lines(home, "findings.csv")}
    assert found["healthy runs accused by diagnose"]["share"] == f"{1 / 18:.4g}"
    assert {one["k"] for one in corpus.lines(home, "sets.csv")} == {"4", "9"}
    assert {one["left_out"] for one in corpus.lines(home, "archs.csv")} == {"postln", "gpt2"}
    shown(scripts, home)


def shown(scripts: Any, home: Path) -> None:
    """The blocks of the pages, and the figures, say what the tables say."""
    blocks = {name: make() for name, make in scripts("second_say").SecondCorpus(home).blocks.items()}
    assert all(len(lines) > 2 for lines in blocks.values()), "a head, a rule, and rows"
    widths = {name: {line.count("|") for line in lines} for name, lines in blocks.items()}
    assert all(len(own) == 1 for own in widths.values()), widths
    assert "| half of the events announced | 1 | reached |" in blocks["goals"]
    assert any(line.startswith("| combination | loud (.2) |") for line in blocks["alarms"])
    assert "| climb | 4 |" in "\n".join(blocks["families"])
    draw = scripts("second_draw")
    draw.main(home)
    for name in ("announced", "leads", "one-run"):
        assert (home / "figures" / f"{name}.png").stat().st_size > 10_000
    with (home / "figures" / "announced.csv").open() as file:
        rows = list(csv.DictReader(file))
    ours = [(float(row["x"]), float(row["y"])) for row in rows if row["series"] == "combination"]
    assert ours[-2:] == [(1.0, 1.0)] * 2 or (1.0, 1.0) in ours, "the lowest threshold lets everything through"
    assert min(x for x, _ in ours) == 0.0, "at the largest score of a healthy run none is accused"
    assert all(later >= sooner for (_, sooner), (_, later) in itertools.pairwise(ours[: len(ours) // 2]))


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=A", "-c", "user.email=a@b")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)
