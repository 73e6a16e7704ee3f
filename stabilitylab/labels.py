"""The label of a configuration in tables and figures: its architecture or control.

Two models of one size that differ in initial weights or formula have two labels. There are three exceptions: T of a
ramp, which figures note; ``model.tie``; and ``model.stack``. Tie, stack, sizes and dropout are not part of a label:
they distinguish runs by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from .arch_notes import note, options_read
from .config import ModelConfig
from .designs import DESIGNS
from .registry import spelling


def label(config: ModelConfig) -> str:
    """Return the label: ``postln``, ``postln+beta``, ``branchnorm T=1``, ``deepnorm alpha-only`` or, for two
    architectures, ``postln/preln``."""
    encoder, decoder = config.arch, config.decoder_arch or config.arch
    if spelling(encoder) == spelling(decoder):
        return _control(encoder, config)
    return f"{_control(encoder, config)}/{_control(decoder, config)}"


def label_of(manifest: Mapping[str, Any]) -> str:
    """Return the label of a recorded run. A label made from its settings replaces the recorded label where possible."""
    recorded = str(manifest.get("label", ""))
    model = (manifest.get("config") or {}).get("model")
    if isinstance(model, Mapping) and model.get("arch") and recorded.startswith(str(model["arch"])):
        try:
            return label(ModelConfig.model_validate(model))
        except ValidationError:  # settings of another version
            pass
    return recorded


def may_follow_ramp(arch: str) -> bool:
    """True if alpha's schedule drives this architecture, or if its note does not say what its gains do."""
    said = note(arch)
    return said is None or said.gains is None or said.scheduled


def has_ramp(config: ModelConfig) -> bool:
    """True if alpha grows; False if alpha is a constant."""
    return config.alpha is None and config.t0 < config.T


def _control(arch: str, config: ModelConfig) -> str:
    said = note(arch)
    gains = said.gains if said else None
    like_base = gains == "base" or (gains == "even base" and config.base != "gpt2")
    xavier = config.init.startswith(("xavier", "base")) and not like_base
    based = config.init == "xavier-1" or (config.init == "arch-1" and gains not in ("own", "beta"))
    alone = spelling(arch) == "deepnorm" and (xavier, config.alpha) in ((True, None), (False, 1.0))
    options = dict(sorted(options_read(config.options, (config.arch, config.decoder_arch)).items()))
    words = [
        *(["alpha-only" if xavier else "beta-only"] if alone else _alpha(arch, config)),
        *(["xavier"] if xavier and not alone else []),
        *(["gain=1"] if based else []),
        *([] if config.qk_gain is None else [f"qk={config.qk_gain:g}"]),
        *([] if config.v_gain is None else [f"v={config.v_gain:g}"]),
        *_design(config, gains in ("own", "beta", "even base") and config.init.startswith("arch")),
        *(["qk-norm"] if config.qk_norm else []),
        *([] if config.norm not in ("dyt", "derf") or config.norm_alpha == (0.5, 0.5, 0.5) else [_starts(config)]),
        *([] if config.attention_gate == "off" else [f"gate={config.attention_gate}"]),
        *_values(config),
        *_prores(config),
        *(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in options.items()),
    ]
    return " ".join([arch + ("+beta" if config.init == "deepnorm" and gains != "beta" else ""), *words])


def _starts(config: ModelConfig) -> str:
    return "norm-alpha=" + ",".join(f"{alpha:g}" for alpha in config.norm_alpha)


def _values(config: ModelConfig) -> list[str]:
    """Return the words about the value residual."""
    if config.value_residual == "off":
        return []
    weights = "" if config.value_weights == (0.5, 0.5) else "=" + ",".join(f"{w:g}" for w in config.value_weights)
    return [f"values-{config.value_residual}{weights}"]


def _prores(config: ModelConfig) -> list[str]:
    """Return the words about ProRes, its T among them."""
    if config.prores == "off":
        return []
    name = "prores" if config.prores == "linear" else f"prores-{config.prores}"
    start = [f"prores-t0={config.prores_t0}"] if config.prores_t0 else []
    through = ["prores-through"] if config.prores_order == "through" and config.prores == "linear" else []
    return [name, f"prores-T={config.prores_T}", *start, *through]


def _design(config: ModelConfig, replaces: bool) -> list[str]:
    """Return the name of the nearest design, nothing for the Transformer of 2017, and the settings that differ from it.

    The settings alone decide, whatever ``model.design`` they were made from: one model has one label. ``replaces``: the
    arch's own gains leave nothing of the base by which ``gpt2`` differs from ``normal``.
    """
    own = _switches(config.model_dump() | {"base": config.base}, replaces)
    designs = {name: _switches(PLAIN | _based(settings), replaces) for name, settings in DESIGNS.items()}
    lacking = {name: [own[key] for key in own if own[key] != said[key]] for name, said in designs.items()}
    nearest = min(lacking, key=lambda name: len(lacking[name]))  # the first of equals, the Transformer
    return [*([] if nearest == "transformer" else [nearest]), *lacking[nearest]]


PLAIN: dict[str, Any] = {
    **{"positions": "sinusoidal", "activation": "relu", "bias": True, "embedding_scale": "sqrt(d)"},
    **{"norm": "layernorm", "base": "xavier"},
}


def _based(settings: Mapping[str, Any]) -> dict[str, Any]:
    base = str(settings.get("init", "")).partition("-")[2]
    return {**settings, **({"base": base} if base else {})}


def _switches(settings: Mapping[str, Any], replaces: bool) -> dict[str, str]:
    """Return the word for each setting of a design."""
    base = "normal" if replaces and settings["base"] == "gpt2" else settings["base"]
    return {
        "positions": settings["positions"],
        "activation": settings["activation"],
        "bias": "bias" if settings["bias"] else "no-bias",
        "embedding_scale": "unscaled" if settings["embedding_scale"] == 1 else "scaled",
        "norm": settings["norm"],
        "base": f"{base}-init",
    }


def _alpha(arch: str, config: ModelConfig) -> list[str]:
    """Return the words about alpha: its constant value, or its schedule without the length of the ramp."""
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
