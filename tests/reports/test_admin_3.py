"""Relative gradients at initialisation, and the claims on them, against made-up tables whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from making import Made, load, make_run, sublayer_rows
from rest_slow import slow

from stabilitylab.experiments import command
from stabilitylab.reports import FIGURES, MissingRuns, figures
from stabilitylab.reports.claims import CLAIMS, Finding, judge
from stabilitylab.schema import Row

assert figures
ENTRY = [Row(f"{stack}.input", stack, 0, "input") for stack in ("encoder", "decoder")]
EVEN, WILD = (0.95, 1.0, 1.05), (0.05, 1.0, 20.0)  # what three seeds multiply a ratio by
SEEDS = (3, 4, 5)


def gradients(layers: int, first_over_last: Mapping[str, float]) -> Made:
    """An activation gradient that falls or grows by one factor a layer; other sub-layers hold numbers of no use."""

    def value(step: int, row: Row) -> float:
        if row.sublayer != "ffn":
            return 1e3
        return 2 * first_over_last[row.stack] ** ((layers - row.layer) / max(layers - 1, 1))

    rows = [*ENTRY, *sublayer_rows(layers)]
    return Made(rows, ("value",), value, total="")


def start(
    folder: Path,
    arch: str,
    ratio: float | Mapping[str, float],
    *,
    seed: int = 3,
    layers: int = 3,
    kind: str = "onestep",
    settings: Mapping[str, Any] | None = None,
    tag: str = "",
) -> None:
    ratios = ratio if isinstance(ratio, Mapping) else {"encoder": ratio, "decoder": ratio}
    tables = {"activation_grad_norm": gradients(layers, ratios)}
    name = f"{arch}-{layers}-{seed}{tag}"
    make_run(folder, name, arch=arch, seed=seed, layers=layers, tables=tables, kind=kind, settings=settings)


def verdict(id: str, folder: Path) -> Finding:
    return judge(CLAIMS[id], load(folder))


def test_the_figure_shows_each_layer_over_the_largest(tmp_path: Path) -> None:
    for seed, factor in ((3, 0.5), (4, 2.0)):
        start(tmp_path, "postln", {"encoder": 4.0, "decoder": 0.01 * factor}, seed=seed)
    start(tmp_path, "deepnorm", 1.0)
    picture = FIGURES["admin:3"]().picture(load(tmp_path))
    assert [panel.title for panel in picture.panels] == ["Encoder", "Decoder"]
    assert {line.arch for panel in picture.panels for line in panel.series} == {"postln"}  # of the paper's three
    encoder, decoder = ({line.arch: line for line in panel.series} for panel in picture.controls)
    assert list(encoder["postln"].y) == pytest.approx([1, 0.5, 0.25])
    assert list(decoder["postln"].x) == [1, 2, 3]
    assert list(decoder["postln"].y) == pytest.approx([0.01, 0.1, 1])  # the geometric mean of .005 and .02
    assert (list(decoder["postln"].low or ()), decoder["postln"].seeds) == (pytest.approx([0.005, 0.005**0.5, 1]), 2)
    assert list(decoder["deepnorm"].y) == [1, 1, 1]
    assert picture.finding == "Gradient at the first over the last decoder layer (2 seeds): Post-LN 0.01, DeepNorm 1."
    assert "one step" in picture.notes[0]


def test_the_figure_says_what_it_left_out_and_prefers_the_papers_depth(tmp_path: Path) -> None:
    start(tmp_path, "postln", 0.1, layers=18)
    for layers in (2, 30):
        start(tmp_path, "postln", 0.1, layers=layers)
    picture = FIGURES["admin:3"]().picture(load(tmp_path))
    assert len(picture.panels[0].series[0].x) == 18
    assert picture.notes[-1] == "Not drawn: 2 runs with other settings, or repeated."
    assert "(one seed)" in picture.finding


def test_a_gradient_of_zero_is_not_drawn_and_said(tmp_path: Path) -> None:
    start(tmp_path, "branchnorm", {"encoder": 0.0, "decoder": 1.0}, layers=1)
    zero = Made(sublayer_rows(2), ("value",), lambda step, row: float(row.stack == "decoder"), total="")
    make_run(tmp_path, "all", layers=2, tables={"activation_grad_norm": zero})
    picture = FIGURES["admin:3"]().picture(load(tmp_path))
    assert [panel.title for panel in picture.panels] == ["Decoder"]
    assert "Exactly 0 throughout, so not drawn: BranchNorm (encoder)." in picture.notes


def test_without_gradients_the_figure_names_the_command(tmp_path: Path) -> None:
    late = gradients(3, {"encoder": 1.0, "decoder": 0.1})
    table = Made(late.rows, late.columns, late.values, steps=(4,), total="")
    make_run(tmp_path, "late", layers=3, tables={"activation_grad_norm": table})
    with pytest.raises(MissingRuns, match="activation_grad_norm at initialisation") as missing:
        FIGURES["admin:3"]().picture(load(tmp_path))
    assert missing.value.command == command("admin:4")


@pytest.mark.parametrize(
    ("id", "arch", "stack", "ratio", "spread", "expected"),
    [
        ("C01", "postln", "decoder", 0.003, EVEN, "reproduced"),
        ("C01", "postln", "decoder", 0.9, EVEN, "contradicted"),
        slow("C01", "postln", "decoder", 0.1, EVEN, "not reproduced"),
        slow("C01", "postln", "decoder", 0.003, WILD, "inconclusive"),
        ("C02", "postln", "encoder", 2.0, EVEN, "reproduced"),
        ("C02", "postln", "encoder", 0.01, EVEN, "contradicted"),
        slow("C02", "postln", "encoder", 20.0, EVEN, "not reproduced"),
        slow("C02", "postln", "encoder", 2.0, WILD, "inconclusive"),
    ],
)
def test_vanishing_at_initialisation(
    tmp_path: Path, id: str, arch: str, stack: str, ratio: float, spread: Sequence[float], expected: str
) -> None:
    other = "encoder" if stack == "decoder" else "decoder"
    for seed, factor in zip(SEEDS, spread, strict=True):
        start(tmp_path, arch, {stack: ratio * factor, other: 1.0}, seed=seed, layers=18)
    finding = verdict(id, tmp_path)
    assert finding.verdict == expected
    (effect,) = finding.effects
    assert effect["mean"] == pytest.approx(ratio * math.prod(spread) ** (1 / 3))
    assert effect["seeds"] == list(SEEDS)


def test_other_depths_archs_and_later_steps_say_nothing_about_18_layers(tmp_path: Path) -> None:
    start(tmp_path, "postln", 0.003, layers=17)
    start(tmp_path, "deepnorm", 0.003, layers=18)
    late = gradients(18, {"encoder": 1.0, "decoder": 0.003})
    late = Made(late.rows, late.columns, late.values, steps=(4,), total="")
    make_run(tmp_path, "late", arch="postln", layers=18, tables={"activation_grad_norm": late})
    for id in ("C01", "C02", "C05"):
        finding = verdict(id, tmp_path)
        assert (finding.verdict, finding.command) == ("not testable", command("claims:fast"))


def test_one_step_runs_count_before_the_first_row_of_training_runs(tmp_path: Path) -> None:
    start(tmp_path, "postln", 0.5, layers=18, kind="train")
    assert verdict("C01", tmp_path).effects[0]["mean"] == pytest.approx(0.5)
    start(tmp_path, "postln", 0.01, layers=18, kind="onestep", tag="-one")
    assert verdict("C01", tmp_path).effects[0]["mean"] == pytest.approx(0.01)


def test_a_gradient_that_underflowed_decides_nothing(tmp_path: Path) -> None:
    for seed in SEEDS:
        start(tmp_path, "postln", 0.0, seed=seed, layers=18)
    assert verdict("C01", tmp_path).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("log_ratio", "expected"),
    [
        (lambda n, seed: -(0.3 + 0.01 * seed) * n, "reproduced"),
        (lambda n, seed: (0.2 + 0.01 * seed) * n, "contradicted"),
        (lambda n, seed: -(0.03 + 0.001 * seed) * n, "not reproduced"),  # slower than the threshold
        (lambda n, seed: (0.4 * seed - 1.8) * n, "inconclusive"),
        (lambda n, seed: -0.3 * n + 2 * (-1) ** (n // 6) + 0.01 * seed, "reproduced"),  # no straight line: described
    ],
)
def test_exponential_vanishing(tmp_path: Path, log_ratio: Any, expected: str) -> None:
    for seed in SEEDS:
        for layers in (6, 12, 18) if seed > 3 else (3, 6, 12, 18, 51):
            outside = layers in (3, 51)  # would spoil the line
            ratio = 1e3 if outside else math.exp(log_ratio(layers, seed))
            start(tmp_path, "postln", {"encoder": 1.0, "decoder": ratio}, seed=seed, layers=layers)
    finding = verdict("C03", tmp_path)
    assert finding.verdict == expected
    if expected == "reproduced":
        line = abs(log_ratio(6, 4) - 2 * log_ratio(12, 4) + log_ratio(18, 4)) < 1e-9
        assert (finding.effects[1]["mean"] == pytest.approx(1)) == line
        assert finding.effects[0]["mean"] == pytest.approx(-0.34 if line else -0.3)


def test_two_depths_are_no_line(tmp_path: Path) -> None:
    for layers in (6, 12):
        start(tmp_path, "postln", 0.1, layers=layers)
    assert verdict("C03", tmp_path).verdict == "not testable"


@pytest.mark.parametrize(
    ("ratio", "spread", "expected"),
    [
        (2.8, EVEN, "reproduced"),
        (0.5, EVEN, "contradicted"),
        (1.2, EVEN, "not reproduced"),
        (2.8, WILD, "inconclusive"),
    ],
)
def test_preln_is_bottom_heavy(tmp_path: Path, ratio: float, spread: Sequence[float], expected: str) -> None:
    for seed, factor in zip(SEEDS, spread, strict=True):

        def value(step: int, row: Row, factor: float = factor) -> float:
            """Two sub-layers of a layer at 3 and 4 make 5; embeddings and decoders do not count."""
            own = {"self_attn": 3.0, "ffn": 4.0}.get(row.sublayer, 1e6)
            return own * (ratio * factor if row.stack == "encoder" and row.layer == 1 else 1.0)

        embedding = Row("encoder.embedding", "encoder", 0, "embedding")
        table = Made([embedding, *sublayer_rows(18)], ("value",), value)
        make_run(tmp_path, f"{seed}", arch="preln", seed=seed, layers=18, kind="onestep", tables={"grad_norm": table})
    finding = verdict("C04", tmp_path)
    assert finding.verdict == expected
    assert finding.effects[0]["mean"] == pytest.approx(ratio * math.prod(spread) ** (1 / 3))


MIXED = {"model": {"decoder_arch": "preln"}}
LONG = {"train": {"steps": 3000}}


def mixed(folder: Path, ratio: float, failed: int, trained: int, pure: int = 0) -> Finding:
    for seed in SEEDS:
        start(
            folder,
            "postln",
            {"encoder": 1.0, "decoder": ratio * (1 + seed / 100)},
            seed=seed,
            layers=18,
            settings=MIXED,
        )
    for number in range(failed + trained):
        state = "diverged" if number < failed else "trained"
        settings = {**MIXED, **LONG}
        make_run(folder, f"long-{number}", arch="postln", seed=3 + number, layers=18, settings=settings, verdict=state)
    for number in range(pure):
        make_run(folder, f"pure-{number}", arch="preln", seed=3 + number, layers=18, settings=LONG)
    return verdict("C05", folder)


@pytest.mark.parametrize(
    ("ratio", "failed", "trained", "expected"),
    [
        (0.9, 6, 0, "reproduced"),  # Clopper-Pearson from .541
        (0.01, 6, 0, "reproduced"),  # the ratio stands beside it
        (0.9, 5, 0, "inconclusive"),  # too few
        (0.9, 0, 8, "contradicted"),  # up to .369
        (0.9, 0, 0, "inconclusive"),
    ],
)
def test_the_mixed_model(tmp_path: Path, ratio: float, failed: int, trained: int, expected: str) -> None:
    finding = mixed(tmp_path, ratio, failed, trained)
    assert finding.verdict == expected
    share, gradient = finding.effects
    assert (share["n"], gradient["verdict"]) == (failed + trained, "")
    assert gradient["mean"] == pytest.approx(ratio * 1.04, rel=1e-3)
    assert ("no runs of 3,000 updates" in share["effect"]) == (not failed + trained)


def test_preln_stands_beside_the_mixed_model(tmp_path: Path) -> None:
    finding = mixed(tmp_path, 0.9, failed=6, trained=0, pure=5)
    assert finding.effects[0]["p"] == pytest.approx(0.5**6)
    assert (finding.effects[2]["effect"], finding.effects[2]["values"]["3"]) == ("Pre-LN models that failed", "0/1")


@pytest.mark.parametrize(
    ("shallow", "deep", "expected"),
    [
        (1.04, 1.1, "reproduced"),
        (0.9, 1.04, "reproduced"),  # which end is the larger does not matter
        (1.04, 9.0, "contradicted"),
        (9.0, 9.0, "contradicted"),
        (1.04, 3.0, "not reproduced"),
    ],
)
def test_deepnorm_is_uniform(tmp_path: Path, shallow: float, deep: float, expected: str) -> None:
    for seed, factor in zip(SEEDS, (0.999, 1.0, 1.001), strict=True):
        start(tmp_path, "deepnorm", shallow * factor, seed=seed, layers=18)
        start(tmp_path, "deepnorm", deep * factor, seed=seed, layers=50)
    finding = verdict("C06", tmp_path)
    assert finding.verdict == expected
    means = [effect["mean"] for effect in finding.effects]
    each = [max(r, 1 / r) for r in (shallow, deep)]
    assert means == pytest.approx([max(each), *each], rel=2e-3)


def test_deepnorm_needs_both_depths(tmp_path: Path) -> None:
    start(tmp_path, "deepnorm", 1.0, layers=18)
    finding = verdict("C06", tmp_path)
    assert (finding.verdict, "50 layers" in finding.why) == ("not testable", True)
