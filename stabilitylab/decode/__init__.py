"""Translating with a trained model, scoring the translations, and comparing two runs' scores."""

from .beam import Hypothesis, translate
from .evaluation import evaluate
from .significance import paired

__all__ = ["Hypothesis", "evaluate", "paired", "translate"]
