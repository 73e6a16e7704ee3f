"""Copies of the arguments of training forwards. They are kept once the forward has ended: a batch whose forward raised
may be too large."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .batch_copy import NotCopied, each_tensor
from .guard import said
from .hooks import RootHook, is_nested


class ForwardCopies:
    """Runs a model on copies of arguments that its training forwards had; a subclass says of which forwards.

    ``trains`` tells whether a forward that begins is one of training. Each run has a copy of its own, so that a model
    that writes into what it is given gets the same each time. ``refused`` says why there are no copies, "" unless the
    arguments hold something that cannot be copied.
    """

    what: str  # the batch that is kept, in messages
    instead: str  # what the caller may give in its place

    def __init__(self, model: nn.Module, trains: Callable[[], bool]) -> None:
        self._model, self._trains = model, trains
        self.refused = ""
        self._begun: tuple[Any, ...] | None = None  # of the forward that runs
        self._inside = 0  # calls of the model within it
        self._handles: list[Any] = [
            model.register_forward_pre_hook(RootHook(self._begin), with_kwargs=True),
            model.register_forward_hook(RootHook(self._end)),
        ]

    def wanted(self) -> bool:
        """Return True if the forward that begins is to be kept."""
        raise NotImplementedError

    def beside(self) -> Mapping[str, Any]:
        """Return what is copied once the forward has ended, beside the arguments."""
        return {}

    def take(self, given: tuple[Any, ...]) -> None:
        """Keep the copies of a forward that has ended: args, kwargs and what :meth:`beside` returned."""
        raise NotImplementedError

    def run(self, args: Any, kwargs: Any) -> Any:
        args, kwargs = each_tensor(torch.Tensor.clone, args=args, kwargs=kwargs)
        return self._model(*args, **kwargs)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, args: Any, kwargs: Any) -> None:
        if self.refused or not self.wanted() or not self._trains():
            return
        if self._begun is not None and is_nested(self._model):
            self._inside += 1
            return
        self._begun, self._inside = None, 0
        self._begun = self._copied(lambda: {"args": args, "kwargs": kwargs})

    def _end(self, *_: object) -> None:
        if self._begun is None or not self._trains():
            return
        if self._inside:
            self._inside -= 1
            return
        given, self._begun = self._begun, None
        if (beside := self._copied(self.beside)) is not None:
            self.take((*given, *beside))

    def _copied(self, of: Callable[[], Mapping[str, Any]]) -> tuple[Any, ...] | None:
        """Return copies; None, and the reason in ``refused``, if there can be none."""
        try:
            return (*each_tensor(lambda t: t.detach().clone(), **of()),)
        except NotCopied as error:
            self.refused = f"{self.what} holds {error}, of which no copy can be kept ({self.instead}, does without)"
        except Exception as error:  # of the caller's classes: training goes on
            self.refused = f"{self.what} cannot be copied: {said(error)}"
        return None
