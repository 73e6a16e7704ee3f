"""One name for one thing: no two public classes share one, and no public name is lost without an alias."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest
from imports import modules

import stabilitylab

FROZEN = Path(__file__).with_name("public_names.json")


def classes(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Public class -> the modules that define it at their top."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    return found


@pytest.mark.slow
def test_no_two_public_classes_have_one_name() -> None:
    sources = {name: path.read_text(encoding="utf-8") for name, path in modules().items()}
    doubled = {name: homes for name, homes in classes(sources).items() if len(homes) > 1}
    assert doubled == {}, "several modules define a public class of one name: rename all but one"


def test_a_doubled_name_is_found() -> None:
    made = classes({"a": "class Grid: ...", "b": "class Grid: ...\nclass _Inner: ...", "c": "class _Inner: ..."})
    assert {name: homes for name, homes in made.items() if len(homes) > 1} == {"Grid": ["a", "b"]}


def test_dir_shows_public_names_only() -> None:
    assert dir(stabilitylab) == sorted(stabilitylab.__all__), "dir(stabilitylab) differs from stabilitylab.__all__"
    private = [name for name in dir(stabilitylab) if name.startswith("_")]
    assert private == ["__version__"], "stabilitylab.__all__ has private names"


@pytest.mark.parametrize("package", sorted(json.loads(FROZEN.read_text(encoding="utf-8"))))
def test_no_public_name_is_lost(package: str) -> None:
    """A name that moves keeps an alias here; one that is added is written into the list by hand."""
    home = import_module(package)
    frozen = json.loads(FROZEN.read_text(encoding="utf-8"))[package]
    assert sorted(home.__all__) == frozen, f"{package}.__all__ differs from tests/public_names.json"
    lost = [name for name in frozen if not hasattr(home, name)]
    assert lost == [], f"{package} no longer has these public names: keep an alias"
