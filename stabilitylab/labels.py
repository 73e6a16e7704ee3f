"""What a configuration is called in tables and figures: the architecture, or the control that it is."""

from __future__ import annotations

from .config import ModelConfig
from .registry import spelling

BETA = ("deepnorm", "branchnorm")
# What an architecture's own initial gains do with the base (``model.qkv_gain``); of one that does not stand here, such
# as a plug-in's, the label says all that may tell it from another. A test holds this against the registry.
REPLACE = (*BETA, "subln", "tfixup")
MULTIPLY = ("postlninit", "dsinit", "dsinitcode", "rfixup")


def label(config: ModelConfig) -> str:
    """Such as ``postln``, ``postln+beta``, ``branchnorm T=1``, ``deepnorm alpha-only`` or, mixed, ``postln/preln``."""
    encoder, decoder = config.arch, config.decoder_arch or config.arch
    if spelling(encoder) == spelling(decoder):
        return _control(encoder, config)
    return f"{_control(encoder, config)}/{_control(decoder, config)}"


def _control(arch: str, config: ModelConfig) -> str:
    family = spelling(arch)
    xavier = config.init in ("xavier", "xavier-1") and family in (*REPLACE, *MULTIPLY)
    name = arch
    if config.init == "deepnorm" and family not in BETA:
        name += "+beta"
    if family == "deepnorm":
        if config.alpha is None:
            name += " alpha-only" if xavier else ""
        elif config.alpha == 1 and not xavier:
            name += " beta-only"
        else:
            name += f" alpha={config.alpha:g}" + (" xavier" if xavier else "")
    else:
        if family == "branchnorm" and config.alpha is not None:
            name += f" alpha={config.alpha:g}"
        elif family == "branchnorm" and config.T == 1:
            name += " T=1"
        elif family == "branchnorm" and config.growth != "linear":
            name += f" {config.growth}"
        name += " xavier" if xavier else ""
    based = config.init == "xavier-1" or (config.init == "arch-1" and family not in REPLACE)
    name += " gain=1" if based else ""
    name += "" if config.qk_gain is None else f" qk={config.qk_gain:g}"
    name += "" if config.v_gain is None else f" v={config.v_gain:g}"
    return name + (" rmsnorm" if config.norm == "rmsnorm" else "") + (" qk-norm" if config.qk_norm else "")
