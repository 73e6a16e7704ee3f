"""Claims on Adam's balance, against made-up runs in which they are true, false and open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import Made, load, make_run, sublayer_rows

from stabilitylab.experiments import command
from stabilitylab.reports import figures
from stabilitylab.reports.claims import CLAIMS, Finding, judge
from stabilitylab.schema import Row

assert figures
SEEDS = (3, 4, 5)
OUTSIDE = Row("decoder.embedding", "decoder", 0, "embedding")


def verdict(id: str, folder: Path) -> Finding:
    return judge(CLAIMS[id], load(folder))


def balanced(folder: Path, seed: int, gradient: float, update: float, steps: int = 500, **how: Any) -> None:
    """Over sub-layers, evenly in logs, gradients span ``gradient`` decades and updates ``update``, in the second half
    of the run; before it, and outside the layers, they span none."""
    rows = [OUTSIDE, *sublayer_rows(3)]

    def spanning(decades: float):
        def value(step: int, row: Row) -> float:
            if row is OUTSIDE:
                return 1e9
            place = rows.index(row) - 1
            wave = 1 + 0.5 * (-1) ** (step // 100)  # cancels in the mean over steps
            return wave * 10 ** (decades * place / (len(rows) - 2)) if step >= steps / 2 else 1.0

        return value

    at = (0, steps // 5, 3 * steps // 5, 4 * steps // 5, steps)
    tables = {
        "grad_norm": Made(rows, ("value",), spanning(gradient), at),
        "update_ratio": Made(rows, ("rms",), spanning(update), at, total=""),
    }
    settings = {"train": {"steps": steps}}
    make_run(folder, f"{seed}-{steps}", arch="postln", seed=seed, layers=3, tables=tables, settings=settings, **how)


@pytest.mark.parametrize(
    ("gradient", "spread", "expected"),
    [(3.0, 0.1, "reproduced"), (0.1, 0.1, "contradicted"), (1.2, 0.1, "inconclusive"), (3.0, 3.0, "inconclusive")],
)
def test_updates_are_narrow(tmp_path: Path, gradient: float, spread: float, expected: str) -> None:
    for place, seed in enumerate(SEEDS):
        balanced(tmp_path, seed, gradient + spread * (place - 1), 0.5)
    finding = verdict("C32", tmp_path)
    assert finding.verdict == expected
    # of places spread evenly over D decades, the 5th and 95th percentile lie .9 D apart
    widths = [abs(gradient + spread * (place - 1)) for place in range(3)]
    assert finding.effects[0]["mean"] == pytest.approx(0.9 * (np.mean(widths) - 0.5))


def test_short_and_diverged_runs_say_nothing_about_adam(tmp_path: Path) -> None:
    balanced(tmp_path, 3, 3, 0.1, steps=100)
    balanced(tmp_path, 4, 3, 0.1, verdict="diverged")
    finding = verdict("C32", tmp_path)
    assert (finding.verdict, finding.command) == ("not testable", command("branchnorm:8"))


def deep(folder: Path, seed: int, ratio: float, layers: int = 50, **how: Any) -> None:
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
        settings={"train": {"steps": 20}}, **how,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ((0.6, 0.7, 0.8), "reproduced"),
        ((0.0, 0.0, 0.01), "contradicted"),  # updates that rounding loses are exactly 0
        ((0.2, 0.4, 0.3), "inconclusive"),
    ],
)
def test_adam_balances(tmp_path: Path, ratios: tuple[float, ...], expected: str) -> None:
    for seed, ratio in zip(SEEDS, ratios, strict=True):
        deep(tmp_path, seed, ratio)
    finding = verdict("C33", tmp_path)
    assert finding.verdict == expected
    assert [effect["mean"] for effect in finding.effects] == pytest.approx([np.mean(ratios), 0.3])


def test_a_shallow_model_says_nothing_about_a_deep_one(tmp_path: Path) -> None:
    deep(tmp_path, 3, 0.5, layers=2)
    finding = verdict("C33", tmp_path)
    assert finding.verdict == "not testable"
    assert finding.command == "stabilitylab sweep --grid arch=postln depth=100 seed=3..7 steps=20"
