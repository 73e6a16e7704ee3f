"""Relative gradients and updates: distributions and widths of known spreads, and the claim that Adam's are narrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import Made, load, make_run, sublayer_rows

from stabilitylab.experiments import command
from stabilitylab.reports import FIGURES, MissingRuns, Panel, Picture, Series, figures
from stabilitylab.reports.claims import CLAIMS, Finding, judge
from stabilitylab.schema import Row

assert figures
SEEDS = (3, 4, 5)
OUTSIDE = Row("decoder.embedding", "decoder", 0, "embedding")
LAYERS = 3
COUNT = LAYERS * 5  # sub-layers of encoder and decoder


def verdict(id: str, folder: Path) -> Finding:
    return judge(CLAIMS[id], load(folder))


def balanced(
    folder: Path, seed: int, gradient: float, update: float, steps: int = 500, arch: str = "postln", **how: Any
) -> None:
    """Over sub-layers, evenly in logs, gradients span ``gradient`` decades and updates ``update``, in the second half
    of the run; before it, and outside the layers, they span none."""
    rows = [OUTSIDE, *sublayer_rows(LAYERS)]

    def spanning(decades: float):
        def value(step: int, row: Row) -> float:
            if row is OUTSIDE:
                return 1e9
            place = rows.index(row) - 1
            wave = 1 + 0.5 * (-1) ** (step // 100)  # cancels in the mean over steps
            return wave * 10 ** (decades * place / (COUNT - 1)) if step >= steps / 2 else 1.0

        return value

    at = (0, steps // 5, 3 * steps // 5, 4 * steps // 5, steps)
    tables = {
        "grad_norm": Made(rows, ("value",), spanning(gradient), at),
        "update_ratio": Made(rows, ("rms",), spanning(update), at, total=""),
    }
    settings = {"train": {"steps": steps}}
    make_run(
        folder, f"{arch}-{seed}-{steps}", arch=arch, seed=seed, layers=LAYERS, tables=tables, settings=settings, **how
    )


def draw(folder: Path) -> Picture:
    return FIGURES["admin:5"]().picture(load(folder))


def lines(panel: Panel) -> dict[str, Series]:
    return {line.detail: line for line in panel.series}


def test_the_share_at_or_below_is_the_count(tmp_path: Path) -> None:
    """Of values 10^(-3 k / 14), k = 0 .. 14, as many lie at or below x as there are k of at least -14 log10(x) / 3."""
    balanced(tmp_path, 3, 3.0, 1.0)
    panel, _ = draw(tmp_path).panels
    for name, span in (("gradient", 3.0), ("update", 1.0)):
        line = lines(panel)[name]
        logs = -np.log10(line.x) * (COUNT - 1) / span
        counted = [sum(k >= log - 1e-6 for k in range(COUNT)) / COUNT for log in logs]
        assert list(line.y) == pytest.approx(counted)
    assert (panel.title, panel.log_x, line.x[0], line.x[-1]) == ("Post-LN", True, pytest.approx(1e-3), 1)
    assert (lines(panel)["gradient"].dash, lines(panel)["update"].dash) == ("solid", "dashed")


def test_the_distribution_is_that_of_each_seed_not_of_their_mean(tmp_path: Path) -> None:
    balanced(tmp_path, 3, 2.0, 1.0)
    balanced(tmp_path, 4, 0.0, 1.0)
    line = lines(draw(tmp_path).panels[0])["gradient"]
    middle = int(np.abs(np.log10(line.x) + 1).argmin())  # a tenth of the largest: half of one seed, none of the other
    assert line.x[middle] == pytest.approx(0.1)
    assert (line.low or ())[middle] == 0
    assert (line.high or ())[middle] == pytest.approx(8 / 15)
    assert line.y[middle] == pytest.approx(4 / 15)


def test_the_width_is_that_of_each_row_and_starts_with_the_first_update(tmp_path: Path) -> None:
    balanced(tmp_path, 3, 3.0, 1.0)
    picture = draw(tmp_path)
    panel = picture.panels[-1]
    assert (panel.title, panel.log_x, panel.log_y) == ("Width", True, False)
    # of places spread evenly over D decades, the 5th and 95th percentile lie .9 D apart
    for name, span in (("gradient", 2.7), ("update", 0.9)):
        assert list(lines(panel)[name].x) == [1, 101, 301, 401, 501]
        assert list(lines(panel)[name].y) == pytest.approx([0, 0, span, span, span])
    assert picture.finding == (
        "From the 5th to the 95th percentile of sub-layers, gradient norms and updates of the second half span, in "
        "decades: Post-LN 2.70 and 0.90 (one seed)."
    )


def test_updates_of_exactly_zero_count_as_far_below(tmp_path: Path) -> None:
    rows = sublayer_rows(2)
    tables = {
        "grad_norm": Made(rows, ("value",), lambda step, row: 1.0 if row.layer == 2 else 0.5, (0, 4)),
        "update_ratio": Made(rows, ("rms",), lambda step, row: float(row.stack == "decoder"), (0, 4), total=""),
    }
    make_run(tmp_path, "lost", arch="postln", layers=2, tables=tables)
    panel, widths = draw(tmp_path).panels
    assert set(lines(panel)["update"].y[:-1]) == {0.4}  # 4 encoder sub-layers of 10
    assert [line.detail for line in widths.series] == ["gradient"]  # the update's width is infinite


def test_the_papers_architectures_are_drawn_and_the_others_named(tmp_path: Path) -> None:
    for arch in ("deepnorm", "admin", "preln", "postln"):
        balanced(tmp_path, 3, 1.0, 0.5, arch=arch)
    balanced(tmp_path, 4, 1.0, 0.5, verdict="diverged")
    picture = draw(tmp_path)
    assert [panel.title for panel in picture.panels] == ["Post-LN", "Pre-LN", "Admin", "Width"]
    assert picture.notes[-2:] == ["Not drawn: DeepNorm.", "Not drawn: 1 run that diverged."]


def test_another_architecture_alone_is_drawn(tmp_path: Path) -> None:
    balanced(tmp_path, 3, 1.0, 0.5, arch="rezero")
    assert draw(tmp_path).panels[0].title == "ReZero"


@pytest.mark.parametrize("table", ["grad_norm", "update_ratio"])
def test_without_one_of_the_tables_the_figure_names_the_command(tmp_path: Path, table: str) -> None:
    made = Made(sublayer_rows(2), ("value", "rms"), lambda step, row: (1.0, 1.0), (0, 4), total="")
    make_run(tmp_path, "half", tables={table: made})
    with pytest.raises(MissingRuns, match="grad_norm and update_ratio") as missing:
        draw(tmp_path)
    assert missing.value.command == command("admin:5")


@pytest.mark.parametrize(
    ("gradient", "spread", "expected"),
    [(3.0, 0.1, "reproduced"), (0.1, 0.1, "contradicted"), (1.2, 0.1, "not reproduced"), (3.0, 3.0, "inconclusive")],
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
    assert (finding.verdict, finding.command) == ("not testable", command("admin:5"))
