"""The top of the page in words and numbers: sentences, events, curves, settings, where two runs part."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from in_memory import remembered
from making import Made, layer_rows, make_run, sublayer_rows
from test_page import Document

from stabilitylab.reports.base import LEAST_SEEDS, Map, Panel, Picture, Series, Spread
from stabilitylab.reports.build import build
from stabilitylab.reports.collection import Runs
from stabilitylab.reports.page.live import watch
from stabilitylab.reports.page.overview import facts, overview, track
from stabilitylab.reports.page.point import pointless
from stabilitylab.reports.page.sections import PageSection, described
from stabilitylab.reports.page.sentences import fold, sentence
from stabilitylab.reports.worst_first import OTHERWISE, place, worst_first
from stabilitylab.schema import Row
from stabilitylab.store import Run, RunWriter
from stabilitylab.store.incident import write_incident

STEPS = (0, 1, 2)


def made(folder: Path, arch: str = "postln", fall: float = 1.0, **how) -> None:
    """A run of four layers a side in whose decoder the gradient falls ``fall``-fold a layer."""
    values = {
        "grad_norm": Made(
            sublayer_rows(4), ("value",), lambda s, r: fall**r.layer if r.stack == "decoder" else 1.0, STEPS
        )
    }
    loss = {
        "nll": [7.0, 6.0, 5.0],
        "held_out_nll": [7.0, 6.0, 5.0],
        "held_out_accuracy": [0.1] * 3,
        "grad_norm_total": [1.0] * 3,
    }
    facts = {"unigram": {"cross_entropy": 6.0, "accuracy": 0.1}}
    make_run(folder, arch, arch=arch, layers=4, tables=values, metrics=loss, **{**facts, **how})


def test_a_run_is_one_sentence_of_state_and_finding(tmp_path: Path) -> None:
    made(tmp_path, fall=1000.0)
    made(tmp_path, "deepnorm")
    told = {one.record.name: one for one in overview(Runs.load(tmp_path), []).told}
    assert told["postln"].sentence == (
        "Post-LN 4L-4L: trained, 1.00 nats below the unigram baseline after 2 steps; "
        "the decoder's gradient falls 1×10⁹-fold from layer 4 to layer 1 at step 0."
    )
    assert told["postln"].events[0].kind == "vanishing_gradient"
    assert re.search(r"; none of \d+ kinds of trouble was found\.$", told["deepnorm"].sentence)


def test_what_is_only_noted_stands_behind(tmp_path: Path) -> None:
    rows = [Row(f"decoder.layers.{n}.cross_attn", "decoder", n + 1, "cross_attn") for n in range(2)]
    alike = Made(rows, ("value", "qk"), lambda step, row: (1.0, 1e-9 if step > 20 else 0.1), range(0, 60, 10))
    make_run(tmp_path, "a", layers=2, tables={"grad_norm": alike}, metrics={"nll": [7.0, 6.0, 5.0]})
    [told] = overview(Runs.load(tmp_path), []).told
    assert told.sentence.endswith(
        " kinds of trouble was found (noted: rank collapse at step 30); the rank collapse of the decoder may pass."
    )


def test_sentences_of_runs_that_go_on_or_have_no_baseline() -> None:
    assert sentence(remembered("a", arch="postln", gap=0.23, verdict="stuck"), None) == (
        "Post-LN 6L-6L: stuck, 0.23 nats above the unigram baseline after 160 steps."
    )
    assert "diverged at step 0: made up" in sentence(remembered("a", verdict="diverged"), None)
    going = remembered("a", arch="postln", verdict="")
    going.status = going.status.__class__("running", 40, "", "", {})
    assert sentence(going, None) == "Post-LN 6L-6L: running at step 40 of 160."


def test_a_run_that_went_on_to_its_end_and_failed_says_how(tmp_path: Path) -> None:
    loss = [4.0 - step / 20 for step in range(60)] + [4.1] * 60
    with RunWriter.create(tmp_path / "mine", {"label": "GPT", "config": {}, "kind": "watched"}) as run:
        run.open([])
        for step, each in enumerate(loss):
            run.append(step, {"loss": each, "lr": 0.001 if step < 60 else 0.1}, {})
        run.set_status("finished", 120)
    (record,) = Runs.load(tmp_path)
    found = record.diagnosis
    assert found is not None
    failure = next(event for event in found.events if event.severity == "failure")
    said = sentence(record, found)
    assert said.startswith(f"mine: finished at step 120, failed: {failure.title} at step {failure.step}; ")
    assert "the learning rate rose to 0.1 at step 60" in said


def test_evidence_that_is_sentences_of_its_own_follows_a_full_stop(tmp_path: Path) -> None:
    path = make_run(tmp_path, "a", arch="postln", metrics={"nll": [7.0, 6.0, math.nan]}, verdict="diverged")
    told = "Step 2: the first number that is not finite is nll. Step 1 had loss 6."
    facts = {"step": 2, "phase": "forward", "kind": "metric", "name": "nll", "paragraph": told}
    facts |= {"stack": "", "layer": 0, "sublayer": "", "table": "", "value": "nan", "before": "", "micro_batch": 0}
    write_incident(path, facts, [(1, {"nll": 6.0}, {})], {}, Run.open(path).identity)
    record = next(iter(Runs.load(tmp_path)))
    assert sentence(record, record.diagnosis) == f"Post-LN 6L-6L: diverged at step 0: made up. {told}"


@pytest.mark.parametrize(("times", "text"), [(40.0, "40"), (2.1e8, "2×10⁸"), (1e3, "1×10³")])
def test_folds_are_round(times: float, text: str) -> None:
    assert fold(times) == text


def test_pairs_settings_and_two_runs_from_the_start(tmp_path: Path) -> None:
    made(tmp_path, fall=10.0)
    made(tmp_path, "deepnorm", settings={"train": {"lr": 1e-3}})
    runs = Runs.load(tmp_path)
    view = overview(runs, list(runs))
    assert view.settings["postln"]["model.arch"] == "postln"
    assert {"model.arch", "train.lr"} <= view.settings["deepnorm"].keys()
    assert "data.source" not in view.settings["postln"]  # alike in both
    (pair,) = view.pairs
    assert "deepnorm and postln part at step 0" in pair["paragraph"]
    assert pair["growth"][0]["probe"] == "grad_norm.value"
    told = facts(view, {"postln": "run-postln", "deepnorm": "run-deepnorm"})
    assert (told["start"]["a"], told["start"]["b"]) == ("deepnorm", "postln")
    assert json.dumps(told, allow_nan=False)
    panels = view.curves.panels if view.curves else []
    assert [panel.title for panel in panels] == ["Held-out loss", "Training loss", "Gradient norm"]
    assert panels[0].references[0].value == 6.0


def test_the_curve_of_the_held_out_batch_has_the_baseline_of_that_batch(tmp_path: Path) -> None:
    losses = {"held_out_nll": [7.0, 6.0, 5.0], "validation_nll": [None, None, 5.5]}
    baselines = {
        name: {"cross_entropy": nll, "accuracy": 0.1} for name, nll in (("unigram", 6.0), ("validation_unigram", 6.7))
    }
    make_run(tmp_path, "a", arch="postln", metrics=losses, **baselines)
    view = overview(Runs.load(tmp_path), [])
    (held_out,) = view.curves.panels if view.curves else []
    assert [line.value for line in held_out.references] == [6.0]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    grad_norm = Made(sublayer_rows(4), ("value",), lambda s, r: 1.0, STEPS)
    for lr, name in ((1e-3, "slow"), (1e-2, "fast")):
        own = {"arch": "postln", "layers": 4, "settings": {"train": {"lr": lr}}}
        make_run(tmp_path, name, tables={"grad_norm": grad_norm}, metrics={"loss": [7.0, 6.0, 5.0]}, **own)
    made(tmp_path, "deepnorm")
    runs = Runs.load(tmp_path)
    view = overview(runs, [])
    told = facts(view, dict.fromkeys(("slow", "fast", "deepnorm"), "figure"))
    assert {one["name"]: one["title"] for one in told["runs"]} == {
        "slow": "Post-LN 4L-4L (slow)",
        "fast": "Post-LN 4L-4L (fast)",
        "deepnorm": "DeepNorm 4L-4L",
    }
    assert view.curves is not None
    assert view.by_run
    assert told["byRun"]  # the page gives each run that it shows a colour of its own
    assert set(told["order"]) == {"slow", "fast", "deepnorm"}
    assert told["labels"] == {"slow": "Post-LN", "fast": "Post-LN", "deepnorm": "DeepNorm"}
    assert {one.name for panel in view.curves.panels for one in panel.series} == {"slow", "fast", "deepnorm"}


def test_runs_of_ones_own_stand_by_their_diagnosis(tmp_path: Path) -> None:
    """A watched run has no verdict: what broke stands before what trained, and that before what is healthy."""
    ending = {"even": 1.0, "broken": math.nan}
    for name, last in ending.items():
        loss = [6.0 - 0.05 * t for t in range(30)]
        make_run(tmp_path, name, kind="watched", metrics={"loss": [*loss, last]}, verdict="", unigram=None)
    made(tmp_path, "deepnorm")
    runs = Runs.load(tmp_path)
    places = {record.name: place(record, look=True) for record in runs}
    assert places["broken"] < places["even"] < places["deepnorm"]
    assert place(next(record for record in runs if record.name == "even"), look=False) == OTHERWISE
    assert worst_first(runs)[0].name == "broken"


def test_runs_of_ones_own_are_named_and_outcomes_alone_have_no_advice(tmp_path: Path) -> None:
    """The first event of a run that never learned is its outcome: the advice names a knob, and the cause is unknown."""
    falls, rises = [6.0 - 0.05 * t for t in range(32)], [4.4 + 0.4 * t for t in range(28)]
    metrics = {
        "alone": {"loss": [6.0 + 0.02 * t for t in range(60)]},
        "rate": {"loss": falls + rises, "lr": [1e-3] * 30 + [1e-1] * 30},
    }
    for name, given in metrics.items():
        make_run(tmp_path, name, kind="watched", label="GPT2", metrics=given, verdict="", unigram=None)
    told = {one.record.name: one for one in overview(Runs.load(tmp_path), []).told}
    assert {event.role for event in told["alone"].first} == {"outcome"}
    assert told["alone"].remedies[0].startswith("Lower `lr`")
    assert told["alone"].unknown.startswith("Cause unknown: `stabilitylab explain`")
    assert told["rate"].remedies[0].startswith("Set `lr` back to 0.001, its largest value before step 30")
    assert told["rate"].unknown == ""
    for name, one in told.items():
        assert one.sentence.startswith(f"{name}: "), f"{name}: {one.sentence}"


def test_an_event_stands_where_it_happened(tmp_path: Path) -> None:
    made(tmp_path, fall=1000.0)
    (one,) = overview(Runs.load(tmp_path), []).told
    event = track(one.events[0], 2)
    assert (event["left"], event["width"], event["step"], event["stack"]) == (0, 0, 0, "decoder")
    assert event["probe"] == "grad_norm"


@pytest.mark.slow
@pytest.mark.usefixtures("unprinted")
def test_a_damaged_top_is_listed_and_the_report_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "runs")

    def fails(*_: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr("stabilitylab.reports.build.overview", fails)
    built = build(tmp_path / "runs", tmp_path / "report")
    assert [(one.id, one.sentence) for one in built.failed] == [("overview", "ValueError: no such thing")]


def test_one_depth_cannot_show_what_grows_with_depth() -> None:
    def lines(*x: float, archs: tuple[str, ...] = ("deepnorm", "postln")) -> Picture:
        return Picture([Panel("t", "layers a side", "nats", [Series(a, x, x, arch=a) for a in archs])], "")

    assert "one place on its axis (layers a side)" in pointless("branchnorm:1", lines(6))
    assert pointless("branchnorm:1", lines(6, 18)) == ""
    assert "have one, Post-LN" in pointless("deepnet:3", lines(6, 18, archs=("postln",)))
    assert pointless("deepnet:8", lines(6, 18, archs=("deepnorm",))) == ""  # its sweep has that one alone
    assert pointless("mine:1", lines(6, archs=("postln",))) == ""


@pytest.mark.usefixtures("unprinted")
def test_a_figure_without_a_point_is_listed_and_made_where_it_is_asked_for(run, tmp_path: Path) -> None:
    for arch in ("postln", "deepnorm"):
        make_run(
            tmp_path / "runs",
            arch,
            arch=arch,
            layers=6,
            metrics={"held_out_nll": [7.0, 5.0], "held_out_accuracy": [0.1, 0.2]},
        )
    code, out, _ = run("report", "runs", "--json")
    facts = json.loads(out)
    why = {one["id"]: one for one in facts["missing"]}["branchnorm:1"]
    assert (code, why["why"]) == (0, "these runs have one place on its axis (layers a side), and it is about several")
    assert why["command"] == "stabilitylab sweep branchnorm:1 --scale tiny"
    code, out, _ = run("report", "runs", "--json", "--figure", "branchnorm:1")
    assert "branchnorm:1" in [one["id"] for one in json.loads(out)["figures"]]


@pytest.mark.slow
@pytest.mark.usefixtures("unprinted")
def test_two_run_directories_are_compared(run, tmp_path: Path) -> None:
    made(tmp_path / "one", "postln")
    made(tmp_path / "two", "deepnorm")
    assert run("report", "one/postln", "two/deepnorm")[0] == 0
    document = Document(tmp_path / "report" / "index.html")
    assert document.named("h1")[0][1] == "postln, deepnorm"
    ((_, told),) = document.named("script", id="told")
    assert {json.loads(told)["start"]["a"], json.loads(told)["start"]["b"]} == {"postln", "deepnorm"}


def test_a_point_of_few_seeds_is_hollow_and_has_no_band() -> None:
    spread = Spread()
    for seed in range(3):
        spread.add([6, 18], [seed, seed]) if seed else spread.add([6], [0.0])
    line = spread.series("x")
    assert line.seeds == [3, 2]
    low, high = line.band or (np.empty(0), np.empty(0))
    assert (low[0], high[0]) == (0, 2)
    assert np.isnan([low[1], high[1]]).all()
    assert Series("x", [1], [1], [0], [2], seeds=LEAST_SEEDS - 1).band is None
    frame = Picture([Panel("t", "x", "y", [line])], "").frame()
    assert frame["seeds"].tolist() == [3, 2]
    assert frame["low"].isna().tolist() == [False, True]


def test_maps_say_how_many_seeds_stand_behind_them() -> None:
    z = np.ones((1, 2))

    def said(seeds) -> tuple[str, list[float]]:
        picture = Picture(
            [Panel("t", "x", "y", map=Map([0, 1], [1], z, np.zeros(z.shape, np.int8), "u", seeds=seeds))], ""
        )
        section = PageSection("a", "a", "a", picture, {})
        return described(section, (), 5)["panels"][0]["n"], picture.frame()["seeds"].tolist()

    assert said(1) == ("n = 1", [1, 1])
    assert said(np.array([[2, 3]])) == ("n = 2 to 3", [2, 3])
    assert said(None)[0] == ""
    assert np.isnan(said(None)[1]).all()


@pytest.mark.usefixtures("unprinted")
def test_watching_writes_a_live_page_and_then_the_whole_report(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "going", layers=2, state="running", metrics={"loss": [1.0]},
             tables={"grad_norm": Made(layer_rows(2), ("value",), lambda s, r: 1.0)})  # fmt: skip
    said: list[str] = []
    built = watch([tmp_path / "runs"], tmp_path / "report", 0.05, quiet=0.2, told=said.append)
    assert said[0].endswith("index.html: 0 runs going")  # its writer is gone
    assert 'id="live"' not in built.page.read_text(encoding="utf-8")
    assert (tmp_path / "report" / "claims.csv").exists()
