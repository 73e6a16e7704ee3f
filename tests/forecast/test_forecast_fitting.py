"""The line, its cover and what is told by it, on numbers that are made up."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import approx_fprime

from stabilitylab.commands._forecasts import lines
from stabilitylab.errors import InputError
from stabilitylab.forecast import fitting
from stabilitylab.forecast.fitting import FEATURES, TRIAL, Cover, Fitted, Line, features, fit, fitted
from stabilitylab.forecast.known import Known, KnownEdges, known_edges
from stabilitylab.forecast.measuring import Measured
from stabilitylab.forecast.telling import NOTHING, forecast
from stabilitylab.forecast.trials import Trial, Trials

NUMBERS = {
    **{"range_end": -2.0, "critical_start": -0.8, "critical_later": -1.2, "critical_later_cold": -1.6},
    **{"trial": -2.4, "trial_cold": -2.8},
    **{"gradient": 0.5, "update": -2.0, "growth_later": 0.1, "growth_later_cold": 0.2},
}
SAME = {"width": 64, "optimizer": "adamw (0.9, 0.98)"}
NEAR = {"tokens": 283}


def runs(n: int = 4000, width: float = 0.1) -> tuple[np.ndarray, ...]:
    """Runs of which the edge is -2.5 + .3 z_0 - .1 z_1, at rates around it."""
    random = np.random.default_rng(0)
    x = random.normal(size=(n, 2)) * (2.0, 5.0) + (1.0, -3.0)
    edge = -2.5 + 0.3 * (x[:, 0] - 1) / 2 - 0.1 * (x[:, 1] + 3) / 5
    rate = edge + random.normal(size=n) * 0.3
    fails = (random.random(n) < 1 / (1 + np.exp(-(rate - edge) / width))).astype(float)
    return x, rate, fails, np.ones(n)


def test_the_line_finds_what_made_the_runs() -> None:
    line = fit(*runs(), ("a", "b"))
    assert line.slopes == pytest.approx([0.3, -0.1], abs=0.02)
    assert line.middle == pytest.approx(-2.5, abs=0.02)
    assert line.width == pytest.approx(0.1, abs=0.01)
    assert line.edge({"a": 3.0, "b": -3.0}) == pytest.approx(-2.2, abs=0.03)
    assert line.probability(-2.0, -2.0) == 0.5
    assert line.probability(-2.0, -1.0) > 0.99
    assert line.probability(-2.0, 500.0) == 1.0


def test_it_is_the_minimum_of_what_the_docstring_says() -> None:
    x, rate, fails, weight = runs(60)
    weight = np.linspace(0.1, 2, 60)
    line = fit(x, rate, fails, weight, ("a", "b"))
    mean = weight @ x / weight.sum()
    z = (x - mean) / np.sqrt(weight @ (x - mean) ** 2 / weight.sum())

    def cost(theta: np.ndarray) -> float:
        score = (rate - theta[0] - z @ theta[2:]) / math.exp(theta[1])
        p = 1 / (1 + np.exp(-score))
        entropy = -(fails * np.log(p) + (1 - fails) * np.log(1 - p))
        return float(weight @ entropy + theta[2:] @ theta[2:] / (2 * fitting.PRIOR**2))

    found = np.array([line.middle, math.log(line.width), *line.slopes])
    assert np.abs(approx_fprime(found, cost, 1e-7)).max() < 1e-2
    assert all(cost(found) <= cost(found + shift) for shift in 0.02 * np.vstack([np.eye(4), -np.eye(4)]))


def test_few_runs_are_held_by_the_penalty() -> None:
    x, rate = np.array([[0.0], [1.0]]), np.array([-3.0, -1.0])
    line = fit(x, rate, np.array([1.0, 0.0]), np.ones(2), ("a",))
    assert 0 < line.slopes[0] < 3 * fitting.PRIOR
    none = fit(np.zeros((4, 0)), np.array([-3.0, -2.9, -2.1, -2.0]), np.array([0.0, 0.0, 1.0, 1.0]), np.ones(4), ())
    assert none.middle == pytest.approx(-2.5, abs=0.02)
    assert none.width >= fitting.STEEP - 1e-12
    with pytest.raises(ValueError, match="all runs end alike"):
        fit(x, rate, np.ones(2), np.ones(2), ("a",))


def test_features_are_those_of_the_warm_up() -> None:
    warm, cold, half = (features(NUMBERS, 36, warmup) for warmup in (40, 0, 20))
    assert set(warm) == {*FEATURES, *TRIAL}
    assert (warm["trial"], cold["trial"]) == (-2.4, -2.8)
    assert (warm["cold"], cold["cold"], half["cold"]) == (0, 1, 0.5)
    assert (warm["critical_later"], cold["critical_later"]) == (-1.2, -1.6)
    assert (warm["growth_later"], cold["growth_later"]) == (0.1, 0.2)
    assert (warm["cold_critical_start"], cold["cold_critical_start"]) == (0, -0.8)
    assert warm["layers"] == math.log10(36)
    assert math.isnan(features({}, 0, 40)["range_end"])


def cover() -> Cover:
    x = features(NUMBERS, 36, 0)
    between = {name: (x[name] - 1.0, x[name] + 1.0) for name in FEATURES if name not in ("cold", "layers")}
    return Cover(SAME, NEAR, {**between, "cold_critical_start": (-2.0, 0.0), "layers": (12, 36), "warmup": (0, 40)})


def made(**more: Any) -> Fitted:
    line = Line([*FEATURES], [0.0] * 9, [1.0] * 9, 0.0, [1.0, *[0.0] * 8], 0.1)  # the edge is range_end
    own = {"spread": 0.2, "errors": "off by a factor of 1.5.", "goal": False, "final_goal": None}
    own |= {"version": "1 (9 runs)", "runs": 9, "archs": ["postln"]}
    return Fitted(**{"line": line, "cover": cover(), **own, **more})


def measured(numbers: dict[str, float] | None = None, **facts: Any) -> Measured:
    tried = {40: Trials(40, (Trial(0.01, "stuck", 0.0, 150), Trial(0.005, "learning", -0.1, 150)))}
    own = {**SAME, **NEAR, "layers": 36, **facts}
    return Measured(own, {**NUMBERS, **(numbers or {})}, ("a line",), 0.1, "postln", tried, 60.0, 20.0)


def test_within_the_cover_a_probability_and_both_edges_are_told() -> None:
    found = forecast(measured(), 1e-2, 40, made())
    assert found.fails is not None
    assert found.fails.value == pytest.approx(0.5)
    assert found.fails.low == pytest.approx(1 / (1 + math.exp(2)))  # the edge .2 decades further up
    assert found.fails.high == pytest.approx(1 / (1 + math.exp(-2)))
    assert found.word == "near the edge"
    assert set(found.critical) == {"warm-up 40", "no warm-up"}
    assert found.rate is not None
    assert (found.rate.value, found.rate.low) == pytest.approx((1e-2, 10**-2.2))
    assert [forecast(measured(), lr, 40, made()).word for lr in (1e-3, 1e-1)] == ["trains", "fails"]
    cold = forecast(measured(), 1e-2, 0, made())
    assert set(cold.critical) == {"no warm-up", "warm-up 40"}


@pytest.mark.parametrize(
    ("facts", "numbers", "warmup", "reason"),
    [
        ({"width": 512}, {}, 40, "width is 512, fitted on 64"),
        ({"optimizer": "sgd ()"}, {}, 40, "optimizer is sgd (), fitted on adamw (0.9, 0.98)"),
        ({"tokens": 600}, {}, 40, "tokens are 600, fitted on about 283"),
        ({"tokens": None}, {}, 40, "tokens are not known, fitted on about 283"),
        ({"layers": 48}, {}, 40, "layers is 48, fitted on 12 to 36"),
        ({}, {}, 400, "warmup is 400, fitted on 0 to 40"),
        ({}, {"range_end": -0.7}, 40, "range_end is -0.7, fitted on -3 to -1"),
        ({}, {"gradient": math.inf}, 40, "gradient is inf, fitted on -0.5 to 1.5"),
        ({}, {"update": math.nan}, 40, "update cannot be measured, fitted on -3 to -1"),
    ],
)
def test_outside_the_cover_it_cannot_tell_and_says_why(
    facts: dict[str, Any], numbers: dict[str, float], warmup: int, reason: str
) -> None:
    found = forecast(measured(numbers, **facts), 1e-2, warmup, made())
    assert found.fails is None
    assert found.word == "cannot tell"
    assert list(found.why_not) == [reason]
    assert "evidence" in found.as_dict()


def test_a_little_outside_is_inside_but_not_for_depth() -> None:
    assert forecast(measured({"range_end": -0.85}), 1e-2, 40, made()).fails is not None
    assert forecast(measured(layers=37), 1e-2, 40, made()).fails is None


def test_what_is_not_covered_is_told_before_it_is_measured() -> None:
    own = cover()
    assert own.misses_before({**SAME, **NEAR, "layers": 36}, 40) == []
    assert own.misses_before({"optimizer": SAME["optimizer"]}, 40) == []  # the width is measured
    found = own.misses_before({**SAME, "tokens": 9, "layers": 60}, 40)
    assert found == ["tokens are 9, fitted on about 283", "layers is 60, fitted on 12 to 36"]
    assert set(found) <= set(own.misses({**SAME, "tokens": 9, "layers": 60}, features(NUMBERS, 60, 40), 40))


def test_where_nothing_is_told_the_trials_head_it() -> None:
    assert lines(forecast(measured(layers=60), 1e-2, 40, made()))[0] == (
        "postln, 60 layers, lr 0.01, warm-up 40: cannot tell; its trials learn up to a rate of 0.005 and not at 0.01"
    )


def test_an_edge_that_is_known_goes_before_what_is_forecast() -> None:
    edges = KnownEdges("a text", 5.5, [Known("abc", 40, 2e-3, 4e-3, 3), Known("abc", 0, 0.0, 1e-3, 1)])
    own = measured(design="abc", entropy=5.505)
    for lr, word, risk in ((1e-3, "trains", 0), (3e-3, "near the edge", 0.5), (5e-3, "fails", 1)):
        for one in (made(), None):
            found = forecast(own, lr, 40, one, edges)
            assert (found.word, found.risk) == (word, risk)
            assert {*found.known} == {"warm-up 40", "no warm-up"}
    told = found.as_dict()["known"]
    assert told["warm-up 40"] == {"design": "abc", "warmup": 40, "low": 2e-3, "high": 4e-3, "seeds": 3}
    assert told["no warm-up"]["low"] is None
    elsewhere = forecast(measured(design="abc", entropy=5.55), 1e-3, 40, made(), edges)
    assert elsewhere.known == {}
    assert elsewhere.elsewhere == {"warm-up 40": edges.edges[0], "no warm-up": edges.edges[1]}
    line = (
        "  on another text (a text) with no warm-up trained at no rate, failed from 0.001 on (1 seed, results/forecast)"
    )
    assert line in lines(elsewhere)
    assert elsewhere.fails is not None
    assert elsewhere.risk == elsewhere.fails.value


def test_known_edges_are_read_as_they_were(tmp_path: Path) -> None:
    own = KnownEdges("a text", 5.5, [Known("abc", 40, 2e-3, math.inf, 3), Known("abc", 0, 0.0, 1e-3, 1)])
    own.write(tmp_path / "known.json")
    assert known_edges(tmp_path / "known.json") == own
    assert known_edges(tmp_path / "none.json") is None
    assert [one.sentence() for one in own.edges] == [
        "trained up to a rate of 0.002, failed at none (3 seeds, results/forecast)",
        "trained at no rate, failed from 0.001 on (1 seed, results/forecast)",
    ]
    for text in ("{", "[]", "{}", '{"text": 1, "entropy": 2, "edges": [{"low": null}]}'):
        path = tmp_path / f"{len(text)}.json"
        path.write_text(text)
        with pytest.raises(InputError, match="holds no edges that can be read"):
            known_edges(path)


def test_without_a_fit_nothing_is_forecast() -> None:
    found = forecast(measured(), 1e-2, 40, None)
    assert (found.word, found.why_not, found.fails, found.critical) == ("cannot tell", (NOTHING,), None, {})
    assert found.as_dict()["p_fails"] is None


def test_what_is_stored_is_read_as_it_was(tmp_path: Path) -> None:
    made().write(tmp_path / "fitted.json")
    found = fitted(tmp_path / "fitted.json")
    assert found == made()
    assert fitted(tmp_path / "none.json") is None
    for text in ("{", "[]", "{}", json.dumps({"line": 3})):
        path = tmp_path / f"{len(text)}.json"
        path.write_text(text)
        with pytest.raises(InputError, match="holds no fit that can be read"):
            fitted(path)
