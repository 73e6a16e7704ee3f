"""Settings that change nothing in the model that they are given for, and stacks that equal another architecture's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..designs import DESIGNS
from ..errors import UsageError
from ..inputs import shown
from .base import ARCHS, Place, Residual, options_of, stack_archs
from .norms import ELEMENTWISE

log = logging.getLogger(__name__)


def say_equal(config: ModelConfig) -> None:
    """Say in the log which stacks are too small to differ from those of another architecture."""
    for stack, entry in stack_archs(config).items():
        place = Place(stack, 0, "", config.d_model, config.encoder_layers, config.decoder_layers)
        other = entry.equal(place, options_of(entry, config))
        if other:
            own = next(name for name, known in ARCHS.items() if known is entry)
            log.warning("%s", equality(own, place, other))


def equality(name: str, place: Place, other: str) -> str:
    """Say that a stack of the architecture ``name`` is that of ``other``."""
    count = f"{place.layers} layer{'s' * (place.layers != 1)}"
    return f"{name} with {count} in the {place.stack} equals {other}: only a deeper {place.stack} differs."


def refuse_idle(config: ModelConfig) -> None:
    """Raise UsageError for a setting that changes nothing: the label of the model would claim an effect.

    Only new runs are checked. A recorded run with such a setting can still be evaluated and continued.
    """
    archs = list(stack_archs(config).values())
    reasons = _general(config)
    found: list[Mapping[str, str]] = [{**_without_norm(entry, config), **entry.idle(config)} for entry in archs]
    for setting in dict.fromkeys(key for own in found for key in own):
        section, _, key = setting.partition(".")
        asked = [
            own
            for own, entry in zip(found, archs, strict=True)
            if section == "model" or key in entry.Options.model_fields
        ]
        if all(setting in own for own in asked):
            reasons[setting] = asked[0][setting]
    for setting, why in reasons.items():
        value = _value(setting, config)
        said = str(value).lower() if isinstance(value, bool) else shown(value)
        raise UsageError(f"{setting} = {said} changes nothing here: {why}; leave it out.")


def _value(setting: str, config: ModelConfig) -> Any:
    section, _, key = setting.partition(".")
    value = config.options[key] if section == "arch" else getattr(config, key)
    return list(value) if isinstance(value, tuple) else value


def _general(config: ModelConfig) -> dict[str, str]:
    """Return setting -> reason, of the settings of the model that other settings switch off."""
    fields = ModelConfig.model_fields
    given = {key for key in fields if not fields[key].is_required() and getattr(config, key) != fields[key].default}
    found: dict[str, str] = {}
    if config.prores == "off":
        found |= {
            f"model.{key}": "model.prores is off" for key in ("prores_T", "prores_t0", "prores_order") if key in given
        }
    elif config.prores_order == "through" and config.stack != "encoder-decoder":
        found["model.prores_order"] = "a single stack has one order of its layers"
    elif config.prores_order == "through" and config.prores == "equal":
        found["model.prores_order"] = "model.prores = 'equal' opens all layers at the same time"
    if "value_weights" in given and config.value_residual == "off":
        found["model.value_weights"] = "model.value_residual is off"
    if "norm_alpha" in given and config.norm not in ELEMENTWISE:
        found["model.norm_alpha"] = f"model.norm = {config.norm!r} has no alpha, which dyt and derf have"
    if config.context is not None and config.positions != "learned":
        found["model.context"] = f"model.positions = {config.positions!r} has no table, which learned positions have"
    return found


def _without_norm(entry: type[Residual], config: ModelConfig) -> dict[str, str]:
    """Return the reason against ``model.norm`` for an architecture without norms, unless a design brings the norm."""
    by_design = DESIGNS[config.design].get("norm", "layernorm")
    if entry.normalised or config.qk_norm or config.norm == by_design:
        return {}
    return {"model.norm": "the architecture has no norms, and model.qk_norm is off"}
