"""Rank correlations with made-up runs: ties, intervals, other settings, one seed with another."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from made_verdict import made_verdict
from recommend_cases import made

from stabilitylab.config import merge, resolve
from stabilitylab.errors import InputError
from stabilitylab.recommend import Measurement
from stabilitylab.recommend.checking import agreement, alike, check, real_ranks
from stabilitylab.reports.collection import Runs
from stabilitylab.store import RunWriter
from stabilitylab.verdict import STATES

ARCHS = ("preln", "deepnorm", "admin", "subln", "postln", "dlcl")


def config(arch: str, seed: int, *more: Any) -> dict[str, Any]:
    own = {"model": {"arch": arch, "encoder_layers": 6, "decoder_layers": 6}, "data": {"seed": seed}}
    return resolve(merge(own, {"train": {"seed": seed}}, *more)).model_dump(mode="json")


def trained(folder: Path, arch: str, seed: int, state: str, gap: float, *more: Any) -> None:
    facts = {"label": arch, "config": config(arch, seed, *more), "kind": "train"}
    with RunWriter.create(folder / f"{arch}-{seed}-{len(list(folder.glob('*')))}", facts) as run:
        run.open([])
        run.append(0, {"loss": 1.0}, {})
        run.set_status("finished", 1, "made up", verdict=made_verdict(state, gap))


def measured(arch: str, seed: int = 0, **numbers: float) -> Measurement:
    own = config(arch, seed)
    for key in ("probes", "preset"):
        own.pop(key)
    return Measurement(**{**vars(made(arch, seed, **numbers)), "config": own})


def row(**own: float) -> dict[str, float]:
    return {"seeds": 3, "trained": 0, "learning": 0, "stuck": 0, "diverged": 0, "nll_gap": -1.0, **own}


def test_real_ranks_go_by_state_and_then_quality_and_all_that_never_left_the_plateau_are_tied() -> None:
    table = {
        "good": row(trained=3, nll_gap=-1.0),
        "better": row(learning=3, nll_gap=-1.5),
        "one stuck": row(trained=2, stuck=1, nll_gap=-2.0),
        "stuck": row(stuck=3, nll_gap=0.1),
        "stuck too": row(stuck=3, nll_gap=0.4),
        "one blew up": row(trained=2, diverged=1, nll_gap=-3.0),
        "blew up": row(diverged=3, nll_gap=math.nan),
        "blew up too": row(diverged=3, nll_gap=math.nan),
    }
    ranks = [2, 1, 3, 4.5, 4.5, 6, 7.5, 7.5]
    assert real_ranks(table) == dict(zip(table, ranks, strict=True))


def test_rho_and_its_interval_are_the_formulas() -> None:
    one = {name: float(place) for place, name in enumerate("abcdefg", start=1)}
    other = dict(zip("abcdefg", [2.0, 1.0, 4.0, 3.0, 5.0, 7.0, 6.0], strict=True))
    rho = 1 - 6 * 6 / (7 * 48)  # 1 - 6 sum d^2 / (n (n^2 - 1)), six of the seven d being 1
    found = agreement("x", one, other)
    assert found.rho == pytest.approx(rho)
    half = 1.959964 * math.sqrt((1 + rho**2 / 2) / 4)
    ends = [math.tanh(math.atanh(rho) + sign * half) for sign in (-1, 1)]
    assert [found.low, found.high] == pytest.approx(ends, rel=1e-6)
    tied = agreement("x", dict.fromkeys("abc", 1.0), dict.fromkeys("abc", 2.0))
    assert math.isnan(tied.rho)
    assert agreement("x", one, one).rho == agreement("x", one, one).low == pytest.approx(1)


def test_a_column_that_knows_and_one_that_is_wrong(tmp_path: Path) -> None:
    for seed in (3, 4):
        for place, arch in enumerate(ARCHS):
            failing = place > 3
            trained(tmp_path, arch, seed, "stuck" if failing else "trained", 0.1 * seed if failing else place - 5)
    own = [
        measured(arch, gradient=float(min(place, 4)), headroom=10.0 + place, parameters=5.0)
        for place, arch in enumerate(ARCHS)
    ]
    found = check(own, Runs.load(tmp_path))
    assert found.real == {**{arch: place + 1.0 for place, arch in enumerate(ARCHS[:4])}, "postln": 5.5, "dlcl": 5.5}
    by_name = {one.name: one.rho for one in found.agreements}
    assert by_name["gradient decades"] == pytest.approx(1)
    assert by_name["headroom / lr"] == pytest.approx(-33 / math.sqrt(35 * 33 - 33 / 2), abs=0.02)
    assert math.isnan(by_name["sensitivity"])
    assert found.reliability == pytest.approx(1)
    assert (found.seeds, found.states) == (2, {**dict.fromkeys(STATES, 0), "trained": 8, "stuck": 4})


def test_only_runs_with_the_settings_of_the_measurements_count(tmp_path: Path) -> None:
    trained(tmp_path, "preln", 3, "trained", -1.0)
    trained(tmp_path, "preln", 4, "trained", -1.0, {"train": {"device": "cpu"}})
    trained(tmp_path, "preln", 5, "trained", -1.0, {"train": {"lr": 1e-3}})
    trained(tmp_path, "preln", 6, "trained", -1.0, {"model": {"encoder_layers": 18}})
    trained(tmp_path, "admin", 7, "trained", -1.0)
    assert {record.seed for record in alike([measured("preln")], Runs.load(tmp_path))} == {3, 4}


def test_too_few_runs_are_refused_with_what_to_do(tmp_path: Path) -> None:
    for arch in ARCHS[:4]:
        trained(tmp_path, arch, 3, "trained", -1.0)
    with pytest.raises(InputError, match=r"those of 4 architectures .* and 5 are needed: train them, or ask for what"):
        check([measured(arch) for arch in ARCHS], Runs.load(tmp_path))
