"""Experiments of any grid of settings: ``arch=deepnorm,branchnorm depth=12,36 seed=0..4 train.lr=1e-3,3e-4``."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from ..config import (
    RAMP,
    SECTIONS,
    Config,
    ModelConfig,
    depth_layers,
    merge,
    resolve,
    stack_of,
    toml_value,
)
from ..errors import ResourceError, UsageError
from ..experiments import CONTROLS, Experiment, Kind, name_of, slug
from ..registry import Registry, spelling

ALIASES = {
    "arch": ("model.arch",),
    "depth": ("depth",),  # encoder and decoder layers together, as --depth
    "seed": ("train.seed", "data.seed"),
    "lr": ("train.lr",),
    "warmup": ("train.warmup",),
    "steps": ("train.steps",),
    "T": ("model.T",),
    "data": ("data.source",),
    "preset": ("preset",),
}
LIMIT = 100_000  # runs; a typo such as seed=0..10^9 should not fill the memory
RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")
PIECE = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'[^']*'|\[[^\]]*\]|[^,]*?)\s*,""")
SPEC = re.compile(r"(?:text|hf):|synthetic\b")  # the beginning of a value of data.source
IN_NAMES = ("arch", "depth", "seed")  # axes that a run's name says anyway


def grid(
    axes: Sequence[str], base: Mapping[str, Any] | None = None, *, depth: int | None = None, kind: Kind = "train"
) -> list[Experiment]:
    """Combine the values of ``axes`` in every way, the last axis fastest, over the settings ``base``.

    An axis is KEY=VALUE,VALUE,... with a section.key, an option arch.KEY or one of :data:`ALIASES`; FIRST..LAST stands
    for all whole numbers from FIRST to LAST; a value that holds a comma is put in quotes. Raises UsageError for
    anything wrong.
    """
    parsed = [axis(text) for text in axes]
    if not parsed:
        raise UsageError("--grid needs at least one KEY=VALUE,VALUE, such as arch=deepnorm,branchnorm.")
    keys = [target for key, _ in parsed for target in _targets(key)]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise UsageError(f"--grid sets {twice!r} twice: give all its values in one axis.")
    if (size := math.prod(len(values) for _, values in parsed)) > LIMIT:
        raise UsageError(f"--grid makes {size:,} runs: more than {LIMIT:,} is refused; give fewer values.")
    found: dict[str, Experiment] = {}
    for values in itertools.product(*(values for _, values in parsed)):
        point = {key: value for (key, _), value in zip(parsed, values, strict=True)}
        config = _config(point, base or {}, depth)
        _check_options(config.model)
        name = name_of(config, *(_tag(key, value) for key, value in point.items() if not _is_in_names(key)))
        if name in found:
            raise UsageError(f"--grid makes two runs named {name}: leave out the value that is given twice.")
        found[name] = Experiment(name, config, kind)
    return list(found.values())


def axis(text: str) -> tuple[str, list[Any]]:
    """Read KEY=VALUE,VALUE: return the key, by its alias if it has one, and all values. Raises UsageError."""
    key, equals, values = text.partition("=")
    key = key.strip()
    if not equals or not key or not values.strip():
        raise UsageError(f"--grid {text!r} is not of the form KEY=VALUE,VALUE, such as seed=3..7.")
    _targets(key)
    key = next((alias for alias, (target, *_) in ALIASES.items() if target == _targets(key)[0]), key)
    pieces = PIECE.findall(values + ",")
    if "data.source" in _targets(key):
        pieces = _rejoined(pieces)
    if "" in pieces:
        raise UsageError(f"--grid {text!r} has an empty value: write KEY=VALUE,VALUE without spare commas.")
    expanded = [value for piece in pieces for value in _values(piece, text)]
    return key, [_arch(value) if key.endswith("arch") else value for value in expanded]


def _targets(key: str) -> tuple[str, ...]:
    """Return the names of the settings behind an axis."""
    if key in ALIASES:
        return ALIASES[key]
    section, _, name = key.partition(".")
    if section == "arch" and name:
        return (f"model.{name}" if name in RAMP else key,)
    if key == "model.kind":  # the other name of model.stack
        return ("model.stack",)
    if section not in SECTIONS or not name:
        raise UsageError(
            f"--grid knows no {key!r}: use {', '.join(ALIASES)}, an option arch.KEY of the architectures, or a "
            "section.key such as train.beta2."
        )
    if name not in SECTIONS[section].model_fields:
        raise UsageError(f"unknown setting {key!r}; known are {', '.join(SECTIONS[section].model_fields)}.")
    return ("train.seed", "data.seed") if key == "train.seed" else (key,)


def _values(piece: str, axis: str) -> list[Any]:
    if match := RANGE.fullmatch(piece):
        first, last = int(match[1]), int(match[2])
        if last < first:
            raise UsageError(f"--grid {axis!r}: the range {piece} is empty; write it from the smaller number up.")
        if last - first >= LIMIT:
            raise UsageError(f"--grid {axis!r}: the range {piece} is longer than {LIMIT:,}; give fewer values.")
        return list(range(first, last + 1))
    return [toml_value(piece)]


def _rejoined(pieces: Sequence[str]) -> list[str]:
    """Join the pieces of one value: ``text:SRC,TGT`` and ``hf:DATASET,SRC,TGT`` hold commas of their own. A piece that
    begins with the name of a source begins another value: ``text:FILE,text:FILE`` are two."""
    whole: list[str] = []
    rest = list(pieces)
    while rest:
        parts = {"text": 2, "hf": 3}.get(rest[0].partition(":")[0], 1)
        parts = next((n for n, piece in enumerate(rest[1:parts], start=1) if SPEC.match(piece)), parts)
        whole.append(",".join(rest[:parts]))
        del rest[:parts]
    return whole


def _config(point: Mapping[str, Any], base: Mapping[str, Any], depth: int | None) -> Config:
    settings: dict[str, Any] = {}
    for key, value in point.items():
        for target in _targets(key):
            section, _, name = target.partition(".")
            if name:
                settings.setdefault(section, {})[name] = value
            elif target != "depth":
                settings[target] = value
    if "depth" in point:
        if not isinstance(point["depth"], int):
            raise UsageError(f"--grid depth={point['depth']}: give whole numbers of layers, such as depth=12,36.")
        stack = stack_of(merge(base, settings).get("model", {}))
        encoder, decoder = depth_layers(point["depth"], stack)
        settings = merge({"model": {"encoder_layers": encoder, "decoder_layers": decoder}}, settings)
        depth = None
    return resolve(base, settings, depth=depth)


def _is_in_names(key: str) -> bool:
    """True if a run's name says the value anyway; the label in the name says the options of architectures."""
    return key in IN_NAMES or _targets(key)[0].startswith("arch.")


def _check_options(model: ModelConfig) -> None:
    """Raise UsageError for an option that the architecture does not have, now and not in every run."""
    if not model.options:
        return
    archs = dict.fromkeys(registered_arch(name) for name in (model.arch, model.decoder_arch or model.arch))
    known = {key for name in archs for key in arch_facts()[name]["options"]}
    if foreign := next((key for key in model.options if key not in known), None):
        have = ", ".join(sorted(known)) or "none"
        raise UsageError(f"architecture {model.arch!r} has no option {foreign!r}; it has {have}.")


def _tag(key: str, value: Any) -> str:
    return slug(f"{key.rpartition('.')[2]}{value}")


def _arch(name: Any) -> Any:
    return registered_arch(name) if isinstance(name, str) else name


def registered_arch(name: str) -> str:
    """Return the registered spelling of an architecture. A wrong name raises now, not in every run of the grid."""
    used = {spelling(control["arch"]): control["arch"] for control in CONTROLS.values()}
    return used.get(spelling(name)) or _registered().resolve(name)


@cache
def arch_facts() -> dict[str, dict[str, Any]]:
    """Return the facts of ``list archs`` about all architectures, by name. They come from a process of its own, since
    the models need torch."""
    command = [sys.executable, "-m", "stabilitylab", "list", "archs", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ResourceError(f"cannot list the architectures: {result.stderr.strip() or result.returncode}")
    return json.loads(result.stdout)["archs"]


@cache
def _registered() -> Registry[None]:
    registry: Registry[None] = Registry("architecture")
    for name in arch_facts():
        registry.register(name)(None)
    return registry
