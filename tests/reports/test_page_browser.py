"""The page as a browser shows it: no error, every plot drawn, toggles that change what is seen, narrow and dark.

Runs wherever a Chromium is. Its screenshots stay in pytest's temporary folder, for a person to look at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from making import make_run
from pages import CLOSING, EVIL, a_table, heat, lines, write
from PIL import Image
from rest_slow import rest_slow

from stabilitylab.reports import style
from stabilitylab.reports.base import Map, Panel, Picture, Series, compared
from stabilitylab.reports.collection import Runs
from stabilitylab.reports.page import html

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; test_page.py covers the document")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("report"))


def pixels(picture: Path, colour: str) -> int:
    """How many pixels of a screenshot have about this colour."""
    with Image.open(picture) as image:
        shown = np.asarray(image.convert("RGB"), int)
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return int((np.abs(shown - wanted).max(axis=2) < 12).sum())


def test_the_errors_of_a_page_are_seen(browser: Browser, tmp_path: Path) -> None:
    bad = "<script>window.Plotly = 1; console.error('broken'); alert; fetch('nowhere.json'); undefined.x</script>"
    (tmp_path / "bad.html").write_text(bad)
    browser.open(tmp_path / "bad.html", everything=False)
    assert any("broken" in error for error in browser.errors)
    assert any("TypeError" in error for error in browser.errors)
    assert len(browser.requests) == 2


def test_every_plot_is_drawn_and_nothing_is_fetched(browser: Browser, written: Path) -> None:
    browser.open(written)
    found = browser.run(
        """
        const map = $("#diagnoses .plot"), traces = $("#made-1 .plot").data.filter((one) => one.hovertemplate);
        return {
          plots: $$(".plot").length,
          drawn: $$(".plot").filter((plot) => plot.querySelector(".main-svg .trace, .main-svg .hm")).length,
          legends: $$(".legend").map((legend) => legend.textContent),
          hover: traces.map((one) => one.hovertemplate),
          cells: [0, 1, 2, 3].map((column) => map.data.map((trace) => trace.z[0][column] !== null)),
          value: map.data[0].customdata[2][7],
          dash: traces.map((one) => [one.name, one.line.dash, one.yaxis]),
        };
        """
    )
    assert browser.errors == []
    assert browser.requests == [f"file://{written}"]
    assert found["plots"] == found["drawn"] == 6
    assert found["legends"] == ["exactly 0no gradientnot finite"]
    assert found["hover"][0] == (
        "<b>Post-LN</b><br>layer %{x}: %{y:.4g}<br>%{customdata[0]}n = %{customdata[1]}<extra></extra>"
    )
    findings = [[False, True, False, False], [False, False, True, False], [False, False, False, True]]
    assert found["cells"] == [*findings, [True, False, False, False]]
    expected = heat().panels[0].map
    assert expected is not None
    assert found["value"] == pytest.approx(expected.z[2, 7], rel=2e-3)  # half of 16,383 steps in 14 decades
    assert found["dash"][1:] == [
        ["BranchNorm T=1", "dash", "y"], ["Post-LN, loss", "dot", "y2"], ["Post-LN, norm", "dash", "y"]
    ]  # fmt: skip


@pytest.mark.slow
def test_a_table_prints_each_cell_once_under_its_names(browser: Browser, tmp_path: Path) -> None:
    browser.open(write(tmp_path, [html.PageSection("made:1", "Table", "", Picture([a_table()], ""), {})]))
    found = browser.run(
        """
        const plot = $("#made-1 .plot"), layout = plot._fullLayout;
        const printed = (i, j) => plot.data.map((one) => one.text[i][j]).filter(Boolean);
        const cells = plot.data[0].z.map((row, i) => row.map((_, j) => printed(i, j)));
        return { cells, rows: layout.yaxis.ticktext, columns: layout.xaxis.ticktext, range: layout.yaxis.range };
        """
    )
    assert browser.errors == []
    assert found["cells"] == [[["-1.00"], ["stuck"]], [["-1.20"], ["-0.90"]], [[], ["diverged"]]]
    assert (found["rows"], found["columns"]) == (["Post-LN", "DeepNorm", "ReZero"], ["6L", "18L"])
    assert found["range"][0] > found["range"][1]


@pytest.mark.slow
def test_what_panels_share_and_what_maps_are_is_what_paper_prints(browser: Browser, tmp_path: Path) -> None:
    raw = [Series("Post-LN", [1, 2, 3], [y, 3 * y, 2 * y], arch="postln", faint=y == 1, seeds=3) for y in (1.0, 4.0)]
    shared = {"limits": (0.5, 20.0)}
    lines = [Panel("a", "x", "loss", raw[:1], log_y=True, **shared), Panel("b", "x", "loss", raw[1:], **shared)]
    z = np.array([[-1.0, 0.0], [0.5, 3.0]])
    around = Map([1, 2], [1, 2], z, np.zeros(z.shape, np.int8), "gap", log=False, centre=0.0, square=True)
    picture = Picture([*lines, Panel("c", "j", "i", map=around)], "")
    browser.open(write(tmp_path, [html.PageSection("made:1", "Shared", "", picture, {})]))
    found = browser.run(
        """
        const [first, second, map] = $$("#made-1 .plot");
        const seen = (plot) => plot.data.filter((one) => one.hovertemplate)[0];
        const { xaxis, yaxis } = map._fullLayout;
        const cell = (axis) => Math.abs(axis._length / (axis.range[1] - axis.range[0]));
        return {
          ranges: [first, second].map((plot) => plot._fullLayout.yaxis.range),
          faint: [first, second].map((plot) => [seen(plot).opacity, seen(plot).mode]),
          ends: [map.data[0].zmin, map.data[0].zmax], white: map.data[0].colorscale[1],
          sides: cell(xaxis) / cell(yaxis),
        };
        """
    )
    assert browser.errors == []
    assert found["ranges"] == [pytest.approx([math.log10(0.5), math.log10(20)]), [0.5, 20]]
    assert found["faint"] == [[0.4, "lines"], [1, "lines+markers"]]
    assert (found["ends"], found["white"]) == ([-3, 3], [0.5, "#f7f7f7"])
    assert found["sides"] == pytest.approx(1, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("log", [True, False])
def test_compared_maps_have_the_same_colours_on_both_scales(browser: Browser, tmp_path: Path, log: bool) -> None:
    def panel(*values: float) -> Panel:
        z = np.array([values])
        return Panel("t", "x", "y", map=Map([0, 1], [1], z, np.zeros(z.shape, np.int8), "nats", log=log))

    picture = Picture(compared([panel(1, 10), panel(5, 1000)]), "")
    browser.open(write(tmp_path, [html.PageSection("made:1", "Maps", "", picture, {})]))
    found = browser.run(
        """
        const ends = () => $$("#made-1 .plot").map((plot) => [plot._fullData[0].zmin, plot._fullData[0].zmax]);
        const all = [ends()];
        for (const button of $$("#made-1 .scale")) { button.click(); await wait(200); }
        return [...all, ends()];
        """
    )
    assert browser.errors == []
    logarithms, numbers = found if log else reversed(found)
    assert logarithms == [pytest.approx([0, 3])] * 2
    assert numbers == [pytest.approx([1, 1000])] * 2


@pytest.mark.slow
def test_a_line_of_a_cell_is_a_line_on_the_screen(browser: Browser, tmp_path: Path) -> None:
    table = a_table()
    assert table.map is not None
    text = np.full(table.map.z.shape, "1 < 2\n1/3 lost", dtype=object)
    two = replace(table, map=replace(table.map, text=text))
    browser.open(write(tmp_path, [html.PageSection("made:1", "Table", "", Picture([two], ""), {})]))
    counts = browser.run('return [...$("#made-1 .plot").querySelectorAll(".heatmap-label")].map((one) => '
                        'one.querySelectorAll("tspan.line").length)')  # fmt: skip
    assert browser.errors == []
    assert counts
    assert set(counts) == {2}


@pytest.mark.slow
def test_a_toggle_acts_on_its_figure_and_one_above_on_all(browser: Browser, written: Path) -> None:
    browser.open(written)
    found = browser.run(
        """
        const key = '[data-key="BranchNorm T=1"]', own = $("#made-1 .toggle" + key), both = $("#everywhere " + key);
        const curves = (at) => $$(at + " .scatterlayer .trace").length;
        const state = async (button) => {
          if (button) { button.click(); await wait(200); }
          return [curves("#made-1"), curves("#made-2"), own.getAttribute("aria-pressed")];
        };
        const states = [await state()];
        for (const button of [own, own, both, both]) states.push(await state(button));
        own.focus();
        return { states, focused: document.activeElement === own };
        """
    )
    (one, other, pressed), *states = found["states"]
    assert (one, pressed) == (other, "true")
    assert states == [
        [one - 2, one, "false"], [one, one, "true"], [one - 2, one - 2, "false"], [one, one, "true"]
    ]  # fmt: skip
    assert found["focused"]
    assert browser.errors == []


@pytest.mark.slow
def test_a_toggle_takes_its_colour_off_the_screen(browser: Browser, written: Path) -> None:
    colour = style.looks()["postln"][0]
    browser.open(written, height=1400)
    top = "$('#made-1').scrollIntoView(); await wait(); return 0;"
    browser.run(top)
    before = pixels(browser.shoot(written.with_name("before.png")), colour)
    browser.run("$('#made-1 .toggle[data-key=\"Post-LN\"]').click(); await wait(200);" + top)
    after = pixels(browser.shoot(written.with_name("after.png")), colour)
    assert before > 1000
    assert after < before - 500


@pytest.mark.slow
def test_log_and_linear_for_axes_and_for_colours(browser: Browser, written: Path) -> None:
    browser.open(written)
    found = browser.run(
        """
        const type = () => $$("#made-1 .plot").map((plot) => plot._fullLayout.yaxis.type), types = [type()];
        $("#made-1 .scale").click(); await wait(200);
        types.push(type());
        const map = $("#diagnoses .plot"), top = () => Math.max(...map.data[0].z.flat()), tops = [top()];
        map.closest(".panel").querySelector(".scale").click(); await wait(200);
        return { types, tops: [...tops, top()] };
        """
    )
    assert found["types"] == [["log", "linear"], ["linear", "linear"]]
    logarithm, number = found["tops"]
    assert number == pytest.approx(10**logarithm)
    assert browser.errors == []


@pytest.mark.slow
def test_log_axes_show_bands_that_reach_zero_and_ticks_when_enlarged(browser: Browser, tmp_path: Path) -> None:
    line = Series("x", [1, 2, 3], [1e-6, 1e-3, 1.0], [0.0, 1e-4, 0.5], [1e-5, 1e-2, 2.0], seeds=3, colour="black")
    picture = Picture([Panel("a", "layer", "L2 norm", [line], log_y=True)], "found")
    browser.open(write(tmp_path, [html.PageSection("made:1", "a", "made up", picture, {})]))
    found = browser.run(
        """
        const plot = $(".plot"), ticks = () => $$(".plot .ytick text").length, band = plot.data[0], counts = [ticks()];
        await Plotly.relayout(plot, { "yaxis.range[0]": Math.log10(0.12), "yaxis.range[1]": Math.log10(0.9) });
        await wait(200);
        counts.push(ticks());
        await Plotly.relayout(plot, { "yaxis.autorange": true, "xaxis.autorange": true }); await wait(200);
        return { band: band.y, fill: band.fillcolor, counts: [...counts, ticks()] };
        """
    )
    assert found["band"] == [1e-5, 1e-2, 2.0, 0.5, 1e-4, 1e-6]
    assert found["fill"] == "#0000002b"
    whole, part, again = found["counts"]
    assert whole == again > 3
    assert part > 1
    assert browser.errors == []


def test_the_ledger_filters_and_links_and_the_runs_sort(browser: Browser, written: Path) -> None:
    browser.open(written)
    found = browser.run(
        """
        const seen = {}, rows = (table) => $$(`#${table} tbody tr`).filter((row) => row.offsetParent);
        const shown = (table) => rows(table).map((row) => row.id || row.children[0].textContent);
        const search = (table, text) => {
          const box = $(`.search[data-table="${table}"]`);
          box.value = text;
          box.dispatchEvent(new Event("input"));
        };
        seen.all = shown("ledger");
        $('[data-value="reproduced"]').click();
        seen.filtered = [shown("ledger"), $('.found[data-table="ledger"]').textContent];
        $('#made-1 figcaption a[href="#C01"]').click(); await wait(200);
        seen.revealed = [shown("ledger"), location.hash, Math.abs($("#C01").getBoundingClientRect().top) < innerHeight];
        $('[data-value="Admin"]').click();
        seen.both = shown("ledger");
        $('[data-value="control"]').click();
        seen.kinds = shown("ledger");
        search("ledger", "IT vanishes");
        seen.searched = shown("ledger");
        search("table", "branchnorm");
        seen.found = shown("table");
        search("table", "");
        const sort = $$("#table .sort"), heading = (n) => sort[n].parentElement.getAttribute("aria-sort");
        seen.sorted = [];
        for (const column of [5, 5, 0]) {
          sort[column].click();
          seen.sorted.push([shown("table"), heading(5), heading(0)]);
        }
        return seen;
        """
    )
    assert found["all"] == ["C01", "C02", "C03", "C05"]
    assert found["filtered"] == [["C02", "C03", "C05"], "3 of 4"]
    assert found["revealed"] == [["C01", "C02", "C03", "C05"], "#C01", True]
    assert found["both"] == ["C03", "C05"]
    assert found["kinds"] == ["C03"]
    assert found["searched"] == ["C03"]
    assert found["found"] == ["branchnorm-1"]
    assert found["sorted"] == [
        [["postln-0", "branchnorm-1", "deepnorm-2"], "ascending", None],
        [["deepnorm-2", "branchnorm-1", "postln-0"], "descending", None],
        [["branchnorm-1", "deepnorm-2", "postln-0"], None, "ascending"],
    ]
    assert browser.errors == []


@pytest.mark.slow
@pytest.mark.parametrize("width", rest_slow([400, 1280], [400]))
def test_nothing_sticks_out(browser: Browser, written: Path, width: int) -> None:
    browser.open(written, width=width)
    browser.shoot(written.with_name(f"{width}.png"))
    found = browser.run(
        """
        return {
          wide: [innerWidth, document.documentElement.scrollWidth],
          plots: $$(".plot .main-svg").map((svg) => svg.getBoundingClientRect().right),
          beside: $("#made-1 .panels").children[1].offsetTop === $("#made-1 .panels").children[0].offsetTop,
        };
        """
    )
    assert found["wide"] == [width, width]
    assert max(found["plots"]) <= width
    assert found["beside"] == (width > 400)
    assert browser.errors == []


@pytest.mark.slow
def test_dark_as_the_system_or_as_chosen_and_light_on_paper(browser: Browser, written: Path) -> None:
    def state() -> list[str]:
        return browser.run(
            "await wait(200); const ink = $('#made-1 .xtitle').style.fill;"
            "return [root.dataset.theme, getComputedStyle(document.body).backgroundColor, ink, theme.textContent];"
        )

    light = ["light", "rgb(253, 253, 252)", "rgb(29, 29, 31)", "Dark"]
    dark = ["dark", "rgb(22, 23, 26)", "rgb(233, 233, 230)", "Light"]
    browser.open(written, dark=True)
    browser.shoot(written.with_name("dark.png"))
    assert state() == dark
    assert int(browser.run("return visible('#222222');")[1:3], 16) > 0xA0  # ink would not be seen on a dark page
    browser.run("dispatchEvent(new Event('beforeprint'));")
    assert state() == light
    browser.run("dispatchEvent(new Event('afterprint'));")
    assert state() == dark
    browser.run("theme.click();")
    assert state() == light
    browser.open(written, dark=True)
    assert state() == light  # what was chosen is remembered
    browser.run("localStorage.clear();")
    browser.open(written)
    assert state() == light


@pytest.mark.slow
def test_names_that_look_like_html_do_nothing(browser: Browser, tmp_path: Path) -> None:
    make_run(tmp_path / "runs", EVIL.replace("/", "_"), layers=1, metrics={"loss": [1.0]}, label=CLOSING)
    label = f"{EVIL} {CLOSING} <b>bold</b>"
    sections = [html.PageSection(f"run:{EVIL}", EVIL, EVIL, lines(label), {}, group="runs")]
    written = write(tmp_path, sections, Runs.load(tmp_path / "runs"), title=CLOSING, findings=[])
    browser.open(written)
    browser.run(
        "const plot = $$('.plot')[1]; Plotly.Fx.hover(plot, [{ curveNumber: 1, pointNumber: 0 }]); await wait(200);"
    )
    assert browser.run("return $$('img, figure b, script[src]').length;") == 0
    assert EVIL in browser.run("return $$('.plot')[1].querySelector('.hoverlayer').textContent;")
    assert browser.errors == []


@pytest.mark.slow
def test_printing_draws_everything_at_once(browser: Browser, written: Path) -> None:
    browser.open(written, height=300, everything=False)
    browser.run("for (const each of $$('details.folded')) each.open = true; return 0;")
    undrawn = "return $$('.plot').filter((plot) => !plot.querySelector('.main-svg .trace, .main-svg .hm')).length;"
    assert browser.run(undrawn) > 0
    assert browser.run("dispatchEvent(new Event('beforeprint')); " + undrawn) == 0
    assert browser.errors == []


@pytest.mark.slow
def test_a_hundred_runs_are_drawn_only_where_one_looks(browser: Browser, tmp_path: Path) -> None:
    sections = [html.PageSection(f"run:{n}", str(n), "one run", lines(), {}, "runs") for n in range(100)]
    written = write(tmp_path, sections)
    browser.open(written, everything=False)
    drawn = "await wait(500); return $$('[data-drawn]').length;"
    assert browser.run(drawn) < 10
    browser.run(
        "const run = $('#run-99'); run.closest('details').open = true; run.scrollIntoView();"
        "await until(() => $('#run-99 [data-drawn]'));"
    )
    assert 2 <= browser.run(drawn) < 20
    assert browser.run("return $$('#run-99 .scatterlayer .trace').length;") > 0
    assert browser.errors == []
