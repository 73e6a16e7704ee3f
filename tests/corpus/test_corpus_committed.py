"""The committed corpus: what was frozen is what is there, its tables follow from it, and pages say what tables say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).resolve().parents[2] / "results" / "alarm"
FROZEN = "b3e4099090777d81"  # committed before the other half was made


@pytest.fixture
def lines(scripts: Any) -> Any:
    """``lines("recall")``: the rows of a committed table."""
    return lambda name: list(scripts("corpus").lines(HERE, f"{name}.csv"))


def test_what_was_frozen_is_what_is_there(scripts: Any, lines: Any) -> None:
    digest = scripts("freeze").digest
    assert digest(HERE / "frozen.json") == FROZEN
    told = json.loads((HERE / "frozen.json").read_text())["features"]
    assert told == {name: digest(HERE / "features" / name) for name in told}
    assert {line["half"] for line in lines("runs") if f"seed-{line['seed']}.parquet" in told} == {"train"}


def test_the_corpus_is_as_large_as_it_has_to_be(scripts: Any) -> None:
    """600 runs of 400 updates (fewer where a number was not finite), 100 failures from within, a third healthy; of each
    run as many rows of features as runs.csv says, below 20 MB."""
    corpus = scripts("corpus")
    runs = [run for half in ("train", "test") for run in corpus.read(half)]
    assert len(runs) >= 600
    assert sum(run.outcome == "failure" for run in runs) >= 100
    assert sum(run.kind == "healthy" for run in runs) >= len(runs) / 3
    assert all({len(column) for column in run.columns.values()} == {run.rows} for run in runs)
    ended = [run for run in runs if run.rows < 400]
    assert all(not np.isfinite([run.columns["nll"][-1], run.columns["gradient"][-1]]).all() for run in ended)
    assert sum(path.stat().st_size for path in (HERE / "features").iterdir()) < 20e6
    twins = {run.cluster for run in runs if run.family == "twin"}
    assert {run.cluster for run in runs} == twins


def test_tables_follow_from_the_features(scripts: Any, lines: Any) -> None:
    """A part of score.py: the combination, and the baselines to beat, on the test half."""
    score, freeze, corpus = scripts("score"), scripts("freeze"), scripts("corpus")
    frozen, own = freeze.load()
    test = corpus.read("test")
    known = score.rules(own)
    names = dict.fromkeys((freeze.COMBINATION, frozen["to_beat"], frozen["to_beat_all"]))
    made = score.recalls(test, {name: (known[name], freeze.scored(test, known[name].score)) for name in names}, frozen)
    told = {(line["rule"], line["target"]): line for line in lines("recall")}
    for line in made:
        committed = told[line["rule"], line["target"]]
        for name, value in line.items():
            if name in ("rule", "group", "source", "target"):
                assert str(value) == committed[name]
            else:
                assert float(value) == pytest.approx(float(committed[name]), rel=1e-3, nan_ok=True), (
                    line["rule"],
                    name,
                )


def test_pages_say_what_tables_say(scripts: Any) -> None:
    say = scripts("say")
    assert say.page_blocks.differing(say.PAGES, say.anew) == []


def test_consequences_follow_from_the_features_and_before_the_rule_they_are_what_was_judged(
    scripts: Any, lines: Any
) -> None:
    """One half again; and events without the rule give the shares that were measured as the corpus was made."""
    corpus, own = scripts("corpus"), scripts("consequence")
    runs = [run for run in corpus.lines(HERE) if run["half"] == "train"]
    told = [line for line in lines("consequence") if line["half"] == "train"]
    assert list(own.scored("train", runs, corpus.read("train"))) == told
    before = {
        line["measure"]: line["share"]
        for line in lines("consequence")
        if (line["half"], line["rule"]) == ("test", "before")
    }
    judged = {line["measure"]: line["share"] for line in lines("judged") if line["half"] == "test"}
    assert {name: share for name, share in before.items() if name in judged} == {
        name: judged[name] for name in before if name in judged
    }
    assert len(before.keys() & judged.keys()) == 3
