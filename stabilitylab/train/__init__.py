"""The trainer of the reference Transformer: the first user of the probes.

Public beside these names: :mod:`.recipe` (loss, rate and optimizer of the papers, for a loop of your own).
"""

from .environment import provenance
from .loop import Trainer
from .run import Plan, Result, automatic_name, join, plan, resume, start
from .trained import TrainedModel, load_model

__all__ = [
    "Plan",
    "Result",
    "TrainedModel",
    "Trainer",
    "automatic_name",
    "join",
    "load_model",
    "plan",
    "provenance",
    "resume",
    "start",
]
