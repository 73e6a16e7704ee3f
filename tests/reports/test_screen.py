"""Pictures as plotly data: valid JSON, no spike lost, findings unlike any number."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from pages import a_table, heat, lines

from stabilitylab.arch_notes import MARKERS
from stabilitylab.reports import paper, style
from stabilitylab.reports.base import ABSENT, DIVERGED, NONFINITE, STUCK, ZERO, Map, Panel, Picture, Series, compared
from stabilitylab.reports.page import screen


def decoded(plot: dict) -> np.ndarray:
    """The codes of an embedded map, by a definition of its own: a running sum of 16-bit differences."""
    data = zlib.decompress(base64.b64decode(plot["map"]["cells"]))
    half = len(data) // 2
    codes, total = [], 0
    for low, high in zip(data[:half], data[half:], strict=True):
        total = (total + low + 256 * high) % 65536
        codes.append(total)
    return np.array(codes).reshape(len(plot["map"]["y"]), len(plot["map"]["x"]))


def only(panel: Panel, columns: int = 600) -> dict:
    (plot,) = screen.plots(Picture([panel], "found"), columns)
    return plot


def test_what_is_not_finite_is_null_and_the_rest_is_valid_json() -> None:
    first, second = json.loads(json.dumps(screen.plots(lines()), allow_nan=False))
    post, branch, loss, _ = first["traces"]
    assert branch["y"] == [1, None, 0.8, None]
    assert (post["low"], post["high"]) == ([5e-5, 5e-4, 5e-3, 0.5], [2e-4, None, 0.1, 2])
    assert (post["seeds"], post["right"], loss["right"]) == (3, False, True)
    assert first["right"] == {"title": "loss [nats]", "log": False}
    assert second["right"] is None
    assert second["x"]["ticks"] == [6, 12]
    assert first["references"] == [
        {"value": 0.1, "label": "limit", "vertical": False},
        {"value": 3, "label": "here", "vertical": True},
    ]


def test_numbers_keep_five_digits_and_whole_ones_all() -> None:
    assert screen.numbers([1.0, 123456789.0, 0.123456, 1.5e-39, math.nan, -math.inf, 1e300]) == [
        1, 123456789, 0.12346, 1.5e-39, None, None, 1e300
    ]  # fmt: skip


def test_looks_are_those_of_paper() -> None:
    own, control = (screen.look(Series("x", [1], [1], arch=arch)) for arch in ("branchnorm", "branchnorm T=1"))
    assert own["colour"] == control["colour"] == style.looks()["branchnorm"][0].lower()
    assert screen.look(Series("x", [1], [1], colour="black"))["colour"] == "#000000"
    assert (own["symbol"], own["dash"], own["face"]) == ("diamond", "solid", own["colour"])
    assert control["face"] == style.paler(own["colour"])
    assert control["dash"] == screen.DASHES[style.style("branchnorm T=1").dash] != "solid"
    assert screen.look(Series("x", [1], [1], colour="#123456", dash="dotted", marker="none")) == {
        "colour": "#123456", "dash": "dot", "symbol": "circle", "face": "#123456", "marked": False
    }  # fmt: skip
    assert {*MARKERS, "none"} == screen.MARKERS.keys()
    drawn = (Path(screen.__file__).parent / "templates" / "parts.html").read_text(encoding="utf-8")
    assert [shape for shape in screen.MARKERS.values() if f'"{shape}": "M' not in drawn] == []
    assert set(style.DASHES) <= screen.DASHES.keys()


def test_a_toggle_stands_for_an_architecture_or_for_a_series() -> None:
    assert screen.key(Series("Post-LN, warm-up 9", [], [], arch="postln")) == "Post-LN"
    assert screen.key(Series("held out", [], [])) == "held out"


def test_a_map_comes_back_to_within_half_a_step_and_findings_exactly() -> None:
    map_ = heat().panels[0].map
    plot = only(heat().panels[0])
    codes, span = decoded(plot), plot["map"]["span"]
    usual = map_.finding == 0
    assert (codes[usual] >= screen.FIRST).all()
    back = plot["map"]["low"] + (codes[usual] - screen.FIRST) / (screen.LEVELS - 1) * span
    assert np.abs(back - np.log10(map_.z[usual])).max() <= span / (screen.LEVELS - 1) / 2 * 1.001
    for kind in (ZERO, ABSENT, NONFINITE):
        assert (codes[map_.finding == kind] == kind).all()
    assert plot["map"]["findings"] == ["exactly 0", "no gradient", "not finite"]
    assert (plot["map"]["log"], plot["map"]["unit"]) == (True, "L2 norm")


def test_a_cell_that_does_not_exist_is_blank_and_no_finding() -> None:
    plot = only(heat(layers=4).panels[1])
    assert (decoded(plot)[np.triu_indices(4, 1)] == screen.BLANK).all()
    assert (decoded(plot)[np.tril_indices(4)] >= screen.FIRST).all()
    assert plot["map"]["findings"] == []


@pytest.mark.parametrize("z", [np.full((2, 3), 5.0), np.full((2, 3), math.nan), np.array([[-1.0, 0.0, 1.0]] * 2)])
def test_maps_of_one_number_or_none_or_negative_ones(z: np.ndarray) -> None:
    codes = decoded(only(Panel("t", "x", "y", map=Map([0, 1, 2], [1, 2], z, np.zeros(z.shape), "u"))))
    assert ((codes >= screen.FIRST) == (np.isfinite(z) & (z > 0))).all()


def test_a_table_keeps_its_names_and_the_text_of_its_cells() -> None:
    plot = only(a_table())
    assert (plot["x"]["names"], plot["x"]["ticks"]) == (["6L", "18L"], [0, 1])
    assert plot["y"]["names"] == ["Post-LN", "DeepNorm", "ReZero"]
    assert plot["map"]["text"] == [["-1.00", "stuck"], ["-1.20", "-0.90"], ["", "diverged"]]
    assert plot["map"]["findings"] == ["diverged", "stuck"]
    assert (decoded(plot) == [[decoded(plot)[0, 0], STUCK], [screen.FIRST, decoded(plot)[1, 1]], [0, DIVERGED]]).all()
    wide = Map(range(9), [0], np.ones((1, 9)), np.zeros((1, 9)), "u", x_names=[f"c{i}" for i in range(9)])
    assert decoded(screen.plots(Picture([Panel("t", "x", "y", map=wide)], ""), columns=4)[0]).shape == (1, 9)


@pytest.mark.parametrize("log", [True, False])
def test_compared_maps_of_one_unit_have_the_same_colours(log: bool) -> None:
    def panel(values: list[float], unit: str, finding: int = 0) -> Panel:
        marks = np.array([[0, 0, finding]])
        return Panel("t", "x", "y", map=Map([0, 1, 2], [1], np.array([values]), marks, unit, log=log))

    line = Panel("t", "x", "y", [Series("s", [0], [1])])
    panels = [panel([1, 10, 99], "nats", STUCK), line, panel([2, 100, math.nan], "nats"), panel([3, 4, 5], "beta")]
    one, same, other, alone = compared(panels)
    assert same is line
    assert [each.map and each.map.colours for each in (one, other, alone)] == [(1, 100), (1, 100), (3, 5)]
    first, second = (only(each) for each in (one, other))
    end = screen.FIRST + screen.LEVELS - 1
    assert decoded(first)[0, 0] == screen.FIRST
    assert decoded(second)[0, 1] == end
    middle = (screen.FIRST + end) / 2 if log else screen.FIRST + 9 / 99 * (screen.LEVELS - 1)
    assert decoded(first)[0, 1] == pytest.approx(middle, abs=1)
    drawn = paper.draw(Picture([one, other], ""), 6.75)
    shades = {mesh.get_clim() for axes in drawn.axes for mesh in axes.collections if mesh.get_cmap().name == "viridis"}
    assert shades - {(None, None)} == {(1, 100)}  # a colour bar's own patches have no limits
    assert [each.map and each.map.colours for each in compared([panel([math.nan] * 3, "u")])] == [None]


def test_a_long_map_is_pooled_and_its_spike_survives() -> None:
    z = np.ones((200, 2000))
    z[120, 1234], z[7, 999] = 1e6, math.inf
    finding = np.where(np.isinf(z), NONFINITE, 0)
    plot = only(Panel("t", "step", "layer", map=Map(range(2000), range(200), z, finding, "u")))
    codes = decoded(plot)
    assert codes.shape == (200, 600)
    assert (codes == screen.FIRST + screen.LEVELS - 1).sum() == 1
    assert codes[120].max() == screen.FIRST + screen.LEVELS - 1
    assert (codes == NONFINITE).sum() == 1
    spike = plot["map"]["x"][int(codes[120].argmax())]
    assert 1234 - 4 < spike <= 1234


def test_a_long_line_keeps_spikes_dips_ends_and_gaps() -> None:
    count = 20_000
    y, low, high = np.ones(count), np.full(count, 0.9), np.full(count, 1.1)
    y[7_777], y[8_888], y[15_000], low[3_333], high[4_444] = 50.0, 0.01, math.nan, 0.001, 99.0
    bare = Series("x", range(count), y)
    kept = screen.thinned(bare, 600)
    assert len(kept) <= 600
    assert {0, 7_777, 8_888, 15_000, count - 1} <= set(kept)
    assert (np.diff(kept) > 0).all()
    banded = only(Panel("t", "x", "y", [Series("x", range(count), y, low, high, seeds=3)]))["traces"][0]
    assert (min(filter(None, banded["low"])), max(filter(None, banded["high"]))) == (0.001, 99)
    assert None in banded["y"]
    assert len(banded["x"]) == len(banded["y"]) == len(banded["low"]) <= 600
    points = Series("x", range(count), y, kind="points")
    assert len(screen.thinned(points, 600)) == count  # a cloud has no neighbours to stand for its points


def test_log_is_offered_where_nothing_negative_would_be_lost() -> None:
    def panel(*y: float, log: bool = False, right: bool = False) -> Panel:
        series = [Series("x", range(len(y)), y, right=right)]
        return Panel("t", "x", "y", series, log_y=log)

    assert screen.switchable(panel(1.0, 2.0))
    assert screen.switchable(panel(0.0, math.nan, 2.0))
    assert not screen.switchable(panel(-1.0, 2.0))
    assert not screen.switchable(panel(0.0, 0.0))
    assert not screen.switchable(panel(1.0, 2.0, right=True))
    assert screen.switchable(panel(-1.0, 2.0, log=True))
    assert [screen.switchable(one) for one in heat().panels] == [True, True]
    signed = Map([0, 1], [1], np.array([[-1.0, 1.0]]), np.zeros((1, 2)), "u", log=False)
    assert not screen.switchable(Panel("t", "x", "y", map=signed))


def test_the_script_reads_what_python_writes() -> None:
    script = (files("stabilitylab.reports.page") / "templates" / "shared.js").read_text(encoding="utf-8")
    codes = dict(re.findall(r'"([a-z0 ]+)": (\d)[, }]', script))
    assert codes == {name: str(kind) for kind, name in screen.FINDINGS.items()}
    assert f"first = {screen.FIRST}, levels = {screen.LEVELS}" in script
    colours = dict(re.findall(r'"([a-z0 ]+)": "(#\w+)"', script))
    assert colours == {screen.FINDINGS[kind]: colour for kind, colour in paper.SPECIAL.items()}
