"""The best learning rate by trials, a search that any trainer can run (:mod:`stabilitylab.lr_find.search`)."""

from .search import Choice, RateResult, RateTrial, RateTrials, Rungs, choose

__all__ = ["Choice", "RateResult", "RateTrial", "RateTrials", "Rungs", "choose"]
