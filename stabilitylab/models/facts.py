"""The facts about an architecture, for ``stabilitylab list archs`` and the documentation."""

from __future__ import annotations

import inspect
from typing import Any, Literal, get_args, get_origin

from ..config import ModelConfig
from .base import ARCHS, Place, xavier_gain
from .transformer import KINDS


def facts(name: str, encoder_layers: int, decoder_layers: int) -> dict[str, Any]:
    """Return formula, source, remarks, learnable extras, options with their defaults, the values of options that have a
    choice, initial gains, values of ``model.stack``, constants by stack, and the architecture that a stack of so many
    layers equals."""
    arch = ARCHS[name]
    first, *rest = (" ".join(text.split("\n")) for text in (inspect.getdoc(arch) or "").split("\n\n"))
    formula, _, source = first.partition(".  ")
    layers = {"encoder": encoder_layers, "decoder": decoder_layers}
    places = {stack: Place(stack, 0, "", 0, encoder_layers, decoder_layers) for stack in layers if layers[stack]}
    kind = "encoder-decoder" if len(places) == 2 else next(iter(places))
    return {
        "formula": formula,
        "source": source if source.endswith("et al.") else source.removesuffix("."),
        "remarks": " ".join(rest),
        "learns": arch.learns,
        "options": {name: field.default for name, field in arch.Options.model_fields.items()},
        "choices": {
            name: list(get_args(field.annotation))
            for name, field in arch.Options.model_fields.items()
            if get_origin(field.annotation) is Literal
        },
        "gains": gains(name),
        "defined_for": list(arch.defined_for),
        "constants": {stack: arch.constants(place) for stack, place in places.items()}
        if kind in arch.defined_for
        else {},
        "equal": {stack: other for stack, place in places.items() if (other := arch.equal(place, arch.Options()))}
        if kind in arch.defined_for
        else {},
    }


def gains(name: str) -> str:
    """Say how the initial gains of an architecture use the base (``model.qkv_gain``), by a comparison at both of its
    values and with GPT-2's."""
    kind = "encoder-decoder" if "encoder-decoder" in ARCHS[name].defined_for else ARCHS[name].defined_for[0]
    sizes = {f"{stack}_layers": 2 if stack in kind else 0 for stack in ("encoder", "decoder")}
    found, base = [], []
    for init in ("arch", "arch-1", "arch-gpt2"):
        settings = {"arch": name, "stack": kind, "init": init, "d_model": 4, "d_ffn": 4, **sizes}
        model = KINDS[kind](ModelConfig.model_validate(settings), source_vocab=2, target_vocab=2)
        asked = [(residual, matrix) for residual in model.residuals() for matrix in residual.f.matrices]
        found.append([residual.gain(matrix) for residual, matrix in asked])
        base.append([xavier_gain(residual.place, matrix) for residual, matrix in asked])
    if found == base:
        return "the base"
    if found[:2] == base[:2]:
        return "the base, without gpt2's 1/sqrt(2 layers) on out and fc2"
    return "its own, in place of the base" if found[0] == found[1] else "its own, times the base"
