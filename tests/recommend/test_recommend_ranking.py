"""The rule of docs/recommend.md on numbers made by hand, and the bounds on evidence made by hand."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from recommend_cases import GOOD, made

from stabilitylab.recommend import ranking
from stabilitylab.recommend.columns import COLUMNS, RANKED
from stabilitylab.recommend.measurement import bounds
from stabilitylab.recommend.ranking import ranks

EVIDENCE: dict[str, Any] = {"finite_losses": True, "at_adams_floor": {}}


def order(*measurements: Any) -> list[str]:
    return [place.arch for place in ranking(measurements)]


@pytest.mark.parametrize(
    ("column", "best", "middle", "worst"),
    [
        ("gradient", 0.0, 1.0, math.inf),
        ("update", 0.01, 0.1, math.nan),
        ("growth", -0.1, 0.2, -0.3),
        ("sensitivity", 0.0, 1e-3, 2e-3),
        ("headroom", 300.0, 100.0, 3.0),
        ("progress", 0.1, 0.04, -0.1),
    ],
)
def test_each_ranked_column_has_its_better_end(column: str, best: float, middle: float, worst: float) -> None:
    three = [made(name, **{column: value}) for name, value in (("a", worst), ("b", best), ("c", middle))]
    chosen = next(one for one in RANKED if one.name == column)
    assert ranks(three, chosen) == {"a": 3.0, "b": 1.0, "c": 2.0}
    assert order(*three) == ["b", "c", "a"]


def test_the_score_is_the_mean_rank_over_seeds_and_columns_and_ties_share_theirs() -> None:
    found = ranking(
        [
            made("a", 0, gradient=0.5), made("b", 0), made("c", 0, gradient=2.0),
            made("a", 1), made("b", 1), made("c", 1, headroom=200.0),
        ]
    )  # fmt: skip
    scores = {place.arch: place.score for place in found}
    # seed 0: gradient 1, 2, 3, five ties of 2; seed 1: headroom a and b share 2.5, c 1, five ties of 2
    assert scores == pytest.approx(
        {"a": (1 + 10 + 2.5 + 10) / 12, "b": (2 + 10 + 2.5 + 10) / 12, "c": (3 + 10 + 1 + 10) / 12}
    )
    assert [(place.place, place.arch) for place in found] == [(1, "a"), (2, "c"), (3, "b")]
    assert found[0].numbers["gradient"] == 0.75  # the median of .5 and 1
    assert found[0].seeds == 2


def test_what_breaks_a_bound_with_one_seed_comes_last_however_good_it_is() -> None:
    good = {"gradient": 0.0, "headroom": 800.0, "progress": 1.0}
    found = ranking([made("a", 0, **good), made("a", 1, broken="above eps", **good), made("b", 0), made("b", 1)])
    assert [(place.arch, place.broken) for place in found] == [("b", ()), ("a", ("above eps: made up",))]
    assert found[1].score < found[0].score


def test_a_tie_goes_by_progress() -> None:
    # each better than the other in two columns
    one = made("a", gradient=0.5, progress=0.04)
    other = made("b", gradient=1.0, progress=0.05)
    assert [place.score for place in ranking([one, other])] == [1.5, 1.5]
    assert order(one, other) == ["b", "a"]


def test_columns_that_are_not_ranked_decide_nothing() -> None:
    assert {column.name for column in COLUMNS} == GOOD.keys()
    for column in COLUMNS:
        scores = [place.score for place in ranking([made("a", **{column.name: 7.0}), made("b")])]
        assert (scores[0] == scores[1]) == (not column.better), column.name


def test_only_seeds_that_all_have_are_compared_and_a_lower_bound_stays_one() -> None:
    found = ranking([made("a", 0), made("a", 1, gradient=0.0), made("b", 0, broke=False)])
    assert {place.seeds for place in found} == {1}
    assert {place.arch: place.unbroken for place in found} == {"a": False, "b": True}
    assert ranking([]) == []
    assert ranking([made("a", 0), made("b", 1)]) == []


@pytest.mark.parametrize(
    ("numbers", "evidence", "bound", "said"),
    [
        ({"gradient": math.inf}, {}, "finite", "gradient: not a finite number"),
        ({"growth": math.nan}, {}, "finite", "growth: not a finite number"),
        ({}, {"finite_losses": False}, "finite", "of the first 30 updates is not finite"),
        ({}, {"at_adams_floor": {"encoder 2": 0.6, "encoder 1": 0.9}}, "above eps", "2 layers .*, 90 % of encoder 1"),
        ({"progress": -0.01}, {}, "loss falls", "rose by 0.30 nats"),
        ({"progress": 0.0}, {}, "loss falls", "rose by"),
    ],
)  # fmt: skip
def test_each_bound_can_be_broken_and_says_by_what(numbers: Any, evidence: Any, bound: str, said: str) -> None:
    assert bounds(GOOD, EVIDENCE) == {}
    broken = bounds({**GOOD, **numbers}, {**EVIDENCE, **evidence})
    assert list(broken) == [bound]
    assert re.search(said, broken[bound])
