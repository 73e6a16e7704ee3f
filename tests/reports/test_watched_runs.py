"""Runs of anybody's own loop on the page: they have no verdict, so what was found in them takes its place."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
from making import make_run
from test_page import Document

from stabilitylab.reports.build import build
from stabilitylab.reports.collection import Runs
from stabilitylab.reports.worst_first import MANY, NOT_FINITE, OTHERWISE, place, worst_first
from stabilitylab.store import Run, RunWriter
from stabilitylab.store.incident import write_incident
from stabilitylab.store.nonfinite import lost

FALLING = [6.0 - 0.05 * t for t in range(30)]


def watched(folder: Path, name: str, loss: list[float], label: str = "GPT", state: str = "finished", **metrics) -> Path:
    with RunWriter.create(folder / name, {"kind": "watched", "label": label, "config": {}}) as run:
        run.open([])
        for step, value in enumerate(loss):
            run.append(step, {"loss": value, **{key: column[step] for key, column in metrics.items()}}, {})
        run.set_status(state, len(loss) - 1)  # type: ignore[arg-type]
    return folder / name


def three(folder: Path) -> Path:
    watched(folder, "even", FALLING)
    watched(folder, "broken", [*FALLING[:20], *[math.nan] * 10])
    watched(folder, "jump", FALLING, lr=[1e-3] * 20 + [0.1] * 10)
    return folder


@pytest.mark.slow
def test_the_badge_is_what_was_found(tmp_path: Path) -> None:
    page = Document(build(three(tmp_path / "runs"), tmp_path / "out").page)
    badges = [text for _, text in page.classed("span", "badge")]
    assert badges[1:6:2] == ["failure", "warning", "healthy"]  # of the table, beside the states
    assert badges[6:9] == ["failure", "warning", "healthy"]  # of the sentences
    rows = {name: row for _, row in page.named("tr") for name in ("even", "broken", "jump") if row.startswith(name)}
    assert "finished healthy" in rows["even"]
    assert re.search("finished failure.*nan at step 20", rows["broken"])
    assert re.search("finished warning.*100 times", rows["jump"])


def test_what_is_not_finite_comes_first_in_any_number_of_runs(tmp_path: Path) -> None:
    """And of the others those are looked at whose loss fell least."""
    for place_ in range(MANY + 6):
        watched(tmp_path, f"a{place_:02}", FALLING, label=f"class {place_}")
    watched(tmp_path, "y-still", [6.0] * 30)
    watched(tmp_path, "z-broken", [*FALLING, math.nan])
    watched(tmp_path, "z-broken-too", [*FALLING, math.inf])
    runs = Runs.load(tmp_path)
    assert [record.name for record in worst_first(runs)[:3]] == ["z-broken", "z-broken-too", "y-still"]
    known = {record.name: record for record in runs}
    assert (place(known["z-broken"], look=False), place(known["a00"], look=False)) == (NOT_FINITE, OTHERWISE)
    assert sum(record.found is not None for record in runs) == MANY - 2  # what is not finite needs no look
    assert known["z-broken"].outcome == "not finite"


def test_only_trained_architectures_take_turns(tmp_path: Path) -> None:
    for arch, seed in itertools.product(("postln", "deepnorm"), (3, 4)):
        make_run(tmp_path, f"{arch}-{seed}", arch=arch, seed=seed, metrics={"loss": FALLING},
                 verdict="diverged" if arch == "postln" else "trained")  # fmt: skip
    watched(tmp_path, "w1", [*FALLING, math.nan])
    watched(tmp_path, "w2", [*FALLING, math.nan])
    found = [record.name for record in worst_first(Runs.load(tmp_path))]
    assert found == ["postln-3", "w1", "w2", "deepnorm-3", "postln-4", "deepnorm-4"]


@pytest.mark.parametrize(
    ("state", "loss", "said"),
    [
        ("finished", FALLING, "healthy"),
        ("interrupted", FALLING, "interrupted"),
        ("failed", FALLING, "failed"),
        ("interrupted", [*FALLING, math.nan], "failure"),
    ],
)
def test_how_a_process_ended_is_said_where_nothing_worse_was_found(
    tmp_path: Path, state: str, loss: list[float], said: str
) -> None:
    watched(tmp_path, "run", loss, state=state)
    [record] = Runs.load(tmp_path)
    assert record.diagnosis is not None
    assert record.standing == said


def test_a_glance_tells_since_when_a_run_is_broken(tmp_path: Path) -> None:
    watched(tmp_path, "broken", [*FALLING[:20], *[math.inf] * 10])
    watched(tmp_path, "back", [*FALLING[:20], math.nan, *FALLING[20:]])
    watched(tmp_path, "never", [math.nan] * 3)
    watched(tmp_path, "even", FALLING)
    path = watched(tmp_path, "incident", FALLING)
    told = {"step": 7, "paragraph": "Step 7: the gradient of a.b is NaN. Step 6 had loss 4.5."}
    write_incident(path, told, [(7, {"loss": 1.0}, {})], {}, Run.open(path).identity)
    assert {record.name: lost(record.run) for record in Runs.load(tmp_path)} == {
        "broken": "Step 20: the loss is inf from here to the end of the record",
        "back": "",
        "never": "Step 0: the loss is nan from here to the end of the record",
        "even": "",
        "incident": "Step 7: the gradient of a.b is NaN",
    }


def test_no_seed_known_is_no_seed(tmp_path: Path) -> None:
    """Of two loops of somebody's own none stands for the other."""
    runs = Runs.load(three(tmp_path / "runs"))
    assert [record.seed for record in runs] == [None] * 3
    assert (runs.seeds, runs.by_seed(), len(runs.groups()[0])) == ([], {}, 3)
    assert "seed" not in runs.describe()
    make_run(tmp_path / "runs", "ours", seed=4, metrics={"loss": FALLING})
    page = Document(build(tmp_path / "runs", tmp_path / "out").page)
    [(_, head)] = page.classed("p", "what")
    assert head.endswith("Seeds 4")
    rows = {row.split()[0]: row for _, row in page.named("tr") if row}
    assert re.search(r"watched – – 29 finished", rows["even"])
    assert re.search(r"training 6\+6 4 29 finished", rows["ours"])
