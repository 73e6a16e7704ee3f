"""Figures as files: sizes, embedded fonts, exactly what is drawn in the CSV, and looks that grey print keeps apart."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from pages import a_table
from PIL import Image
from rest_slow import rest_slow

from stabilitylab.reports import paper, style
from stabilitylab.reports.base import ABSENT, NONFINITE, ZERO, Map, Panel, Picture, Reference, Series, Spread
from stabilitylab.reports.files import PAGE, paths


def a_picture() -> Picture:
    lines = [
        Series("DeepNorm", [1, 2, 3], [1.0, 0.1, 0.01], [0.9, 0.09, 0.009], [1.1, 0.2, 0.02], arch="deepnorm", seeds=3),
        Series("BranchNorm T=1", [1, 2, 3], [2.0, 2.0, 2.0], arch="branchnorm T=1"),
        Series("diverged", [2], [1.0], arch="postln", kind="crosses"),
        Series("loss", [1, 2, 3], [7.0, 6.0, 5.0], right=True, dash="dotted", arch="deepnorm"),
    ]
    z = np.array([[1e-12, 0.0, 1.0], [np.nan, np.nan, 10.0]])
    finding = np.array([[0, ZERO, 0], [ABSENT, NONFINITE, 0]])
    return Picture(
        [
            Panel("gradient norm", "layer", "L2 norm", lines, [Reference(0.5, "limit")], log_y=True, right="nats"),
            Panel("by step", "step", "layer", map=Map([0, 1, 5], [1, 2], z, finding, "L2 norm")),
        ],
        "something was found",
    )


@pytest.mark.slow
def test_files_have_the_widths_of_a_paper(tmp_path: Path) -> None:
    files = paper.write(a_picture(), tmp_path, "branchnorm-8")
    kinds = {f"{kind}{suffix}" for kind in ("png", "svg", "pdf") for suffix in ("", "-column")}
    assert files.keys() == kinds | {"csv", "caption.txt", "tex"}
    for key, inches in (("png", 6.75), ("png-column", 3.25)):
        with Image.open(files[key]) as image:
            assert image.width == pytest.approx(inches * 300, abs=2)
            assert image.info["dpi"][0] == pytest.approx(300, abs=1)
    points = re.search(rb"/MediaBox \[ 0 0 ([\d.]+)", files["pdf"].read_bytes())
    assert points is not None
    assert float(points[1]) == pytest.approx(6.75 * 72, abs=1)


def test_only_what_fits_a_page_is_printed_at_column_width(tmp_path: Path) -> None:
    panel = a_picture().panels[0]
    for panels, narrow in ((4, True), (5, False)):
        files = paths(tmp_path, "x", Picture([panel] * panels, ""))
        assert [f"{kind}-column" in files for kind in ("png", "svg", "pdf")] == [narrow] * 3
        assert {"png", "svg", "pdf"} <= files.keys()
    written = paper.write(Picture([panel] * 5, ""), tmp_path, "x")
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in written.values()}


def test_fonts_are_embedded_and_text_stays_text(tmp_path: Path) -> None:
    files = paper.write(a_picture(), tmp_path, "x")
    assert b"/FontFile2" in files["pdf"].read_bytes()
    assert b"/Type3" not in files["pdf"].read_bytes()
    assert "gradient norm" in files["svg"].read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_csv_is_what_is_drawn(tmp_path: Path) -> None:
    picture = a_picture()
    data = pd.read_csv(paper.write(picture, tmp_path, "x")["csv"], keep_default_na=False, na_values=[""])
    deepnorm = data[data["series"] == "DeepNorm"]
    assert deepnorm["y"].tolist() == [1.0, 0.1, 0.01]
    assert deepnorm["low"].tolist() == [0.9, 0.09, 0.009]
    assert set(deepnorm["seeds"]) == {3}
    assert data.loc[data["series"] == "diverged", "finding"].tolist() == ["crosses"]
    assert data.loc[data["series"] == "loss", "axis"].unique().tolist() == ["nats"]
    cells = data[data["panel"] == "by step"]
    assert cells["finding"].fillna("").tolist() == ["", "exactly 0", "", "no gradient", "not finite", ""]
    assert cells["x"].tolist() == [0, 1, 5, 0, 1, 5]
    assert data.loc[data["series"] == "limit", "y"].tolist() == [0.5]


@pytest.mark.slow
def test_equal_pictures_are_equal_files(tmp_path: Path) -> None:
    first, second = (paper.write(a_picture(), tmp_path / name, "x") for name in ("a", "b"))
    for kind, path in first.items():
        assert path.read_bytes() == second[kind].read_bytes(), kind


def test_zero_absent_and_not_finite_look_unlike_any_number(tmp_path: Path) -> None:
    drawn = paper.draw(a_picture(), 6.75)
    flat = [mesh for axes in drawn.axes for mesh in axes.collections if mesh.get_array() is not None]
    colours = {tuple(np.round(mesh.to_rgba(1.0)[:3], 3)) for mesh in flat[1:]}
    special = {paper.SPECIAL[finding] for finding in (ZERO, ABSENT, NONFINITE)}
    assert {tuple(np.round(to_rgb(colour), 3)) for colour in special} <= colours
    texts = {text.get_text() for text in drawn.legends[0].get_texts()}
    assert {"exactly 0", "no gradient", "not finite"} <= texts


def test_a_table_has_names_text_and_its_first_row_on_top(tmp_path: Path) -> None:
    picture = Picture([a_table()], "")
    drawn = paper.draw(picture, 6.75)
    axes = drawn.axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["Post-LN", "DeepNorm", "ReZero"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["6L", "18L"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
    printed = {text.get_text(): text for text in axes.texts}
    assert printed.keys() == {"-1.00", "stuck", "-1.20", "-0.90", "diverged"}
    colours = [printed[key].get_color() for key in ("-1.20", "-0.90", "stuck", "diverged")]
    assert [sum(to_rgb(colour)) > 1.5 for colour in colours] == [True, False, False, True]  # light on dark
    assert {text.get_text() for text in drawn.legends[0].get_texts()} == {"diverged", "stuck"}
    data = pd.read_csv(paper.write(picture, tmp_path, "x")["csv"])
    assert data["series"].tolist()[:2] == ["Post-LN, 6L", "Post-LN, 18L"]
    assert data["finding"].fillna("").tolist() == ["", "stuck", "", "", "", "diverged"]


def test_a_table_of_many_rows_is_taller() -> None:
    rows = 30
    names = [f"r{i}" for i in range(rows)]
    one = Map([0], range(rows), np.ones((rows, 1)), np.zeros((rows, 1)), "u", y_names=names)
    table, plain = Panel("t", "x", "y", map=one), a_picture().panels[1]
    assert paper.draw(Picture([table], ""), 3.25).get_figheight() >= rows * paper.ROW
    assert paper.draw(Picture([plain], ""), 3.25).get_figheight() < 3


@pytest.mark.parametrize(("rates", "turned"), [([0.001, 0.01, 0.1], 0), ([0.002 * 2 ** (n / 2) for n in range(7)], 90)])
def test_names_of_columns_do_not_overlap(rates: list[float], turned: int) -> None:
    names, cells = [f"{rate:.3g}" for rate in rates], np.ones((2, len(rates)))
    one = Map(
        range(len(rates)),
        range(2),
        cells,
        np.zeros(cells.shape),
        "u",
        x_names=names,
        y_names=["a", "KEEL"],
    )
    drawn = paper.draw(Picture([Panel(f"panel {n}", "rate", "", map=one) for n in range(2)], "", columns=2), 6.75)
    drawn.draw_without_rendering()
    labels = drawn.axes[0].get_xticklabels()
    boxes = [label.get_window_extent() for label in labels]
    assert [label.get_rotation() for label in labels] == [turned] * len(rates)
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_archs_differ_in_colour_and_in_marker_and_in_grey() -> None:
    looks = [style.style(arch) for arch in ("postln", "postln-init", "preln", "deepnorm", "branchnorm", "admin")]
    assert len({look.colour for look in looks}) == len({look.marker for look in looks}) == len(looks)
    grey = sorted(float(np.dot(to_rgb(look.colour), (0.299, 0.587, 0.114))) for look in looks)
    assert grey[-1] - grey[0] > 0.25  # markers carry the rest


def test_few_seeds_are_hollow_and_a_control_is_pale() -> None:
    lines = [Series(arch, [6, 18], [1.0, 2.0], arch=arch, seeds=[6, 2]) for arch in ("branchnorm", "branchnorm T=1")]
    axes = paper.draw(Picture([Panel("", "x", "y", lines)], ""), 3.25).axes[0]
    faces: dict[int, set[object]] = {6: set(), 18: set()}
    for line in axes.lines:
        if line.get_marker() == style.style("branchnorm").marker:
            for x in line.get_xdata():  # type: ignore[union-attr]
                faces[x].add(line.get_markerfacecolor())
    assert faces[6] == {style.style(line.arch).face for line in lines}
    assert faces[18] == {"white"}


def test_no_two_architectures_look_the_same() -> None:
    looks = style.looks()
    assert len({*looks.values()}) == len(looks)
    assert all(style.style(arch).face == style.style(arch).colour for arch in looks)


def test_a_control_keeps_its_archs_colour_but_not_its_look() -> None:
    own, control = style.style("branchnorm"), style.style("branchnorm T=1")
    assert control.colour == own.colour
    assert control.dash != own.dash
    assert control.face not in (own.face, "#ffffff")
    full, pale = (np.array(to_rgb(look.face)) for look in (own, control))
    assert pale == pytest.approx(full + style.PALER * (1 - full), abs=1 / 255)
    assert style.style("postln-init").colour != style.style("postln+beta").colour == style.style("postln").colour
    assert style.title("branchnorm T=1") == "BranchNorm T=1"
    own = style.style("somebody's own")
    assert (own.colour, own.marker) == style.SPARE[0]  # in every process, whatever its hashes
    assert (style.style("somebody's owo").colour, own.dash) == (style.SPARE[1][0], "solid")


def test_a_spread_is_the_mean_and_the_range_over_seeds() -> None:
    spread = Spread(log=True)
    for y in ([1.0, 4.0], [100.0, 4.0]):
        spread.add([0, 5], y)
    line = spread.series("x")
    assert list(line.y) == pytest.approx([10.0, 4.0])
    assert (line.low, line.high, line.seeds) == ([1.0, 4.0], [100.0, 4.0], 2)
    assert Spread(points={0.0: [2.0]}).series("x").low is None


@pytest.mark.slow
def test_files_are_those_that_savefig_writes(tmp_path: Path) -> None:
    """A figure is printed without a second drawing beforehand, and each format as if it were the only one."""
    z = np.linspace(1.0, 2.0, 600).reshape(20, 30)
    heat = Map(list(range(30)), list(range(20)), z, np.zeros(z.shape, np.int8), "u", log=False)
    lines = Panel("lines", "x", "y", [Series("Post-LN", [1, 2, 3], [1.0, 3.0, 2.0], arch="postln")], log_y=True)
    picture = Picture([lines, Panel("map", "step", "layer", map=heat)], "found")
    files = paper.write(picture, tmp_path, "own")
    dateless = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context():
        style.use_print_style()
        drawn = paper.draw(picture, PAGE)
        drawn.draw_without_rendering()
        drawn.set_layout_engine("none")
        for kind in paper.KINDS:
            saved = tmp_path / f"saved.{kind}"
            drawn.savefig(saved, format=kind, metadata=dateless[kind])
            assert files[kind].read_bytes() == saved.read_bytes(), f"the {kind} differs from what savefig writes"


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("place", rest_slow([1.0, 5.0, 9.5, 10.0], [5.0, 10.0]))
def test_the_words_at_a_vertical_line_stay_within_the_axes(log: bool, place: float) -> None:
    line = Series("loss", [1.0, 10.0], [1.0, 2.0], colour="#222222")
    panel = Panel("A panel", "x", "y", [line], [Reference(place, "best = largest safe", vertical=True)], log_x=log)
    figure = paper.draw(Picture([panel], "A finding."), paper.COLUMN)
    axes = figure.axes[0]
    figure.canvas.draw()
    [words] = [text for text in axes.texts if text.get_text() == "best = largest safe"]
    box, inside = words.get_window_extent(), axes.get_window_extent()
    assert inside.x0 - 1 <= box.x0
    assert box.x1 <= inside.x1 + 1


@pytest.mark.parametrize(("y", "height"), [([1, 1, 1], 1.0), ([1, 2, 3], 0.0), ([3, 2, 1], 1.0)])
def test_words_beside_a_vertical_line_leave_the_curve_free(y: list[float], height: float) -> None:
    line = Series("loss", [0, 1, 2], y, colour="#222222", dash="solid", marker="none")
    rival = Series("rival", [0, 0.4], [3, 3], colour="#222222", dash="solid", marker="none")  # on the left
    panel = Panel("a", "x", "y", [line, rival], [Reference(2.1, "not finite", vertical=True)], limits=(0.8, 3.1))
    (words,) = [text for text in paper.draw(Picture([panel], ""), 3.2).axes[0].texts if text.get_text() == "not finite"]
    assert words.xy[1] == height
