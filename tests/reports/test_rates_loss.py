"""The figure of a search: the losses of its runs by rate and rung, and marks at the answer."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from stabilitylab.reports import MissingRuns, paper
from stabilitylab.reports.collection import Runs
from stabilitylab.reports.figures.rates.loss import LossByRate
from stabilitylab.store import RunWriter

RUNGS = (150, 600, 1500)


def trial(out: Path, rate: float, updates: int, *, seed: int = 0, warmup: int = 60, fails: bool = False) -> None:
    name = f"lr{rate:g}-s{seed}" + ("" if warmup == 60 else f"-w{warmup}")
    told = {
        "model": "mine:ready", "rate": rate, "seed": seed, "searches": seed == 0 and warmup == 60,
        "planned": warmup == 60, "rungs": list(RUNGS), "measured": "held_out_loss",
    }  # fmt: skip
    manifest = {"kind": "watched", "label": name, "config": {"warmup": warmup}, "lr_find": told}
    with RunWriter.create(out / name, manifest) as writer:
        writer.open(())
        for rung in [rung for rung in RUNGS if rung <= updates]:
            writer.append(rung, {"held_out_loss": loss(rate, rung, seed)}, {})
        writer.set_status("diverged" if fails else "finished", updates)


def loss(rate: float, rung: int, seed: int) -> float:
    return 2 + 0.1 * math.log2(rate / 1e-3) ** 2 + 100 / rung + 0.01 * seed


@pytest.fixture
def search(tmp_path: Path) -> Path:
    out = tmp_path / "search"
    for rate, updates in ((5e-4, 600), (1e-3, 1500), (2e-3, 1500), (4e-3, 600)):
        trial(out, rate, updates)
    trial(out, 8e-3, 150, fails=True)
    for seed in (1, 2):
        trial(out, 1e-3, 1500, seed=seed)
    trial(out, 2e-3, 600, warmup=10)
    answer = {
        "name": "mine:ready", "updates": 1500, "best": {"value": 1e-3, "low": 7e-4, "high": None},
        "safe": {"value": 2e-3, "low": 2e-3, "high": 4e-3}, "warmup": {"value": 10, "low": 0, "high": 10},
    }  # fmt: skip
    (out / "lr-find.json").write_text(json.dumps(answer))
    return out


def test_a_line_a_rung_and_marks_at_the_three_numbers(search: Path) -> None:
    picture = LossByRate().picture(Runs.load(search))
    (panel,) = picture.panels
    lines = {line.label: line for line in panel.series}
    assert list(lines["150 updates"].x) == [5e-4, 1e-3, 2e-3, 4e-3]
    assert list(lines["600 updates"].y) == pytest.approx([loss(rate, 600, 0) for rate in lines["600 updates"].x])
    assert list(lines["1,500 updates"].x) == [1e-3, 2e-3]
    assert list(lines["mean of seeds"].y) == pytest.approx([loss(1e-3, 1500, 1)])
    assert lines["mean of seeds"].seeds == [3]
    assert list(lines["failed"].x) == [8e-3]
    assert list(lines["warm-up 10, 600 updates, suffices"].x) == [2e-3]
    assert [(mark.value, mark.label) for mark in panel.references] == [(1e-3, "best rate"), (2e-3, "largest safe rate")]
    assert panel.log_x
    assert "best rate 0.001 [0.0007, ?], largest safe rate 0.002 [0.002, 0.004], least warm-up 10" in picture.finding


def test_a_trial_that_failed_at_the_horizon_is_a_cross_and_in_no_mean(search: Path) -> None:
    trial(search, 2e-3, 1500, seed=1)
    trial(search, 2e-3, 1500, seed=2, fails=True)
    trial(search, 4e-3, 600, warmup=10, fails=True)
    (panel,) = LossByRate().picture(Runs.load(search)).panels
    lines = {line.label: line for line in panel.series}
    assert lines["mean of seeds"].y == pytest.approx([loss(1e-3, 1500, 1), loss(2e-3, 1500, 0) + 0.005])
    assert lines["mean of seeds"].seeds == [3, 2]
    assert list(lines["failed"].x) == [2e-3, 8e-3]
    assert [name for name in lines if name.startswith("warm-up")] == [
        "warm-up 10, 150 updates, failed later", "warm-up 10, 600 updates, suffices",
    ]  # fmt: skip


def test_what_failed_has_its_colour_in_the_legend(search: Path) -> None:
    picture = LossByRate().picture(Runs.load(search))
    (failed,) = (line for line in picture.panels[0].series if line.label == "failed")
    (legend,) = paper.draw(picture, 6.75).legends
    keys = zip(legend.get_texts(), legend.legend_handles, strict=True)
    (key,) = (key for text, key in keys if text.get_text() == "failed")
    assert key.get_markeredgecolor() == failed.colour == "#a50f15"


def test_a_search_that_goes_on_is_drawn_without_marks(search: Path) -> None:
    (search / "lr-find.json").unlink()
    picture = LossByRate().picture(Runs.load(search))
    assert not picture.panels[0].references
    assert "has no best rate yet" in picture.finding


def test_one_rate_that_is_best_and_safe_has_one_mark(search: Path) -> None:
    answer = json.loads((search / "lr-find.json").read_text())
    (search / "lr-find.json").write_text(json.dumps({**answer, "safe": answer["best"]}))
    (mark,) = LossByRate().picture(Runs.load(search)).panels[0].references
    assert mark.label == "best rate = largest safe rate"


def test_every_search_has_a_panel(search: Path, tmp_path: Path) -> None:
    trial(tmp_path / "other", 1e-3, 150)
    assert len(LossByRate().picture(Runs.load(tmp_path)).panels) == 2


def test_runs_of_no_search_are_missing_runs(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "one", {"kind": "watched", "config": {}}) as writer:
        writer.append(0, {"loss": 1.0}, {})
        writer.set_status("finished", 1)
    with pytest.raises(MissingRuns, match="no trials of a search"):
        LossByRate().picture(Runs.load(tmp_path))
