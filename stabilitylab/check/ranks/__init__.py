"""The check of several processes before training: the agreement of their weights, batches, gradients and updates."""

from .ask import NAMES, SOURCES, check_ranks
from .report import RankCheck

__all__ = ["NAMES", "SOURCES", "RankCheck", "check_ranks"]
