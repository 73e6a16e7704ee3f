"""The state of a model: its tensors as bits, their holders, and a snapshot that finds and undoes changes."""

from .bits import Span, packed, spans
from .digests import Digester, multipliers
from .holders import PLAIN, HeldTensor, Holder, Survey, survey
from .snapshot import SAMPLE, Found, StateSnapshot, TensorChange, flagged, merged, state_of

__all__ = [
    "PLAIN",
    "SAMPLE",
    "Digester",
    "Found",
    "HeldTensor",
    "Holder",
    "Span",
    "StateSnapshot",
    "Survey",
    "TensorChange",
    "flagged",
    "merged",
    "multipliers",
    "packed",
    "spans",
    "state_of",
    "survey",
]
