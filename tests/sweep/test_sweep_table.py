"""``sweep table``: which runs the stability table has, what it leaves out, and the table that the command prints."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sweep_cases import left

from stabilitylab.commands._stability import minutes, seeds_of
from stabilitylab.config import resolve
from stabilitylab.errors import UsageError
from stabilitylab.experiments import SCHEMES, Experiment, asked, experiments
from stabilitylab.experiments import minutes as minutes_of
from stabilitylab.models import ARCHS
from stabilitylab.models.facts import facts
from stabilitylab.sweep import Job, plan, table, tables


@cache
def known() -> dict[str, Any]:
    return {name: facts(name, 1, 1) for name in ARCHS}


@pytest.fixture
def _listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``list archs`` says, without a process of its own."""
    monkeypatch.setattr(tables, "arch_facts", known)
    monkeypatch.setattr(tables, "registered_arch", ARCHS.resolve)


pytestmark = pytest.mark.usefixtures("_listed")


def made(archs: str = "all", depths: tuple[int, ...] = (), seeds: tuple[int, ...] = (), **settings: Any):
    return table(asked("table", "tiny", settings, seeds), archs.split(","), depths)


def cells(runs: list[Experiment]) -> set[tuple[str, int, int]]:
    return {(run.config.model.arch, run.config.model.depth, run.config.train.seed) for run in runs}


def test_all_is_every_registered_architecture() -> None:
    assert {*SCHEMES} == {*ARCHS}  # those that 'sweep table' lists without asking the models
    runs, left_out = made()
    assert cells(runs) == {(arch, depth, seed) for arch in ARCHS for depth in (12, 36, 100) for seed in (3, 4, 5)}
    assert left_out == ""
    assert runs == experiments("table:stability")


def test_an_architecture_of_ones_own_is_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "arch_facts", lambda: {**dict.fromkeys(ARCHS), "mine": {}})
    assert tables._named(["all"]) == [*SCHEMES, "mine"]


def test_names_are_forgiving_controls_count_and_nothing_comes_twice() -> None:
    runs, _ = made("Post-LN,branchnorm t=1,postln", (4,), (7,))
    assert [run.name for run in runs] == ["postln-4-s7", "branchnorm-T1-4-s7"]
    with pytest.raises(UsageError, match="unknown architecture 'postlm'"):
        made("postlm")


def test_each_setting_of_the_user_reaches_every_run() -> None:
    runs, _ = made("postln,tfixup", (4,), (3,), model={"d_model": 32}, train={"lr": 1e-2, "precision": "bf16"},
                   data={"source": "text:a,b"})  # fmt: skip
    assert {(run.config.model.d_model, run.config.train.lr, run.config.train.precision) for run in runs} == {
        (32, 1e-2, "bf16")
    }
    assert {run.config.data.source for run in runs} == {"text:a,b"}
    assert [run.config.train.warmup for run in runs] == [40, 0]  # T-Fixup's paper insists
    runs, _ = made("postln,tfixup", (4,), (3,), train={"warmup": 9})
    assert [run.config.train.warmup for run in runs] == [9, 9]


@pytest.mark.parametrize(("stack", "layers"), [("encoder", (5, 0)), ("decoder", (0, 5))])
def test_a_single_stack_leaves_out_what_no_paper_defines_for_it(stack: str, layers: tuple[int, int]) -> None:
    runs, left_out = made("all", (5,), (3,), model={"stack": stack})
    assert {run.config.model.arch for run in runs} == {name for name in ARCHS if stack in ARCHS[name].defined_for}
    assert {(run.config.model.encoder_layers, run.config.model.decoder_layers) for run in runs} == {layers}
    assert left_out == f"left out of the table: tfixup (not defined for model.stack = '{stack}')."
    _, left_out = made("postln,postln/preln", (5,), (3,), model={"stack": stack})
    assert "postln/preln (not defined" in left_out


def test_odd_depths_of_two_stacks_are_left_out() -> None:
    runs, left_out = made("postln", (3, 4, 5, 4), (3,))
    assert [run.name for run in runs] == ["postln-4-s3"]
    assert left_out == "left out of the table: depth 3, 5 (odd: an encoder-decoder has depth/2 layers a side)."


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"archs": "tfixup", "model": {"stack": "decoder"}}, r"nothing is left of the table: tfixup \(not defined"),
        ({"archs": "postln", "depths": (3,)}, "nothing is left of the table: depth 3"),
        ({"archs": "postln", "depths": (0,)}, "--depths 0: give numbers of layers"),
        ({"archs": "postln", "model": {"arch": "preln"}}, "the table sets model.arch itself: give --archs"),
        ({"archs": "postln", "train": {"seed": 1}}, "the table sets train.seed itself"),
        ({"archs": "postln", "model": {"stack": "tower"}}, "model.stack = 'tower'"),
    ],
)
def test_what_cannot_be_a_table_is_one_sentence(how: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        made(**how)


def test_scale_paper_is_the_papers_recipe_and_needs_text() -> None:
    with pytest.raises(UsageError, match="needs text of yours"):
        asked("table", "paper", {})
    runs, _ = table(asked("table", "paper", {"data": {"source": "text:a,b"}}, [3]), ["postln"])
    assert [run.config.model.depth for run in runs] == [12, 36, 100, 200]
    assert {(run.config.train.steps, run.config.train.accumulate) for run in runs} == {(100_000, 128)}


@pytest.mark.parametrize(
    ("text", "figure", "of_the_table"),
    [(None, None, None), ("3", [3], [3, 4, 5]), ("1", [1], [3]), ("3..5", [3, 4, 5], [3, 4, 5]),
     ("7..7", [7], [7]), ("3,9", [3, 9], [3, 9])],
)  # fmt: skip
def test_a_bare_number_of_seeds_counts_them_for_the_table(text: Any, figure: Any, of_the_table: Any) -> None:
    assert seeds_of(text) == figure
    assert seeds_of(text, counted=True) == of_the_table


@pytest.mark.parametrize("text", ["0", "three", "", "5..3", "-2", "3,", "1.5"])
def test_seeds_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"give them as 3\.\.7 or 3,4,5"):
        seeds_of(text, counted=True)


def test_minutes_grow_with_layers_and_updates() -> None:
    whole = minutes_of("table")
    assert whole is not None
    jobs = [Job(run, Path()) for run in experiments("table")]
    assert minutes(jobs) == whole
    train = {"train": {"steps": 320}}
    twice = [
        Job(replace(job.experiment, config=resolve(job.experiment.config.model_dump(), train)), Path()) for job in jobs
    ]
    assert minutes(twice) == 2 * whole
    assert minutes(jobs[:1]) == math.ceil(whole * 12 / (19 * 3 * (12 + 36 + 100)))


def test_the_command_prints_plans_and_shows_the_table(run, tmp_path: Path) -> None:
    asked_for = ["sweep", "table", "--depths", "2,3", "--archs", "deepnorm,postln", "--seeds", "2",
                 "--set", "train.steps=5", "--set", "model.d_model=32"]  # fmt: skip
    code, out, err = run(*asked_for, "--print")
    assert (code, len(out.splitlines())) == (0, 4)
    assert err.startswith("left out of the table: depth 3 (odd")
    runs, _ = made("deepnorm,postln", (2,), (3, 4), train={"steps": 5}, model={"d_model": 32})
    for job, gap in zip(plan(runs, Path("runs/tiny/table")), (-0.5, -0.7, 0.1), strict=False):
        state = "trained" if gap < 0 else "stuck"
        left(job, "finished", step=5, verdict=state, nll_gap=gap)
    code, out, err = run(*asked_for, "--status")
    assert code == 0
    assert (out.count("finished"), out.count(" new ")) == (3, 1)
    assert [line.split() for line in out.splitlines()[-3:]] == [
        ["arch", "2"],
        ["Post-LN", "stuck"],
        ["DeepNorm", "-0.60"],
    ]


@pytest.mark.slow
def test_a_table_is_made_and_printed(run) -> None:
    small = ["--set=train.steps=2", "--set=data.sentences=4", "--set=data.held_out=6"]
    arguments = ["sweep", "table", "--archs", "deepnorm", "--depths", "2", "--seeds", "1", "-q", *small]
    code, out, _ = run(*arguments)
    assert code == 0
    first, title, head, row = out.splitlines()
    assert first == "runs/tiny/table: 1 run: 1 finished"
    assert title.startswith("held-out nll - unigram")
    assert head.split() == ["arch", "2"]
    assert row.startswith("DeepNorm")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["table", "--depths", "deep"], "--depths 'deep': give numbers of layers"),
        (["table", "--steps", "9"], "--set train.steps=9"),
        (["table", "--scale", "h200"], "no runs at scale h200"),
        (["table", "--set", "model.arch=preln"], "give --archs"),
        (["table", "branchnorm:8", "--seeds", "3"], "is a count to the table and a seed to a figure"),
        (["branchnorm:8", "--depths", "12"], "go with 'sweep table'"),
        (["--grid", "arch=postln", "--archs", "postln"], "go with 'sweep table'"),
        (["deepnet:6", "--set", "train.lr=1"], "--set goes with --grid or with 'sweep table' alone"),
    ],
)
def test_bad_usage_is_one_sentence(run, arguments: list[str], sentence: str) -> None:
    code, out, err = run("sweep", *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
