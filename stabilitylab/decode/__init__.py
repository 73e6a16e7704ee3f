"""Translating with a trained model, and scoring the translations."""

from .beam import Hypothesis, length_penalty, translate
from .evaluation import evaluate, paired

__all__ = ["Hypothesis", "evaluate", "length_penalty", "paired", "translate"]
