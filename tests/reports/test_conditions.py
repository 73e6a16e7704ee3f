"""What a number was measured under: of every effect of every claim, on the made-up runs of the claims' own tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import test_admin_3
import test_admin_3_claims
import test_admin_4
import test_admin_5
import test_admin_grid
import test_branchnorm_1
import test_branchnorm_3
import test_branchnorm_5_depth_claims
import test_branchnorm_6
import test_branchnorm_7
import test_branchnorm_8
import test_branchnorm_9
import test_branchnorm_t
import test_curvature_figures
import test_deepnet_3
import test_deepnet_4
import test_deepnet_5
import test_deepnet_6
import test_deepnet_7
import test_deepnet_8
import test_table_claims
from branching import run as branching
from in_memory import remembered
from judged import SPREAD, by_depth, flat, models
from making import Made, load, make_run
from rest_slow import rest_slow

from stabilitylab.reports import figures
from stabilitylab.reports.base import MissingRuns
from stabilitylab.reports.claims import CLAIMS, judge
from stabilitylab.reports.collection import Record, Runs
from stabilitylab.reports.conditions import by_protocol, conditions, last_fall, limits
from stabilitylab.reports.measures.comparison import comparable, with_the_protocols_ramp
from stabilitylab.schema import Row

assert figures
SEEDS = (3, 4, 5)


def _initial(folder: Path) -> None:
    for seed in SEEDS:
        for layers in (6, 12, 18):
            test_admin_3.start(folder, "postln", 0.1, seed=seed, layers=layers)
        for layers in (18, 50):
            test_admin_3.start(folder, "deepnorm", 1.0, seed=seed, layers=layers)
    test_admin_3.mixed(folder / "mixed", 0.9, failed=6, trained=0, pure=3)


def _grown(folder: Path) -> None:
    for arch in ("postln", "preln", "admin"):
        test_admin_4.grow(folder, arch, lambda n, seed: n)


def _branches(folder: Path) -> None:
    for seed, arch in itertools.product(SEEDS, ("postln", "preln", "admin")):
        branching(folder, arch, lambda step, i: 0.5 / i, layers=18, seed=seed)
        branching(folder, arch, lambda step, i: 0.5 / i, layers=18, seed=seed, kind="train")


def _bottom_heavy(folder: Path) -> None:
    test_admin_3.test_preln_is_bottom_heavy(folder, 2.8, test_admin_3.EVEN, "reproduced")


def _alphas(folder: Path) -> None:
    names = ("branchnorm alpha=0", "branchnorm", "branchnorm T=1")
    test_branchnorm_3.make_one_step(folder, lambda name, seed: 1.2, names)


def _balance(folder: Path) -> None:
    for seed in SEEDS:
        test_admin_3_claims.deep(folder, seed, 0.5)


def _narrow(folder: Path) -> None:
    for seed in SEEDS:
        test_admin_5.balanced(folder, seed, 3, 0.1)


def _who_fails(folder: Path) -> None:
    for arch, layers in (("postln", 50), ("deepnorm", 50), ("branchnorm", 50), ("admin", 18), ("admin", 50)):
        test_table_claims.long_runs(folder, arch, layers, 3, 3)


def _ramps() -> Iterable[Record]:
    return test_branchnorm_t.ramps({2: flat, 40: flat, 400: flat, 2000: flat})


FOLDERS: list[tuple[str, Callable[[Path], None]]] = [
    ("C01 C02 C03 C05 C06", _initial),
    ("C04", _bottom_heavy),
    ("C07 C08", _alphas),
    ("C11", lambda folder: test_deepnet_3.make_gradients(folder, lambda seed, step: 2.0)),
    ("C12", lambda folder: test_deepnet_3.make_long(folder, ["stuck"] * 6, ["trained"] * 6)),
    ("C13 C14 C15 C16 C18", lambda folder: test_deepnet_4.make_all(folder, lambda seed: test_deepnet_4.EXPLODES)),
    ("C17 C19 C20 C21 C22 C23 C24 C25 C26", lambda folder: test_deepnet_5.make_steps(folder, depths=(6, 12))),
    ("C27 C28", _grown),
    ("C29", lambda folder: test_admin_4.proportional(folder, lambda name, layers, seed: 1e-4)),
    ("C30 C31 C53", _branches),
    ("C32", _narrow),
    ("C33", _balance),
    ("C34 C35", _who_fails),
    ("C41 C42", lambda folder: test_branchnorm_8.make_pairs(folder, lambda s, step, row: 0.1, beta=lambda s, row: 0.1)),
    (
        "C43 C44",
        lambda folder: test_branchnorm_9.make_shares(folder, lambda a, s, step, row: 0.5 - step / 100 - s / 99),
    ),
    ("C56 C57 C58", lambda folder: [test_curvature_figures.trained(folder, seed) for seed in (3, 4, 5)]),
]
REMEMBERED: list[tuple[str, Callable[[], Iterable[Record]]]] = [
    ("C09 C10", lambda: test_branchnorm_3.early(0.5, 0.6, 0.7)),
    ("C36", lambda: [r for a in ("postln", "deepnorm") for r in test_branchnorm_1.converged(a, flat, depths=(6, 12))]),
    ("C37 C47", lambda: [*models("branchnorm", by_depth(0)), *models("deepnorm", flat),
                         *models("branchnorm", flat, settings={"model": {"T": 1}})]),
    ("C38", _ramps),
    ("C39", lambda: test_branchnorm_7.shapes(flat)),
    ("C40 C48", lambda: test_branchnorm_6.grid(lambda *_: False)),
    ("C45", lambda: test_branchnorm_5_depth_claims.both(lambda share, s: share + SPREAD[s])),
    ("C46", lambda: test_deepnet_8.deepnorm(lambda n, s: 9 - math.log(n))),
    ("C50 C51", lambda: test_deepnet_7.sweep(test_deepnet_7.faster)),
    ("C52", lambda: test_deepnet_6.deepnorm(lambda s: 0.2)),
    ("C54 C55", lambda: test_admin_grid.grid(test_admin_grid.failing(21))),
]  # fmt: skip


def test_no_claim_is_left_out() -> None:
    assert {id for ids, _ in (*FOLDERS, *REMEMBERED) for id in ids.split()} == {*CLAIMS}


def check(ids: str, runs: Runs) -> None:
    for id in ids.split():
        found = judge(CLAIMS[id], runs)
        assert found.effects, f"{id}: {found.why}"
        first, *others = found.effects
        assert first["reproduced"] is not None, f"{id} has a first effect that cannot decide"
        for effect in found.effects:
            assert effect["conditions"], f"{id}, {effect['effect']}: measured on no run"
        for effect in others:
            assert effect["reproduced"] is effect["contradicted"] is None, f"{id}: {effect['effect']} has regions"


@pytest.mark.parametrize(("ids", "make"), rest_slow(FOLDERS, FOLDERS[::2]), ids=[ids for ids, _ in FOLDERS])
def test_every_effect_of_made_runs_has_its_conditions(tmp_path: Path, ids: str, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    check(ids, load(tmp_path))


@pytest.mark.parametrize(("ids", "make"), REMEMBERED, ids=[ids for ids, _ in REMEMBERED])
def test_every_effect_of_remembered_runs_has_its_conditions(ids: str, make: Callable[[], Iterable[Record]]) -> None:
    check(ids, Runs(make()))


def test_conditions_name_what_decides_a_number() -> None:
    slow = {"model": {"T": 40}, "train": {"steps": 1000, "warmup": 40, "lr": 1e-3}, "data": {"fraction": 0.1}}
    fast = {**slow, "train": {**slow["train"], "lr": 2e-3}}
    runs = [remembered("a", layers=18, settings=slow), remembered("b", arch="deepnorm", layers=18, settings=fast)]
    assert conditions(runs) == (
        "18L-18L, 64-128-2, synthetic x 0.1, 1,000 updates, lr 0.001 (BranchNorm), 0.002 (DeepNorm), "
        "warm-up 40 (4 %), T = 40 (4 %)"
    )
    both = [*runs, remembered("c", layers=6, settings=fast)]
    assert conditions(both).startswith("18L-18L / 6L-6L, ")
    assert "lr 0.001 / 0.002 (BranchNorm), 0.002 (DeepNorm)" in conditions(both)
    assert "T = " not in conditions([runs[1]])  # means nothing to DeepNorm
    assert conditions([]) == limits([]) == ""
    many = [remembered(f"{n}", layers=n) for n in (3, 6, 12, 18, 24)]
    assert conditions(many).startswith("3L-3L ... 24L-24L, ")


def test_one_step_runs_have_neither_updates_nor_limits(tmp_path: Path) -> None:
    make_run(tmp_path, "one", arch="postln", layers=2, kind="onestep")
    runs = load(tmp_path)
    assert conditions(runs) == "2L-2L, 64-128-2, synthetic, one step"
    assert limits(runs) == ""


@pytest.mark.parametrize(
    ("falls", "words"),
    [(0.009, "converged, width 64"), (0.4, "at equal updates, not converged (last fifth: -0.4 nats), width 64")],
)
def test_limits_say_whether_the_runs_converged(falls: float, words: str) -> None:
    runs = [remembered("a", falls=falls), remembered("b", falls=0.001)]
    assert limits(runs) == words
    assert last_fall(runs[0]) == pytest.approx(falls)


def test_limits_say_in_how_many_runs_attention_had_nothing_to_choose_between(tmp_path: Path) -> None:
    rows = [Row(f"{stack}.1.attn", stack, 1, "attn") for stack in ("encoder", "decoder")]
    for name, share in (("well", 0.1), ("alike", 1e-9)):
        table = Made(rows, ("value", "qk"), lambda step, row, share=share: (1.0, share), range(0, 6000, 1000))
        make_run(tmp_path, name, layers=1, settings={"train": {"steps": 6000}}, tables={"grad_norm": table})
    assert limits(load(tmp_path)).endswith("width 64, rank collapse in 1 of 2 runs")


def test_limits_say_how_much_of_the_data_was_seen(tmp_path: Path) -> None:
    for steps in (100, 400):
        make_run(tmp_path, f"{steps}", layers=1, settings={"train": {"steps": steps}}, data={"batches_per_epoch": 200})
    assert limits(load(tmp_path)) == "0.5 to 2 epochs, width 64"


@pytest.mark.parametrize(
    ("T", "updates", "fits"),
    [(40, 1000, True), (46, 1000, True), (50, 1000, False), (20, 1000, False), (1000, 1000, True), (4000, 500, True),
     (6, 160, True), (100, 160, False), (600, 1200, False)],
)  # fmt: skip
def test_the_protocols_ramp_is_4_percent_of_the_run(T: int, updates: int, fits: bool) -> None:
    settings = {"model": {"T": T}, "train": {"steps": updates}}
    ramped, plain = remembered("a", settings=settings), remembered("b", arch="deepnorm", settings=settings)
    assert by_protocol(plain)
    assert by_protocol(ramped) == fits
    if fits:
        assert len(with_the_protocols_ramp(Runs([ramped, plain]))) == 2
    else:
        with pytest.raises(MissingRuns, match=f"BranchNorm ramped for {T} of {updates:,} updates"):
            with_the_protocols_ramp(Runs([ramped, plain]))


def test_groups_of_own_learning_rates() -> None:
    """Beside the groups of one rate those in which each architecture has one of its own: that of most seeds."""

    def at(arch: str, lr: float, layers: int = 6, seed: int = 3) -> Record:
        name = f"{arch}-{lr}-{layers}-{seed}"
        return remembered(name, arch=arch, layers=layers, seed=seed, settings={"train": {"lr": lr}})

    own = [at("deepnorm", 1e-3), at("branchnorm", 2e-3)]
    assert comparable(Runs(own))[0].labels == ["deepnorm", "branchnorm"]
    several = [*own, at("deepnorm", 4e-3)]
    assert {len(group.labels) for group in comparable(Runs(several))} == {1}  # which of DeepNorm's rates?
    more = [*several, at("deepnorm", 1e-3, seed=4), at("branchnorm", 2e-3, seed=4)]
    first = comparable(Runs(more))[0]
    assert {(run.label, run.settings["train.lr"]) for run in first} == {("deepnorm", 1e-3), ("branchnorm", 2e-3)}
    assert len(first) == 4  # a rate tried beside it changes nothing
    apart = [at("deepnorm", 1e-3, 6), at("branchnorm", 2e-3, 18)]
    layers = ("model.encoder_layers", "model.decoder_layers")
    assert {len(group.labels) for group in comparable(Runs(apart), *layers)} == {1}  # no depth has both
    deeper = [*own, at("deepnorm", 8e-3, 18), at("branchnorm", 8e-3, 18)]
    assert len(comparable(Runs(deeper), *layers)[0]) == 4
