"""The checks before training: one update of a copy of a model, judged by stated bounds; the agreement of several
processes; and the proof that watching a loop changes nothing."""

from .bounds import BOUNDS, Bound
from .measure import preflight
from .neutrality import Neutrality, verify_neutral
from .ranks import RankCheck, check_ranks
from .result import Breach, Check, Preflight

__all__ = [
    "BOUNDS",
    "Bound",
    "Breach",
    "Check",
    "Finding",
    "Neutrality",
    "Preflight",
    "RankCheck",
    "check_ranks",
    "preflight",
    "verify_neutral",
]

Finding = Breach  # its name until 0.1
