"""Models with their initial weights, built from a configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import nn

from ..config import PRESETS, ModelConfig, resolve
from ..errors import ResourceError, UsageError
from .base import ARCHS
from .idle import refuse_idle
from .initialisation import initialise
from .transformer import KINDS, Transformer


def build_model(
    config: ModelConfig | None = None, *, source_vocab: int, target_vocab: int, seed: int = 0, **settings: Any
) -> Transformer:
    """Build a Transformer on the CPU. Its initial weights depend on ``seed`` and not on the global generator.

    ``settings`` override fields of ``config``; ``depth=200`` and ``preset="tiny"`` are accepted too. A single stack
    uses only ``target_vocab``. Raises UsageError for an empty vocabulary and for ``settings`` with which one changes
    nothing, ResourceError if the weights alone exceed the memory of the machine.
    """
    given = bool(settings) or config is None
    config = canonical(configure(config, **settings))
    if given:  # else it may be the configuration of a recorded run
        refuse_idle(config)
    for name, size in (("source_vocab", source_vocab), ("target_vocab", target_vocab)):
        if size < 1:
            raise UsageError(f"{name} = {size} must be at least 1.")
    need = 4 * parameter_count(config, source_vocab=source_vocab, target_vocab=target_vocab)
    have = psutil.virtual_memory().total
    if need > have:
        raise ResourceError(
            f"the weights of this model alone take {need / 2**30:,.0f} GiB and this machine has {have / 2**30:,.0f}: "
            "choose fewer layers or a smaller width."
        )
    model = _construct(config, source_vocab, target_vocab)
    initialise(model, seed)
    return model


def configure(config: ModelConfig | None = None, **settings: Any) -> ModelConfig:
    """Return ``settings`` over ``config``, or over a preset, validated."""
    depth, preset = settings.pop("depth", None), settings.pop("preset", None)
    layers = [] if config is None else [{"model": config.model_dump()}]
    if preset is not None:
        layers.append({"preset": preset, "model": PRESETS.get(preset, {}).get("model", {})})
    if depth is not None and config is not None:
        layers[0]["model"] = {k: v for k, v in layers[0]["model"].items() if not k.endswith("_layers")}
    found = resolve(*layers, {"model": settings}, depth=depth).model
    known = settings.get("context") or (config.context if config else None)
    return found.model_copy(update={"context": known})  # there are no data that say how long inputs are


def canonical(config: ModelConfig) -> ModelConfig:
    """Return the same configuration with the canonical names of its architectures."""
    decoder = config.decoder_arch and ARCHS.resolve(config.decoder_arch)
    return config.model_copy(update={"arch": ARCHS.resolve(config.arch), "decoder_arch": decoder})


def parameter_count(config: ModelConfig, *, source_vocab: int, target_vocab: int) -> int:
    """Return the number of parameters. Two layers of each stack are built, without memory, so that a model of any size
    is counted at once: the first layer may be unlike the others."""
    layers = {key: getattr(config, key) for key in ("encoder_layers", "decoder_layers")}
    with torch.device("meta"):
        model = _construct(
            config.model_copy(update={key: min(n, 2) for key, n in layers.items()}), source_vocab, target_vocab
        )
    total = _size(model)
    for name, stack in model.stacks.items():
        depth = layers[f"{name}_layers"]
        total += (depth - len(stack.layers)) * _size(stack.layers[-1])
        with torch.device("meta"):
            trunk = stack.arch.new_trunk(replace(stack.place, **{f"{name}_layers": depth}), stack.options)
        total += _size(trunk) - _size(stack.trunk)
    return total


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _construct(config: ModelConfig, source_vocab: int, target_vocab: int) -> Transformer:
    return KINDS[config.stack](config, source_vocab=source_vocab, target_vocab=target_vocab)
