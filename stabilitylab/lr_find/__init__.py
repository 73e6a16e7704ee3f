"""The best and the largest safe learning rate of a model, by trials; calling the package is :func:`.find.lr_find`."""

from __future__ import annotations

from ..callable_package import make_callable
from .search import Choice, RateResult, RateTrial, RateTrials, Rungs, choose

__all__ = ["Choice", "RateResult", "RateTrial", "RateTrials", "Rungs", "choose"]

make_callable(__name__, "find")
