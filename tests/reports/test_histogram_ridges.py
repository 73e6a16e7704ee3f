"""Histograms as ridges: the bins of a made-up table, the choice of places, and what the notes say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from test_page import Document

from stabilitylab.errors import UsageError
from stabilitylab.histograms import COLUMNS
from stabilitylab.reports import MissingRuns
from stabilitylab.reports.collection import Record, Runs
from stabilitylab.reports.diagnosis import diagnose
from stabilitylab.reports.figures.histograms.ridges import HistogramRidges
from stabilitylab.reports.measures.histograms import HIGHEST, RIDGES, distances, ridges
from stabilitylab.reports.page import live
from stabilitylab.reports.page.sections import PageSection
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import Run, RunWriter
from stabilitylab.terminal.summary import summary

SITES = ("layers.0.weight", "layers.1.weight", "layers.1.bias")


def bins(**counts: float) -> np.ndarray:
    """``p3=5``: five entries of +2^3, ``m0``: of -2^0, ``zero``, ``nonfinite``."""
    found = np.zeros(len(COLUMNS))
    for name, count in counts.items():
        sign = {"p": "+2^", "m": "-2^"}.get(name[0])
        found[COLUMNS.index(name if name in COLUMNS else f"{sign}{name[1:].replace('_', '-')}")] = count
    return found


def recorded(
    out: Path, rows: Sequence[Sequence[np.ndarray]], table: str = "histograms", steps: Sequence[int] = (), **facts: str
) -> Record:
    places = tuple(Row(name, "layers", int(name[7]) + 1, name[9:]) for name in SITES)
    with RunWriter.create(out, {"kind": "watched", "label": "Mine", "config": {}, **facts}) as writer:
        writer.open([Table(table, COLUMNS, places, "entries", "counts", main="zero", log=False)])
        for step, row in zip(steps or range(len(rows)), rows, strict=True):
            writer.append(step, {"loss": 1.0}, {table: Cells(np.array(row), np.zeros(len(places), bool))})
        writer.set_status("finished", len(rows))
    (record,) = Runs.load(out.parent).where(lambda one: one.name == out.name)
    return record


def test_how_far_a_histogram_moved_by_hand() -> None:
    before = np.array([bins(p0=4), bins(p0=2, m0=2), bins(zero=4), bins(p0=4), bins(p_3=1, p0=3)])
    after = np.array([bins(p3=4), bins(p0=4), bins(p5=4), bins(p0=3, nonfinite=1), bins(p0=4)])
    # three bins up; a sign is no size; exact zeros have none; a quarter of all entries is lost; a quarter, three bins
    assert distances(before, after) == pytest.approx([3, 0, 0, 0.25 * 82, 0.75])


def test_a_ridge_is_the_share_of_each_bin_above_its_step(tmp_path: Path) -> None:
    rows = [[bins(p0=6, m0=2, zero=2), bins(p1=10), bins(zero=1)], [bins(p2=5, m0=5), bins(p1=10), bins(zero=1)]]
    record = recorded(tmp_path / "a", rows, steps=(0, 100))
    (one,) = ridges(record, "histograms", most=1)
    assert one.what == "weights of layers.0.weight"
    assert one.distance == pytest.approx(1.0)  # half of the entries by two
    lines = {(line.label, line.y[0]): line for line in one.panel.series}
    assert set(lines) == {("positive", 0.0), ("negative", 0.0), ("positive", 100.0), ("negative", 100.0)}
    middles = np.exp2(np.array([-1, 0, 1, 2, 3]) + 0.5)
    unit = 100 * HIGHEST / 0.6  # the highest bin of the panel, 6 of 10
    assert lines["positive", 0.0].x == pytest.approx(middles)
    assert lines["positive", 0.0].y == pytest.approx([0, 0.6 * unit, 0, 0, 0])
    assert lines["negative", 100.0].y == pytest.approx(100 + unit * np.array([0, 0.5, 0, 0, 0]))
    assert list(one.notes("mine")) == [
        "Mine: weights of layers.0.weight: a rise as high as the space between two ridges is 43 % of its entries. Not "
        "drawn: at step 0 20 % are exact zeros."
    ]


def test_the_places_that_moved_most_or_were_chosen_are_drawn(tmp_path: Path) -> None:
    rows = [
        [bins(p0=8), bins(p0=8), bins(p_20=2)],
        [bins(p1=8), bins(p5=8), bins(p9=2)],
    ]
    record = recorded(tmp_path / "a", rows)
    assert [one.what for one in ridges(record, "histograms", most=2)] == [
        "weights of layers.1.weight", "weights of layers.0.weight",  # the bias is small: its bins say little
    ]  # fmt: skip
    assert [one.what for one in ridges(record, "histograms", most=5, chosen="bias|layers.0")] == [
        "weights of layers.0.weight", "weights of layers.1.bias",
    ]  # fmt: skip
    assert ridges(record, "histograms", most=5, chosen="embed") == []
    assert ridges(record, "histograms_update", most=5) == []
    with pytest.raises(UsageError, match="is no regular expression"):
        ridges(record, "histograms", most=1, chosen="(")
    with pytest.raises(UsageError, match="no place with a histogram in a matches 'embed'"):
        diagnose(record, places="embed")
    titles = [panel.title for panel in diagnose(record, places="bias").panels]
    assert titles == ["Loss", "weights of layers.1.bias"]


def test_a_long_run_is_drawn_at_evenly_spaced_steps_and_what_broke_is_crossed(tmp_path: Path) -> None:
    steps = [*range(20), *range(20, 221, 5)]
    rows = [[bins(p0=8 - (step > 200), nonfinite=step > 200), bins(p0=1), bins(zero=1)] for step in steps]
    (one, *_) = ridges(recorded(tmp_path / "a", rows, "histograms_gradient", steps), "histograms_gradient", most=3)
    drawn = sorted({line.y[0] for line in one.panel.series if line.label == "positive"})
    assert len(drawn) == RIDGES
    assert np.diff(drawn).max() < 25
    (cross,) = [line for line in one.panel.series if line.kind == "crosses"]
    assert list(cross.y) == [220]
    assert "at step 220 12 % are not finite" in next(iter(one.notes("")))


def test_the_figure_has_a_panel_for_each_table_and_run(tmp_path: Path) -> None:
    with pytest.raises(MissingRuns, match="no run has recorded histograms"):
        HistogramRidges().picture(Runs(()))
    for name in "abc":
        recorded(tmp_path / "runs" / name, [[bins(p0=8), bins(p0=8), bins(p0=2)], [bins(p1=8), bins(p4=8), bins(p0=2)]])
    picture = HistogramRidges().picture(Runs.load(tmp_path / "runs"))
    assert [panel.title for panel in picture.panels] == [f"{name}: weights of layers.1.weight" for name in "ab"]
    assert "weights of layers.1.weight, by 4 powers of two" in picture.finding
    assert "Left out: 1 more run with histograms." in picture.notes
    PageSection("run:a", "a", "", picture, {}, "runs").check()


@pytest.mark.slow
def test_the_command_draws_the_places_that_are_chosen(run, tmp_path: Path) -> None:
    recorded(tmp_path / "runs" / "a", [[bins(p0=8), bins(p0=8), bins(p0=2)], [bins(p1=8), bins(p4=8), bins(p0=2)]])
    code, _, err = run("report", "runs", "--run", "a", "--figure", "histograms:ridges", "--place", "bias", "--quiet")
    assert code == 0, err
    headings = [text for _, text in Document(tmp_path / "report" / "index.html").named("h4")]
    assert any(text.endswith("weights of layers.1.bias") for text in headings)
    assert any(text.endswith("weights of layers.1.weight") for text in headings)
    assert (tmp_path / "report" / "figures" / "histograms-ridges.png").stat().st_size > 0


def test_a_run_without_histograms_says_so_where_places_are_chosen(run, tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a", {"kind": "watched", "label": "Mine", "config": {}}) as writer:
        writer.open([Table("grad_norm", ("value",), (Row("layers.0", "layers", 1, ""),), "L2 norm", "", "norm")])
        for step in range(3):
            writer.append(step, {"loss": 1.0}, {"grad_norm": Cells(np.ones((1, 1)), np.zeros(1, bool))})
        writer.set_status("finished", 3)
    (record,) = Runs.load(tmp_path)
    told = "a has no histograms to draw: record them with --probes default,histograms."
    assert told in diagnose(record, places="lm_head").notes
    assert told not in diagnose(record).notes


@pytest.mark.parametrize("watch", [(), ("--watch",)])
def test_a_bad_expression_ends_the_command_before_a_page_is_written(
    run, tmp_path: Path, watch: tuple[str, ...]
) -> None:
    recorded(tmp_path / "runs" / "a", [[bins(p0=8), bins(p0=8), bins(p0=2)]])
    code, _, err = run("report", "runs", *watch, "--place", "[")
    assert code == 2
    assert err.startswith("stabilitylab: --place '[' is no regular expression (")
    assert not (tmp_path / "report").exists()


def test_the_page_of_a_run_that_goes_on_draws_them_too(tmp_path: Path) -> None:
    recorded(tmp_path / "runs" / "a", [[bins(p0=8), bins(p0=8), bins(p0=2)], [bins(p1=8), bins(p4=8), bins(p0=2)]])
    for places, drawn in (("", "weight"), ("bias", "bias")):
        page, _ = live.write([tmp_path / "runs"], tmp_path / "report", 1.0, seen=live.LastPage(places=places))
        headings = [text for _, text in Document(page).named("h4")]
        assert [text.rpartition(".")[2] for text in headings if "weights of layers.1" in text] == [drawn]


def test_the_table_by_depth_leaves_histograms_out(tmp_path: Path) -> None:
    places = (Row("encoder.layers.0.weight", "encoder", 1, "weight"),)
    config = {"model": {"encoder_layers": 1, "decoder_layers": 0}}
    with RunWriter.create(tmp_path / "run", {"kind": "train", "label": "postln", "config": config}) as writer:
        writer.open([Table(name, COLUMNS, places, "entries", main="zero") for name in ("histograms", "of_mine")])
        cells = Cells(bins(zero=3)[None], np.zeros(1, bool))
        writer.append(0, {"loss": 1.0}, {"histograms": cells, "of_mine": cells})
        writer.set_status("finished", 1)
    assert summary(Run.open(tmp_path / "run"))[1] == [["of_mine", "0", "3.000"]]
