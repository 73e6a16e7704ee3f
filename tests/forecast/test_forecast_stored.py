"""What comes with the package: the fit with its cover and errors, and the edges that are known."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from made_tables import ARCHS, told_by_the_range_test, with_final_test, write

from stabilitylab.config import parse_set, resolve
from stabilitylab.forecast.fitting import FEATURES, TRIAL


def test_a_fit_is_stored_with_cover_and_errors_and_is_what_the_command_reads(scripts: Any, tmp_path: Path) -> None:
    from stabilitylab.forecast.fitting import fitted

    write(tmp_path, scripts.truth, told_by_the_range_test)
    scripts.fit.fitted(tmp_path).write(tmp_path / "fitted.json")
    found = fitted(tmp_path / "fitted.json")
    assert found is not None
    assert found.runs == len(scripts.loading.load(tmp_path).runs)
    assert found.cover.same["width"] == 64
    assert found.cover.between["layers"] == (12, 36)
    assert found.cover.between["warmup"] == (0, 40)
    assert "within 2 for" in found.errors
    assert found.errors.startswith("by nine predictors the edge is off by a factor of")
    assert {*found.cover.between} == {*FEATURES, "warmup"} - {"cold"}
    assert (found.goal, found.final_goal) == (False, None)
    assert found.errors.endswith("This misses the goals that were set beforehand.")
    assert json.loads((tmp_path / "fitted.json").read_text())["archs"] == [*ARCHS]


def test_a_fit_says_what_the_final_test_said(scripts: Any, tmp_path: Path) -> None:
    with_final_test(tmp_path, scripts.truth)
    found = scripts.fit.fitted(tmp_path)
    assert re.search(
        r"At 12 and 36 layers, which no fit had seen \(the final test\): off by 1\.\d+, within 2 for 100% of 10"
        r", the right one \d+% of the time; this misses the goals\.$",  # rivals know as much
        found.errors,
    )
    assert found.final_goal is False


def test_where_the_range_test_alone_is_off_by_less_it_is_what_is_stored(scripts: Any, tmp_path: Path) -> None:
    write(tmp_path, scripts.truth, lambda numbers, layers, warmup: numbers["range_end"])
    numbers = pd.read_csv(tmp_path / "predictors.csv")
    noise = {name: np.random.default_rng(7).normal(size=len(numbers)) for name in ("gradient", "update")}
    numbers.assign(**noise).to_csv(tmp_path / "predictors.csv", index=False)
    found = scripts.fit.fitted(tmp_path)
    assert found.errors.startswith("by a range test the edge is off by a factor of")
    assert found.line.names == ("range_end",)
    assert {*found.cover.between} == {"range_end", "layers", "warmup"}
    scores = scripts.score.judged(scripts.loading.load(tmp_path))[0]
    assert scores.each[scripts.forecasters.RANGE].error < scores.each[scripts.forecasters.NINE].error
    assert not found.goal  # a rival reaches none


def test_trials_that_tell_the_edge_reach_the_goals_and_are_stored(scripts: Any, tmp_path: Path) -> None:
    write(tmp_path, scripts.truth, lambda numbers, layers, warmup: numbers["trial" if warmup else "trial_cold"])
    course = pd.read_csv(tmp_path / "course.csv")
    course.assign(losses="8 5.5 5.5").to_csv(tmp_path / "course.csv", index=False)  # no rival knows it
    scores = scripts.score.judged(scripts.loading.load(tmp_path))[0]
    found = scripts.fit.fitted(tmp_path)
    assert found.errors.startswith("by trials of 150 updates the edge is off by a factor of ")
    assert found.line.names == TRIAL
    assert {*found.cover.between} == {"trial", "layers", "warmup"}
    assert found.goal
    assert re.search(
        r"This reaches the goals that were set beforehand; nine predictors, tried first, are off by \d\.\d\d\.$",
        found.errors,
    )
    assert "**By trials the goals are reached**" in scores.text
    assert "**By nine predictors the goals are missed**" in scores.text


def test_the_edge_of_trials_is_read_from_their_file(scripts: Any, tmp_path: Path) -> None:
    (tmp_path / "trials.csv").write_text(
        "arch,layers,warmup,seed,rate,state,gap,updates\n"
        "a,12,40,0,0.001,trained,-.5,99\na,12,40,0,0.002,cannot-tell,.1,150\na,12,40,0,0.004,descending,.3,150\n"
        "a,12,0,0,0.001,stuck,0,150\na,12,0,0,0.0005,stuck,0,150\n"
        "b,36,40,0,0.25,learning,-.1,150\n"
    )
    found = scripts.loading.by_trials(tmp_path / "trials.csv")
    assert {*found} == {("a", 12), ("b", 36)}
    assert found["a", 12]["trial"] == pytest.approx(math.log10(0.001 * math.sqrt(2)))  # 0.004 lies above one that fails
    assert found["a", 12]["trial_cold"] == pytest.approx(math.log10(0.0005 / math.sqrt(2)))  # none learns
    assert found["b", 36] == {"trial": pytest.approx(math.log10(0.25 * math.sqrt(2)))}  # all do
    assert scripts.loading.by_trials(tmp_path / "none.csv") == {}


def test_the_text_is_known_with_a_validation_text_and_without(scripts: Any, multi30k: Path) -> None:
    """Its synthetic twin: test_an_edge_that_is_known_is_told_first, and the entropy by hand in tests/data."""
    from stabilitylab.data import load_data
    from stabilitylab.forecast.known import SAME_TEXT, known_edges

    stored = known_edges()
    assert stored is not None
    assert (stored.text, stored.entropy) == scripts.truth.TEXT

    def entropy(source: str, target: str) -> float:
        text = f"data.source=text:{multi30k / source},{multi30k / target}"
        return load_data(resolve(parse_set([text]), depth=12).data, stack="encoder-decoder").label_entropy()

    cell = scripts.truth.Cell("preln", 12, 40, 3)
    runs = load_data(scripts.make.config(cell, 0, str(multi30k)).data, stack="encoder-decoder")
    assert runs.label_entropy() == pytest.approx(stored.entropy, abs=1e-4)
    assert stored.same_text({"entropy": entropy("train.de.gz", "train.en.gz")})
    assert abs(entropy("train.en.gz", "train.de.gz") - stored.entropy) > 10 * SAME_TEXT


def test_edges_that_are_known_are_stored_with_their_design(scripts: Any, tmp_path: Path) -> None:
    from stabilitylab.forecast.known import design, known_edges

    keys = "arch,layers,warmup,seed,shift,k,lr,outcome,unigram"
    runs = [
        *("postln,12,40,3,0,3,0.0022,trains,5.5", "postln,12,40,3,0,4,0.00286,fails,5.5"),
        *("postln,12,40,4,0,2,0.00169,trains,5.5", "postln,12,40,4,0,3,0.0022,fails,5.5"),
        *("postln,12,40,5,0,9,0.01,trains,5.5", "preln,12,0,3,0,22,0.32,trains,5.5"),  # the first is still looked for
        *("preln,60,40,3,.5,3,0.0025,trains,5.5", "preln,60,40,3,.5,4,0.00326,fails,5.5"),  # of the final test
    ]
    (tmp_path / "runs.csv").write_text("\n".join([keys, *runs, ""]))
    scripts.fit.known(tmp_path).write(tmp_path / "known.json")
    found = known_edges(tmp_path / "known.json")
    assert found is not None
    assert [(one.warmup, one.low, one.high, one.seeds) for one in found.edges] == [
        (40, 0.00169, 0.00286, 2),
        (0, 0.321, math.inf, 1),
        (40, 0.0025, 0.00326, 1),
    ]
    asked = {arch: resolve(parse_set([f"model.arch={arch}"]), depth=12) for arch in ("Post-LN", "preln", "deepnorm")}
    facts = {arch: {"design": design(config), "entropy": 5.55} for arch, config in asked.items()}
    edge = found.of(facts["Post-LN"], 40)
    assert edge is not None
    assert [edge.word(rate) for rate in (1e-3, 0.002, 0.003)] == ["trains", "near the edge", "fails"]
    assert edge.sentence() == "trained up to a rate of 0.0017, failed from 0.0029 on (2 seeds, results/forecast)"
    assert found.of(facts["preln"], 0) is not None
    assert found.of(facts["preln"], 40) is None
    assert found.of(facts["deepnorm"], 40) is None
    assert [found.same_text({"entropy": own}) for own in (5.55, 5.56, 5.58)] == [True, True, False]
    assert not found.same_text({})
    assert found.of({}, 40) is None
