"""What a configuration is called in tables and figures: the architecture, or the control that it is."""

from __future__ import annotations

from .config import ModelConfig
from .registry import spelling


def label(config: ModelConfig) -> str:
    """Such as ``postln``, ``postln+beta``, ``branchnorm T=1``, ``deepnorm alpha-only`` or, mixed, ``postln/preln``."""
    encoder, decoder = config.arch, config.decoder_arch or config.arch
    if spelling(encoder) == spelling(decoder):
        return _control(encoder, config)
    return f"{_control(encoder, config)}/{_control(decoder, config)}"


def _control(arch: str, config: ModelConfig) -> str:
    family = spelling(arch)
    beta_is_its_own = family in ("deepnorm", "branchnorm")
    own_gains = beta_is_its_own or family in ("postlninit", "dsinit", "dsinitcode", "rfixup", "tfixup", "subln")
    xavier = config.init == "xavier" and own_gains
    name = arch
    if config.init == "deepnorm" and not beta_is_its_own:
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
    name += "" if config.qk_gain is None else f" qk={config.qk_gain:g}"
    return name + (" rmsnorm" if config.norm == "rmsnorm" else "") + (" qk-norm" if config.qk_norm else "")
