"""Claims C36 to C40, on made-up losses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_memory import remembered
from making import load, make_run
from scipy import stats

from stabilitylab.reports.claims import CLAIMS, Finding, judge
from stabilitylab.reports.collection import Record, Runs

SEEDS = (3, 4, 5, 6)
SPREAD = dict(zip(SEEDS, (-0.003, -0.001, 0.001, 0.003), strict=True))  # what the seed adds to a difference
Loss = Callable[[int, int], float]  # of depth and seed


def models(arch: str, loss: Loss, *, depths: Sequence[int] = (6,), seeds: Iterable[int] = SEEDS, **more: Any):
    return [
        remembered(f"{arch}-{n}-{s}-{more}", arch=arch, layers=n, seed=s, nll=loss(n, s), **more)
        for n in depths
        for s in seeds
    ]


def verdict(id: str, *records: Sequence[Record]) -> Finding:
    return judge(CLAIMS[id], Runs(itertools.chain(*records)))


def flat(n: int, s: int) -> float:
    return 5.0


def by_depth(slope: float, at_zero: float = 0.0) -> Loss:
    return lambda n, s: 5.0 + at_zero + slope * n + SPREAD[s]


@pytest.mark.parametrize(
    ("deepnorm", "depths", "expected"),
    [
        (by_depth(0.01), (6, 12, 18), "reproduced"),
        (by_depth(-0.01), (6, 12, 18), "contradicted"),
        (by_depth(-0.01, 1.0), (6, 12, 18), "contradicted"),  # under-trained, but less so with depth
        (lambda n, s: 5.0 + 20 * SPREAD[s], (6, 12, 18), "inconclusive"),
        (by_depth(0.01), (6,), "inconclusive"),  # one depth cannot show that the gap grows ...
        (by_depth(-0.01), (6,), "contradicted"),  # ... but it can show that there is none
    ],
)
def test_c36_undertrained_deepnorm(deepnorm: Loss, depths: Sequence[int], expected: str) -> None:
    found = verdict("C36", models("deepnorm", deepnorm, depths=depths), models("postln", flat, depths=depths))
    assert found.verdict == expected
    assert len(found.effects) == len(depths) + 1


def test_c36_numbers() -> None:
    found = verdict("C36", models("deepnorm", by_depth(0.01), depths=(6, 18)), models("postln", flat, depths=(6, 18)))
    assert [effect["mean"] for effect in found.effects] == pytest.approx([0.06, 0.18, 0.01])


def test_c36_is_about_runs_that_converge() -> None:
    stuck = models("postln", flat, depths=(6, 12), verdict="stuck")
    found = verdict("C36", models("deepnorm", by_depth(0.01), depths=(6, 12)), stuck)
    assert found.verdict == "not testable"
    assert "arch=postln,deepnorm depth=12,24,36" in found.command


@pytest.mark.parametrize(
    ("gap", "expected"),
    [
        (lambda n, s: 5 - 0.1 + SPREAD[s], "reproduced"),
        (lambda n, s: 5 + 0.1 + SPREAD[s], "contradicted"),
        (lambda n, s: 5 + (0.1 if n == 6 else -0.1) + SPREAD[s], "contradicted"),  # at one depth is enough
        (lambda n, s: 5 + SPREAD[s], "inconclusive"),
    ],
)
def test_c37_final_loss(gap: Loss, expected: str) -> None:
    depths = (6, 12)
    found = verdict("C37", models("branchnorm", gap, depths=depths), models("deepnorm", flat, depths=depths))
    assert found.verdict == expected
    assert found.effects[1]["mean"] == pytest.approx(np.mean([gap(12, s) - 5 for s in SEEDS]))


def test_c37_prints_the_ablation_which_decides_nothing() -> None:
    good = models("branchnorm", lambda n, s: 4.9)
    ablation = models("branchnorm", lambda n, s: 4.5, seeds=(3,), settings={"model": {"T": 1}})
    found = verdict("C37", good, ablation, models("deepnorm", flat))
    assert found.verdict == "reproduced"
    assert [e["effect"] for e in found.effects] == ["difference at 6L (ablation T = 1: -0.500, n = 1)"]


def test_c37_takes_the_longest_training_with_enough_seeds() -> None:
    def at(steps: int, loss: float, seeds: Sequence[int]) -> list[Record]:
        settings = {"train": {"steps": steps}}
        return [
            *models("branchnorm", lambda n, s: loss, seeds=seeds, settings=settings),
            *models("deepnorm", flat, seeds=seeds, settings=settings),
        ]

    found = verdict("C37", at(100, 6.0, SEEDS), at(200, 4.0, SEEDS[:3]), at(300, 6.0, SEEDS[:1]))
    assert (found.verdict, found.effects[0]["n"]) == ("reproduced", 3)


def test_c37_two_ramps_are_not_mixed() -> None:
    rare = models("branchnorm", lambda n, s: 9.0, seeds=SEEDS[:2], settings={"model": {"T": 7}})
    found = verdict("C37", models("branchnorm", lambda n, s: 4.9), models("deepnorm", flat), rare)
    assert (found.verdict, found.effects[0]["n"]) == ("reproduced", 4)


def test_c37_from_run_directories(tmp_path: Path) -> None:
    for arch, loss in (("branchnorm", 4.9), ("deepnorm", 5.0)):
        for seed in (1, 3, 4, 5):  # 1 was a pilot at this width
            metrics = {"held_out_nll": [8.0, loss + seed / 1000], "held_out_accuracy": [0.1, 0.2]}
            make_run(tmp_path, f"{arch}-{seed}", arch=arch, seed=seed, layers=2, metrics=metrics)
    found = judge(CLAIMS["C37"], load(tmp_path))
    assert (found.verdict, found.effects[0]["seeds"]) == ("reproduced", [3, 4, 5])
    assert found.effects[0]["mean"] == pytest.approx(-0.1)


def test_c37_without_runs() -> None:
    found = verdict("C37", models("branchnorm", flat))
    assert (found.verdict, found.command) == ("not testable", "stabilitylab sweep branchnorm:8 --scale tiny")


def ramps(losses: Mapping[int, Loss], **more: Any) -> list[Record]:
    return [r for T, loss in losses.items() for r in models("branchnorm", loss, settings=ramp(T), **more)]


def ramp(T: int, **model: Any) -> dict[str, Any]:
    return {"model": {"T": T, **model}, "train": {"steps": 10_000}}


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (lambda n, s: 5.01 + SPREAD[s], "reproduced"),
        (lambda n, s: 5.2 + SPREAD[s], "contradicted"),
        (lambda n, s: 4.8 + SPREAD[s], "contradicted"),
        (lambda n, s: 5.05 + SPREAD[s], "inconclusive"),
        (lambda n, s: math.inf if s == 3 else 5.0, "inconclusive"),
    ],
)
def test_c38_insensitive_to_t(last: Loss, expected: str) -> None:
    found = verdict("C38", ramps({2: flat, 40: flat, 400: flat, 2000: last}))
    assert found.verdict == expected
    assert len(found.effects) == 6  # every two of four


def test_c38_a_run_that_diverged_is_not_equal() -> None:
    lost = models("branchnorm", flat, settings=ramp(2000), seeds=SEEDS[:1], verdict="diverged")
    rest = models("branchnorm", flat, settings=ramp(2000), seeds=SEEDS[1:])
    assert verdict("C38", ramps({2: flat, 40: flat, 400: flat}), lost, rest).verdict == "inconclusive"


def test_c38_a_value_with_few_seeds_does_not_take_the_others() -> None:
    few = models("branchnorm", flat, settings=ramp(9), seeds=(3,))
    found = verdict("C38", ramps({2: flat, 40: flat, 400: flat, 2000: flat}), few)
    assert (found.verdict, found.effects[0]["n"], len(found.effects)) == ("reproduced", 4, 6)


def test_c38_needs_four_ramps_and_no_others() -> None:
    three = ramps({2: flat, 40: flat, 400: flat})
    ablation = models("branchnorm", flat, settings=ramp(1))
    exponential = models("branchnorm", flat, settings=ramp(9, growth="exp"))
    xavier = models("branchnorm", flat, settings=ramp(9, init="xavier"))
    half = models("branchnorm", flat, settings=ramp(5000))  # longer than any of the paper's
    found = verdict("C38", three, ablation, exponential, xavier, half)
    assert found.verdict == "not testable"
    assert "--grid arch=branchnorm T=2,5,48,240 depth=12" in found.command


def shapes(exponential: Loss, names: Sequence[str] = ("linear", "exp", "sigmoid"), T: int = 100) -> list[Record]:
    return [
        record
        for name in names
        for record in models(
            "branchnorm", exponential if name == "exp" else flat, settings={"model": {"growth": name, "T": T}}
        )
    ]


@pytest.mark.parametrize(
    ("exponential", "expected"),
    [
        (lambda n, s: 5.01 + SPREAD[s], "reproduced"),
        (lambda n, s: 5.2 + SPREAD[s], "contradicted"),
        (lambda n, s: 5.05 + SPREAD[s], "inconclusive"),
    ],
)
def test_c39_shape_of_the_schedule(exponential: Loss, expected: str) -> None:
    # another T stands beside it, without all shapes
    found = verdict("C39", shapes(flat, ("linear", "exp"), T=50), shapes(exponential))
    assert found.verdict == expected
    assert [e["effect"] for e in found.effects] == [
        "growth = linear minus exp",
        "growth = sigmoid minus exp",
        "growth = sigmoid minus linear",
    ]
    assert found.effects[0]["mean"] == pytest.approx(5 - np.mean([exponential(6, s) for s in SEEDS]))


def test_c39_without_sigmoid() -> None:
    found = verdict("C39", shapes(flat, ("linear", "exp")))
    assert found.verdict == "not testable"
    assert "model.growth=linear,exp,sigmoid" in found.command


WARMUPS, RATES = (0, 100, 1000, 4000), (5e-4, 8e-4, 1e-3, 1.5e-3)


def grid(lost: Callable[[str, int, float], bool], rates: Sequence[float] = RATES) -> list[Record]:
    return [
        remembered(f"{arch}-{warmup}-{lr}-{seed}", arch=arch, seed=seed, layers=2,
                   settings={"train": {"warmup": warmup, "lr": lr}},
                   verdict="stuck" if lost(arch, warmup, lr) else "trained")
        for arch, warmup, lr, seed in itertools.product(("branchnorm", "deepnorm"), WARMUPS, rates, SEEDS)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        (lambda arch, warmup, lr: arch == "deepnorm" and warmup == 0, "reproduced"),
        (lambda arch, warmup, lr: arch == "branchnorm" and warmup == 0, "contradicted"),
        (lambda arch, warmup, lr: warmup == 0, "contradicted"),  # both fail
        (lambda arch, warmup, lr: False, "inconclusive"),  # neither: DeepNorm tolerates it as well
    ],
)
def test_c40_no_warmup_needed(lost: Callable[[str, int, float], bool], expected: str) -> None:
    found = verdict("C40", grid(lost))
    assert found.verdict == expected
    assert found.effects[0]["n"] == 64
    assert found.effects[0]["mean"] == sum(lost("branchnorm", w, r) for w in WARMUPS for r in RATES) / 16


def test_c40_p_is_mcnemars() -> None:
    def lost(arch: str, warmup: int, lr: float) -> bool:
        return (arch == "deepnorm" and warmup == 0) or (arch == "branchnorm" and warmup == 100 and lr == RATES[0])

    share = verdict("C40", grid(lost)).effects[1]
    assert (share["n"], share["mean"]) == (20, 0.8)
    assert share["p"] == pytest.approx(2 * stats.binom.cdf(4, 20, 0.5))


def test_c40_needs_the_whole_grid() -> None:
    found = verdict("C40", grid(lambda *_: False, RATES[:3]))
    assert found.verdict == "not testable"
    holed = [run for run in grid(lambda *_: False) if run.settings["train.warmup"] or run.settings["train.lr"] > 5e-4]
    assert verdict("C40", holed).verdict == "not testable"
    assert "warmup=0,100,1000,4000 lr=5e-4,8e-4,1e-3,1.5e-3" in found.command
