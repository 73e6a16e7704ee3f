"""The state of a model: its tensors as bits, their holders, and a snapshot that finds and undoes changes."""

from .bits import Span, packed, spans
from .digests import Digester, multipliers
from .holders import PLAIN, numbers_of, survey
from .random_states import RandomStates, random_states, seed_all, set_random_states
from .snapshot import SAMPLE, Found, StateSnapshot, TensorChange, merged, state_of

__all__ = [
    "PLAIN",
    "SAMPLE",
    "Digester",
    "Found",
    "RandomStates",
    "Span",
    "StateSnapshot",
    "TensorChange",
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
