"""What architectures say of themselves has the form that the list and the documentation cut up."""

from __future__ import annotations

import inspect

import pytest

from stabilitylab.models import ARCHS
from stabilitylab.models.archs.facts import facts

EVERY = sorted(ARCHS)


@pytest.mark.parametrize("name", EVERY)
def test_each_has_a_formula_and_a_source_of_its_own(name) -> None:
    said = facts(name, 100, 100)
    assert said["formula"]
    assert said["source"]
    assert not said["source"].endswith(".")
    assert "  " not in f"{said['formula']} {said['source']} {said['remarks']}"
    assert inspect.getdoc(ARCHS[name]) != inspect.getdoc(ARCHS[name].__base__)
    assert ARCHS[name].__module__.startswith("stabilitylab.models.archs.")


@pytest.mark.parametrize("name", EVERY)
def test_constants_are_those_of_the_stacks_that_there_are(name) -> None:
    for sizes, kind in (((4, 6), "encoder-decoder"), ((4, 0), "encoder"), ((0, 6), "decoder")):
        constants = facts(name, *sizes)["constants"]
        stacks = {stack for stack, layers in zip(("encoder", "decoder"), sizes, strict=True) if layers}
        assert set(constants) == (stacks if kind in ARCHS[name].defined_for else set())


def test_constants_that_depend_on_depth_do() -> None:
    changed = {name for name in EVERY if facts(name, 6, 6)["constants"] != facts(name, 100, 100)["constants"]}
    without = {"postln", "preln", "admin", "rezero", "normformer", "sandwich", "periln", "resi-dual"}
    assert changed == set(EVERY) - without
