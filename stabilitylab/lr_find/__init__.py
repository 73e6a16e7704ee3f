"""The best learning rate by trials, a search that any trainer can run (:mod:`stabilitylab.lr_find.search`)."""

from .search import Choice, Result, Rungs, Trainer, Trial, choose

__all__ = ["Choice", "Result", "Rungs", "Trainer", "Trial", "choose"]
