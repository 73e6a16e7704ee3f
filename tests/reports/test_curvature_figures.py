"""The figures of curvature, and the claims of the edge: true, false and undecided."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from making import Made, load, make_run
from rest_slow import slow

from stabilitylab.decisive import BOUND, CONVERGED, FOUND
from stabilitylab.reports import FIGURES, MissingRuns
from stabilitylab.reports.claims import CLAIMS, judge
from stabilitylab.schema import Row

MODEL = [Row("model")]
SEEDS = (3, 4, 5, 6)
LR = 1e-3


def once(
    folder: Path, arch: str, layers: int, seed: int, rate: float, state: float = FOUND, residual: float = 0.01
) -> None:
    """What is known of a run's first update; a bound, and an eigenvalue that has not converged, are far off."""
    critical = rate if state == FOUND else 1e6
    value = (2 / rate, 1.0) if residual <= CONVERGED else (1e-9, 1e-9)
    tables = {
        "critical_sharpness": Made(
            MODEL, ("headroom", "critical_rate", "state"), lambda *_: [critical / LR, critical, state]
        ),
        "preconditioned_sharpness": Made(
            MODEL, ("value", "to_edge", "residual"), lambda *_: [38 / LR, value[1], residual]
        ),
        "sharpness": Made(MODEL, ("value", "residual"), lambda *_: [value[0], residual]),
    }
    settings = {"model": {"arch": arch}, "train": {"lr": LR}}
    make_run(
        folder, f"{arch}-{layers}-{seed}", arch=arch, seed=seed, layers=layers, settings=settings, tables=tables,
        kind="onestep",
    )  # fmt: skip


def test_critical_rate_against_depth(tmp_path: Path) -> None:
    for seed in SEEDS:
        for layers in (3, 6, 12):
            once(tmp_path, "postln", layers, seed, 0.01 / layers**1.5)
            lost = (BOUND, 0.5) if seed == 3 else (FOUND, 0.01)
            once(tmp_path, "preln", layers, seed, 0.02, *lost)
    picture = FIGURES["curvature:depth"]().picture(load(tmp_path))
    assert [panel.title for panel in picture.panels] == [
        "Critical rate of Adam's first update", "Adam's edge at the run's full rate",
        "The Hessian's own largest eigenvalue",
    ]  # fmt: skip
    lines = {line.arch: line for line in picture.panels[0].series}
    assert lines["postln"].x == [3, 6, 12]
    assert lines["postln"].y == pytest.approx([0.01 / n**1.5 for n in (3, 6, 12)])
    assert lines["preln"].y == pytest.approx([0.02] * 3)
    assert "of Post-LN already the first update raises the loss" in picture.finding
    assert picture.finding.replace("N^-0.00", "N^0.00").endswith(
        "(4 seeds): what a warm-up is for shows here. The critical rate goes as N^-1.50 (Post-LN) to N^0.00 (Pre-LN). "
        "The largest eigenvalue goes as N^0.00 (Pre-LN) to N^1.50 (Post-LN)."
    )
    assert [note for note in picture.notes if "left out" in note] == [
        f"{panel.title}: 3 of 24 runs are left out, whose number was not found." for panel in picture.panels
    ]
    for panel in picture.panels:
        assert min(value for line in panel.series for value in line.y) > 1e-4


@pytest.mark.parametrize("name", ["curvature:depth", "curvature:edge"])
def test_without_runs_they_name_the_command(name: str, tmp_path: Path) -> None:
    with pytest.raises(MissingRuns) as raised:
        FIGURES[name]().picture(load(tmp_path))
    assert f"sweep {name}" in raised.value.command


def trained(
    folder: Path,
    seed: int,
    *,
    edge: float = 1.0,
    grows: float = 3.0,
    told: float = 0.9,
    rate: float = LR,
    lost: tuple[int, ...] = (),
    width: int = 64,
    **facts: Any,
) -> None:
    """A run with momentum and one without: settles at ``edge``, sharpens ``grows``-fold, and of rising and of other
    updates the share ``told`` is told. At the steps ``lost`` the Hessian's eigenvalue has not converged."""
    settings: dict[str, Any] = {
        "model": {"arch": "preln", "d_model": width},
        "train": {"lr": rate, "beta1": 0.9, "steps": 100, "warmup": 40},
        "probes": {"curvature_batch": "training"},
    }
    steps = tuple(range(0, 100, 10))
    factor = 1 + 0.01 * seed
    tables = {
        "preconditioned_sharpness": Made(
            MODEL, ("to_edge", "residual", "along_gradient"),
            lambda step, _: [edge * factor if step >= 50 else 9.0, 0.3 if step == 90 else 0.01, 1.0], steps,
        ),
        "sharpness": Made(
            MODEL, ("value", "residual"),
            lambda step, _: [99.0, 0.2] if step in lost else [1 + (grows - 1) * factor * min(step, 40) / 40, 0.01],
            steps,
        ),
    }  # fmt: skip
    losses = [2 - 0.001 * t for t in range(100)]
    warming = [rate * min(1, (t + 1) / 40) for t in range(100)]
    metrics = {"loss": losses, "lr": warming}
    name = f"adam-{rate:g}-{seed}-{width}"
    make_run(folder, name, arch="preln", seed=seed, settings=settings, tables=tables, metrics=metrics, **facts)
    if rate != LR:
        return
    settings = {**settings, "train": {**settings["train"], "beta1": 0.0}}
    zigzag = [2 + 0.1 * (t % 4 in (1, 2)) for t in range(100)]  # rises after 0 and 4 and 8, falls after 2 and 6
    rising = [t % 4 == 0 for t in range(100)]
    wrong = round((1 - told) * 50)

    def along(step: int, _: Row) -> list[float]:
        right = step // 2 % 50 >= wrong
        return [1.0, 0.01, 2 / rate * (1.5 if rising[step] is right else 0.5)]

    own = {
        "preconditioned_sharpness": Made(
            MODEL, ("to_edge", "residual", "along_gradient"), along, tuple(range(0, 99, 2))
        )
    }
    metrics = {"loss": zigzag, "lr": [rate] * 100}
    name = f"alone-{seed}-{width}"
    make_run(folder, name, arch="preln", seed=seed, settings=settings, tables=own, metrics=metrics, **facts)


@pytest.mark.parametrize(
    ("id", "options", "verdict"),
    [
        slow("C56", {"edge": 1.0}, "reproduced"),
        ("C56", {"edge": 0.2}, "contradicted"),
        slow("C56", {"edge": 0.65}, "not reproduced"),
        ("C57", {"told": 1.0}, "reproduced"),
        slow("C57", {"told": 0.5}, "contradicted"),
        ("C58", {"grows": 3.0}, "reproduced"),
        slow("C58", {"grows": 0.5}, "contradicted"),
    ],
)
def test_claims_of_the_edge(id: str, options: dict[str, float], verdict: str, tmp_path: Path) -> None:
    for seed in SEEDS:
        trained(tmp_path, seed, **options)
    found = judge(CLAIMS[id], load(tmp_path))
    assert found.verdict == verdict, found.effects
    assert judge(CLAIMS[id], load(tmp_path).where(lambda run: run.seed == 3)).verdict == "inconclusive"


@pytest.mark.parametrize("lost", [(40,), slow((0,))])
def test_a_run_whose_ends_of_warm_up_have_not_converged_has_no_growth(lost: tuple[int, ...], tmp_path: Path) -> None:
    for seed in SEEDS:
        trained(tmp_path, seed, lost=lost if seed == 3 else (10, 90))
    (effect,) = judge(CLAIMS["C58"], load(tmp_path)).effects
    assert {int(seed): value for seed, value in effect["values"].items()} == pytest.approx(
        {seed: 1 + 2 * (1 + 0.01 * seed) for seed in SEEDS[1:]}
    )
    (panel,) = [
        panel for panel in FIGURES["curvature:edge"]().picture(load(tmp_path)).panels if "itself" in panel.title
    ]
    assert all(max(line.y) < 10 for line in panel.series)


def test_the_edge_is_drawn(tmp_path: Path) -> None:
    for seed in SEEDS:
        trained(tmp_path, seed)
    trained(tmp_path, 3, rate=3e-4)
    picture = FIGURES["curvature:edge"]().picture(load(tmp_path))
    assert [panel.title for panel in picture.panels] == [
        "Full-batch Adam, lr 0.001", "Full-batch Adam, lr 0.0003", "Without momentum", "Sharpness itself, lr 0.001",
    ]  # fmt: skip
    faint = [[line.faint for line in panel.series] for panel in picture.panels]
    assert faint == [[True] * n + [False] for n in (4, 1, 4, 4)]
    own, mean = picture.panels[0].series[:4], picture.panels[0].series[4]
    late = mean.x.index(50)
    assert mean.y[late] == pytest.approx(math.exp(sum(math.log(line.y[late]) for line in own) / 4))
    assert "lies at 1.04 of its edge" in picture.finding
    names = [effect["effect"] for effect in judge(CLAIMS["C56"], load(tmp_path)).effects]
    assert names == ["sharpness over its edge, lr 0.001", "sharpness over its edge, lr 0.0003"]


def test_runs_of_other_settings_and_of_several_batches_are_no_evidence(tmp_path: Path) -> None:
    for seed in SEEDS:
        trained(tmp_path, seed, data={"batches_per_epoch": 1})
        trained(tmp_path, seed, width=96, edge=0.2, data={"batches_per_epoch": 9})
    for seed in SEEDS[:2]:
        trained(tmp_path, seed, width=80, edge=0.3, data={"batches_per_epoch": 1})
    first, *_ = judge(CLAIMS["C56"], load(tmp_path)).effects
    assert first["values"] == pytest.approx({str(seed): 1 + 0.01 * seed for seed in SEEDS})
    picture = FIGURES["curvature:edge"]().picture(load(tmp_path))
    assert "64 wide" in picture.provenance
    assert all(len(panel.series) == len(SEEDS) + 1 for panel in picture.panels)


def test_the_edge_without_momentum_is_that_of_each_rows_rate(tmp_path: Path) -> None:
    rates = [LR * min(1, (t + 1) / 40) for t in range(100)]
    settings = {"train": {"lr": LR, "beta1": 0.0, "steps": 100}, "probes": {"curvature_batch": "training"}}
    at_edge = Made(MODEL, ("to_edge", "along_gradient"), lambda step, _: [1.0, 2 / rates[step]], range(0, 100, 10))
    metrics = {"lr": rates, "loss": [1.0] * 100}
    make_run(tmp_path, "a", settings=settings, tables={"preconditioned_sharpness": at_edge}, metrics=metrics)
    (panel,) = FIGURES["curvature:edge"]().picture(load(tmp_path)).panels
    assert panel.series[-1].y == pytest.approx([1.0] * 10)


def test_sharpness_over_that_of_step_0_needs_step_0(tmp_path: Path) -> None:
    for seed in SEEDS:
        trained(tmp_path, seed, lost=(0,) if seed == 3 else ())
    *_, panel = FIGURES["curvature:edge"]().picture(load(tmp_path)).panels
    assert (panel.y, len(panel.series)) == ("sharpness / that of step 0", len(SEEDS))  # three seeds and their mean
