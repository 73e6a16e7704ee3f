"""Translation with a trained model, scores of translations, and comparison of two runs' scores."""

from .beam import Hypothesis, translate
from .evaluation import evaluate
from .significance import paired

__all__ = ["Hypothesis", "evaluate", "paired", "translate"]
