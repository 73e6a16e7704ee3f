"""BranchNorm, Figure 9, and its claims C43 and C44, on made-up shares of nonzero activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from making import Made, load, make_run
from rest_slow import slow

from stabilitylab.reports.base import MissingRuns, Panel, Picture
from stabilitylab.reports.claims import CLAIMS, Finding, judge
from stabilitylab.reports.diagnosis import diagnose
from stabilitylab.reports.figures.branchnorm.figure_9 import NonzeroShare
from stabilitylab.schema import Row

SEEDS = (3, 4, 5)
STEPS = (0, 10, 20, 30)
Share = Callable[[str, int, int, Row], float]  # of architecture, seed, step and layer


def make_shares(
    folder: Path,
    share: Share,
    *,
    archs: Sequence[str] = ("deepnorm", "branchnorm"),
    seeds: Sequence[int] = SEEDS,
    steps: Sequence[int] = STEPS,
    stacks: Sequence[str] = ("encoder", "decoder"),
    layers: int = 2,
    **facts: Any,
) -> None:
    rows = [Row(f"{s}.layers.{n - 1}.ffn.activation", s, n, "ffn") for s in stacks for n in range(1, layers + 1)]
    for arch in archs:
        for seed in seeds:

            def value(step: int, row: Row, arch: str = arch, seed: int = seed) -> float:
                return share(arch, seed, step, row)

            tables = {
                "activation_sparsity": Made(rows, ("nonzero_fraction",), value, steps, "mean"),
                "grad_norm": Made(rows, ("value",), lambda step, row: float(row.layer), steps),
            }
            make_run(folder, f"{arch}-{seed}", arch=arch, seed=seed, layers=layers, tables=tables,
                     metrics={"held_out_nll": [8.0, 5.0], "held_out_accuracy": [0.1, 0.2]}, metric_steps=(0, 30),
                     **facts)  # fmt: skip


def drawn(folder: Path) -> tuple[dict[str, Panel], Picture]:
    picture = NonzeroShare().picture(load(folder))
    return {panel.title: panel for panel in picture.panels}, picture


def one(folder: Path, id: str) -> Finding:
    return judge(CLAIMS[id], load(folder))


def test_the_picture_is_the_share_after_training(tmp_path: Path) -> None:
    def share(arch: str, seed: int, step: int, row: Row) -> float:
        level = 0.4 if arch == "deepnorm" else (0.3 if row.stack == "decoder" else 0.5)
        return level + row.layer / 100 + seed / 1000 - step / 1000

    make_shares(tmp_path, share)
    panels, picture = drawn(tmp_path)
    assert [*panels] == ["Encoder", "Decoder"]  # loss and gradient stand beside the controls of branchnorm:8
    assert panels["Encoder"].limits == panels["Decoder"].limits is not None
    deepnorm, branchnorm = panels["Encoder"].series
    assert (deepnorm.x, deepnorm.y) == ([1, 2], pytest.approx([0.384, 0.394]))
    assert branchnorm.y == pytest.approx([0.484, 0.494])
    assert (branchnorm.low, branchnorm.high) == (pytest.approx([0.483, 0.493]), pytest.approx([0.485, 0.495]))
    assert panels["Decoder"].series[1].y == pytest.approx([0.284, 0.294])
    assert picture.finding == (
        "BranchNorm is sparser than DeepNorm in 0 of 2 encoder layers and 2 of 2 decoder layers (3 seeds)."
    )


def test_one_run_of_a_decoder_alone_is_drawn(tmp_path: Path) -> None:
    panels, picture = drawn_decoder(tmp_path, "relu")
    assert [*panels] == ["Decoder"]
    assert panels["Decoder"].y == "share of nonzero activations"
    assert picture.finding == "Share of nonzero activations: Pre-LN 25.0% (one seed)."


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_entries_above_0_are_called_positive_where_no_entry_is_0(tmp_path: Path, activation: str) -> None:
    panels, picture = drawn_decoder(tmp_path, activation)
    assert panels["Decoder"].y == "share of positive activations"
    assert picture.finding.startswith("Share of positive activations: ")
    (panel,) = [one for one in diagnose(load(tmp_path)[0]).panels if "sparsity" in one.title]
    assert panel.map is not None
    assert panel.map.unit.startswith("positive fraction")


def drawn_decoder(folder: Path, activation: str) -> tuple[dict[str, Panel], Picture]:
    decoder = {"model": {"stack": "decoder", "encoder_layers": 0, "activation": activation}}
    make_shares(folder, lambda arch, seed, step, row: 0.25, archs=("preln",), seeds=(3,), stacks=("decoder",),
                settings=decoder)  # fmt: skip
    return drawn(folder)


def test_a_run_that_diverged_decides_nothing(tmp_path: Path) -> None:
    make_shares(tmp_path, lambda arch, seed, step, row: 0.3 + (arch == "deepnorm") / 10)
    make_shares(tmp_path, lambda arch, seed, step, row: math.nan, seeds=(9,), verdict="diverged", state="diverged")
    _, picture = drawn(tmp_path)
    assert picture.finding.endswith("2 of 2 encoder layers and 2 of 2 decoder layers (3 seeds).")
    effect = one(tmp_path, "C43").effects[0]
    assert (effect["seeds"], effect["mean"]) == ([3, 4, 5], 1)


def test_without_runs_it_names_the_command(tmp_path: Path) -> None:
    make_run(tmp_path, "bare", layers=2)
    with pytest.raises(MissingRuns) as missing:
        NonzeroShare().picture(load(tmp_path))
    assert "stabilitylab sweep branchnorm:9" in missing.value.command
    found = {id: one(tmp_path, id) for id in ("C43", "C44")}
    assert {finding.verdict for finding in found.values()} == {"not testable"}
    assert "sweep branchnorm:8" in found["C43"].command


@pytest.mark.parametrize(
    ("lower", "verdict"),
    [
        (lambda seed, row: True, "reproduced"),
        (lambda seed, row: False, "contradicted"),
        # 12 of 16 on either side
        slow(lambda seed, row: row.layer > 4, "not reproduced"),
        # all but one of 32: .97
        slow(lambda seed, row: row.stack == "decoder" or row.layer > 1, "inconclusive"),
        slow(lambda seed, row: seed > 3, "inconclusive"),
    ],
)
def test_c43_sparser_in_all_layers(tmp_path: Path, lower: Callable[[int, Row], bool], verdict: str) -> None:
    def share(arch: str, seed: int, step: int, row: Row) -> float:
        below = lower(seed, row) if step == 30 else not lower(seed, row)  # what counts is the end
        return 0.4 if arch == "deepnorm" else (0.3 if below else 0.5)

    make_shares(tmp_path, share, layers=16, seeds=range(3, 9))
    found = one(tmp_path, "C43")
    counts = {s: [lower(3, Row("", s, n)) for n in range(1, 17)] for s in ("encoder", "decoder")}
    whole, encoder, decoder = found.effects
    assert whole["values"]["3"] == f"{sum(sum(own) for own in counts.values())}/32"
    assert (encoder["values"]["3"], decoder["values"]["3"]) == tuple(f"{sum(own)}/16" for own in counts.values())
    assert found.verdict == verdict


@pytest.mark.parametrize(
    ("share", "verdict"),
    [
        (lambda arch, seed, step, row: 0.5 - step / 100, "reproduced"),
        (lambda arch, seed, step, row: 0.1 + step / 100, "contradicted"),
        slow(
            lambda arch, seed, step, row: 0.5 - step / 100 * (1 if seed > 3 else -1),
            "inconclusive",
        ),
        slow(
            lambda arch, seed, step, row: 0.5 - step / 100 * (1 if arch == "deepnorm" else -1),
            "contradicted",
        ),
        slow(
            lambda arch, seed, step, row: 0.5 + step / 100 * (1 if arch == "deepnorm" else -1),
            "reproduced",
        ),
    ],
)
def test_c44_sparser_with_training(tmp_path: Path, share: Share, verdict: str) -> None:
    make_shares(tmp_path, share)
    found = one(tmp_path, "C44")
    assert found.verdict == verdict
    assert len(found.effects) == 2


def test_c44_is_spearmans_rho_of_the_mean_over_layers(tmp_path: Path) -> None:
    values = {0: 0.5, 10: 0.6, 20: 0.4, 30: 0.3}  # ranks 3 4 2 1 against 1 2 3 4: 1 - 6 * 18 / 60
    make_shares(
        tmp_path, lambda arch, seed, step, row: values[step] + 10 * (row.layer - 1.5) * step, archs=("branchnorm",)
    )
    (effect,) = one(tmp_path, "C44").effects  # DeepNorm's would stand beside it
    assert effect["mean"] == pytest.approx(1 - 6 * 18 / 60)


@pytest.mark.parametrize("share", [lambda arch, seed, step, row: 0.5, lambda arch, seed, step, row: 0.5 - step / 100])
def test_c44_needs_three_steps_and_a_change(tmp_path: Path, share: Share) -> None:
    make_shares(tmp_path, share, steps=STEPS if share("", 0, 30, Row("", "", 1)) == 0.5 else STEPS[:2])
    assert one(tmp_path, "C44").verdict == "not testable"
