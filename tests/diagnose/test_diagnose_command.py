"""``stabilitylab diagnose`` as a user meets it, on runs of ``probe``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from default_runs import assert_nothing_is_wrong
from diagnose_cases import falling, made
from rest_slow import rest_slow

from stabilitylab.store import RunWriter

QUICK = ["--set", "train.lr=2e-3"]
TINY = ["--set", "data.sentences=8", "--set", "data.held_out=8", "--quiet"]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "depth", "seed"), [("postln", "6", "0"), *rest_slow([("preln", "6", "1")], [])])
def test_a_run_that_learns_is_healthy(run, arch: str, depth: str, seed: str) -> None:
    path = run("probe", "--arch", arch, "--depth", depth, "--seed", seed, "--steps", "120", *QUICK, *TINY)[1].strip()
    code, out, err = run("diagnose", path, "--fail")
    assert (code, err) == (0, "")
    assert f"{path} is healthy (finished at step 120" in out
    assert "not checked: attention entropy collapse; not recorded: attention (probe attention)" in out


@pytest.mark.slow
def test_a_run_that_ends_within_a_collapse_is_open(run) -> None:
    """This one recovers by update 1,700; at 120 nobody can tell."""
    model = ["--arch", "branchnorm", "--depth", "8", "--seed", "2"]
    path = run("probe", *model, "--steps", "120", "--set", "train.warmup=40", *QUICK, *TINY)[1].strip()
    code, out, err = run("diagnose", path, "--fail")
    assert (code, err) == (0, "")
    assert "the rank collapse of the decoder may pass" in " ".join(out.split())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_wrong_with_the_default_recipe(run) -> None:
    """At 12 layers; README's command trains 200, all of its updates with EVERY=1."""
    path = run("probe", "--arch", "deepnorm", "--depth", "12", "--quiet")[1].strip()
    assert_nothing_is_wrong(json.loads(run("diagnose", path, "--json")[1]))


@pytest.mark.slow
def test_a_collapsed_post_ln_names_what_came_first_and_fails_where_asked(run) -> None:
    hot = ["--set", "train.lr=0.03", "--set", "train.warmup=0", "--set", "train.schedule=linear", "--steps", "60"]
    path = run("probe", "--arch", "postln", "--depth", "12", *hot, *TINY)[1].strip()
    code, out, _ = run("diagnose", path)
    assert code == 0
    assert "First sign (without notes): vanishing gradient" in out
    assert "vanishing gradient at step 2 -> plateau at step" in out
    assert run("diagnose", path, "--fail")[0] == 1
    code, out, err = run("diagnose", path, "--json")
    facts = json.loads(out)
    assert (code, err, facts["verdict"]) == (0, "", "failure")
    assert facts["chain"][0] == "vanishing_gradient"
    assert facts["chain"][-1] == "plateau"
    event = next(event for event in facts["events"] if event["severity"] != "note")
    assert {"kind", "step", "until", "stack", "layer", "sublayer", "evidence", "strength"} <= event.keys()
    assert (event["stack"], event["layer"]) == ("decoder", 1)


def test_a_missing_an_empty_and_a_foreign_folder_are_one_sentence(run, tmp_path: Path) -> None:
    code, out, err = run("diagnose", "nowhere")
    assert (code, out, err.count("\n")) == (4, "", 1)
    (tmp_path / "folder").mkdir()
    assert run("diagnose", "folder")[0] == 4
    with RunWriter.create(tmp_path / "empty", {"config": {}}) as empty:
        empty.open([])
    code, out, err = run("diagnose", "empty")
    assert (code, out) == (4, "")
    assert "recorded nothing yet: diagnose it after its first steps" in err


def test_a_watched_run_with_a_loss_alone_says_what_it_cannot_see(run, tmp_path: Path) -> None:
    loss = falling(80)
    loss[50:] = [4.0, *(value + 0.3 for value in loss[51:])]  # it comes back in part
    made(tmp_path / "mine", {"loss": loss})
    code, out, _ = run("diagnose", "mine")
    assert code == 0
    assert "First sign: loss spike. Loss rose from its level of 1.23 to 4 at step 50" in out
    assert "x its threshold): still so at the last row" in out
    assert "Cause unknown: `stabilitylab explain` can test it" in out
    assert "What to do: Look at the batch of its step" in out
    assert "not checked: growth of norm inputs; not recorded: ln_input (probe ln_input)" in out
    assert out.count("(stabilitylab probe, of an encoder-decoder)") == 1, "three kinds with one need share a line"
    assert "not checked: constant encoder, ignored source, alike tokens; not recorded: encoder_distance_between" in out
    checked = "explosion of the loss at the start, non-finite numbers, loss spike, divergence, plateau"
    assert f"checked: {checked}" in " ".join(out.split())
    assert run("diagnose", "mine", "--fail")[0] == 1


def test_a_changed_setting_that_did_no_harm_has_its_advice_and_is_said_once(run, tmp_path: Path) -> None:
    made(tmp_path / "mine", {"loss": falling(80), "lr": [1e-3] * 40 + [1e-2] * 2 + [1e-3] * 38})
    out = run("diagnose", "mine")[1]
    assert "mine is healthy" in out, out
    assert out.count("he learning rate rose to 0.01 at step 40") == 1, f"the finding is said twice: {out}"
    assert "If this was not intended: " in out
    assert "The events in order." not in out, "a note is no chain of events"
