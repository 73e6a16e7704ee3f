"""The corpus's rules and their scores: what made-up runs announce is found, and what they do not is not."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from made_runs import corpus_run

from stabilitylab.alarm import AlarmRule, Reading, names
from stabilitylab.alarm.rules import compressed

ROOT = Path(__file__).resolve().parents[2]


def test_compressed_is_the_package_s(scripts: Any) -> None:
    squeezed = scripts("rivals").squeezed
    values = np.array([-3.0, 0.0, 1e-3, 1.0, 50.0, 1e12])
    for name in names():
        assert squeezed(name, values) == pytest.approx([compressed(name, float(value)) for value in values])


def test_the_combination_scores_as_the_alarm_does(scripts: Any) -> None:
    """The same row through ``AlarmRule`` and through the script."""
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

    def make(told: bool) -> SimpleNamespace:
        folder = tmp_path_factory.mktemp("told" if told else "untold")
        train, test = made_corpus(scripts, range(0, 4, 2), told), made_corpus(scripts, range(1, 5, 2), told)
        (folder / "frozen.json").write_text(json.dumps(freeze.frozen(train)))
        score.tables(train, test, folder)
        return SimpleNamespace(folder=folder, test=test)

    return {told: make(told) for told in (True, False)}


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_what_is_announced_is_found(judged: Any) -> None:
    for by in ("family", "arch"):
        own = [
            line
            for line in lines(judged[True].folder / "left_out.csv")
            if (line["left_out"], line["target"], line["rule"]) == (by, "0.5", "combination")
        ]
        assert float(own[0]["recall"]) > 0.9
        assert float(own[0]["lead"]) > 60
    told = {line["rule"]: line for line in lines(judged[True].folder / "auc.csv")}
    assert float(told["update.drift"]["auc_50"]) > 0.99
    assert abs(float(told["learning rate"]["auc_50"]) - 0.5) < 1e-9


@pytest.mark.slow
def test_what_is_not_announced_is_not_found(judged: Any) -> None:
    own = [line for line in lines(judged[False].folder / "recall.csv") if line["target"] == "0.5"]
    told = {line["rule"]: float(line["recall"]) for line in own}
    assert told["combination"] < 0.4
    assert abs(float(lines(judged[False].folder / "auc.csv")[0]["auc_100"]) - 0.5) < 0.15


def test_the_goal_needs_a_gain_over_every_baseline(scripts: Any) -> None:
    verdict = scripts("score").verdict

    def line(by: str, rule: str, gain: str = "nan", low: str = "nan", **own: str) -> dict[str, str]:
        told = {"left_out": by, "target": "0.5", "rule": rule, "gain_lead_20": gain, "gain_low": low}
        return {**told, "failures": "150", "recall": "0.8", "lead": "30", **own}

    def reached(*changes: Any, corpus: int = 150, **own: str) -> list[int]:
        held = [line(by, "combination", **own) for by in ("family", "arch")]
        held += [line(by, rule, "0.2", "0.05") for by in ("family", "arch") for rule in ("gradient", "loss")]
        for place, name, text in changes:
            held[place][name] = text
        return [made["reached"] for made in verdict(held, corpus)]

    assert reached() == [1, 1]
    assert reached(corpus=99) == reached(recall="0.69") == reached(lead="19") == [0, 0]
    assert reached((2, "gain_lead_20", "0.14")) == reached((3, "gain_low", "-0.01")) == [0, 1]


def test_what_papers_say_is_counted_by_seed(scripts: Any) -> None:
    claims = scripts("claims")
    runs = []
    for seed in (1, 3, 5, 7):
        columns = {name: np.zeros(400) for name in ("rms_t.level", "update.z", "loss.z")}
        columns |= {"nll": np.ones(400), "gradient": np.ones(400)}
        columns["gradient"][5:26:2] = 1.1  # some spread
        columns["rms_t.level"][295] = 3.0
        columns["update.z"][280], columns["loss.z"][300] = 8.0, 9.0
        runs.append(corpus_run(scripts, name=f"f{seed}", seed=seed, failed=300, why="rise", columns=columns))
        late = {**columns, "rms_t.level": np.roll(columns["rms_t.level"], 6), "update.z": columns["loss.z"]}
        runs.append(corpus_run(scripts, name=f"l{seed}", seed=seed, failed=300, why="rise", columns=late))
        runs.append(corpus_run(scripts, name=f"s{seed}", seed=seed, failed=300, why="behind its twin", columns=columns))
    rms, updates, zclip = claims.claims(runs)
    assert (rms["mean"], updates["mean"]) == ("0.500", "0.500")  # the second of each two comes too late
    assert zclip["beside"] == "recall: 0"


def test_the_strongest_rival_is_that_of_the_table(scripts: Any) -> None:
    def line(rule: str, led: str, target: str = "0.5") -> dict[str, str]:
        return {"rule": rule, "target": target, "recall_lead_20": led}

    lines_ = [line("combination", "0.9"), line("a", "0.3"), line("b", "0.4"), line("c", "0.8", "own")]
    assert scripts("score").strongest([*lines_, line("d", "0.7", "1")]) == "b"


def test_one_run_stands_beside_its_twin(scripts: Any) -> None:
    draw = scripts("draw")
    held = np.full(400, np.nan)
    held[::5] = np.linspace(8, 4, 80)
    columns = {"held_out": held}
    run = corpus_run(scripts, name="r", failed=130, columns=columns)
    twin = corpus_run(scripts, name="t", family="twin", columns={"held_out": held - 1})
    others = [corpus_run(scripts, name="o", family="twin", seed=3), corpus_run(scripts, name="p", family="fast")]
    assert draw.twin_of(run, [*others, run, twin]) is twin
    assert draw.twin_of(run, [*others, run]) is None
    panel = draw._beside(run, twin, [])
    own, other = panel.series
    assert own.x.tolist() == list(range(0, 400, 5))
    assert (own.y - other.y).tolist() == pytest.approx([1.0] * 80)


@pytest.mark.slow
def test_figures_show_the_tables(scripts: Any, judged: Any) -> None:
    folder, test = judged[True].folder, judged[True].test
    scripts("draw").main(folder, test)
    drawn = pd.read_csv(folder / "figures" / "roc.csv")
    at = drawn[(drawn["panel"].str.startswith("all")) & (drawn["series"] == "combination, at all")]
    table = [line for line in lines(folder / "curves.csv") if (line["rule"], line["family"]) == ("combination", "all")]
    assert at["y"].tolist() == [float(line["recall"]) for line in table]
    assert set(drawn["series"].str.partition(",")[0]) == {line["rule"] for line in lines(folder / "curves.csv")}
    leads = pd.read_csv(folder / "figures" / "leads.csv").query("series == 'combination' and x == 20")
    led = [line["lead"] for line in lines(folder / "leads.csv") if line["rule"] == "combination"]
    assert leads["y"].item() == pytest.approx(np.mean([bool(lead) and int(lead) >= 20 for lead in led]))
    assert "before" in (folder / "figures" / "one-run.caption.txt").read_text()


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
