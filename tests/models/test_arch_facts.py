"""What architectures say of themselves has the form that the list and the documentation cut up."""

from __future__ import annotations

import inspect
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from stabilitylab.arch_notes import built_in, note, notes
from stabilitylab.config import ModelConfig
from stabilitylab.labels import label, may_follow_ramp
from stabilitylab.models import ARCHS, Place, build_model
from stabilitylab.models.facts import facts
from stabilitylab.models.initialisation import GAINS

EVERY = sorted(ARCHS)


@pytest.mark.parametrize("name", EVERY)
def test_each_has_a_formula_and_a_source_of_its_own(name) -> None:
    said = facts(name, 100, 100)
    assert said["formula"], f"the docstring of {name} does not begin with a formula"
    assert said["source"], f"the docstring of {name} has no source: two spaces and the paper after the formula"
    assert not said["source"].endswith("."), f"the source of {name} ends with a full stop"
    assert "  " not in f"{said['formula']} {said['source']} {said['remarks']}"
    assert inspect.getdoc(ARCHS[name]) != inspect.getdoc(ARCHS[name].__base__)


@pytest.mark.parametrize("name", [one.name for one in built_in() if "since 2024" in one.family.lower()])
def test_sources_of_new_architectures_have_a_year_and_a_number(name) -> None:
    source = facts(name, 100, 100)["source"]
    assert re.search(r"(et al\.|and Wei|Team|GPAS) 20\d\d \(\d{4}\.\d{5}\)", source), source


def test_the_table_of_initial_gains_is_that_of_the_code() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "architectures.md").read_text(encoding="utf-8")
    table = text.split("\n| `model.init` | q, k |")[1].split("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    said = {cells[0].split("`")[1]: cells[1:] for cells in (re.split(r"\s*\|\s*", line.strip("| ")) for line in lines)}
    assert set(said) == set(GAINS) == set(get_args(ModelConfig.model_fields["init"].annotation))
    beta = ARCHS["deepnorm"].constants(Place("decoder", 0, "", 0, 6, 6))["beta"]
    values = {"1": 1.0, "1/sqrt(2)": math.sqrt(0.5), "beta": beta}

    def spread(cell: str, matrix: str) -> float:
        """The gain of a standard deviation of .02, at 64-128 and 3 * 6 sub-layers."""
        assert cell.startswith("std .02")
        inner = 128 if matrix.startswith("fc") else 64
        smaller = "out and fc2 / sqrt(L)" in cell and matrix in ("out", "fc2")
        return 0.02 / math.sqrt(2 / (64 + inner)) / (math.sqrt(18) if smaller else 1)

    for init, (qk, v, rest, own, labels) in said.items():
        postln, shrinking = (
            list(build_model(arch=arch, init=init, depth=12, source_vocab=9, target_vocab=9).residuals())
            for arch in ("postln", "postln-init")
        )
        for residual in postln:
            for matrix in residual.f.matrices if residual.place.stack == "decoder" else ():
                cell = qk if matrix in "qk" else v if matrix == "v" else rest
                assert GAINS[init](residual, matrix) == pytest.approx(values.get(cell) or spread(cell, matrix))
        shrunk = GAINS[init](shrinking[0], "out") / GAINS[init](postln[0], "out")
        assert shrunk == pytest.approx(1 / 6 if own == "applied" and init != "deepnorm" else 1)
        assert labels == ", ".join(f"`{label(ModelConfig(arch=arch, init=init))}`" for arch in ("postln", "deepnorm"))


@pytest.mark.parametrize("name", EVERY)
def test_labels_know_what_each_architectures_gains_do(name) -> None:
    own = dict.fromkeys(("own", "beta"), "its own, in place of the base")
    words = {"base": "the base", "times base": "its own, times the base", **own}
    words["even base"] = "the base, without gpt2's 1/sqrt(2 layers) on out and fc2"
    said = note(name)
    assert said is not None
    assert words[said.gains] == facts(name, 6, 6)["gains"]
    assert may_follow_ramp(name) == ARCHS[name].scheduled
    assert ARCHS[name].takes_alpha == (said.gains == "beta" or name == "keel")


def test_notes_are_read_from_the_sources_as_the_classes_have_them() -> None:
    assert [each.name for each in notes().values() if each.name in EVERY] == sorted(EVERY, key=lambda n: note(n).rank)
    for name in EVERY:
        said, entry = note(name), ARCHS[name]
        assert (said.scheduled, said.takes_alpha, dict(said.recipe)) == (
            entry.scheduled,
            entry.takes_alpha,
            dict(entry.recipe),
        )
        lacking = [field for field in ("title", "look", "gains") if not getattr(said, field)]
        assert lacking == [], f"@arch({name!r}, ...) lacks these"
    assert len({note(name).rank for name in EVERY}) == len(EVERY)


def test_reading_notes_imports_no_torch() -> None:
    check = "import sys; from stabilitylab.arch_notes import note; note('admin'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize("name", EVERY)
def test_constants_are_those_of_the_stacks_that_there_are(name) -> None:
    for sizes, kind in (((4, 6), "encoder-decoder"), ((4, 0), "encoder"), ((0, 6), "decoder")):
        constants = facts(name, *sizes)["constants"]
        stacks = {stack for stack, layers in zip(("encoder", "decoder"), sizes, strict=True) if layers}
        assert set(constants) == (stacks if kind in ARCHS[name].defined_for else set())


def test_constants_that_depend_on_depth_do() -> None:
    changed = {name for name in EVERY if facts(name, 6, 6)["constants"] != facts(name, 100, 100)["constants"]}
    without = {"postln", "preln", "rezero", "normformer", "sandwich", "periln", "resi-dual", "gpas", "hybridnorm"}
    without |= {"hybridnorm-star", "hyper-connections", "hyper-connections-static", "mhc", "attnres"}
    assert changed.isdisjoint(without), "constants that must not depend on depth"
    assert {
        "deepnorm",
        "branchnorm",
        "postln-init",
        "dsinit",
        "tfixup",
        "rfixup",
        "subln",
        "layernorm-scaling",
    } <= changed
    assert {"keel", "mix-ln", "completep", "admin", "siamese-norm", "attnres-block"} <= changed
