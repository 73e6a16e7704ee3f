"""The page's top as a browser shows it: slider and play, linked cursors, the address, two runs, and axe's rules.

Runs wherever a Chromium is; axe's where axe-core-python is, too.
"""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from making import Made, layer_rows, make_run

from stabilitylab.reports.build import build
from stabilitylab.reports.page.live import write as write_live

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; test_overview.py covers what it shows"),
]
STEPS = (0, 1, 2, 4, 8, 16)
AXE = importlib.util.find_spec("axe_core_python")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    opened = Browser()
    yield opened
    opened.close()


def runs(folder: Path, count: int = 3, state: str = "finished") -> Path:
    """Gradients 10^(2 + layer - step / 4): of the second run a tenth, of the third a hundredth."""
    for place, arch in enumerate(("postln", "deepnorm", "branchnorm")[:count]):
        tables = {
            "grad_norm": Made(
                layer_rows(4), ("value",), lambda s, r, p=place: 10.0 ** (2 - p + r.layer - s / 4), STEPS
            ),
            "cosine_similarity": Made(
                layer_rows(4), ("raw", "centred"), lambda s, r: (0.1 * r.layer, 0.5), STEPS, "mean"
            ),
        }
        loss = [7.0 - 0.1 * step - place for step in range(17)]
        metrics = {"nll": loss, "held_out_nll": loss, "held_out_accuracy": [0.1] * 17, "grad_norm_total": loss}
        facts = {"unigram": {"cross_entropy": 5.0, "accuracy": 0.1}}
        make_run(folder, arch, arch=arch, layers=4, tables=tables, metrics=metrics, state=state, **facts)
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("top")
    return build(runs(folder / "runs"), folder / "report").page


def test_the_layers_follow_the_slider_the_probe_and_play(browser: Browser, written: Path) -> None:
    browser.open(written, everything=False)
    found = browser.run(
        """
        await until(() => $$(".tower").length === 6);
        const colours = () =>
          $$(".tower canvas").map((one) => one.toDataURL());
        const slide = async (place) => {
          $("#step").value = place; $("#step").dispatchEvent(new Event("input")); await wait(300);
        };
        const seen = { max: +$("#step").max, last: colours() };
        seen.start = [$("#step-shown").textContent, $("#probe").value];
        await slide(0);
        seen.first = colours();
        seen.shown = [$("#step-shown").textContent, location.hash];
        $("#own").click(); await wait(100);
        seen.own = colours();
        seen.bars = $$(".scale-bar").length;
        $("#own").click();
        $("#play").click();
        await until(() => $("#play").getAttribute("aria-pressed") === "false");
        seen.played = $("#step-shown").textContent;
        $("#probe").value = "cosine_similarity";
        $("#probe").dispatchEvent(new Event("change")); await wait(400);
        seen.unit = $("#scales").textContent;
        seen.titles = $$("#map-panels .plot").map((one) => one.getAttribute("aria-label"));
        return seen;
        """
    )
    assert browser.errors == []
    assert (found["max"], found["start"]) == (len(STEPS) - 1, ["16", "grad_norm"])
    assert found["first"] != found["last"]
    assert found["shown"][0] == "0"
    assert "step=0" in found["shown"][1]
    assert "probe=grad_norm" in found["shown"][1]
    assert len({*found["first"]}) == 3  # one scale: the same layer of three runs has three colours
    assert len({*found["own"]}) == 1  # each its own: they are alike
    assert found["bars"] == 3
    assert found["played"] == "16"
    assert "raw [" in found["unit"] or "similarity" in found["unit"] or "0.4" in found["unit"]
    assert len(found["titles"]) == 6
    assert all("cosine similarity" in title for title in found["titles"])


def test_a_layer_pointed_at_is_marked_in_every_panel(browser: Browser, written: Path) -> None:
    browser.open(written)
    found = browser.run(
        """
        const tower = $$(".tower")[1], area = () => tower.getBoundingClientRect(), seen = {};
        tower.scrollIntoView({ block: "center" });
        const height = (share) => area().top + (1 - share) * area().height;
        const at = (share) => ({ clientX: area().left + 3, clientY: height(share), bubbles: true });
        const marked = () => ({
          towers: $$(".here").filter((one) => !one.hidden).length,
          maps: $$("#map-panels .cursor.level").filter((one) => !one.hidden).length,
          curves: $$("#curves .cursor.upright").filter((one) => !one.hidden).length,
        });
        tower.dispatchEvent(new PointerEvent("pointermove", at(0.6))); await wait(100);
        seen.pointed = marked();
        seen.said = $("#readout").textContent;
        tower.dispatchEvent(new PointerEvent("pointerleave")); await wait(100);
        seen.left = marked();
        tower.dispatchEvent(new MouseEvent("click", at(0.1))); await wait(300);
        seen.kept = [marked(), location.hash];
        tower.focus();
        for (const key of ["ArrowUp", "ArrowLeft"])
          tower.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
        await wait(300);
        seen.keys = [tower.getAttribute("aria-valuetext"), $("#step-shown").textContent];
        const map = $("#map-panels .plot");
        Plotly.Fx.hover(map, [{ curveNumber: 0, pointNumber: [2, 3] }]); await wait(200);
        seen.hovered = $("#readout").textContent;
        return seen;
        """
    )
    assert browser.errors == []
    assert found["pointed"] == {"towers": 3, "maps": 3, "curves": 3}  # the decoders of three runs, three curves
    assert found["said"].startswith("Update 16, decoder layer 3 [L2 norm]: ")
    assert "Post-LN 4L-4L 10" in found["said"]
    assert found["left"]["towers"] == 0
    assert found["kept"][0]["towers"] == 3
    assert "layer=1&stack=decoder" in found["kept"][1]
    assert found["keys"][0].startswith("layer 2: ")
    assert found["keys"][1] == "8"
    assert found["hovered"].startswith("Update ")


def test_an_address_is_a_view_and_an_event_leads_to_its_step(browser: Browser, written: Path) -> None:
    browser.open(written, everything=False)
    found = browser.run(
        """
        await until(() => $$(".tower").length === 6);
        $(".pick").click(); await wait(300);
        return { hash: location.hash, picked: $(".sentences li.picked").dataset.run, events: $$(".event").length };
        """
    )
    assert f"run={found['picked']}" in found["hash"]
    browser.call(
        "Page.navigate", url=f"file://{written}?again#probe=cosine_similarity&step=4&layer=2&stack=encoder&own=true"
    )
    again = browser.run(
        """
        await until(() => document.readyState === "complete" && window.Plotly && $$(".tower").length);
        await wait(200);
        return [$("#probe").value, $("#step-shown").textContent, $("#own").checked, $("#readout").textContent];
        """
    )
    assert again[:3] == ["cosine_similarity", "4", True]
    assert again[3].startswith("Update 4, encoder layer 2")
    assert browser.errors == []


def test_two_runs_stand_side_by_side(browser: Browser, written: Path) -> None:
    browser.open(written, everything=False)
    found = browser.run(
        """
        const tick = (name) => $$(".tick").find((one) => one.value === name);
        const seen = { before: $("#parted").hidden };
        tick("branchnorm").click(); // what is left are two, which are compared
        await until(() => !$("#parted").hidden && $$("#two-panels .plot").length);
        for (const each of $$("#two-panels .plot")) { each.scrollIntoView(); await until(() => each.dataset.drawn); }
        const maps = $$("#two-panels .plot").filter((one) => one.data[0].type === "heatmap");
        seen.panels = $$("#two-panels .plot").length;
        seen.ratio = maps.map((one) => one.data[0].customdata[0][0]);
        seen.range = [maps[0].data[0].zmin, maps[0].data[0].zmax];
        const traces = $$("#two-panels .plot")[0].data.filter((one) => one.line && one.name);
        seen.lines = traces.map((one) => [one.name, one.line.dash]);
        seen.settings = $("#part-settings").textContent;
        seen.said = $("#part-said").textContent;
        seen.growth = $$("#part-growth tbody tr").length;
        await until(() => location.hash.includes("b="));
        seen.hash = location.hash;
        tick("branchnorm").click(); await wait(400);
        seen.third = $$(".side").map((one) => one.value);
        const side = $$(".side")[1];
        side.value = "branchnorm"; side.dispatchEvent(new Event("change")); await wait(400);
        seen.chosen = $$(".side").map((one) => one.value);
        return seen;
        """
    )
    assert browser.errors == []
    assert found["before"]
    assert found["panels"] == 5  # three curves, two maps
    looks = {dash: name for name, dash in found["lines"][:2]}
    assert {*looks.values()} == {"postln", "deepnorm"}
    times = 10 if looks["solid"] == "postln" else 0.1  # A is solid
    assert found["ratio"] == [pytest.approx(times, rel=5e-3)] * 2
    assert found["range"][0] == -found["range"][1]
    assert "model.arch" in found["settings"]
    assert "part at step 0" in found["said"]
    assert found["growth"] > 0
    pair = [looks["solid"], looks["dash"]]
    assert f"a={pair[0]}&b={pair[1]}" in found["hash"]
    assert found["third"] == pair  # a third run that is shown beside them changes nothing
    assert found["chosen"] == [pair[0], "branchnorm"]


def test_a_live_page_comes_again_and_keeps_what_was_looked_at(browser: Browser, tmp_path: Path) -> None:
    runs(tmp_path / "runs", 1, state="running")
    page, _ = write_live([tmp_path / "runs"], tmp_path / "report", 2.0)
    browser.open(page, everything=False)
    wait_for = "await until(() => $$('.tower').length && window.Plotly);"
    browser.run(f"{wait_for} $('#step').value = 2; $('#step').dispatchEvent(new Event('input')); await wait(300);")
    assert browser.run("return [$('#figures'), $('#claims'), $('#live') !== null];") == [None, None, True]
    make_run(tmp_path / "runs", "second", arch="deepnorm", layers=4)
    write_live([tmp_path / "runs"], tmp_path / "report", 2.0)
    found: list[object] = []
    for _ in range(240):
        try:
            found = browser.run(
                "await wait(500); await until(() => $$('.tower').length);"
                "return [$$('#table tbody tr').length, $('#step-shown').textContent];"
            )
        except AssertionError:  # it was reloading
            continue
        if found[0] == 2:
            break
    assert found == [2, "2"]
    browser.run(f"{wait_for} document.querySelector('#pause').click(); window.stays = true;")
    assert browser.run("await wait(3000); return window.stays;")


@pytest.mark.skipif(AXE is None, reason="axe-core-python is not here (extra dev)")
@pytest.mark.parametrize("width", [390, 1440])
def test_axe_finds_nothing_critical(browser: Browser, written: Path, width: int) -> None:
    assert AXE is not None
    assert AXE.submodule_search_locations
    script = (Path(AXE.submodule_search_locations[0]) / "axe.min.js").read_text(encoding="utf-8")
    browser.open(written, width=width)
    browser.call("Runtime.evaluate", expression=script)
    found = browser.run(
        "const { violations } = await axe.run(document, { resultTypes: ['violations'] });"
        "return violations.map((one) => [one.id, one.impact, one.nodes.slice(0, 2).map((node) => node.html)]);"
    )
    assert [one for one in found if one[1] in ("critical", "serious")] == []


def test_what_is_folded_is_not_printed_and_panels_are_whole(browser: Browser, written: Path) -> None:
    browser.open(written, everything=False)
    browser.run("dispatchEvent(new Event('beforeprint')); await wait(500);")
    made = browser.call("Page.printToPDF", preferCSSPageSize=False)
    pages = base64.b64decode(made["data"]).count(b"/Type /Page\n")
    assert 1 <= pages <= 8
    assert browser.errors == []
