"""The check of several processes before training: whether they fit together."""

from .ask import NAMES, SOURCES, check_ranks
from .report import RankCheck

__all__ = ["NAMES", "SOURCES", "RankCheck", "check_ranks"]
