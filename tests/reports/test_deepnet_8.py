"""DeepNet, Figure 8: the fits through quality against depth, and claim C46, on made-up losses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from in_memory import remembered
from scipy import stats

from stabilitylab.reports.base import MissingRuns, Picture
from stabilitylab.reports.caption import small_print
from stabilitylab.reports.claims import CLAIMS, Finding, judge
from stabilitylab.reports.collection import Record, Runs
from stabilitylab.reports.figures.deepnet.figure_8 import LogarithmOfDepth
from stabilitylab.reports.measures.curves import curves, log_over_best

SEEDS = (3, 4, 5, 6)
SPREAD = dict(zip(SEEDS, (-0.003, -0.001, 0.001, 0.003), strict=True))  # what the seed adds


def verdict(id: str, records: Sequence[Record]) -> Finding:
    return judge(CLAIMS[id], Runs(records))


def drawn(records: Sequence[Record]) -> Picture:
    return LogarithmOfDepth().picture(Runs(records))


DEPTHS = (6, 12, 24, 48, 96)
NOISE = dict(zip(DEPTHS, (0.003, -0.004, 0.002, 0.003, -0.004), strict=True))


def deepnorm(loss: Callable[[int, int], float], depths: Sequence[int] = DEPTHS) -> list[Record]:
    places = itertools.product(depths, SEEDS)
    return [remembered(f"{n}-{s}", arch="deepnorm", layers=n, seed=s, nll=loss(n, s)) for n, s in places]


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        (lambda n, s: math.log(n), "reproduced"),
        (lambda n, s: n / 20, "contradicted"),
        (lambda n, s: 5 * (1 - math.exp(-n / 10)), "contradicted"),
        (lambda n, s: math.log(n) if s < 5 else n / 20, "inconclusive"),
        (lambda n, s: -math.log(n), "contradicted"),  # of that shape, and falling
    ],
)
def test_c46_logarithm_of_depth(curve: Callable[[int, int], float], expected: str) -> None:
    runs = deepnorm(lambda n, s: 9 - curve(n, s) - (1 + SPREAD[s]) * NOISE[n])
    assert verdict("C46", runs).verdict == expected


def test_c46_a_seed_that_failed_at_one_depth_is_undecided() -> None:
    runs = deepnorm(lambda n, s: 9 - math.log(n) - (1 + SPREAD[s]) * NOISE[n])
    lost = remembered("lost", arch="deepnorm", layers=192, seed=3, nll=9.0, verdict="stuck")
    assert verdict("C46", runs).verdict == "reproduced"
    assert verdict("C46", [*runs, lost]).verdict == "inconclusive"


def test_c46_needs_five_depths() -> None:
    found = verdict("C46", deepnorm(lambda n, s: 9 - math.log(n), DEPTHS[:4]))
    assert found.verdict == "not testable"
    assert "stabilitylab sweep deepnet:8" in found.command


@pytest.mark.parametrize(
    "quality", [[1.0, 1.9, 2.6, 3.4, 3.9], [5 * (1 - math.exp(-n / 10)) + NOISE[n] for n in DEPTHS]]
)
def test_aic_is_that_of_the_likelihood(quality: Sequence[float]) -> None:
    """Against scipy's Gaussian log-likelihood of each fit, maximised over all its parameters."""
    depth = np.array(DEPTHS, float)

    def aic(shape: np.ndarray, parameters: int) -> float:
        fit = stats.linregress(shape, quality)
        residual = np.array(quality) - fit.intercept - fit.slope * shape
        likelihood = stats.norm.logpdf(residual, scale=math.sqrt(np.mean(residual**2))).sum()
        return 2 * parameters - 2 * float(likelihood)

    scales = np.geomspace(2, 288, 200)
    for _ in range(3):  # finer and finer
        best = min(scales, key=lambda c: aic(1 - np.exp(-depth / c), 4))
        width = scales[1] / scales[0]
        scales = np.geomspace(best / width, best * width, 100)
    least = min(aic(depth, 3), aic(np.log(depth), 3), aic(1 - np.exp(-depth / best), 4))
    assert log_over_best(DEPTHS, quality) == pytest.approx(aic(np.log(depth), 3) - least, abs=1e-4)


def test_the_picture_has_the_means_and_three_fits() -> None:
    """Each seed's slope is its own, so that A has an interval that is known."""
    picture = drawn(deepnorm(lambda n, s: 9 - (0.5 + 10 * SPREAD[s]) * math.log(n)))
    quality, left = picture.panels
    points, log, linear, saturating = quality.series
    assert (points.kind, points.x, points.seeds, quality.ticks) == ("points", [*DEPTHS], 4, [*DEPTHS])
    assert "n = 4" in small_print(picture).split(" · ")
    assert points.y == pytest.approx([9 - 0.5 * math.log(n) for n in DEPTHS])
    assert points.low is not None
    assert points.low[4] == pytest.approx(9 - 0.53 * math.log(96))
    assert log.y == pytest.approx([9 - 0.5 * math.log(x) for x in log.x])
    assert (log.x[0], log.x[-1]) == pytest.approx((6, 96))
    straight = stats.linregress(DEPTHS, points.y)
    assert linear.y == pytest.approx([straight.intercept + straight.slope * x for x in linear.x])
    ends = [(saturating.y[0], 9 - 0.5 * math.log(6)), (saturating.y[-1], 9 - 0.5 * math.log(96))]
    assert all(abs(fit - true) < 0.1 for fit, true in ends)
    assert [line.label for line in left.series] == ["A log d + B", "A d + B", "A (1 - exp(-d / c)) + B"]
    assert left.series[0].y == pytest.approx([0] * 5, abs=1e-9)
    half = float(stats.t.ppf(0.975, 3)) * np.std([0.5 + 10 * SPREAD[s] for s in SEEDS], ddof=1) / 2
    assert f"A = +0.500 nats a unit of log depth, 95 % interval {0.5 - half:+.3f} to" in picture.finding
    assert "logarithmic 0.0" in picture.finding


def test_the_curves_go_through_what_they_made() -> None:
    found = curves(DEPTHS, [2 - 3 * math.exp(-n / 20) for n in DEPTHS])
    assert found["saturating"].at([10.0, 50.0]) == pytest.approx(
        [2 - 3 * math.exp(-x / 20) for x in (10, 50)], abs=1e-3
    )
    assert found["linear"].aic > found["saturating"].aic < found["logarithmic"].aic
    assert curves(DEPTHS, [5 + 2 * n for n in DEPTHS])["linear"].slope == pytest.approx(2)


def test_failures_are_no_points() -> None:
    runs = deepnorm(lambda n, s: 9 - math.log(n))
    runs += [remembered(f"lost-{n}", arch="deepnorm", layers=n, seed=9, nll=20, verdict="stuck") for n in DEPTHS]
    picture = drawn(runs)
    assert picture.panels[0].series[0].y == pytest.approx([9 - math.log(n) for n in DEPTHS])
    assert any("5 got stuck at or above the unigram baseline" in note for note in picture.notes)


def test_few_depths_are_drawn_without_a_fit() -> None:
    picture = drawn(deepnorm(lambda n, s: 9 - math.log(n), DEPTHS[:3]))
    (panel,) = picture.panels
    assert [line.kind for line in panel.series] == ["points"]
    assert picture.finding.startswith("3 depths are too few for a curve: held-out nll [nats/token] 7.21 at 6")
    assert any("stabilitylab sweep deepnet:8" in note for note in picture.notes)


def test_the_group_with_most_depths_is_drawn() -> None:
    few = [remembered(f"x{s}{n}", arch="deepnorm", layers=n, seed=s, nll=1, settings={"train": {"lr": 1.0}})
           for s in range(3, 20) for n in (6, 12)]  # fmt: skip
    assert drawn([*few, *deepnorm(lambda n, s: 9 - math.log(n))]).panels[0].series[0].x == [*DEPTHS]


def test_without_runs_it_names_the_command() -> None:
    lost = [remembered("a", arch="deepnorm", verdict="stuck"), remembered("b", arch="postln")]
    with pytest.raises(MissingRuns) as missing:
        drawn(lost)
    assert missing.value.command == "stabilitylab sweep deepnet:8 --scale tiny"
