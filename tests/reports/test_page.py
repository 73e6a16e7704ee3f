"""The page as a document: complete, self-contained, linked, escaped and small."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from making import make_run
from pages import CLOSING, EVIL, claim, findings, heat, lines, some_runs, write

from stabilitylab.reports.base import Map, Panel, Picture, Series
from stabilitylab.reports.claims import Finding
from stabilitylab.reports.collection import Runs
from stabilitylab.reports.intervals import WIDTH, interval, mark
from stabilitylab.reports.page import html
from stabilitylab.reports.page.backticks import with_code
from stabilitylab.reports.statistics import Region

VOID = {"meta", "input", "br", "link", "img", "path", "line", "circle", "rect"}


class Document(HTMLParser):
    """Every element as (name, attributes) with the text that stands in it, and the data of the plots."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[list[str]] = []
        self._open: list[int] = []
        self.feed(path.read_text(encoding="utf-8"))
        (plots,) = [text for name, text in self.named("script") if name.get("id") == "plots"]
        self.plots = json.loads(plots, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))
        self.texts.append([])
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.elements[self._open.pop()][0] == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        for place in self._open:
            self.texts[place].append(data)

    def named(self, name: str, **wanted: str) -> list[tuple[dict[str, str], str]]:
        return [
            (attributes, " ".join(" ".join(text).split()) if name != "script" else "".join(text))
            for (tag, attributes), text in zip(self.elements, self.texts, strict=True)
            if tag == name and all(attributes.get(key) == value for key, value in wanted.items())
        ]

    def classed(self, name: str, word: str) -> list[tuple[dict[str, str], str]]:
        return [(a, text) for a, text in self.named(name) if word in a.get("class", "").split()]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def document(written: Path) -> Document:
    return Document(written)


def test_nothing_is_fetched_and_plotly_is_there_once(written: Path, document: Document) -> None:
    text = written.read_text(encoding="utf-8")
    ((_, packed),) = document.named("script", id="plotly")
    assert zlib.decompress(base64.b64decode(packed)).count(b"* plotly.js v") == 1
    assert "* plotly.js v" not in text
    for name, attributes in document.elements:
        assert "src" not in attributes, name
        assert name not in ("link", "img", "iframe", "object"), name
        if "href" in attributes:
            assert not re.match(r"[a-z]+:|//", attributes["href"]), attributes["href"]
    assert not re.search(r"@import|url\((?!#)", text[: text.index("</style>")])
    ((policy, _),) = document.named("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"].startswith("default-src 'none'")
    assert len(text) < 3_500_000


def test_every_link_on_the_page_leads_somewhere_and_names_are_unique(document: Document) -> None:
    ids = [attributes["id"] for _, attributes in document.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    inside = {attributes["href"][1:] for attributes, _ in document.named("a") if attributes["href"].startswith("#")}
    assert inside <= set(ids)
    assert {"made-1", "C01", "C02", "C03"} <= inside  # from a claim to its figure, and back
    assert "elsewhere-1" not in inside  # a figure that was not made
    labelled = [attributes["aria-labelledby"] for _, attributes in document.elements if "aria-labelledby" in attributes]
    assert set(labelled) <= set(ids)


def test_a_figure_has_its_finding_its_files_its_numbers_and_its_switches(document: Document) -> None:
    assert [attributes["id"] for attributes, _ in document.named("figure")] == [
        "made-1",
        "made-2",
        html.anchor("run:postln-0"),
    ]
    assert "Post-LN vanishes DeepNet, Figure 1. Made up. Claims:" in document.named("figcaption")[0][1]
    files = [attributes["href"] for attributes, _ in document.named("a") if "download" in attributes]
    assert files[:5] == [f"figures/made-1{end}" for end in (".csv", ".pdf", ".svg", ".png", "-column.pdf")]
    toggles = [text for attributes, text in document.classed("button", "toggle") if attributes.get("data-key")]
    assert toggles == ["Post-LN", "BranchNorm T=1"] * 2
    signs = [text for _, text in document.classed("p", "signs")]
    assert signs == ["loss norm", "Post-LN: diverged"] * 2
    scales = [attributes for attributes, _ in document.classed("button", "scale")]
    assert [(one["aria-pressed"], one["aria-label"]) for one in scales[:2]] == [
        ("true", "log y of (a) Gradient"), ("false", "log y of (b) Quality")
    ]  # fmt: skip
    cells = [text for _, text in document.named("td")]
    assert "0.0001" in cells
    assert "5e-05" in cells


def test_every_plot_has_data_and_says_what_it_shows(document: Document) -> None:
    places = [attributes for attributes, _ in document.classed("div", "plot")]
    assert len(places) == 6 == sum(len(plots) for plots in document.plots.values())
    for attributes in places:
        assert attributes["role"] == "img"
    assert places[0]["aria-label"] == (
        "L2 norm by layer, of Post-LN, BranchNorm T=1, Post-LN, loss, Post-LN, norm. Post-LN vanishes"
    )
    assert places[-1]["aria-label"].startswith("Heat map of share, output (6) by branch (6).")


@pytest.mark.parametrize(
    ("sides", "term"),
    [(((2, 2),), "Layers a side"), (((0, 2), (3, 0)), "Layers"), (((0, 2), (3, 3)), "Layers a stack")],
)
def test_layers_have_sides_only_where_there_are_two(tmp_path: Path, sides, term: str) -> None:
    for encoder, decoder in sides:
        stack = "encoder-decoder" if encoder and decoder else "encoder" if encoder else "decoder"
        model = {"model": {"stack": stack, "encoder_layers": encoder, "decoder_layers": decoder}}
        make_run(tmp_path, f"{encoder}-{decoder}", arch="preln", settings=model, metrics={"loss": [1.0]})
    said = dict(html._what(Runs.load(tmp_path)))
    assert said[term] == ", ".join(str(max(own)) for own in sides)


def test_the_ledger_says_what_was_measured_and_what_is_missing(document: Document) -> None:
    rows = [(attributes, text) for attributes, text in document.named("tr") if "data-verdict" in attributes]
    assert [(a["id"], a["data-verdict"], a["data-paper"]) for a, _ in rows] == [
        ("C01", "reproduced", "DeepNet"), ("C02", "contradicted", "Admin"),
        ("C03", "inconclusive", "DeepNet"), ("C05", "not reproduced", "DeepNet"),
    ]  # fmt: skip
    first, ((_, unmade),) = rows[0][1], document.named("li", id="C04")
    ((_, folded),) = document.named("details", id="untestable")
    assert folded.startswith("Not testable with these runs: 1 claim, each with what it lacks C04 It vanishes.")
    assert "ratio 0.594 [0.391, 0.903] n = 3, p = 0.017, Holm 0.05 R: < 1; X: > 2" in first
    assert "6L-6L, 64-128-2, synthetic, 160 updates, lr 0.0003, warm-up 40 (25 %), T = 6 (3.75 %)" in first
    assert "at equal updates, not converged (last fifth: -3 nats), width 64" in first
    assert "It vanishes. DeepNet, Fig. 1. Figure made:1 . How it is tested ratio. R: < 1; X: > 2." in first
    assert "n = 3, would need" in rows[2][1]
    assert unmade.endswith("needs a GPU. stabilitylab sweep deepnet:3 --scale paper")
    assert len(document.classed("svg", "mark")) == 10
    assert "verdict" not in "".join(text for _, text in document.named("section", id="claims")).lower()


def test_the_first_effect_stands_before_those_that_describe(document: Document) -> None:
    effects = document.classed("div", "effect")
    assert [text.split()[0] for a, text in effects if "primary" in a["class"]] == ["ratio"] * 4
    beside = [text for a, text in effects if "descriptive" in a["class"]]
    assert [text.startswith(f"beside {place} 1.05") for place, text in enumerate(beside)] == [True] * 6
    assert not any("R: " in text or "p = " in text for text in beside)
    assert "Beside it: 6 effects" in document.named("body")[0][1]


def test_kinds_are_counted_apart_and_what_survives_is_said(document: Document) -> None:
    tallies = [text for _, text in document.classed("p", "tally")]
    assert tallies == [
        "DeepNet, published: 1 reproduced , 1 inconclusive , 1 not testable ; of these judgements 0 survive Holm over "
        "the 3 published claims of that paper",
        "Admin, published: 1 contradicted ; of these judgements 1 survives Holm over the 1 published claims of that "
        "paper",
        "control: 1 not reproduced",
    ]
    rows = {a["id"]: (a, text) for a, text in document.named("tr") if "data-verdict" in a}
    assert {id: a["data-kind"] for id, (a, _) in rows.items()} == {
        id: "control" if id == "C05" else "published" for id in ("C01", "C02", "C03", "C05")
    }
    assert "survives Holm" in rows["C02"][1]
    assert "not after Holm" in rows["C01"][1]
    assert "Set after a look: its threshold." in rows["C05"][1]
    assert "Holm" not in rows["C05"][1].replace("not after Holm", "")
    ((_, page_text),) = document.named("section", id="claims")
    assert "in which runs of one seed are no independent ones" in page_text
    style = document.named("style")[0][1] if document.named("style") else ""
    assert ".badge.not-reproduced" in style


def test_runs_stand_with_their_states_and_those_unreadable_too(document: Document) -> None:
    ((_, table),) = document.named("table", id="table")
    assert "postln-0 6 Post-LN training 2+2 3 1 diverged diverged -1.000 made up" in table
    assert "branchnorm-1 6 BranchNorm training 3+3 4 1 finished trained -1.000" in table
    assert document.named("a", href=f"#{html.anchor('run:postln-0')}")[-1][1] == "postln-0"
    everything = document.named("body")[0][1]
    assert "torn : its journal is torn" in everything
    assert "Update against depth deepnet:5 no run of one step. stabilitylab sweep deepnet:5" in everything
    assert "3 training: diverged (2), trained (1)" in everything
    assert "Seeds 3-5" in everything


def test_names_are_text_and_never_html(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", EVIL.replace("/", "_"), layers=1, metrics={"loss": [1.0]}, label=CLOSING)
    sections = [
        html.PageSection(f"run:{EVIL}", EVIL, EVIL, lines(CLOSING), {"csv": f"figures/{EVIL}.csv"}, group=group)
        for group in ("figures", "runs")
    ]
    sections[1] = html.PageSection(f"run:{CLOSING}", CLOSING, EVIL, lines(EVIL), {}, group="runs")
    found = [Finding(claim("C01", f"run:{EVIL}", EVIL, CLOSING), "not testable", why=EVIL, command=CLOSING)]
    content = {"title": CLOSING, "broken": [(Path(EVIL), CLOSING)], "missing": [(EVIL,) * 4]}
    path = write(tmp_path, sections, Runs.load(tmp_path / "runs"), findings=found, **content)
    document = Document(path)
    assert not document.named("img")
    assert not any(name.startswith("on") for _, attributes in document.elements for name in attributes)
    assert (
        len(document.named("script"))
        == len(Document(write(tmp_path / "plain")).named("script"))
        == 4 + len(html.SCRIPTS)
    )
    assert document.named("h1")[0][1] == document.named("title")[0][1] == CLOSING
    assert "alert" not in "".join(
        text for attributes, text in document.named("script") if attributes.get("id") != "plots"
    )
    assert document.plots[html.anchor(f"run:{EVIL}")][1]["traces"][1]["name"] == CLOSING


def test_places_of_different_names_differ() -> None:
    names = ["a:b", "a-b", "a b", "a/b", "a.b", "run:x", "run-x", "é"]
    assert len({html.anchor(name) for name in names}) == len(names)
    assert all(re.fullmatch(r"[\w-]+", html.anchor(name)) for name in names)


def test_no_claims_no_figures_and_no_runs(tmp_path: Path) -> None:
    document = Document(write(tmp_path, [], Runs([]), findings=[], broken=[], missing=[]))
    assert document.plots == {}
    assert "No figure could be made" in document.named("main")[0][1]


def test_the_ledgers_files_are_offered_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "claims.csv").write_text("x")
    document = Document(write(tmp_path))
    assert document.named("a", href="claims.csv")
    assert not document.named("a", href="claims.json")


@pytest.mark.slow
def test_a_hundred_runs_with_maps_of_200_layers_stay_small(tmp_path: Path) -> None:
    made = heat(200, 600)
    spiky = np.asarray(made.panels[0].map.z).copy()  # type: ignore[union-attr]
    spiky[3, 333] = 1e9
    one = made.panels[0].map
    assert one is not None
    maps = Picture([Panel("t", "x", "y", map=Map(one.x, one.y, spiky, one.finding, "u"))] * 3, "found")
    sections = [
        html.PageSection(f"run:{n}", str(n), "one run", maps if n < 4 else lines(), {}, "runs") for n in range(100)
    ]
    path = write(tmp_path, sections, Runs([*some_runs(tmp_path / "runs", 10)] * 10))
    assert path.stat().st_size < 7_000_000
    document = Document(path)
    assert len(document.named("figure")) == 100
    assert len(document.named("th", scope="row")) == 100 + len(findings()) - 1  # one is not testable
    plot = document.plots["run-0"][0]["map"]
    assert html.NARROWEST <= len(plot["x"]) < 600
    assert plot["low"] + plot["span"] == pytest.approx(9)  # the spike is still there


def test_few_maps_keep_600_columns(tmp_path: Path) -> None:
    sections = [html.PageSection("made:1", "x", "y", heat(200, 2000), {})]
    document = Document(write(tmp_path, sections, Runs([])))
    assert len(document.plots["made-1"][0]["map"]["x"]) == 600


def test_a_table_ends_where_the_csv_goes_on(tmp_path: Path) -> None:
    count = html.LISTED + 1234
    picture = Picture([Panel("t", "x", "y", [Series("s", range(count), range(count))])], "found")
    document = Document(write(tmp_path, [html.PageSection("made:1", "x", "y", picture, {})], Runs([]), findings=[]))
    assert "1,234 more rows stand in the CSV." in document.named("details")[0][1]
    assert len([1 for attributes, _ in document.named("td")]) == html.LISTED * 7  # low and high are empty: left out


def effect(
    mean: float,
    low: float,
    high: float,
    reproduced: Region | None = Region(high=1),
    contradicted: Region | None = Region(low=2),
    log: bool = False,
) -> dict:
    regions = {"reproduced": reproduced, "contradicted": contradicted}
    return {"mean": mean, "low": low, "high": high, "log": log, **regions}


def test_a_mark_puts_interval_and_regions_on_one_scale() -> None:
    found = mark(effect(1.5, 1.0, 2.0))
    assert found is not None
    unit = WIDTH / 1.24  # one between 1 and 2, and 12 % of it left on either side
    assert found["low"] == pytest.approx(0.12 * unit, abs=0.06)
    assert found["mean"] == pytest.approx(WIDTH / 2, abs=0.06)
    rest = pytest.approx(WIDTH - found["high"], abs=0.11)
    assert found["regions"] == [("reproduced", 0.0, found["low"]), ("contradicted", found["high"], rest)]


def test_a_mark_of_wide_ratios_is_logarithmic() -> None:
    found = mark(effect(1.0, 0.01, 100.0, Region(0.01, 100), None, log=True))
    assert found is not None
    assert found["mean"] == pytest.approx(WIDTH / 2, abs=0.06)
    assert found["regions"] == [("reproduced", found["low"], pytest.approx(found["high"] - found["low"], abs=0.11))]


def test_one_seed_is_a_dot_and_an_endless_interval_reaches_the_edge() -> None:
    dot = mark(effect(1.5, math.nan, math.nan))
    assert dot is not None
    assert dot["low"] == dot["mean"] == dot["high"]
    endless = mark(effect(1.5, -math.inf, math.inf))
    assert endless is not None
    assert (endless["low"], endless["high"]) == (0, WIDTH)
    assert mark(effect(math.nan, math.nan, math.nan)) is None
    assert mark(effect(1.0, 1.0, 1.0, Region(), None)) is not None


def test_intervals_in_words() -> None:
    assert interval(effect(1.23456, 1.0, 1.5)) == "1.23 [1, 1.5]"
    assert interval(effect(1.23456, math.nan, math.nan)) == "1.23"
    assert interval(effect(math.nan, math.nan, math.nan)) == "not measured"
    assert {finding.verdict for finding in findings()} == set(html.VERDICTS)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("set `lr` to < 0.1", "set <code>lr</code> to &lt; 0.1"),
        ("`a` and `<b>`", "<code>a</code> and <code>&lt;b&gt;</code>"),
        ("one ` alone", "one ` alone"),
    ],
)
def test_backticks_are_code(text: str, shown: str) -> None:
    assert str(with_code(text)) == shown
