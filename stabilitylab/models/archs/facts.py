"""What an architecture says of itself, for ``stabilitylab list archs`` and the documentation."""

from __future__ import annotations

import inspect
from typing import Any

from .base import ARCHS, Place


def facts(name: str, encoder_layers: int, decoder_layers: int) -> dict[str, Any]:
    """Formula, source, remarks, learnable extras, values of ``model.stack``, and its constants by stack."""
    arch = ARCHS[name]
    first, *rest = (" ".join(text.split("\n")) for text in (inspect.getdoc(arch) or "").split("\n\n"))
    formula, _, source = first.partition(".  ")
    layers = {"encoder": encoder_layers, "decoder": decoder_layers}
    places = {stack: Place(stack, 0, "", 0, encoder_layers, decoder_layers) for stack in layers if layers[stack]}
    kind = "encoder-decoder" if len(places) == 2 else next(iter(places))
    return {
        "formula": formula,
        "source": source.rstrip("."),
        "remarks": " ".join(rest),
        "learns": arch.learns,
        "defined_for": list(arch.defined_for),
        "constants": {stack: arch.constants(place) for stack, place in places.items()}
        if kind in arch.defined_for
        else {},
    }
