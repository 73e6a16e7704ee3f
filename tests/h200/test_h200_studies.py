"""The language-model studies on a GPU: a process an arm, in the order of depths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType

import pytest
from loose_scripts import scripts_of


@pytest.fixture
def studies(script) -> Iterator[ModuleType]:
    with scripts_of("results/h200") as load:
        yield load("studies")


def test_the_steps_are_all_arms_of_both_studies(studies) -> None:
    first, second, last = studies.steps()
    keel, baseline = studies.protocol_of("keel"), studies.protocol_of("deepnorm-baseline")
    assert {step.arm for step in first if step.study == "keel"} == {*keel.arms(12)}
    assert {step.arm for step in first if step.study == "deepnorm-baseline"} == {*baseline.arms(12)}
    assert {(step.study, step.layers) for step in second} == {("keel", 36), ("deepnorm-baseline", 32)}
    assert [step.name for step in last] == ["keel-deep"]
    names = [step.name for at_once in studies.steps() for step in at_once]
    assert len(names) == len({*names})


@pytest.mark.parametrize("is_shared", [True, False])
def test_what_has_ended_is_not_begun_again(script, studies, monkeypatch, is_shared: bool) -> None:
    place, called = script.at(smoke=False), {}

    def call(self, command, clock, output, environment):
        called[output.stem] = command
        return None if output.stem == "keel-search-judged-12-deepnorm" else 0

    monkeypatch.setattr(script.place.Place, "call", call)
    monkeypatch.setattr(studies, "side_by_side", lambda *_: nullcontext(is_shared))
    found = studies.studies(place, script.place.Clock(60))
    of = sum(map(len, studies.steps()))
    assert (found.state, found.sentence) == ("partial", f"{of - 1} of {of} processes")
    command = called["keel-search-judged-36-keel-no-inner"]
    assert command[1].endswith("results/keel/make.py")
    assert command[2:8] == ["search", "judged", "--layers", "36", "--arm", "keel-no-inner"]
    assert command[command.index("--workers") + 1] == (str(studies.WORKERS) if is_shared else "1")
    assert [command[command.index(flag) + 1] for flag in ("--text", "--valid", "--test")] == [
        f"data/{split}.en.gz" for split in ("train", "val", "test_2016_flickr")
    ]
    called.clear()
    assert studies.studies(place, script.place.Clock(60)).state == "partial"
    assert [*called] == ["keel-search-judged-12-deepnorm"]


def test_a_smoke_test_tries_nothing(script, studies) -> None:
    assert studies.studies(script.at(), script.place.Clock(60)).state == "complete"
