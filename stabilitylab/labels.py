"""What a configuration is called in tables and figures: the architecture, or the control that it is.

Two models that differ in initial weights or formula have two labels, but for T of a ramp, which figures note; sizes,
norms and dropout keep runs apart by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from .arch_notes import note
from .config import ModelConfig
from .registry import spelling


def label(config: ModelConfig) -> str:
    """Such as ``postln``, ``postln+beta``, ``branchnorm T=1``, ``deepnorm alpha-only`` or, mixed, ``postln/preln``."""
    encoder, decoder = config.arch, config.decoder_arch or config.arch
    if spelling(encoder) == spelling(decoder):
        return _control(encoder, config)
    return f"{_control(encoder, config)}/{_control(decoder, config)}"


def label_of(manifest: Mapping[str, Any]) -> str:
    """The label of a recorded run: today's, where its settings say more than the label that it was recorded with."""
    recorded = str(manifest.get("label", ""))
    model = (manifest.get("config") or {}).get("model")
    if isinstance(model, Mapping) and model.get("arch") and recorded.startswith(str(model["arch"])):
        try:
            return label(ModelConfig.model_validate(model))
        except ValidationError:  # settings of another version
            pass
    return recorded


def may_follow_ramp(arch: str) -> bool:
    """Does alpha's schedule drive this architecture? Of one that does not say what its gains do it may."""
    said = note(arch)
    return said is None or said.gains is None or said.scheduled


def has_ramp(config: ModelConfig) -> bool:
    """Does alpha grow at all, or is it a constant?"""
    return config.alpha is None and config.t0 < config.T


def _control(arch: str, config: ModelConfig) -> str:
    said = note(arch)
    gains = said.gains if said else None
    xavier = config.init in ("xavier", "xavier-1") and gains != "base"
    based = config.init == "xavier-1" or (config.init == "arch-1" and gains not in ("own", "beta"))
    alone = spelling(arch) == "deepnorm" and (xavier, config.alpha) in ((True, None), (False, 1.0))
    options = dict(sorted(config.options.items()))
    words = [
        *(["alpha-only" if xavier else "beta-only"] if alone else _alpha(arch, config)),
        *(["xavier"] if xavier and not alone else []),
        *(["gain=1"] if based else []),
        *([] if config.qk_gain is None else [f"qk={config.qk_gain:g}"]),
        *([] if config.v_gain is None else [f"v={config.v_gain:g}"]),
        *(["rmsnorm"] if config.norm == "rmsnorm" else []),
        *(["qk-norm"] if config.qk_norm else []),
        *(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in options.items()),
    ]
    return " ".join([arch + ("+beta" if config.init == "deepnorm" and gains != "beta" else ""), *words])


def _alpha(arch: str, config: ModelConfig) -> list[str]:
    """What is said of alpha: a constant in the arch's place or, of a schedule, all but the length of its ramp."""
    said = note(arch)
    if config.alpha is not None:
        return [f"alpha={config.alpha:g}"] if may_follow_ramp(arch) or (said and said.takes_alpha) else []
    if not may_follow_ramp(arch):
        return []
    if not has_ramp(config):
        return ["T=1"]  # alpha is 1 from the first row on
    shape = config.growth if config.growth != "linear" and config.T > 1 else ""  # alpha_0 = 0 is that of all shapes
    start = "" if config.t0 == 1 else f"t0={config.t0}"
    return [word for word in ("T=1" if config.T == 1 else "", shape, start) if word]
