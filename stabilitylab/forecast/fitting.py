"""The fit from predictors to a critical rate: one line, its penalty, its cover, and the file that holds it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError

FEATURES = (
    *("range_end", "critical_start", "critical_later", "gradient", "update", "growth_later"),
    *("layers", "cold", "cold_critical_start"),
)
TRIAL = ("trial",)  # e(x) may also be linear in this predictor alone
WARMUP = 40  # updates that count as a whole warm-up
PRIOR = 0.3  # decades: the prior standard deviation of the slope of a standardised predictor
STEEP, FLAT = 0.02, 1.0  # decades: the bounds of the logistic's width
MARGIN = 0.1  # the cover goes beyond a predictor's range by this share of it
FILE = Path(__file__).parent / "fitted.json"
Facts = Mapping[str, Any]


def features(numbers: Mapping[str, float], layers: int, warmup: int) -> dict[str, float]:
    """Return the variables of e(x). ``numbers``: those of :func:`.measuring.measure`."""
    cold = 1 - min(warmup, WARMUP) / WARMUP
    suffix = "" if warmup else "_cold"
    found = {name: numbers.get(name, math.nan) for name in ("range_end", "critical_start", "gradient", "update")}
    found |= {name: numbers.get(name + suffix, math.nan) for name in ("critical_later", "growth_later", "trial")}
    found |= {"layers": math.log10(layers) if layers else math.nan, "cold": cold}
    return {**found, "cold_critical_start": cold * found["critical_start"]}


@dataclass(frozen=True)
class Line:
    """The model P(fails) = logistic((log10(rate) - e(x)) / ``width``), e(x) = ``middle`` + sum of ``slopes`` x (x -
    ``mean``) / ``scale``: log10 of the critical rate, at which P = 1/2."""

    names: Sequence[str]
    mean: Sequence[float]
    scale: Sequence[float]
    middle: float
    slopes: Sequence[float]
    width: float

    def edge(self, x: Mapping[str, float]) -> float:
        """Return e(x), log10."""
        z = (np.array([x[name] for name in self.names]) - np.array(self.mean)) / np.array(self.scale)
        return float(self.middle + z @ np.array(self.slopes))

    def probability(self, edge: float, rate: float) -> float:
        """Return P(fails) at log10 ``rate`` if log10 of the critical rate is ``edge``."""
        return float(_logistic((rate - edge) / self.width))


def fit(x: np.ndarray, rate: np.ndarray, fails: np.ndarray, weight: np.ndarray, names: Sequence[str]) -> Line:
    """Return the line that minimises sum of weight x cross-entropy + sum of slope^2 / (2 ``PRIOR``^2), over predictors
    standardised with the same weights.

    ``x`` (runs, predictors); ``rate`` log10; ``fails`` 0 or 1. Raises ValueError if all runs end alike.
    """
    from scipy.optimize import minimize

    if len({*fails.tolist()}) < 2:
        raise ValueError("all runs end alike: there is no edge between them")
    mean = np.average(x, axis=0, weights=weight)
    scale = np.sqrt(np.average((x - mean) ** 2, axis=0, weights=weight))
    scale = np.where(scale > 1e-9, scale, 1.0)
    z = (x - mean) / scale

    def cost(theta: np.ndarray) -> tuple[float, np.ndarray]:
        middle, log_width, slopes = theta[0], theta[1], theta[2:]
        width = math.exp(log_width)
        score = (rate - middle - z @ slopes) / width
        loss = weight @ (np.logaddexp(0, score) - fails * score) + slopes @ slopes / (2 * PRIOR**2)
        pull = weight * (_logistic(score) - fails)  # d loss / d score
        gradient = np.concatenate(([-pull.sum() / width, -pull @ score], -(z.T @ pull) / width + slopes / PRIOR**2))
        return float(loss), gradient

    start = np.concatenate(([rate.mean(), math.log(0.2)], np.zeros(z.shape[1])))
    bounds = [(None, None), (math.log(STEEP), math.log(FLAT)), *[(None, None)] * z.shape[1]]
    found = minimize(cost, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 2000}).x
    lists = (names, mean.tolist(), scale.tolist())
    return Line(*lists, float(found[0]), found[2:].tolist(), math.exp(float(found[1])))


def _logistic(score: Any) -> Any:
    return 0.5 * (1 + np.tanh(np.asarray(score) / 2))  # never overflows


@dataclass(frozen=True)
class Cover:
    """The range of a fit. ``same``: facts that must be equal; ``near``: facts that may differ by a factor of 2;
    ``between``: the least and largest of layers, warm-up and every predictor."""

    same: Facts
    near: Facts
    between: Mapping[str, tuple[float, float]]

    def misses_before(self, facts: Facts, warmup: int) -> list[str]:
        """Return the reasons against a forecast that ``facts`` show before anything is measured."""
        same, near = ({name: x for name, x in own.items() if name in facts} for own in (self.same, self.near))
        own = {name: self.between[name] for name in ("layers", "warmup") if name in self.between}
        return Cover(same, near, own if "layers" in facts else {}).misses(facts, {}, warmup)

    def misses(self, facts: Facts, x: Mapping[str, float], warmup: int) -> list[str]:
        """Return the reasons why a case is not covered; [] if it is covered."""
        found = []
        for name, value in self.same.items():
            own = facts.get(name)
            if own != value:
                found.append(f"{name} {'is not known' if own is None else f'is {own}'}, fitted on {value}")
        for name, value in self.near.items():
            own = facts.get(name)
            if own is None or not value / 2 <= own <= value * 2:
                found.append(f"{name} {'are not known' if own is None else f'are {own}'}, fitted on about {value}")
        own_between = {**x, "layers": float(facts.get("layers") or math.nan), "warmup": float(warmup)}
        for name, (low, high) in self.between.items():
            value = own_between.get(name, math.nan)
            margin = 0.0 if name in ("layers", "warmup") else MARGIN * (high - low)
            if not low - margin <= value <= high + margin:
                told = "cannot be measured" if math.isnan(value) else f"is {value:.3g}"
                found.append(f"{name} {told}, fitted on {low:.3g} to {high:.3g}")
        return found


@dataclass(frozen=True)
class Fitted:
    """A line with its cover. ``spread``: decades that hold 80 % of the errors of critical rates of architectures that
    were left out; ``errors``: the quality of the fit, in sentences; ``goal``: True if the goals that were set before
    were reached on architectures that were left out, ``final_goal``: the same at a depth that no fit had seen, None if
    that was not tried."""

    version: str
    line: Line
    cover: Cover
    spread: float
    errors: str
    goal: bool
    final_goal: bool | None
    runs: int
    archs: Sequence[str]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


@cache
def fitted(path: Path = FILE) -> Fitted | None:
    """Return the stored fit; None if there is no file. Raises InputError for a file that is none of ours."""
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        cover = found["cover"]
        between = {name: (float(low), float(high)) for name, (low, high) in cover["between"].items()}
        return replace(Fitted(**found), line=Line(**found["line"]), cover=Cover(cover["same"], cover["near"], between))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} holds no fit that can be read: install the package anew.") from error
