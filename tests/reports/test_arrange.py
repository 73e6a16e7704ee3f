"""What panels share, what stands beside controls, captions, and looks that grey print tells apart."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from stabilitylab.reports import paper, style
from stabilitylab.reports.arrange import alike, apart, distinct, signs, smoothed
from stabilitylab.reports.base import FIGURES, Map, Panel, Picture, Reference, Series
from stabilitylab.reports.caption import caption, small_print, tex
from stabilitylab.reports.heatmaps import scale
from stabilitylab.reports.lines import MOVED, PATTERNS, decades, look, plain, spread_out
from stabilitylab.reports.page import screen

TOLD = 0.1  # difference in luminance that grey print shows


def a_line(arch: str, y: Sequence[float] = (1.0, 2.0), **more) -> Series:
    return Series(style.title(arch), [1, 2][: len(y)], y, arch=arch, seeds=3, **more)


def luminance(colour: str) -> float:
    return float(np.dot(to_rgb(colour), (0.299, 0.587, 0.114)))


def alike_in_grey(one: Series, other: Series) -> bool:
    """Whether nothing but the hue tells them apart."""
    first, second = look(one), look(other)
    near = all(abs(luminance(first[key]) - luminance(second[key])) < TOLD for key in ("colour", "shown"))
    return near and all(first[key] == second[key] for key in ("dash", "marker"))


def test_controls_stand_in_a_picture_of_their_own() -> None:
    lines = [a_line("deepnorm"), a_line("branchnorm"), a_line("branchnorm T=1")]
    zero = Series("limit", [1], [1.0])
    panels = [Panel("a", "x", "y", [*lines, zero]), Panel("b", "x", "y", lines[:2]), Panel("c", "x", "y", lines[2:])]
    main, controls = apart(panels, ("deepnorm", "branchnorm"))
    assert [[one.label for one in panel.series] for panel in main] == [
        ["DeepNorm", "BranchNorm", "limit"], ["DeepNorm", "BranchNorm"], ["BranchNorm T=1"]
    ]  # fmt: skip
    assert [panel.title for panel in controls] == ["a"]
    assert controls[0] is panels[0]
    assert apart(panels, ("admin",)) == (panels, [])  # a user's runs: all of them are what there is


def test_the_page_shows_controls_too() -> None:
    picture = Picture(
        [Panel("a", "x", "y", [a_line("deepnorm")])], "", controls=[Panel("b", "x", "y", [a_line("admin")])]
    )
    assert [panel.title for panel in picture.whole.panels] == ["a", "With controls: b"]
    assert replace(picture, controls=()).whole.panels is picture.panels
    assert set(picture.frame()["panel"]) == {"a"}


def test_panels_of_one_axis_share_its_limits_on_paper_and_on_the_screen() -> None:
    one = Panel("a", "x", "loss", [a_line("deepnorm", (1.0, 3.0))])
    two = Panel("b", "x", "loss", [a_line("deepnorm", (5.0, 2.0))], [Reference(6.0, "baseline")])
    other = Panel("c", "x", "share", [a_line("deepnorm", (0.1, 0.2))])
    first, second, third = alike([one, two, other])
    assert first.limits == second.limits == pytest.approx((0.75, 6.25))
    assert third.limits is None
    drawn = paper.draw(Picture([first, second, third], ""), 6.75)
    assert drawn.axes[0].get_ylim() == drawn.axes[1].get_ylim() == pytest.approx((0.75, 6.25))
    plots = screen.plots(Picture([first, third], ""))
    assert plots[0]["y"]["limits"] == [0.75, 6.25]
    assert "limits" not in plots[1]["y"]


def test_limits_of_a_logarithmic_axis_leave_out_what_it_cannot_show() -> None:
    one = Panel("a", "x", "g", [a_line("deepnorm", (0.0, 1.0))], log_y=True)
    two = Panel("b", "x", "g", [a_line("deepnorm", (100.0, np.nan))], log_y=True)
    low, high = alike([one, two])[0].limits or (0, 0)
    assert 0.5 < low < 1
    assert 100 < high < 200
    assert alike([replace(one, series=[a_line("deepnorm", (2.0, 2.0))])] * 2)[0].limits is None  # nothing to span


def test_a_smoothed_line_keeps_its_mean_and_the_raw_one_behind_it() -> None:
    line = Series("x", [*range(9)], [0.0, 3.0] * 4 + [0.0], arch="deepnorm", seeds=3)
    raw, mean = smoothed(line, 3)
    assert (raw.faint, raw.y) == (True, line.y)
    assert mean.y[1:-1] == pytest.approx([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0])
    assert mean.y[0] == pytest.approx(1.5)  # of two
    assert smoothed(Series("x", [0], [1.0]), 3) == [Series("x", [0], [1.0])]
    drawn = paper.draw(Picture([Panel("", "x", "y", [raw, mean])], ""), 6.75)
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["x"]
    assert sorted(line.get_alpha() or 1 for line in drawn.axes[0].lines if len(line.get_xdata()) == 9) == [0.3, 1]
    assert screen.plots(Picture([Panel("", "x", "y", [raw, mean])], ""))[0]["traces"][0]["faint"]


def test_lines_of_architectures_of_one_colour_get_their_markers_where_they_had_none() -> None:
    labels = ("postln llama prores", "gpas llama", "mhc llama", "keel llama")
    x, y = [*range(20)], [1.0] * 20
    lines = [line for label in labels for line in smoothed(Series(label, x, y, arch=label), 15)]
    before = [one for one in lines if not one.faint]
    assert {look(one)["colour"] for one in before[:3]} == {"#D55E00"}, "these three have one colour"
    assert look(before[0])["dash"] == look(before[2])["dash"], "and two of them one dash"
    found = distinct(Picture([Panel("a", "x", "y", lines)], "")).panels[0].series
    full = [one for one in found if not one.faint]
    assert [look(one)["marker"] for one in full[:3]] == ["o", "D", "P"]
    assert full[3] is before[3], "a line that looks like no other stays"
    assert [one for one in found if one.faint] == [one for one in lines if one.faint]
    drawn = paper.draw(Picture([Panel("a", "x", "y", found)], ""), 6.75).axes[0]
    marked = [line for line in drawn.get_lines() if line.get_marker() not in ("None", "none", "", None)]
    assert {len(line.get_xdata()) for line in marked} == {0, 10}, "every second point has a marker"


def test_lines_of_one_colour_dash_and_marker_get_dashes_of_their_own() -> None:
    labels = ["postln llama", "postln llama qk-norm", "postln llama prores prores-T=2", "postln gpt2", "keel llama"]
    panels = [Panel(name, "x", "y", [a_line(label, marker="none") for label in labels]) for name in "ab"]
    found = distinct(Picture(panels, "", controls=[Panel("c", "x", "y", [a_line(label) for label in labels])]))
    looks = [[(look(one)["colour"], look(one)["dash"]) for one in panel.series] for panel in found.whole.panels]
    assert len({*looks[0]}) == len(labels)
    assert looks[0] == looks[1] == looks[2], "a label has one look in all panels"


def test_a_dash_with_a_meaning_stays() -> None:
    lines = [a_line(label, dash="dashed", detail="encoder") for label in ("branchnorm", "branchnorm T=1")]
    picture = Picture([Panel("a", "x", "y", lines)], "")
    assert distinct(picture).panels == picture.panels


def test_committed_looks_stay() -> None:
    """The architectures of the papers, and the controls of the sweeps, differ without help."""
    lines = [a_line(label) for label in (*style.CONTROLS, "postln", "preln", "deepnorm", "branchnorm", "admin")]
    picture = Picture([Panel("a", "x", "y", lines)], "")
    assert distinct(picture).panels == picture.panels


def test_a_map_around_a_centre_is_white_there_on_paper_and_on_the_screen() -> None:
    heat = Map([0, 1], [0], np.array([[-1.0, 3.0]]), np.zeros((1, 2)), "u", log=False, x_names=["a", "b"],
               y_names=["r"], centre=0.0)  # fmt: skip
    norm = scale(heat)
    assert (norm.vmin, norm(0.0), norm.vmax) == (-3, 0.5, 3)
    assert screen.plots(Picture([Panel("", "x", "y", map=heat)], ""))[0]["map"]["centre"] == 0
    assert scale(replace(heat, centre=None)).vmin == -1


def test_maps_with_one_scale_have_one_colour_bar() -> None:
    def panel(colours: tuple[float, float] | None) -> Panel:
        heat = Map([1, 2], [1, 2], np.eye(2), np.zeros((2, 2)), "u", log=False, colours=colours, square=True)
        return Panel("", "x", "y", map=heat)

    shared = paper.draw(Picture([panel((0.0, 1.0))] * 3, "", columns=3), 6.75)
    assert len(shared.axes) == 3 + 1
    assert shared.axes[0].get_aspect() == 1
    assert len(paper.draw(Picture([panel(None)] * 3, "", columns=3), 6.75).axes) == 3 + 3


@pytest.mark.slow
def test_many_panels_fit_a_page() -> None:
    heat = Map([1, 2], [1, 2], np.eye(2), np.zeros((2, 2)), "norm per token and layer", log=False)
    drawn = paper.draw(Picture([Panel(f"a long name {place}", "x", "y", map=heat) for place in range(27)], ""), 6.75)
    assert drawn.get_figheight() <= paper.TALL
    drawn.draw_without_rendering()  # the layout finds room for all
    assert all(axes.get_position().height > 0.03 for axes in drawn.axes)


def test_no_other_line_has_the_colour_of_an_architecture() -> None:
    taken = {colour.lower() for colour, _ in style.looks().values()}
    package = Path(paper.__file__).parent
    named = {
        (path.name, colour)
        for path in [*package.glob("*.py"), *package.glob("figures/*/*.py"), *package.glob("measures/*.py")]
        for colour in re.findall(r'"(#[0-9a-fA-F]{6})"', path.read_text(encoding="utf-8"))
    }
    assert named
    assert not {(name, colour) for name, colour in named if colour.lower() in taken} - {
        ("style.py", colour) for colour, _ in style.SPARE
    }


def _end(text: Any) -> tuple[float, float]:
    return text.xy


def _place(text: Any) -> tuple[float, float]:
    return text.xyann


def test_lines_of_one_label_are_named_with_what_tells_them_apart() -> None:
    lines = [
        replace(a_line("deepnorm", (1.0, float(place))), detail=detail) for place, detail in enumerate(("SGD", "Adam"))
    ]
    lines += [replace(a_line("admin", (1.0, 5.0)), detail="Adam"), replace(lines[0], detail="raw", faint=True)]
    drawn = paper.draw(Picture([Panel("", "x", "y", lines, direct=True)], ""), 6.75)
    assert {text.get_text() for text in drawn.axes[0].texts} == {"DeepNorm, SGD", "DeepNorm, Adam", "Admin"}
    assert not drawn.axes[0].get_legend()


def test_a_panels_key_covers_no_line() -> None:
    dashes = {"solid": "not in a branch", "dashed": "decoder branches", "dotted": "encoder branches"}
    lines = [
        replace(a_line("deepnorm", (level, level)), dash=dash, detail=detail)
        for level, (dash, detail) in enumerate(dashes.items())
    ]
    drawn = paper.draw(Picture([Panel("Title", "x", "y", lines)] * 3, "", columns=3), 6.75)
    drawn.draw_without_rendering()
    for axes in drawn.axes:
        key, title = axes.get_legend().get_window_extent(), axes.title.get_window_extent()
        assert key.y0 >= axes.get_window_extent().y1
        assert title.y0 >= key.y1 - 1


def test_ticks_stay_apart_beside_names_and_one_of_equal_y_labels_is_written() -> None:
    depths = [3, 6, 12, 18, 25, 50, 100]
    line = Series("all parameters: N^0.56", depths, depths, colour="#222222", seeds=3)
    own = Panel("", "layers", "norm", [line], log_x=True, log_y=True, ticks=depths, direct=True)
    drawn = paper.draw(Picture([own] * 3, "", columns=3), 6.75)
    drawn.draw_without_rendering()
    assert [axes.get_ylabel() for axes in drawn.axes] == ["norm", "", ""]
    assert drawn.axes[0].texts[0].get_text() == "all parameters:\nN^0.56"
    boxes = [label.get_window_extent() for label in drawn.axes[0].get_xticklabels() if label.get_text()]
    assert len(boxes) > 2
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


@pytest.mark.slow
def test_no_cell_of_lines_is_empty() -> None:
    def widths(count: int, columns: int, one: Panel) -> list[float]:
        drawn = paper.draw(Picture([one] * count, "", columns=columns), 6.75)
        drawn.draw_without_rendering()
        return [round(axes.get_position().width, 1) for axes in drawn.axes[:count]]

    own = Panel("", "x", "y", [a_line("deepnorm", (1.0, 2.0))])
    above, below = widths(5, 3, own)[:3], widths(5, 3, own)[3:]
    assert len({*above}) == len({*below}) == 1
    assert below[0] > above[0]
    assert len({*widths(4, 3, own)}) == 1  # one of three would be a line across the page
    heat = Panel("", "x", "y", map=Map([1, 2], [1, 2], np.eye(2), np.zeros((2, 2)), "u", log=False))
    assert len({*widths(5, 3, heat)}) == 1


def test_lines_are_named_at_their_ends_and_no_name_lies_on_another() -> None:
    lines = [a_line(arch, (1.0, 2.0 + place / 1000)) for place, arch in enumerate(("deepnorm", "branchnorm", "admin"))]
    drawn = paper.draw(Picture([Panel("", "x", "y", lines, direct=True)], ""), 6.75)
    assert not drawn.legends
    named = {text.get_text(): text for text in drawn.axes[0].texts}
    assert named.keys() == {"DeepNorm", "BranchNorm", "Admin"}
    assert [named[one.label].get_color() for one in lines] == [style.style(one.arch).colour for one in lines]
    ends, heights = (sorted(place(text)[1] for text in named.values()) for place in (_end, _place))
    assert min(np.diff(heights)) > 0.07
    assert max(ends) <= 1
    moved = [abs(_place(text)[1] - _end(text)[1]) > MOVED for text in named.values()]
    assert [text.arrow_patch is not None for text in named.values()] == moved  # a line leads to those
    assert sorted(moved) == [False, True, True]
    assert spread_out([0.5, 0.5, 0.1], [0.1] * 3) == pytest.approx([0.45, 0.55, 0.1])
    assert spread_out([0.5, 0.5], [0.2, 0.1]) == pytest.approx([0.45, 0.6])  # 0.35 to 0.55, and 0.55 to 0.65
    assert spread_out([0.0, 1.0, 0.99], [0.1] * 3) == pytest.approx([0.05, 0.95, 0.85])  # inside of the axes
    assert spread_out([0.5] * 3, [0.5] * 3) == pytest.approx([0.0, 0.5, 1.0])  # too many: about the middle
    assert spread_out([], []) == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.6, "0.6"),
        (200.0, "200"),
        (0.001, "0.001"),
        (1e-6, "$10^{-6}$"),
        (0, "0"),
        (2e7, r"$2{\times}10^{7}$"),
        (1.85e6, r"$1.85{\times}10^{6}$"),
        (1.9e6, r"$1.9{\times}10^{6}$"),
    ],
)
def test_ticks_are_plain(value: float, words: str) -> None:
    assert plain(value) == words


def test_a_logarithmic_axis_within_a_decade_has_ticks() -> None:
    for low, high in ((0.5, 0.9), (0.2, 5.0), (1e-8, 1.0)):
        shown = [at for at in decades(low, high).tick_values(low, high) if low <= at <= high]
        assert 2 <= len(shown) <= 8, (low, high)


def test_one_point_at_one_tick_has_room_on_a_logarithmic_axis() -> None:
    point = Series("x", [6], [1.6], [1.4], [1.8], arch="postln", seeds=3)
    axes = paper.draw(Picture([Panel("", "x", "y", [point], log_x=True, ticks=[6])], ""), 3.25).axes[0]
    low, high = axes.get_xlim()
    assert low < 5 < 7 < high


def test_only_the_signs_of_a_map_are_explained() -> None:
    text = np.array([["(-0.42)", "stuck"], ["+0.10", ""]], dtype=object)
    heat = Map([1, 2], [1, 2], np.zeros((2, 2)), np.zeros((2, 2), np.int8), "nats", log=False, text=text)
    bare = Map([1], [1], np.zeros((1, 1)), np.zeros((1, 1), np.int8), "nats", log=False)
    panels = [Panel("", "x", "y", map=heat), Panel("", "x", "y", map=bare), Panel("", "x", "y", [a_line("admin")])]
    assert signs(panels, {"(": "open", "/": "counts"}) == ["open"]
    assert signs(panels[1:], {"(": "open", "/": "counts"}) == []


@pytest.mark.parametrize(
    ("ticks", "shown"),
    [([6, 18, 50, 100], ["6", "18", "50", "100"]), ([1, 6, 18, 20, 22, 100], ["1", "6", "18", "", "", "100"])],
)
def test_a_tick_without_room_is_a_mark_without_a_word(ticks: list[float], shown: list[str]) -> None:
    line = Series("x", ticks, [1.0] * len(ticks), arch="postln", seeds=3)
    axes = paper.draw(Picture([Panel("", "x", "y", [line], log_x=True, ticks=ticks)], ""), 3.25).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == shown
    assert [*axes.get_xticks()] == ticks


@pytest.mark.slow
def test_a_caption_says_what_is_drawn(tmp_path: Path) -> None:
    low, high = [0.9, 0.9], [1.1, 1.1]
    lines = [a_line("deepnorm", low=low, high=high), replace(a_line("admin"), seeds=2)]
    picture = Picture([Panel("Model update", "x", "‖ΔF‖", lines)], "5 % more & more.", ["A note."],
                      provenance="6L-6L, 64 wide", band="95 % interval")  # fmt: skip
    assert small_print(picture) == "6L-6L, 64 wide · n = 2 to 3 · hollow: n < 3 · bands: 95 % interval"
    said = caption(picture, "Updates", "Somebody, Figure 1")
    assert said.startswith("Updates. Model update. 5 % more & more. A note. 6L-6L")
    assert said.endswith("After Somebody, Figure 1.")
    written = tex(picture, "some_1", "‖ΔF‖ over N_2")
    assert r"$\Vert$$\Delta$F$\Vert$ over N\_2" in written
    assert r"5 \% more \& more" in written
    assert r"\includegraphics[width=\linewidth]{some_1.pdf}" in written
    assert written.isascii() or "·" not in written
    files = paper.write(replace(picture, controls=picture.panels), tmp_path, "some-1", "Updates")
    assert files["caption.txt"].name == "some-1.caption.txt"
    assert files["caption.txt"].read_text(encoding="utf-8").startswith("Updates. ")
    assert files["controls-pdf"].name == "some-1-controls.pdf"
    assert all(path.exists() for path in files.values())
    assert len(pd.read_csv(files["controls-csv"])) == 4


def test_the_archs_that_papers_compare_differ_in_grey() -> None:
    archs = ("postln", "postln-init", "preln", "deepnorm", "branchnorm", "admin", "branchnorm T=1", "postln gain=1")
    for one, other in itertools.combinations(map(a_line, archs), 2):
        assert not alike_in_grey(one, other), (one.label, other.label)


def test_what_differs_in_hue_alone_is_found() -> None:
    one, other = (Series(c, [1], [1.0], colour=c, marker="o", dash="solid") for c in ("#0072B2", "#7b5a36"))
    assert alike_in_grey(one, other)


def test_palettes_of_parts_and_amounts_are_nobodys_and_ordered_in_grey() -> None:
    taken = {colour.lower() for colour, _ in style.looks().values()}
    for palette in (style.PARTS, style.AMOUNTS):
        assert not taken & {colour.lower() for colour in palette}
        steps = np.diff([luminance(colour) for colour in palette])
        assert (np.abs(steps) > 0.06).all()
        assert len({*np.sign(steps)}) == 1
    assert style.of_amounts(2) == [style.AMOUNTS[0], style.AMOUNTS[-1]]
    assert style.of_amounts(1) == [style.AMOUNTS[-1]]
    assert len({*style.of_amounts(5)}) == 5


def test_the_palette_of_parts_is_seaborns() -> None:
    import seaborn

    made = seaborn.cubehelix_palette(6, start=2.6, rot=0.9, dark=0.12, light=0.64, hue=1.2, reverse=True).as_hex()
    assert sorted(made, key=luminance) == [*style.PARTS]


def test_a_legend_has_the_marker_where_any_panel_shows_it() -> None:
    bare, marked = (Panel("", "x", "y", [a_line("admin", marker=marker)]) for marker in ("none", ""))
    (entry,) = paper.draw(Picture([bare, marked], ""), 6.75).legends[0].legend_handles
    assert entry.get_marker() == style.style("admin").marker


def test_a_legend_has_the_dash_of_its_lines_unless_they_have_several() -> None:
    lines = [a_line("admin", dash="dashed", detail="mean of 15 updates", marker="none"), a_line("deepnorm"),
             a_line("deepnorm", dash="dotted", detail="encoder")]  # fmt: skip
    legend = paper.draw(Picture([Panel("", "x", "y", lines)], ""), 6.75).legends[0]
    assert [entry.get_linestyle() for entry in legend.legend_handles] == ["--", "-"]


def test_every_dash_has_a_pattern() -> None:
    assert PATTERNS.keys() == {*style.DASHES}
    assert FIGURES
