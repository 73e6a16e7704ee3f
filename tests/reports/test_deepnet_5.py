"""DeepNet, Figure 5, and its claims C17 and C19 to C26, on made-up power laws of depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import Made, load, make_run, sublayer_rows
from rest_slow import rest_slow, slow

from stabilitylab.reports.base import MissingRuns
from stabilitylab.reports.claims import CLAIMS, Finding, judge
from stabilitylab.reports.figures.deepnet.figure_5 import UpdateAgainstDepth
from stabilitylab.reports.measures.one_step import exponents
from stabilitylab.schema import Row

DEPTHS, SEEDS = (6, 12, 25, 50), (3, 4, 5)
Law = Callable[[int, int], float]  # of depth and seed
GROUPS = ("all", "vo_ffn", "qk", "bias", "ln", "embedding", "encoder", "decoder", "cross_attn")
SITES = [Row(f"{optimizer}.{group}") for optimizer in ("sgd", "adam") for group in GROUPS]


def power(factor: float, exponent: float, noise: float = 0.01) -> Law:
    """``factor`` N^``exponent``, whose exponent differs a little from seed to seed."""
    return lambda depth, seed: factor * depth ** (exponent + noise * (seed - 4))


def torn(factor: float, low: float, high: float) -> Law:
    """Seeds that disagree about the exponent."""
    return lambda depth, seed: factor * depth ** (low if seed == 3 else high)


# what the paper says, for every claim on rates
RIGHT: dict[str, Law] = {
    **{f"deepnorm {row.site}": power(2.0, 0.0) for row in SITES},
    **{f"postln {row.site}": power(20.0, 0.9) for row in SITES},
    **{f"deepnorm {optimizer}.qk": power(0.02, 0.0) for optimizer in ("sgd", "adam")},
}


def make_steps(
    folder: Path,
    laws: Mapping[str, Law] | None = None,
    *,
    archs: Sequence[str] = ("postln", "deepnorm"),
    depths: Sequence[int] = DEPTHS,
    seeds: Sequence[int] = SEEDS,
    bound: Law = lambda depth, seed: 0.9,
    magnitude: Law = lambda depth, seed: 0.6 + 0.01 * seed,
    largest: Law = lambda depth, seed: 0.95,
    jacobian: float = -1.0,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """One-step runs with these rates; the measured update is ``bound`` of the theorem's bound, and 20 times that of the
    estimate."""
    known = RIGHT | dict(laws or {})
    for arch in archs:
        for depth in depths:
            for seed in seeds:

                def rate(step: int, row: Row, arch: str = arch, n: int = depth, seed: int = seed) -> float:
                    return known[f"{arch} {row.site}"](n, seed)

                def theorem(step: int, row: Row, n: int = depth, seed: int = seed) -> Sequence[float]:
                    size = 7.0 + 0.1 * seed
                    return bound(n, seed) * size, size / 20, size

                def lemma(step: int, row: Row, n: int = depth, seed: int = seed) -> Sequence[float]:
                    count = int(row.site.removeprefix("n="))
                    return (magnitude(n, seed) if count == 64 else 0.01), largest(n, seed) * (1 if count == 4 else 0.5)

                def norms(step: int, row: Row, seed: int = seed) -> Sequence[float]:
                    centred = 8.0 + row.layer
                    noise = 1e-3 * seed * row.layer
                    return 3.0 * math.exp(noise) * centred**jacobian, centred

                make_run(
                    folder,
                    f"{arch}-{depth}-s{seed}",
                    arch=arch,
                    seed=seed,
                    layers=depth,
                    kind="onestep",
                    settings=settings,
                    tables={
                        "update_rate": Made(SITES, ("value",), rate, total="mean"),
                        "theorem43": Made(
                            [Row("sgd.vo_ffn"), Row("adam.vo_ffn")],
                            ("measured", "estimate", "spectral"),
                            theorem,
                            total="mean",
                        ),
                        "lemma41": Made(
                            [Row(f"n={n}") for n in (4, 16, 64, 256)], ("ratio", "bound"), lemma, total="mean"
                        ),
                        "ln_jacobian": Made(sublayer_rows(3), ("frobenius", "centred"), norms, total="mean"),
                    },
                    metrics={"alpha": [1 / 4000 if arch == "branchnorm" else 1.0]},
                )


def one(folder: Path, id: str) -> Finding:
    return judge(CLAIMS[id], load(folder))


def verdict(folder: Path, id: str) -> str:
    return one(folder, id).verdict


def test_the_picture_is_the_rates(tmp_path: Path) -> None:
    make_steps(tmp_path, {"deepnorm sgd.ln": power(1.0, 1.0, 0), "deepnorm adam.all": power(2.0, 0.5, 0)})
    picture = UpdateAgainstDepth().picture(load(tmp_path))
    left, adam, sgd = picture.panels
    assert left.log_x
    assert left.log_y
    postln, slope, deepnorm, _ = left.series
    assert (postln.label, postln.x) == ("Post-LN: N^0.90", [*DEPTHS])
    assert (slope.faint, slope.y) == (True, pytest.approx(postln.y[:-1]))  # the power law, to 25 layers
    assert left.direct
    assert postln.y == pytest.approx([20.0 * n**0.9 for n in DEPTHS])  # the geometric mean over seeds
    assert postln.low == pytest.approx([20.0 * n**0.89 for n in DEPTHS])
    assert deepnorm.y == pytest.approx([2.0 * n**0.5 for n in DEPTHS])
    assert [adam.title, sgd.title] == ["DeepNorm by group, Adam", "DeepNorm by group, SGD"]
    lines = {line.label: line for line in sgd.series}
    assert len(lines) == len(adam.series) == 6
    assert lines["LayerNorm: N^1.00"].y == pytest.approx([*DEPTHS])
    assert lines["v, out, FFN: N^0.00"].y == pytest.approx([2.0] * 4)
    assert "Post-LN's as N^0.90, DeepNorm's as N^0.50; in the theorem's scope" in picture.finding
    assert "(N from 6 to 50, of Post-LN to 25; 3 seeds)" in picture.finding
    assert any("under SGD, 6 to 50 layers a side: all parameters 0.00, v, out, FFN 0.00, LayerNorm 1.00" in note
               for note in picture.notes)  # fmt: skip


@pytest.mark.slow
def test_exponents_are_fitted_where_the_claims_fit_them(tmp_path: Path) -> None:
    """Beyond the depths of the claims the update falls to nothing, which moves no exponent and no line of it."""

    def until(last: int, n: int) -> float:
        return n**0.5 if n <= last else 1e-9

    laws = {
        "deepnorm adam.all": lambda n, seed: until(50, n),
        "postln adam.all": lambda n, seed: until(25, n),
        "deepnorm sgd.ln": lambda n, seed: until(50, n),
    }
    make_steps(tmp_path, laws, depths=(3, 6, 12, 25, 50, 100))
    whole, _, sgd = UpdateAgainstDepth().picture(load(tmp_path)).panels
    laws_drawn = {line.label: line.x for line in whole.series if line.faint}
    assert laws_drawn == {"Post-LN: N^0.50": [6, 12, 25], "DeepNorm: N^0.50": [6, 12, 25, 50]}
    assert "LayerNorm: N^0.50" in {line.label for line in sgd.series}
    assert one(tmp_path, "C20").effects[0]["mean"] == pytest.approx(0.5)


def test_alpha_is_stated(tmp_path: Path) -> None:
    laws = {f"branchnorm {row.site}": power(1.0, 1.0) for row in SITES}
    make_steps(tmp_path, laws, archs=("postln", "branchnorm"), depths=(6, 12), seeds=(3,))
    picture = UpdateAgainstDepth().picture(load(tmp_path))
    assert "alpha of these runs: BranchNorm 0.00025; of all others 1." in picture.notes
    assert "one seed" in picture.finding


def test_one_run_is_drawn_without_an_exponent(tmp_path: Path) -> None:
    make_steps(tmp_path, archs=("deepnorm",), depths=(6,), seeds=(4,))
    picture = UpdateAgainstDepth().picture(load(tmp_path))
    assert picture.panels[0].series[0].y == pytest.approx([2.0])
    assert "at 1 depth, no exponent" in picture.finding


def test_training_runs_of_several_depths_are_drawn_under_saturation(tmp_path: Path) -> None:
    make_steps(tmp_path, archs=("deepnorm",), depths=(6, 12), seeds=(3,))
    outputs = [Row(stack, stack, 0, "output") for stack in ("encoder", "decoder")]
    for depth, steps in ((6, (0, 10, 20)), (12, (0, 10)), (25, (0, 8))):

        def updates(step: int, row: Row, depth: int = depth) -> Sequence[float]:
            return (depth * step / 10, 0.0) if row.stack == "decoder" else (77.0, 77.0)

        made = Made(outputs, ("cumulative", "one_update"), updates, steps, "mean")
        make_run(tmp_path, f"train-{depth}", arch="deepnorm", layers=depth, tables={"model_update": made})
    early = UpdateAgainstDepth().picture(load(tmp_path)).panels[3]
    assert [line.x for line in early.series] == [[6, 12]]  # 25L was not probed at update 10
    assert early.series[0].y == pytest.approx([6, 12])
    assert [line.value for line in early.references] == pytest.approx([math.sqrt(128)])


def test_training_runs_alone_are_a_figure_too_after_10_and_100_updates(tmp_path: Path) -> None:
    outputs = [Row(stack, stack, 0, "output") for stack in ("encoder", "decoder")]
    for arch, power in (("postln", 2), ("deepnorm", 0)):
        for depth in (6, 12, 100):
            for seed in (3, 4):

                def updates(step: int, row: Row, n: int = depth, k: int = power, s: int = seed) -> Sequence[float]:
                    return (step * n**k * (4 if s == 3 else 9) / 100, 0.0)  # whose geometric mean is 6

                made = Made(outputs, ("cumulative", "one_update"), updates, (0, 10, 100), "mean")
                name = f"{arch}-{depth}-s{seed}"
                make_run(tmp_path, name, arch=arch, layers=depth, seed=seed, tables={"model_update": made})
    picture = UpdateAgainstDepth().picture(load(tmp_path))
    assert [panel.title for panel in picture.panels] == [f"After {n} updates of training" for n in (10, 100)]
    for panel, updates_made in zip(picture.panels, (10, 100), strict=True):
        for line, power in zip(panel.series, (2, 0), strict=True):
            assert line.x == [6, 12, 100]
            assert line.y == pytest.approx([updates_made * n**power * 6 / 100 for n in (6, 12, 100)])
    assert picture.finding == (
        "After 10 updates of training, ‖ΔF‖ goes: Post-LN from 22 at 6 to 6e+03 at 100 layers a side; "
        "DeepNorm from 0.6 at 6 to 0.6 at 100 layers a side."
    )


def test_training_runs_of_one_depth_each_are_no_panel_against_depth(tmp_path: Path) -> None:
    outputs = [Row(stack, stack, 0, "output") for stack in ("encoder", "decoder")]
    for arch, depth in (("postln", 6), ("deepnorm", 12)):
        made = Made(outputs, ("cumulative", "one_update"), lambda step, row: (step + 1.0, 0.0), (0, 10, 100), "mean")
        make_run(tmp_path, arch, arch=arch, layers=depth, tables={"model_update": made})
    with pytest.raises(MissingRuns):
        UpdateAgainstDepth().picture(load(tmp_path))


def test_without_runs_it_names_the_command(tmp_path: Path) -> None:
    make_run(tmp_path, "bare", layers=2)
    with pytest.raises(MissingRuns) as missing:
        UpdateAgainstDepth().picture(load(tmp_path))
    assert "stabilitylab sweep deepnet:5" in missing.value.command


@pytest.mark.slow
def test_exponents_are_those_of_the_law(tmp_path: Path) -> None:
    make_steps(tmp_path, {"postln adam.all": power(3.0, 0.7, 0.1)})
    own = load(tmp_path).where(label="postln")
    assert exponents(own, "adam", "all", DEPTHS) == pytest.approx({3: 0.6, 4: 0.7, 5: 0.8})
    assert exponents(own, "adam", "all", [6]) == {}


def test_claims_hold_where_the_paper_is_right(tmp_path: Path) -> None:
    make_steps(tmp_path)
    found = {id: verdict(tmp_path, id) for id in ("C17", *(f"C{n}" for n in range(19, 27)))}
    assert found == dict.fromkeys(found, "reproduced")


RATES: list[tuple[str, dict[str, Law], str]] = [
    ("C19", {"postln adam.all": power(20.0, 0.05)}, "contradicted"),
    ("C19", {"postln adam.all": torn(20.0, 0.1, 0.9)}, "inconclusive"),
    ("C19", {"postln adam.all": lambda n, seed: 20.0 * min(n, 25) ** (0.9 + 0.01 * seed)}, "reproduced"),
    ("C20", {"deepnorm adam.all": power(2.0, 0.56)}, "contradicted"),
    ("C20", {"deepnorm adam.all": torn(2.0, 0.0, 0.5)}, "inconclusive"),
    ("C20", {"deepnorm adam.all": power(2.0, -0.3)}, "not reproduced"),
    ("C21", {"deepnorm sgd.vo_ffn": power(2.0, 0.5)}, "contradicted"),
    ("C21", {"deepnorm sgd.vo_ffn": torn(2.0, 0.0, 0.5)}, "inconclusive"),
    ("C21", {"deepnorm adam.vo_ffn": power(2.0, 0.5)}, "reproduced"),
    ("C22", {"postln adam.all": power(1.0, 0.0)}, "contradicted"),
    ("C22", {"postln adam.all": power(4.0, 0.0)}, "not reproduced"),
    ("C22", {"postln adam.all": lambda n, seed: (1.0 if n == 6 else 90.0) + seed / 10}, "reproduced"),  # on the mean
    ("C24", {"postln adam.encoder": power(2.0, 0.1)}, "contradicted"),
    ("C24", {"deepnorm adam.encoder": power(2.0, 0.9)}, "reproduced"),  # DeepNorm's stands beside it
    ("C24", {"postln adam.encoder": torn(2.0, 0.1, 0.9)}, "inconclusive"),
    ("C26", {"deepnorm adam.qk": power(1.0, 0.0)}, "contradicted"),
    ("C26", {"deepnorm sgd.qk": lambda n, seed: 1.0 if seed == 3 else 0.02}, "inconclusive"),
]


@pytest.mark.parametrize(
    ("id", "laws", "expected"), rest_slow(RATES, [one for one in RATES if one[2] == "contradicted"])
)
def test_claims_on_rates(tmp_path: Path, id: str, laws: dict[str, Law], expected: str) -> None:
    make_steps(tmp_path, laws, depths=(6, 25, 50))
    assert verdict(tmp_path, id) == expected


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        slow(lambda n, seed: 2.0 + 0.01 * seed, "contradicted"),
        (lambda n, seed: 2.0 + 0.01 * seed if n == 12 else 0.5, "contradicted"),  # at one depth is enough
        slow(lambda n, seed: 0.5 if seed == 3 else 1.3, "inconclusive"),
        (lambda n, seed: 0.1 + 0.01 * seed, "reproduced"),  # though twice the estimate
    ],
)
def test_the_theorem_is_a_bound(tmp_path: Path, bound: Law, expected: str) -> None:
    make_steps(tmp_path, bound=bound, depths=(6, 12))
    found = one(tmp_path, "C23")
    assert found.verdict == expected
    largest = np.exp(np.mean([np.log(max(bound(n, seed) for n in (6, 12))) for seed in SEEDS]))
    assert found.effects[0]["mean"] == pytest.approx(largest)
    assert [(e["effect"], e["mean"]) for e in found.effects[-4:]] == [
        (f"over the estimate, {name}", pytest.approx(20 * largest))
        for name in ("DeepNorm, SGD", "DeepNorm, Adam", "Post-LN, SGD", "Post-LN, Adam")
    ]


@pytest.mark.slow
def test_deepnets_own_postln_decides(tmp_path: Path) -> None:
    make_steps(tmp_path / "fairseq", {"postln adam.all": power(1.0, 0.05), "postln adam.encoder": power(1.0, 0.0)})
    make_steps(tmp_path / "own", archs=("postln",), settings={"model": {"init": "xavier-1"}})
    for id in ("C19", "C22", "C24"):
        found = one(tmp_path, id)
        assert found.verdict == "reproduced"
        assert found.effects[0]["effect"].endswith(", gain 1")
        assert any(effect["effect"].endswith("fairseq's gain") for effect in found.effects[1:])
    assert "Post-LN gain=1, Adam" in [e["effect"].partition("bound, ")[2] for e in one(tmp_path, "C23").effects]
    picture = UpdateAgainstDepth().picture(load(tmp_path))
    shown, aside = (
        {line.arch: line.dash for line in panel.series if not line.faint}
        for panel in (picture.panels[0], picture.controls[0])
    )
    assert shown == {"postln gain=1": "solid", "deepnorm": ""}
    assert aside == {"postln": "dashed", **shown}
    assert "Post-LN gain=1's as N^0.90" in picture.finding


@pytest.mark.parametrize(
    ("magnitude", "largest", "expected"),
    [
        (lambda n, seed: 0.14 + 0.01 * seed, lambda n, seed: 0.95, "contradicted"),
        (lambda n, seed: 0.2 if seed == 3 else 0.8, lambda n, seed: 0.95, "inconclusive"),
        (
            lambda n, seed: 0.6 + 0.01 * seed,
            lambda n, seed: 1.2 + 0.01 * seed,
            "reproduced",
        ),  # the proved half is printed
        (lambda n, seed: 0.6 + 0.01 * seed, lambda n, seed: 1.0, "reproduced"),
    ],
)
def test_the_lemma(tmp_path: Path, magnitude: Law, largest: Law, expected: str) -> None:
    make_steps(tmp_path, magnitude=magnitude, largest=largest, depths=(6, 12), archs=("deepnorm",))
    assert verdict(tmp_path, "C25") == expected


def test_the_jacobian(tmp_path: Path) -> None:
    make_steps(tmp_path / "true", jacobian=-1.0, depths=(6,))
    make_steps(tmp_path / "false", jacobian=0.0, depths=(6,))
    make_steps(tmp_path / "between", jacobian=-0.7, depths=(6,))
    found = {name: one(tmp_path / name, "C17") for name in ("true", "false", "between")}
    assert [finding.verdict for finding in found.values()] == ["reproduced", "contradicted", "not reproduced"]
    layers = np.repeat(np.arange(1, 4), 5)
    fitted = np.polyfit(np.log(8.0 + layers), -np.log(8.0 + layers) + 1e-3 * 4 * layers, 1)[0]
    assert found["true"].effects[0]["mean"] == pytest.approx(fitted)


@pytest.mark.parametrize("id", ["C17", *(f"C{n}" for n in range(19, 27))])
def test_claims_without_their_runs(tmp_path: Path, id: str) -> None:
    make_run(tmp_path, "bare", layers=2)
    found = one(tmp_path, id)
    assert found.verdict == "not testable"
    assert found.command.startswith(("stabilitylab sweep ", "stabilitylab claims --fast"))


@pytest.mark.parametrize("id", ["C19", "C20", "C21", "C22", "C24"])
def test_one_depth_is_no_growth(tmp_path: Path, id: str) -> None:
    make_steps(tmp_path, depths=(6,))
    assert verdict(tmp_path, id) == "not testable"


@pytest.mark.parametrize("id", ["C22", "C23", "C24"])
def test_claims_on_two_architectures_need_both(tmp_path: Path, id: str) -> None:
    make_steps(tmp_path, archs=("deepnorm",), depths=(6, 12), seeds=(3,))
    assert verdict(tmp_path, id) == "not testable"


def test_pilots_are_no_evidence(tmp_path: Path) -> None:
    make_steps(tmp_path, seeds=(0, 1, 2), depths=(6, 12))
    assert verdict(tmp_path, "C20") == "not testable"


@pytest.mark.parametrize(("id", "depth"), [("C26", 6), ("C26", 12), ("C23", 6), ("C23", 12)])
def test_a_number_that_is_not_known_leaves_its_seed_undecided(id: str, depth: int, tmp_path: Path) -> None:
    def lost(law: Law) -> Law:
        return lambda n, seed: math.nan if (n, seed) == (depth, 4) else law(n, seed)

    laws = {"deepnorm adam.qk": lost(RIGHT["deepnorm adam.qk"])}
    make_steps(tmp_path, laws, depths=(6, 12), bound=lost(lambda n, seed: 0.9))
    found = one(tmp_path, id)
    assert found.verdict == "inconclusive"
    assert [seed for seed, value in found.effects[0]["values"].items() if math.isnan(value)] == ["4"]


def test_stacks_of_two_depths_are_no_point_of_the_depth_of_the_deeper_one(tmp_path: Path) -> None:
    make_steps(tmp_path, depths=(6, 12))
    laws = {f"{arch} {row.site}": power(1e6, 0.0) for arch in ("postln", "deepnorm") for row in SITES}
    make_steps(tmp_path / "uneven", laws, depths=(12,), settings={"model": {"encoder_layers": 6}})
    assert {run.layers for run in load(tmp_path)} == {(6, 6), (12, 12), (6, 12)}
    assert [verdict(tmp_path, id) for id in ("C19", "C20", "C22")] == ["reproduced"] * 3
    assert max(UpdateAgainstDepth().picture(load(tmp_path)).panels[0].series[0].y) < 1e3
