"""The state of a model: its tensors as bits, their holders, and a snapshot that finds and undoes changes."""

from .bits import Span, packed, spans
from .digests import Digester, multipliers
from .holders import PLAIN, HeldTensor, Holder, Survey, numbers_of, survey
from .random_states import RandomStates, random_states, seed_all, set_random_states
from .snapshot import SAMPLE, Found, StateSnapshot, TensorChange, flagged, merged, state_of

__all__ = [
    "PLAIN",
    "SAMPLE",
    "Digester",
    "Found",
    "HeldTensor",
    "Holder",
    "RandomStates",
    "Span",
    "StateSnapshot",
    "Survey",
    "TensorChange",
    "flagged",
    "merged",
    "multipliers",
    "numbers_of",
    "packed",
    "random_states",
    "seed_all",
    "set_random_states",
    "spans",
    "state_of",
    "survey",
]
