"""Runs of one's own on the page, as a browser shows them: colours by run, the table that drives every panel, findings
on the curves, smoothing, scales, and what a reload, the keyboard, paper and a narrow screen keep.

Runs wherever a Chromium is. Its screenshots stay in pytest's temporary folder, for a person to look at.
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from making import Made, layer_rows, make_run
from PIL import Image

from stabilitylab.reports.build import build
from stabilitylab.reports.page import live

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; test_sparks.py covers the numbers"),
]
BROKEN = 40  # the step at which the loss of the run that breaks is not finite
STEPS = 60
READY = "await until(() => window.Plotly && $$('#curves .plot').every((one) => one.dataset.drawn)); await wait(200);"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    opened = Browser()
    yield opened
    opened.close()


def own(
    folder: Path, name: str, place: int = 0, breaks: bool = False, lr: float = 1e-3, state: str = "finished"
) -> None:
    """A run of a GPT-2 of one's own; one that breaks has gradients of 10^6 beside others' 1, and then a NaN."""
    loss = [10.0 - 0.05 * t - place / 10 for t in range(STEPS)]
    norm = [1.0] * STEPS
    if breaks:
        loss = [value if t < BROKEN - 8 else value + 4 * (t - BROKEN + 8) for t, value in enumerate(loss)]
        loss[BROKEN:] = [math.nan] * (STEPS - BROKEN)
        norm = [1.0 if t < BROKEN - 8 else 1e6 for t in range(STEPS)]
    rows = layer_rows(4, ("encoder",))
    tables = {"grad_norm": Made(rows, ("value",), lambda s, r: norm[s] * r.layer, range(0, STEPS, 4))}
    metrics = {"loss": loss, "grad_norm_total": norm, "lr": [lr] * STEPS}
    facts = {"kind": "watched", "label": "GPT2", "config": {"lr": lr, "seed": place}}
    made = {"layers": 4, "tables": tables, "metrics": metrics, "verdict": "", "state": state}
    make_run(folder, name, **(made | facts))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    own(folder / "runs", "base")
    own(folder / "runs", "warm-up", 1)
    own(folder / "runs", "breaks", 2, breaks=True, lr=1e-2)
    return build(folder / "runs", folder / "report").page


def test_runs_of_one_model_have_a_colour_each_everywhere(browser: Browser, three: Path) -> None:
    browser.open(three, everything=False)
    found = browser.run(
        READY
        + """
        const lines = $$("#curves .plot")[0].data.filter((one) => one.mode === "lines" && order.includes(one.name));
        return {
          lines: lines.map((one) => [one.name, one.line.color, one.line.dash]),
          table: $$("#table .of-run").map((one) => [one.dataset.run, getComputedStyle(one).color]),
          heads: $$(".head-of-run").map((one) =>
            [one.textContent, getComputedStyle(one.querySelector(".patch")).backgroundColor]),
        };
        """
    )
    browser.shoot(three.with_name("three.png"))
    assert browser.errors == []
    assert len({colour for _, colour, _ in found["lines"]}) == len({dash for *_, dash in found["lines"]}) == 3
    assert {name for name, _ in found["heads"]} == {"base", "warm-up", "breaks"}
    assert dict(found["table"]) == dict(found["heads"])
    assert {name: rgb(colour) for name, colour, _ in found["lines"]} == dict(found["table"])


def test_runs_of_three_architectures_have_the_colours_of_their_curves_in_the_table(
    browser: Browser, tmp_path: Path
) -> None:
    for arch in ("postln", "deepnorm", "branchnorm"):
        metrics = {"nll": [7.0, 6.0, 5.0], "held_out_nll": [7.0, 6.0, 5.0]}
        make_run(tmp_path / "runs", arch, arch=arch, layers=2, metrics=metrics)
    browser.open(build(tmp_path / "runs", tmp_path / "report").page, everything=False)
    found = browser.run(
        READY
        + """
        const drawn = $$("#curves .plot")[0].data;
        const lines = drawn.filter((one) => one.mode.includes("lines") && order.includes(one.name));
        return {
          byRun: told.byRun,
          lines: lines.map((one) => [one.name, one.line.color, one.line.dash]),
          table: $$("#table .of-run").map((one) =>
            [one.dataset.run, getComputedStyle(one).color, one.querySelector("path").getAttribute("class")]),
        };
        """
    )
    browser.shoot(tmp_path / "architectures.png")
    assert browser.errors == []
    assert not found["byRun"], "one run an architecture: the curves have the architectures' own colours"
    expected = {name: (rgb(colour), dash) for name, colour, dash in found["lines"]}
    assert {name: (colour, dash) for name, colour, dash in found["table"]} == expected
    assert len({colour for _, colour, _ in found["table"]}) == 3


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))})"


def test_colours_differ_in_grey_too(browser: Browser, three: Path) -> None:
    browser.open(three, everything=False)
    palette = browser.run("return PALETTE;")
    grey = [sum(w * int(c[i : i + 2], 16) for w, i in ((0.2126, 1), (0.7152, 3), (0.0722, 5))) for c in palette]
    patterns = browser.run("return PATTERNS;")
    assert len(set(palette)) == len(palette) == 8
    for place, (one, other) in enumerate(itertools.pairwise(grey)):
        apart = abs(one - other) > 20 or patterns[place % 4] != patterns[(place + 1) % 4]
        assert apart, f"neighbours {palette[place]} and {palette[place + 1]} look alike in grey"


def test_the_table_drives_every_panel_and_the_address_keeps_it(browser: Browser, three: Path) -> None:
    browser.open(three, everything=False)
    shown = """
        const shown = () => ({
          curves: [...new Set($$("#curves .plot")[0].data.map((one) => one.name))]
            .filter((one) => order.includes(one)).sort(),
          towers: $$(".head-of-run").map((one) => one.textContent).sort(),
          maps: $$("#map-panels h4").length,
          sentences: $$(".sentences li").filter((one) => one.offsetParent)
            .map((one) => one.dataset.run).sort(),
        });
        """
    found = browser.run(
        READY
        + shown
        + """
        const seen = { all: shown() };
        const tick = $$(".tick").find((one) => one.value === "warm-up");
        tick.focus(); tick.click(); await wait(500);
        seen.two = shown();
        seen.compared = $$(".side").map((one) => one.value).sort();
        seen.hash = location.hash;
        $("#show-none").click(); await wait(500);
        seen.none = shown();
        const box = $('.search[data-table="table"]');
        box.value = "bas"; box.dispatchEvent(new Event("input"));
        $("#show-found").click(); await wait(500);
        seen.found = shown();
        $("#show-first").click(); await wait(500);
        seen.first = shown();
        return seen;
        """
    )
    assert browser.errors == []
    names = ["base", "breaks", "warm-up"]
    assert found["all"] == found["first"] == {"curves": names, "towers": names, "maps": 3, "sentences": names}
    two = ["base", "breaks"]
    assert found["two"] == {"curves": two, "towers": two, "maps": 2, "sentences": two}
    assert found["compared"] == two
    assert "runs=" in found["hash"]
    assert found["none"] == {"curves": [], "towers": [], "maps": 0, "sentences": []}
    assert found["found"]["curves"] == found["found"]["towers"] == ["base"]


def test_groups_share_a_colour_and_are_switched_together(browser: Browser, three: Path) -> None:
    browser.open(three, everything=False)
    found = browser.run(
        READY
        + """
        const box = $("#group"), options = [...box.options].map((one) => one.value);
        box.value = "lr"; box.dispatchEvent(new Event("change")); await wait(500);
        const colours = Object.fromEntries(order.map((name) => [name, lookOf(name).colour]));
        const chips = $$("#groups .toggle").map((one) => one.textContent);
        $$("#groups .toggle")[0].click(); await wait(500);
        return { options, colours, chips, left: [...shownNames], pressed: $$("#groups .toggle").map(pressed) };
        """
    )
    assert browser.errors == []
    assert {"", "lr", "seed"} <= {*found["options"]}
    assert found["colours"]["base"] == found["colours"]["warm-up"] != found["colours"]["breaks"]
    assert found["chips"] == ["0.001 (2/2)", "0.01 (1/1)"]
    assert (found["left"], found["pressed"]) == (["breaks"], [False, True])


def test_what_happened_is_on_the_curve_and_failures_above_notes(browser: Browser, three: Path) -> None:
    browser.open(three, everything=False)
    found = browser.run(
        READY
        + """
        const marks = $$("#curves .plot")[0].data.filter((one) => one.meta === "happened");
        return marks.map((one) => [one.name, one.x, one.marker.color, one.marker.symbol]);
        """
    )
    assert browser.errors == []
    names = [name for name, *_ in found]
    order = ["note", "warning", "failure", "not finite"]
    assert names == [name for name in order if name in names]
    lost = found[names.index("not finite")]
    assert lost[1:] == [[BROKEN], "#c00d0d", "x"]
    assert pixels_of(browser.shoot(three.with_name("marks.png")), (192, 13, 13)) > 40


def pixels_of(picture: Path, colour: tuple[int, int, int]) -> int:
    with Image.open(picture) as image:
        shown = np.asarray(image.convert("RGB"), int)
    return int((np.abs(shown - np.array(colour)).max(axis=2) < 12).sum())


def test_the_first_sign_and_its_remedy_are_said(browser: Browser, three: Path) -> None:
    browser.open(three, everything=False)
    told = browser.run("return $('.sentences li[data-run=\"breaks\"]').textContent;")
    assert "First sign, at step 3" in told
    assert "What to do:" in told
    assert browser.run("return $$('.remedy').every((one) => one.closest('li').dataset.run === 'breaks');")
    assert browser.run("return $$('.remedy code').map((one) => one.textContent);")
    assert not browser.run("return $$('.sentences li').filter((one) => one.textContent.includes('`')).length;")


def test_the_first_screen_of_one_run_has_its_curve_its_first_sign_the_remedy_and_the_layers(
    browser: Browser, tmp_path: Path
) -> None:
    own(tmp_path / "runs", "breaks", breaks=True)
    page = build(tmp_path / "runs", tmp_path / "report").page
    browser.open(page, width=1280, height=800, everything=False)
    found = browser.run(
        READY
        + """
        await until(() => $$(".tower").length);
        const place = (selector) => $(selector).getBoundingClientRect();
        const said = place(".remedy"), curve = place("#curves .plot"), layers = place(".tower");
        const marks = $("#curves .plot").data.filter((one) => one.meta === "happened").map((one) => one.name);
        const words = $(".sentences li").textContent;
        return [[said.bottom, curve.bottom, layers.bottom], curve.right < layers.left, marks, words];
        """
    )
    ends, beside, marks, words = found
    assert max(ends) <= 800, "without scrolling"
    assert beside
    assert "failure" in marks
    assert marks[-1] == "not finite"
    assert "First sign, at step" in words
    assert "What to do:" in words
    browser.shoot(page.with_name("one.png"))


def test_a_row_of_a_run_is_a_step_everywhere_on_the_page(browser: Browser, three: Path) -> None:
    browser.open(three)
    found = browser.run(
        """
        await until(() => $$(".tower").length === 3);
        const plots = $$("#curves .plot, #map-panels .plot, #diagnoses .plot");
        const titles = plots.map((one) => one._fullLayout.xaxis.title.text);
        const labels = $$("[aria-label], [title]").map((one) => `${one.ariaLabel} ${one.title}`);
        const said = [document.body.innerText, ...labels];
        return [[...new Set(titles)], said.join("\\n").match(/\\b(at|to|from|by|an) updates?\\b|\\bupdates? [0-9]+/gi)];
        """
    )
    assert found == [["step"], None], "diagnose, the curves and the sentences beside them name a step alike"


def test_a_run_that_diverged_does_not_flatten_the_maps_of_others(browser: Browser, three: Path) -> None:
    browser.open(three, everything=False)
    found = browser.run(
        """
        await until(() => $$(".tower").length === 3 && window.Plotly);
        const map = $$("#map-panels .plot").find((one) => one.getAttribute("aria-label").includes("base"));
        map.scrollIntoView(); await until(() => map.dataset.drawn);
        const ends = () => [map.data[0].zmin, map.data[0].zmax], seen = [[ends(), $("#own").checked]];
        $("#own").click(); await wait(500);
        seen.push([ends(), $("#own").checked, location.hash]);
        return seen;
        """
    )
    assert browser.errors == []
    alone, shared = found
    assert alone == [[pytest.approx(0), pytest.approx(math.log10(4))], True]
    assert shared[0] == [pytest.approx(0), pytest.approx(6 + math.log10(4), abs=1e-3)]
    assert not shared[1]
    assert "own=false" in shared[2]


def test_smoothing_averages_what_is_drawn_and_leaves_gaps(browser: Browser, three: Path) -> None:
    browser.open(three, everything=False)
    found = browser.run(
        READY
        + """
        const seen = {
          plain: smoothed({ x: [0, 1, 2, 3], y: [1, 3, 5, 7] }, 0, false),
          mean: smoothed({ x: [0, 1, 2, 3, 4], y: [0, 3, 0, 3, 0] }, 50, false),
          log: smoothed({ x: [0, 1, 2], y: [1, 100, 1] }, 100, true),
          gap: smoothed({ x: [0, 1, 2, 3, 4], y: [2, 4, null, 8, 8] }, 50, false),
        };
        $("#smooth").value = 10; $("#smooth").dispatchEvent(new Event("input")); await wait(400);
        seen.traces = $$("#curves .plot")[0].data.filter((one) => one.name === "base").map((one) => one.opacity);
        seen.said = [$("#smooth-shown").textContent, location.hash];
        return seen;
        """
    )
    assert browser.errors == []
    assert found["plain"] == [1, 3, 5, 7]
    assert found["mean"] == [1.5, 1, 2, 1, 1.5]
    assert found["log"] == pytest.approx([10, 100 ** (1 / 3), 10])
    assert found["gap"] == [3, 3, None, 8, 8]
    assert found["traces"] == [0.25, 1]
    assert found["said"][0] == "10 %"
    assert "smooth=10" in found["said"][1]


def test_log_axes_of_curves(browser: Browser, three: Path) -> None:
    browser.open(three, everything=False)
    found = browser.run(
        READY
        + """
        const layout = () => $$("#curves .plot")[0]._fullLayout;
        const types = () => [layout().xaxis.type, layout().yaxis.type];
        const seen = [types()];
        for (const name of [".logx", ".scale"]) { $(`#curves ${name}`).click(); await wait(300); seen.push(types()); }
        return seen;
        """
    )
    assert browser.errors == []
    assert found == [["linear", "linear"], ["log", "linear"], ["log", "log"]]


def test_the_keyboard_alone_chooses_runs_and_enlarges(browser: Browser, three: Path) -> None:
    browser.open(three, everything=False)

    def press(key: str, code: int, text: str = "") -> None:
        own = {"key": key, "windowsVirtualKeyCode": code, **({"text": text} if text else {})}
        browser.call("Input.dispatchKeyEvent", type="keyDown", **own)
        browser.call("Input.dispatchKeyEvent", type="keyUp", **{k: v for k, v in own.items() if k != "text"})

    browser.run(READY)
    press("/", 191, "/")
    assert browser.run("return document.activeElement === $('.search[data-table=\"table\"]');")
    browser.run("$$('.tick')[0].focus();")
    press("ArrowDown", 40)
    press(" ", 32, " ")
    assert browser.run("await wait(300); return [document.activeElement === $$('.tick')[1], shownNames.size];") == [
        True,
        2,
    ]
    browser.run("$$('#curves .plot')[0].focus();")
    press("+", 187, "+")
    zoomed = browser.run(
        "await wait(400); const a = $$('#curves .plot')[0]._fullLayout.xaxis; return a.range[1] - a.range[0];"
    )
    press("0", 48, "0")
    whole = browser.run(
        "await wait(400); const a = $$('#curves .plot')[0]._fullLayout.xaxis; return a.range[1] - a.range[0];"
    )
    assert zoomed < 0.7 * whole
    stops = browser.run(
        "const stops = $$('a[href], button, input, select, summary').filter((one) => one.offsetParent);"
        "return [stops.length > 20, stops.filter((one) => one.tabIndex < 0).length];"
    )
    assert stops == [True, 0]
    assert browser.errors == []


def test_a_live_page_keeps_scroll_selection_and_zoom(browser: Browser, tmp_path: Path) -> None:
    for place, name in enumerate(("base", "other", "third")):
        own(tmp_path / "runs", name, place, state="running")
    page, _ = live.write([tmp_path / "runs"], tmp_path / "report", 8.0)
    browser.open(page, everything=False, height=500)
    browser.run("$('#pause').click();")  # until all is as it is to be kept
    before = browser.run(
        READY
        + """
        $$(".tick").find((one) => one.value === "other").click(); await wait(300);
        await Plotly.relayout($$("#curves .plot")[0], { "xaxis.range[0]": 10, "xaxis.range[1]": 20 });
        $("#curves .scale").click(); await wait(300);
        await Plotly.relayout($$("#curves .plot")[0], { "xaxis.range[0]": 10, "xaxis.range[1]": 20 }); await wait(200);
        $("#pause").click();
        document.activeElement.blur();
        scrollTo({ top: 300, behavior: "instant" });
        window.first = true;
        return scrollY;
        """
    )
    found: list[object] = []
    for _ in range(400):
        try:
            found = browser.run(
                "if (window.first) { await wait(250); return []; }"
                + READY
                + """
                const layout = $$("#curves .plot")[0]._fullLayout;
                return [scrollY, [...shownNames].sort(), layout.xaxis.range, layout.yaxis.type];
                """
            )
        except AssertionError:  # it was reloading
            continue
        if found:
            break
    assert found == [before, ["base", "third"], [10, 20], "log"]
    assert browser.errors == []


def test_a_run_that_ended_is_neither_read_nor_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own(tmp_path / "runs", "ended")
    own(tmp_path / "runs", "changes", 1)
    drawn: list[str] = []
    diagnose = live.diagnose
    monkeypatch.setattr(
        live, "diagnose", lambda record, **chosen: drawn.append(record.name) or diagnose(record, **chosen)
    )
    seen = live.LastPage()
    live.write([tmp_path / "runs"], tmp_path / "report", 2.0, (), seen)
    live.write([tmp_path / "runs"], tmp_path / "report", 2.0, (), seen)
    assert sorted(drawn) == ["changes", "ended"]
    shutil.rmtree(tmp_path / "runs" / "changes")
    own(tmp_path / "runs", "changes", 3)
    live.write([tmp_path / "runs"], tmp_path / "report", 2.0, (), seen)
    assert sorted(drawn) == ["changes", "changes", "ended"]


@pytest.mark.parametrize("name", ["three", "one"])
def test_a_phone_shows_all_of_it(browser: Browser, three: Path, tmp_path: Path, name: str) -> None:
    page = three
    if name == "one":
        own(tmp_path / "runs", "gpt2-of-a-long-name-that-has-no-space-in-it-at-all-but-goes-on", breaks=True)
        page = build(tmp_path / "runs", tmp_path / "report").page
    browser.open(page, width=390, height=844)
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=3, mobile=True)
    found = browser.run(
        """
        await wait(500);
        const broken = $$("h1, h2, h3, h4, .head-of-run").map((one) => getComputedStyle(one))
          .filter((one) => one.overflowWrap === "anywhere" || one.wordBreak === "break-all");
        const ends = $$(".plot .main-svg").map((one) => one.getBoundingClientRect().right);
        return [innerWidth, document.documentElement.scrollWidth, broken.length, ends];
        """
    )
    browser.shoot(page.with_name(f"{name}-390.png"))
    assert browser.errors == []
    assert found[:3] == [390, 390, 0]
    assert max(found[3]) <= 390


def test_on_paper_the_whole_table_stands_and_no_control(browser: Browser, three: Path) -> None:
    browser.open(three, everything=False)
    browser.call("Emulation.setEmulatedMedia", media="print")
    found = browser.run(
        """
        const seen = (selector) => $$(selector).filter((one) => one.offsetParent).length;
        const whole = getComputedStyle($(".some")).maxHeight;
        return [seen("#smooth"), seen(".tick"), seen("#table tbody tr"), whole, seen(".remedy"), seen(".pick")];
        """
    )
    browser.shoot(three.with_name("print.png"))
    browser.call("Emulation.setEmulatedMedia", media="")
    assert found == [0, 0, 3, "none", 3, 3], "first sign, the unknown cause and what to do are on paper"
    assert browser.errors == []


def test_a_plot_has_the_size_of_its_place_on_the_sheet_and_then_on_the_screen(browser: Browser, three: Path) -> None:
    browser.open(three, everything=False)
    sizes = """
        const seen = $$(".plot:has(.main-svg)").filter((one) => one.checkVisibility());
        return seen.map((one) => {
          const drawn = one.querySelector(".main-svg").getBoundingClientRect();
          return [one.clientWidth - drawn.width, one.clientHeight - drawn.height, one.clientWidth];
        });"""
    on_screen = browser.run(READY + sizes)
    on_paper = browser.run(
        "dispatchEvent(new Event('beforeprint')); " + sizes
    )  # nothing waits: a sheet is printed then
    undrawn = browser.run("return $$('#diagnoses .plot:has(.main-svg)').length;")
    back = browser.run("dispatchEvent(new Event('afterprint')); await wait(300); " + sizes)
    for found in (on_screen, on_paper, back):
        assert all(abs(wide) <= 1 and abs(high) <= 1 for wide, high, _ in found)
    assert (len(on_screen), len(on_paper), undrawn) == (2, 5, 0), "maps are drawn for paper, what is folded is not"
    assert max(wide for *_, wide in on_paper) == 700
    assert [wide for *_, wide in back[:2]] == [wide for *_, wide in on_screen]
    assert browser.errors == []


def test_paper_keeps_the_colours_of_marks_and_no_empty_section(browser: Browser, three: Path) -> None:
    browser.open(three, everything=False)
    browser.call("Emulation.setEmulatedMedia", media="print")
    found = browser.run(
        """
        const headings = $$("main h2").filter((one) => one.checkVisibility()).map((one) => one.textContent);
        const kept = [".patch", ".strip", ".event"].map((one) => getComputedStyle($(one)).printColorAdjust);
        return [headings, kept];
        """
    )
    browser.call("Emulation.setEmulatedMedia", media="")
    assert found == [["All runs", "Runs in a sentence", "Layer by step"], ["exact"] * 3]


def test_where_many_runs_are_shown_a_number_that_is_not_finite_is_still_a_red_mark(
    browser: Browser, tmp_path: Path
) -> None:
    for place in range(5):
        own(tmp_path / "runs", f"run-{place}", place, breaks=place == 2)
    browser.open(build(tmp_path / "runs", tmp_path / "report").page, everything=False)
    found = browser.run(
        READY
        + """
        const marks = $$("#curves .plot")[0].data.filter((one) => one.meta === "happened");
        return [marks.map((one) => [one.name, one.x, one.marker.color]), shownNames.size];
        """
    )
    assert found == [[["not finite", [BROKEN], "#c00d0d"]], 5], "other findings would cover five curves"


def test_events_differ_in_shape_and_ticks_are_whole_numbers(browser: Browser, three: Path) -> None:
    """In grey print a failure is still told from a warning, and no tick says 5 where 0.5 is meant."""
    browser.open(three, everything=False)
    found = browser.run(
        READY
        + """
        const sign = (kind) => getComputedStyle($(`.event.${kind}`), "::before").content;
        const place = $$("#curves .plot")[1];
        const low = { x: [0, 20], y: [0.04, 3], name: order[0] };
        await Plotly.react(place, [low], { yaxis: axis({ title: "norm" }, true, [low.y], 40) });
        return [sign("failure"), sign("warning"), place._fullLayout.yaxis._vals.map((one) => one.text)];
        """
    )
    assert found[:2] == ['"✕"', '"▲"']
    assert [float(text) for text in found[2] if text] == [0.05, 0.1, 0.2, 0.5, 1, 2, 5]


def test_a_hundred_runs_of_ones_own_are_shown_eight_at_first(browser: Browser, tmp_path: Path) -> None:
    for place in range(100):
        own(tmp_path / "runs", f"run-{place:02d}", place, breaks=place % 10 == 0, lr=10.0 ** -(2 + place % 3))
    page = build(tmp_path / "runs", tmp_path / "report").page
    browser.open(page, everything=False)
    found = browser.run(
        READY
        + """
        const seen = { rows: $$("#table tbody tr").length, shown: [...shownNames] };
        seen.sparks = $$("#table .spark svg").length;
        seen.lost = $$("#table .spark .lost").length;
        $$("#table .tick").at(-1).click(); await wait(500);
        seen.unmapped = $("#unmapped").textContent;
        setShown(order); await wait(1500);
        const drawn = $$("#curves .plot")[0].data.map((one) => one.name);
        seen.all = new Set(drawn.filter((name) => order.includes(name))).size;
        return seen;
        """
    )
    browser.shoot(page.with_name("hundred.png"))
    assert browser.errors == []
    assert (found["rows"], found["sparks"], found["lost"]) == (100, 100, 10)
    assert len(found["shown"]) == 8
    assert all(int(name.removeprefix("run-")) % 10 == 0 for name in found["shown"])  # what broke comes first
    assert "not on this page" in found["unmapped"]
    assert found["all"] == 100
