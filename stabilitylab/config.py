"""Typed, validated, frozen configuration; its resolved form is what a run directory stores."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .arch_notes import note, options_read
from .designs import block_width, design_of, is_design, stack_of
from .errors import InputError, UsageError, bounded, own_words
from .inputs import contents, shown
from .settings import (
    LARGEST,
    MAX_LAYERS,
    MOST,
    NEUTRAL,
    RAMP,
    SENTENCES,
    Config,
    CudaGraphs,
    DataConfig,
    Design,
    Later,
    ModelConfig,
    Parallel,
    ProbesConfig,
    Section,
    Stack,
    TrainConfig,
)

__all__ = [
    "DEFAULT_DEPTH",
    "LARGEST",
    "MAX_LAYERS",
    "MOST",
    "NEUTRAL",
    "PRESETS",
    "RAMP",
    "SENTENCES",
    "Config",
    "CudaGraphs",
    "DataConfig",
    "Design",
    "Later",
    "ModelConfig",
    "Parallel",
    "ProbesConfig",
    "Section",
    "Stack",
    "TrainConfig",
    "complete",
    "depth_layers",
    "later_settings",
    "merge",
    "neutral_settings",
    "parse_set",
    "read_config_file",
    "recipe_of",
    "resolve",
    "stack_of",
    "toml_value",
    "validated",
]

CONFIG_FILE = 1_000_000  # bytes
SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "probes": ProbesConfig,
}

ALIGNED = 8  # lengths of batches on a GPU are multiples of it, at most
PRORES_SHARE = 0.2  # ours: share of the updates in which ProRes opens all layers of a tiny run; the paper has T = 1000
RAMP_SHARE = 0.04  # share of the updates that T is by default: BranchNorm's 4,000 of 100,000
# "tiny" is the model of DeepNet's Figure 5 with a recipe that shows effects within five minutes on one CPU core, and
# with which DeepNorm and BranchNorm of 200 layers read their source (results/default). A run of fewer than 240 updates
# warms up in half of them.
# "small" and "base" follow BranchNorm's Table 4 (learning rate, warm-up, T, batch in tokens scaled to one device).
_PAPER = {"lr": 5e-4, "warmup": 4000, "steps": 100_000}
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {"model": {"T": 100}},  # recorded for an architecture without a ramp; others get their share
    "small": {
        "model": {"d_model": 256, "d_ffn": 1024, "heads": 4, "dropout": 0.1, "T": 4000},
        "data": {"vocab_size": 8000, "sentences": 64, "max_length": 64},
        "train": _PAPER,
    },
    "base": {
        "model": {"d_model": 512, "d_ffn": 2048, "heads": 8, "dropout": 0.1, "T": 4000},
        "data": {"vocab_size": 32_000, "sentences": 64, "max_length": 64},
        "train": _PAPER,
    },
}
DEFAULT_DEPTH = 200


def recipe_of(arch: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the settings that the paper of an architecture requires: over the preset, under everything that is
    given."""
    found = note(arch) if arch else None
    return found.recipe if found else {}


def depth_layers(depth: int, stack: Stack) -> tuple[int, int]:
    """Return ``--depth`` as (encoder layers, decoder layers): 200 is 100L-100L, or 200 layers of a single stack."""
    if not 1 <= depth <= MAX_LAYERS:
        raise UsageError(f"--depth {depth} is out of range: give the number of layers, 1 to {MAX_LAYERS}.")
    if stack == "encoder":
        return depth, 0
    if stack == "decoder":
        return 0, depth
    if depth % 2:
        raise UsageError(
            f"--depth {depth} is odd: an encoder-decoder has depth/2 layers a side; "
            "give an even number, or set model.encoder_layers and model.decoder_layers."
        )
    return depth // 2, depth // 2


def parse_set(assignments: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return ``["train.lr=3e-4", ...]`` as nested settings; a value is read as TOML if it is TOML, else as text."""
    settings: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        section, dot, name = key.strip().partition(".")
        if not (equals and dot and section and name):
            raise UsageError(f"--set {shown(assignment)} is not of the form section.key=value, such as train.lr=3e-4.")
        settings.setdefault(section, {})[name] = toml_value(text)
    return settings


def toml_value(text: str) -> Any:
    """Return ``text`` as TOML if it is one value, else as text."""
    try:
        found = tomllib.loads(f"value = {text}")
    except (RecursionError, ValueError):  # no TOML, too deep, a number of 5,000 digits
        return text.strip()
    return found["value"] if len(found) == 1 else text.strip()


def read_config_file(path: Path) -> dict[str, Any]:
    """Read the settings of a TOML file with the sections of :class:`Config`. Raises InputError."""
    content = contents(path, CONFIG_FILE, "no option")
    try:
        return tomllib.loads(content.decode())
    except (RecursionError, ValueError) as error:
        told = bounded(str(error), 200).rstrip(".")
        raise InputError(f"cannot read the configuration {path}: {told}.") from error


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge sections key by key; later layers win."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, Mapping):
                merged[key] = {**merged.get(key, {}), **value} if isinstance(merged.get(key, {}), dict) else value
            else:
                merged[key] = value
    return merged


def _marks() -> Iterator[tuple[str, str, list[Any]]]:
    """Yield (section or "", setting, marks) of every setting."""
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            yield from ((name, key, inner.metadata) for key, inner in section.model_fields.items())
        else:
            yield "", name, field.metadata


def neutral_settings() -> frozenset[str]:
    """Return the settings marked :data:`NEUTRAL`, as section.key."""
    return frozenset(f"{section}.{key}".lstrip(".") for section, key, marks in _marks() if NEUTRAL in marks)


def later_settings() -> dict[str, dict[str, Any]]:
    """Return the settings marked :class:`Later`, at the value that corresponds to runs from before them."""
    found: dict[str, dict[str, Any]] = {}
    for section, key, marks in _marks():
        for mark in marks:
            if isinstance(mark, Later):
                found.setdefault(section, {})[key] = mark.before
    return found


def complete(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's recorded settings, completed with later settings at the values from before them; {} stays {}."""
    return merge(Config().model_dump(mode="json"), later_settings(), recorded) if recorded else {}


def resolve(*layers: Mapping[str, Any], depth: int | None = None) -> Config:
    """Merge preset < ``layers`` (file, flags, ``--set``) and validate; ``depth`` fills the layers that none of them
    names."""
    settings = _placed(merge(*layers))
    preset = settings.setdefault("preset", "tiny")
    if not isinstance(preset, str) or preset not in PRESETS:
        hint = f" {shown(preset)} is a model: give --model {preset}." if is_design(preset) else ""
        raise UsageError(f"unknown preset {shown(preset)}; choose one of {', '.join(PRESETS)}.{hint}")
    given = settings.get("model", {})
    given = given if isinstance(given, Mapping) else {}  # what is no mapping, validation refuses
    arch = given.get("arch")
    own = recipe_of(arch) if isinstance(arch, str) else {}
    settings = merge(PRESETS[preset], {"model": design_of(given)}, own, settings)
    model = settings.setdefault("model", {})
    if isinstance(model, dict):
        if "d_ffn" not in given and isinstance(width := model.get("d_model", ModelConfig().d_model), int):
            inner = block_width(model.get("design", ""), width)
            model |= {} if inner is None else {"d_ffn": inner}
        stack = stack_of(model)
        if stack in ("encoder-decoder", "encoder", "decoder"):
            if depth is not None or not {"encoder_layers", "decoder_layers"} & model.keys():
                encoder, decoder = depth_layers(DEFAULT_DEPTH if depth is None else depth, stack)
            else:
                encoder, decoder = 0, 0
            model.setdefault("encoder_layers", encoder)
            model.setdefault("decoder_layers", decoder)
    config = _with_context(validated(settings))
    if preset == "tiny" and "warmup" not in settings.get("train", {}):
        config = config.changed(train={"warmup": min(config.train.warmup, config.train.span // 2)})
    if preset == "tiny" and "prores_T" not in given and config.model.prores != "off":
        whole = PRORES_SHARE * config.train.span / _last(config.model)
        config = config.changed(model={"prores_T": max(1, round(whole))})
    if preset == "tiny" and "T" not in given and _ramps(config.model):
        ramp = max(2, round(RAMP_SHARE * config.train.span))  # T = 1 is the control without a ramp
        return config.changed(model={"T": ramp})
    return config


def _with_context(config: Config) -> Config:
    """Return the configuration with a table of learned positions as long as the longest row of a batch, if its length
    is not given."""
    if config.model.positions != "learned" or config.model.context is not None:
        return config
    longest = config.data.max_length + config.data.length_multiple - 1  # rows are padded to a multiple ...
    rows = -(-longest // ALIGNED) * ALIGNED  # ... and on a GPU to another one
    return config.changed(model={"context": rows})


def _last(model: ModelConfig) -> int:
    """Return the number l of the layer that ProRes opens last, at T l; 1 if all layers open at T."""
    layers = model.encoder_layers, model.decoder_layers
    return 1 if model.prores == "equal" else sum(layers) if model.prores_order == "through" else max(layers)


def _ramps(model: ModelConfig) -> bool:
    """True if a schedule drives alpha in one of the model's architectures, as in BranchNorm."""
    notes = [note(name) for name in (model.arch, model.decoder_arch) if name]
    return any(each.scheduled for each in notes if each is not None)


def _placed(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with ``arch.KEY`` in its recorded place: ``model.KEY`` if that is its alias, else
    ``model.options``."""
    options = settings.pop("arch", {})
    if not isinstance(options, Mapping):
        raise UsageError(f"arch = {shown(options)} is no section: name an architecture with --arch or model.arch.")
    model = settings.get("model", {})
    if not isinstance(model, Mapping):
        return settings
    if "kind" in model:  # the other name of model.stack
        if model.get("stack", model["kind"]) != model["kind"]:
            kinds = f"model.kind = {shown(model['kind'])} and model.stack = {shown(model['stack'])}"
            raise UsageError(f"{kinds} are one setting: give one.")
        model = {**{key: value for key, value in model.items() if key != "kind"}, "stack": model["kind"]}
        settings = {**settings, "model": model}
    if not options:
        return settings
    aliased = {key: value for key, value in options.items() if key in RAMP}
    for key, value in aliased.items():
        if key in model and model[key] != value:
            there = shown(model[key])
            raise UsageError(f"arch.{key} = {shown(value)} and model.{key} = {there} are one setting: give one.")
    own = {key: value for key, value in options.items() if key not in RAMP}
    placed = {**model, **aliased, **({"options": {**model.get("options", {}), **own}} if own else {})}
    return {**settings, "model": placed}


def validated(settings: Mapping[str, Any]) -> Config:
    """Return ``settings`` as a :class:`Config`, without options of architectures that are at their defaults. The first
    error becomes one sentence (UsageError)."""
    try:
        config = Config.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "constrained-int")
        if first["type"] == "extra_forbidden":
            raise UsageError(f"unknown setting {shown(where)}{_known(first['loc'])}.") from error
        text = bounded(own_words(first["msg"]), 500)
        prefix = "" if first["type"] == "value_error" else f"setting {where} = {shown(first['input'])}: "
        raise UsageError(f"{prefix}{text}.") from error
    model = config.model
    own = options_read(model.options, (model.arch, model.decoder_arch))
    return config.changed(model={"options": own}) if model.options else config


def _known(location: tuple[int | str, ...]) -> str:
    section = SECTIONS.get(str(location[0])) if len(location) > 1 else Config
    return f"; known are {', '.join(section.model_fields)}" if section else ""
