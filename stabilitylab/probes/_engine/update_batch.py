"""The batch that an update is made of, kept for the curvature of its own loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from .forward_copies import ForwardCopies


class UpdateBatch(ForwardCopies):
    """The training forwards of a row: one micro-batch, or several.

    Copies are made in rows whose curvature is looked at, and are gone once that is done.
    """

    what = "the batch of the update"
    instead = "curvature_loss=, a function that returns the loss of the batch that was trained on"

    def __init__(self, model: nn.Module, trains: Callable[[], bool]) -> None:
        super().__init__(model, trains)
        self._wanted = False
        self._coming: list[Any] = []  # of the row that runs
        self._given: list[Any] = []  # of the row whose update is made

    @property
    def ready(self) -> bool:
        return bool(self._coming)

    def begin(self, wanted: bool) -> None:
        """Begin a row. ``wanted``: True if its batch is to be kept."""
        self._wanted, self._begun, self._coming = wanted, None, []

    def keep(self, stay: Sequence[bool]) -> None:
        """Keep those of the row's forwards so far that stay: True; forget the others, which no update follows."""
        if len(stay) == len(self._coming):
            self._coming = [given for given, stays in zip(self._coming, stay, strict=True) if stays]

    def hand_over(self) -> None:
        """Close the batch before the optimizer's step; the next row's forwards are of another batch."""
        self._given, self._coming, self._wanted = self._coming, [], False

    def release(self) -> None:
        self._given = []

    def parts(self) -> list[Any]:
        """Return the model's output for each micro-batch."""
        return [self.run(args, kwargs) for args, kwargs in self._given]

    def wanted(self) -> bool:
        return self._wanted

    def take(self, given: tuple[Any, ...]) -> None:
        self._coming.append(given)
