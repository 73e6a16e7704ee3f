"""What diagnose and preflight say, held against what was put into a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def diagnosed_run(family: str, first: list[str], verdict: str = "failure", **facts: str) -> dict[str, str]:
    told = {"family": family, "half": "test", "at": "", "failed": "100", "open": "", **facts}
    return {
        **told,
        "diagnosis": json.dumps({"verdict": verdict, "first": first}),
        "preflight": '{"fail": {}, "warn": {}}',
    }


def test_what_is_named_first_is_held_against_what_was_put_in(scripts: Any) -> None:
    right = scripts("diagnosed").is_right
    assert right("rate_jump", {"first": ["lr_jump"]})
    assert right("rate_jump", {"first": ["lr_jump", "loss_spike"]})
    assert not right("rate_jump", {"first": ["update_jump"]})
    assert not right("rate_jump", {"first": []})
    assert right("corrupt_shard", {"first": ["loss_spike"]})  # it names no cause, and none can be named
    assert not right("corrupt_shard", {"first": ["lr_jump"]})


def test_every_way_to_fail_has_a_label_or_none(scripts: Any) -> None:
    from stabilitylab.diagnose.events import DETECTORS

    nameable, families = scripts("diagnosed").NAMEABLE, scripts("families").FAMILIES
    assert set(nameable) == {name for name, own in families.items() if own.kind != "healthy"}
    assert {kind for kinds in nameable.values() for kind in kinds} <= set(DETECTORS)


def test_shares_of_a_made_up_corpus(scripts: Any) -> None:
    runs = [
        diagnosed_run("rate_jump", ["lr_jump"], at="200"),
        diagnosed_run("rate_jump", ["update_jump"], at="200"),
        diagnosed_run("corrupt_shard", [], "healthy", at="200", failed=""),
        diagnosed_run("twin", [], "healthy", failed=""),
        diagnosed_run("fast", ["loss_spike"], "warning", failed=""),
        diagnosed_run("fast", ["loss_spike"], "warning", failed="", open="1"),
    ]
    told = {line["measure"]: line for line in scripts("diagnosed").judged(runs)}
    assert told["right cause, of what was wrong"]["share"] == "0.6667"
    assert told["right cause, of what can be named"]["share"] == "0.5000"
    assert told["always the most frequent cause (lr_jump)"]["share"] == "0.6667"
    assert told["said to be ill, of what was"]["of"] == "3"
    assert (told["accused, of healthy runs"]["share"], told["accused, of healthy runs"]["of"]) == ("0.5000", "2")
    table = {(line["put in"], line["first"]): line["runs"] for line in scripts("diagnosed").confusion(runs)}
    assert table["rate_jump", "lr_jump"] == table["rate_jump", "update_jump"] == table["healthy", "nothing"] == 1
    assert table["healthy", "loss_spike"] == table["open", "loss_spike"] == 1
