"""The recipe of a run: its settings without seeds and names, and the settings in which runs differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import listed
from ..inputs import shown
from ..store.documents import plain
from ..store.layout import flat, is_name

SEED = re.compile(r"seed", re.IGNORECASE)
NAMES = frozenset(
    {"id", "log_dir", "logging_dir", "name", "out", "output_dir", "resume", "run", "run_dir", "run_id", "run_name"}
)  # settings that name a run, and change nothing of its training
VERSIONS = ("torch", "flush_denormal")  # facts of the process that may change numbers; ``numerics`` too
MOST = 4  # at most so many lines about differences; the others are named in one more line
NOTHING = "not given"


def recipe_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run by dotted name, from run.json: its model's label, its configuration and its
    numerics, in JSON's types. Seeds, names and paths of the run itself are left out."""
    told = {
        "label": manifest.get("label", ""),
        "config": manifest.get("config") or {},
        "numerics": manifest.get("numerics") or {},
        **{name: manifest[name] for name in VERSIONS if name in manifest},
    }
    found = {key.removeprefix("config."): value for key, value in flat(plain(told))}  # keys of any type become text
    return {one_line(key): value for key, value in found.items() if not _is_own(key.rsplit(".", 1)[-1])}


def one_line(name: str) -> str:
    """Return a name unchanged if it can be printed on one line, else in quotes and with escapes."""
    return name if name and is_name(name) else shown(name)


def _is_own(name: str) -> bool:
    return bool(SEED.search(name)) or name in NAMES


def differences(recipes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the settings in which recipes differ -> the values in words, each with the names of its runs."""
    found = {}
    for key in dict.fromkeys(key for recipe in recipes.values() for key in recipe):
        values: dict[str, list[str]] = {}
        for name, recipe in recipes.items():
            values.setdefault(shown(recipe[key], 40) if key in recipe else NOTHING, []).append(name)
        if len(values) > 1:
            found[key] = "; ".join(f"{value} in {listed(names)}" for value, names in values.items())
    return found


def in_lines(differing: Mapping[str, str]) -> list[str]:
    """Return a few lines about settings that differ."""
    keys = list(differing)
    lines = [f"{key} differs: {differing[key]}" for key in keys[:MOST]]
    more = keys[MOST:]
    if more:
        lines.append(f"{len(more)} more setting{'s' * (len(more) > 1)} differ{'s' * (len(more) == 1)}: {listed(more)}")
    return lines
