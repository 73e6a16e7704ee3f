"""The corpus's rules and their scores: what made-up runs announce is found, and what they do not is not."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import corpus_run

ROOT = Path(__file__).resolve().parents[2]


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
