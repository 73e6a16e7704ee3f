"""DeepNet, Figure 4, and its claims C13 to C16 and C18, on made-up runs of 30 updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from making import Made, layer_rows, load, make_run, sublayer_rows

from stabilitylab.reports.base import MissingRuns
from stabilitylab.reports.claims import CLAIMS, Finding, judge
from stabilitylab.reports.figures.deepnet.figure_4 import FirstUpdates
from stabilitylab.schema import Row

D = 64
OUTPUTS = [Row(stack, stack, 0, "output") for stack in ("encoder", "decoder")]
Curve = Callable[[int], float]  # of the step


@dataclass(frozen=True)
class Course:
    """What a made-up run does: ||dF||, its change per update, norm inputs over sqrt(d), and -log of the gradient of the
    first decoder layer over the last."""

    moved: Curve = lambda step: 0.0
    change: Curve = lambda step: 0.0
    inputs: Curve = lambda step: 1.0
    lost: Curve = lambda step: 0.0


EXPLODES = Course(
    moved=lambda step: 9.0 * (step > 0),
    change=lambda step: 9.0 if step == 1 else 0.1,
    inputs=lambda step: 1.2 + 2.0 * (step >= 10),
    lost=lambda step: 5.0 + 10.0 * (step >= 20),
)
CALM = Course(
    moved=lambda step: 0.1 * step,
    change=lambda step: 0.1,
    inputs=lambda step: 1.2 + 0.001 * (step >= 10),
    lost=lambda step: 5.0 + 10.0 * (step >= 3),
)
WARM = Course(moved=lambda step: 0.2 * step, inputs=lambda step: 1.2)
INIT = Course(moved=lambda step: 0.02 * step, inputs=lambda step: 1.1)


def make_course(
    folder: Path,
    arch: str,
    seed: int,
    course: Course,
    *,
    warmup: int = 0,
    layers: int = 18,
    steps: Sequence[int] = range(31),
    state: str = "finished",
    init: str = "arch",
) -> None:
    def updates(step: int, row: Row) -> Sequence[float]:
        return (course.moved(step), course.change(step)) if row.stack == "decoder" else (77.0, 77.0)

    def inputs(step: int, row: Row) -> Sequence[float]:
        value = course.inputs(step) * math.sqrt(D) * (1 if row.sublayer == "ffn" else 1.0 + 1e-6)
        return value, value / 10

    def gradient(step: int, row: Row) -> float:
        return math.exp(-course.lost(step) * (layers - row.layer) / (layers - 1))

    taps = [row for row in sublayer_rows(layers, ["decoder"]) if row.sublayer == "ffn"]
    tables = {
        "model_update": Made(OUTPUTS, ("cumulative", "one_update"), updates, steps, "mean"),
        "ln_input": Made(sublayer_rows(layers), ("value", "branch"), inputs, steps, "mean"),
        "grad_norm": Made(layer_rows(layers), ("value",), gradient, steps),
        "activation_grad_norm": Made(taps, ("value",), gradient, steps),
    }
    settings = {"model": {"init": init}, "train": {"steps": 101, "warmup": warmup}}
    name = f"{arch}-{warmup}-s{seed}"
    make_run(folder, name, arch=arch, seed=seed, layers=layers, settings=settings, tables=tables, state=state)


def make_all(
    folder: Path, cold: Callable[[int], Course], *, warm: Course = WARM, init: Course = INIT,
    init_of: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    inits = {"postln": "arch", "postln-init": "arch", **(init_of or {})}
    for seed in (3, 4, 5):
        own = 1 + 0.01 * seed
        make_course(folder, "postln", seed, cold(seed), init=inits["postln"])
        for arch, course in (("postln", warm), ("postln-init", init)):
            scaled = replace(course, moved=lambda step, own=own, course=course: own * course.moved(step))
            make_course(folder, arch, seed, scaled, warmup=4000, init=inits[arch])


def verdicts(folder: Path, *ids: str) -> dict[str, str]:
    runs = load(folder)
    return {id: judge(CLAIMS[id], runs).verdict for id in ids}


def one(folder: Path, id: str) -> Finding:
    return judge(CLAIMS[id], load(folder))


def test_the_picture_is_the_course(tmp_path: Path) -> None:
    make_all(tmp_path, lambda seed: replace(EXPLODES, moved=lambda step: float(seed) * (step > 0)))
    picture = FirstUpdates().picture(load(tmp_path))
    update, ffn, attention, gradient = picture.panels
    cold, warm, init = update.series
    assert [line.name for line in update.series] == [
        "Post-LN, no warm-up",
        "Post-LN, warm-up 4000",
        "Post-LN-init, warm-up 4000",
    ]
    assert cold.x == [*range(31)]
    assert cold.y == pytest.approx([0.0] + [4.0] * 30)
    assert (cold.low, cold.high) == ([0.0] + [3.0] * 30, [0.0] + [5.0] * 30)
    assert warm.y[30] == pytest.approx(6.0 * 1.04)
    assert init.y[30] == pytest.approx(0.6 * 1.04)
    assert [line.value for line in update.references] == pytest.approx([math.sqrt(2 * D)])
    whole, branch = ffn.series[0], picture.controls[0].series[0]
    assert whole.y == pytest.approx([1.0] * 10 + [3.2 / 1.2] * 21)  # over what it was at the start
    assert branch.y == pytest.approx(whole.y)
    assert (picture.controls[0].title, branch.name) == ("Branches alone, feed-forward", "Post-LN, no warm-up")
    assert attention.series[0].y == pytest.approx(whole.y)
    assert ffn.limits == attention.limits is not None
    assert not ffn.log_y
    assert gradient.title == "Gradient at update 30"
    assert gradient.series[0].y == pytest.approx([math.exp(-15 * (18 - layer) / 17) for layer in range(1, 19)])
    expected = "Post-LN, warm-up 4000 6.2, Post-LN, no warm-up 4, Post-LN-init, warm-up 4000 0.62 (3 seeds)."
    assert picture.finding == f"‖ΔF‖ after 30 updates: {expected}"


def test_one_interrupted_run_is_drawn_as_far_as_it_goes(tmp_path: Path) -> None:
    make_course(tmp_path, "deepnorm", 3, CALM, layers=2, steps=range(5), state="interrupted")
    picture = FirstUpdates().picture(load(tmp_path))
    assert picture.panels[0].series[0].x == [0, 1, 2, 3, 4]
    assert picture.panels[3].title == "Gradient at update 4"
    assert picture.finding == "‖ΔF‖ after 4 updates: DeepNorm, no warm-up 0.4 (one seed)."
    assert any("shortcut factor" in note for note in picture.notes)


def test_a_diverged_run_keeps_what_is_not_a_number(tmp_path: Path) -> None:
    blown = replace(EXPLODES, moved=lambda step: math.nan if step > 2 else 9.0, lost=lambda step: math.inf)
    make_course(tmp_path, "postln", 3, blown, layers=2, steps=range(4), state="diverged")
    picture = FirstUpdates().picture(load(tmp_path))
    assert picture.panels[0].series[0].y[:3] == [9.0, 9.0, 9.0]
    assert math.isnan(picture.panels[0].series[0].y[3])


@pytest.mark.slow
def test_other_settings_are_left_out_and_counted(tmp_path: Path) -> None:
    make_all(tmp_path, lambda seed: EXPLODES)
    make_course(tmp_path, "postln", 9, CALM, layers=2)
    picture = FirstUpdates().picture(load(tmp_path))
    assert picture.panels[0].series[0].seeds == 3
    assert "Not drawn: 1 run with other settings." in picture.notes


def test_without_runs_it_names_the_command(tmp_path: Path) -> None:
    make_run(tmp_path, "bare", layers=2)
    with pytest.raises(MissingRuns) as missing:
        FirstUpdates().picture(load(tmp_path))
    assert "stabilitylab sweep deepnet:4" in missing.value.command


def test_claims_hold_where_the_paper_is_right(tmp_path: Path) -> None:
    make_all(tmp_path, lambda seed: replace(EXPLODES, moved=lambda step: (9.0 + 0.01 * seed) * (step > 0)))
    assert set(verdicts(tmp_path, "C13", "C14", "C15", "C16").values()) == {"reproduced"}
    later, jump = one(tmp_path, "C13").effects
    assert jump["mean"] == pytest.approx(9.04 / math.sqrt(128), rel=1e-4)
    assert later["mean"] == pytest.approx(0.1 / 9.0)
    assert one(tmp_path, "C14").effects[0]["mean"] == pytest.approx(6.24 / 9.04, rel=1e-3)
    smaller, *each = one(tmp_path, "C15").effects
    assert smaller["mean"] == pytest.approx(min(effect["mean"] for effect in each))
    growth, size, init = one(tmp_path, "C16").effects
    assert [effect["mean"] for effect in (growth, size, init)] == pytest.approx([3.2 / 1.2, 3.2, 1.1], rel=1e-4)


@pytest.mark.slow
def test_c16_is_about_growth_and_not_about_size(tmp_path: Path) -> None:
    """Inputs that are large from the beginning did not become large."""
    make_all(tmp_path, lambda seed: replace(EXPLODES, inputs=lambda step: 3.0 + 0.01 * (step > 9) * seed))
    found = one(tmp_path, "C16")
    assert (found.verdict, found.effects[1]["verdict"]) == ("contradicted", "")
    assert found.effects[1]["mean"] == pytest.approx(3.04, rel=1e-3)


@pytest.mark.slow
def test_deepnets_own_postln_decides_and_fairseqs_stands_beside_it(tmp_path: Path) -> None:
    make_all(tmp_path / "fairseq", lambda seed: CALM)
    own = {"postln": "xavier-1", "postln-init": "arch-1"}
    make_all(tmp_path / "own", lambda seed: EXPLODES, init_of=own)
    assert set(verdicts(tmp_path, "C13", "C14", "C15", "C16").values()) == {"reproduced"}
    found = one(tmp_path, "C14").effects
    assert [effect["effect"] for effect in found] == [
        "with / without warm-up, gain 1",
        "with / without warm-up, fairseq's gain",
    ]
    assert (found[1]["role"], found[1]["reproduced"]) == ("descriptive", None)
    picture = FirstUpdates().picture(load(tmp_path))
    assert {line.arch for panel in picture.panels for line in panel.series} == {"postln gain=1", "postln-init gain=1"}
    assert len(picture.controls[0].series) == 6
    assert [line.label for line in picture.controls[-1].series] == [
        *("Post-LN gain=1", "Post-LN gain=1", "Post-LN-init gain=1")
    ]


def test_claims_fail_where_it_is_wrong(tmp_path: Path) -> None:
    make_all(tmp_path, lambda seed: CALM)
    assert set(verdicts(tmp_path, "C13", "C14", "C15", "C16").values()) == {"contradicted"}


def test_claims_are_open_where_seeds_disagree(tmp_path: Path) -> None:
    make_all(tmp_path, lambda seed: EXPLODES if seed == 3 else CALM, init=WARM)
    assert set(verdicts(tmp_path, "C13", "C14", "C15", "C16").values()) == {"inconclusive"}


def test_only_comparable_runs_are_compared(tmp_path: Path) -> None:
    """Post-LN without warm-up at 18 layers and with it at 12 are no pair, and 12 layers are not the paper's model."""
    for seed in (3, 4, 5):
        make_course(tmp_path, "postln", seed, EXPLODES)
        make_course(tmp_path, "postln", seed, WARM, warmup=4000, layers=12)
    assert verdicts(tmp_path, "C13", "C14", "C15", "C16") == {
        "C13": "reproduced",
        "C14": "not testable",
        "C15": "not testable",
        "C16": "reproduced",
    }
    assert "postln with warm-up" in one(tmp_path, "C14").why


@pytest.mark.parametrize(("missing", "warmup"), [("postln", 0), ("postln", 4000), ("postln-init", 4000)])
def test_the_order_needs_all_three(tmp_path: Path, missing: str, warmup: int) -> None:
    for arch, updates in {("postln", 0), ("postln", 4000), ("postln-init", 4000)} - {(missing, warmup)}:
        make_course(tmp_path, arch, 3, WARM, warmup=updates)
    found = one(tmp_path, "C15")
    assert found.verdict == "not testable"
    assert "sweep deepnet:4" in found.command


def test_runs_of_different_seeds_are_no_pair(tmp_path: Path) -> None:
    make_course(tmp_path, "postln", 3, EXPLODES)
    make_course(tmp_path, "postln", 4, WARM, warmup=4000)
    assert verdicts(tmp_path, "C14") == {"C14": "not testable"}


def test_a_gap_in_the_first_updates_is_no_evidence(tmp_path: Path) -> None:
    for seed in (3, 4, 5):
        make_course(tmp_path, "postln", seed, EXPLODES, steps=[*range(20), *range(21, 40)])
    assert set(verdicts(tmp_path, "C13", "C18").values()) == {"not testable"}


@pytest.mark.slow
def test_order_of_events(tmp_path: Path) -> None:
    for name, courses in {
        "true": [EXPLODES] * 17,  # Clopper-Pearson's interval of 17 of 17 begins at .805
        "false": [CALM] * 6,  # the gradient is lost first
        "half": [EXPLODES, CALM] * 4,
        "few": [EXPLODES] * 5,
    }.items():
        for seed, course in enumerate(courses, 3):
            make_course(tmp_path / name, "postln", seed, course)
    found = {name: one(tmp_path / name, "C18") for name in ("true", "false", "half", "few")}
    assert {name: finding.verdict for name, finding in found.items()} == {
        "true": "reproduced",
        "false": "contradicted",
        "half": "inconclusive",
        "few": "inconclusive",
    }
    assert found["half"].effects[0]["mean"] == 0.5


@pytest.mark.slow
def test_events_at_the_same_step_are_in_order(tmp_path: Path) -> None:
    at_once = Course(
        moved=lambda step: 9.0 * (step > 3), inputs=lambda step: 1 + (step > 3), lost=lambda step: 2.0 * (step > 3)
    )
    for seed in range(3, 9):
        make_course(tmp_path, "postln", seed, at_once)
    assert one(tmp_path, "C18").effects[0]["mean"] == 1
