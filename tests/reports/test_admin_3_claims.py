"""Claims on Adam's balance, against made-up runs in which they are true, false and open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import Made, load, make_run, sublayer_rows

from stabilitylab.reports import figures
from stabilitylab.reports.claims import CLAIMS, Finding, judge
from stabilitylab.schema import Row

assert figures
SEEDS = (3, 4, 5)
OUTSIDE = Row("decoder.embedding", "decoder", 0, "embedding")


def verdict(id: str, folder: Path) -> Finding:
    return judge(CLAIMS[id], load(folder))


def deep(folder: Path, seed: int, ratio: float, layers: int = 50, init: str = "arch", **how: Any) -> None:
    """The first decoder layer's update is ``ratio`` of all others', under a warm-up; the encoder's is of no use."""

    def rms(step: int, row: Row) -> float:
        if row.stack == "encoder" or row is OUTSIDE or step >= 20:
            return 1e3
        part = {"self_attn": 1.0, "cross_attn": 2.0, "ffn": 3.0}[row.sublayer]
        return 1e-7 * (step + 1) * part * (ratio if row.layer == 1 else 1.0)

    table = Made([OUTSIDE, *sublayer_rows(layers)], ("rms",), rms, (0, 10, 19, 20), total="")
    make_run(
        folder, f"{seed}", arch="postln", seed=seed, layers=layers, tables={"update_ratio": table},
        metrics={"grad_under_eps": [0.25, None, 0.35]}, metric_steps=[0, 10, 19],
        settings={"model": {"init": init}, "train": {"steps": 20}}, **how,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ((0.6, 0.7, 0.8), "reproduced"),
        ((0.0, 0.0, 0.01), "contradicted"),  # updates that rounding loses are exactly 0
        ((0.2, 0.4, 0.3), "inconclusive"),
        ((30.0, 40.0, 35.0), "contradicted"),
    ],
)
def test_adam_balances(tmp_path: Path, ratios: tuple[float, ...], expected: str) -> None:
    for seed, ratio in zip(SEEDS, ratios, strict=True):
        deep(tmp_path, seed, ratio)
    finding = verdict("C33", tmp_path)
    assert finding.verdict == expected
    (effect,) = finding.effects
    assert effect["mean"] == pytest.approx(np.mean(ratios))
    assert effect["effect"] == "first / last decoder layer (30 % of gradient entries below eps), fairseq's gain"


def test_deepnets_own_postln_decides(tmp_path: Path) -> None:
    for seed in SEEDS:
        deep(tmp_path / "fairseq", seed, 0.7 + seed / 100)
        deep(tmp_path / "own", seed, 0.01, init="xavier-1")
    finding = verdict("C33", tmp_path)
    assert finding.verdict == "contradicted"
    assert [effect["mean"] for effect in finding.effects] == pytest.approx([0.01, 0.74])
    assert finding.effects[0]["effect"].endswith(", gain 1")


def test_a_shallow_model_says_nothing_about_a_deep_one(tmp_path: Path) -> None:
    deep(tmp_path, 3, 0.5, layers=2)
    finding = verdict("C33", tmp_path)
    assert finding.verdict == "not testable"
    assert finding.command == "stabilitylab sweep --grid arch=postln depth=100 seed=3..7 steps=20"
    deep(tmp_path, 4, 0.5, layers=2, init="xavier-1")
    assert verdict("C33", tmp_path).command.endswith("steps=20 --set model.init=xavier-1")
