"""The interface of the processes that train one model, and the answers of a single process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from ...schema import Table
from ..places.sites import Sites
from .layouts import Layout, ModelLayout, whole_layout
from .shards import ActivationShards

T = TypeVar("T")


class Processes:
    """The answers of a single process to what a watcher asks of the processes that train one model.

    :class:`~.ranks.Ranks`, several, and :class:`~.pipeline.Pipeline`, the stages of a pipeline, answer the same
    questions in their own way, so that nobody else needs to know how many there are. ``alone``: numbers are known at
    once, without other processes.
    """

    alone = True
    late = False  # the layout is read at the first forward
    staged = False  # each process trains a stage of a pipeline
    rank, size = 0, 1
    shards: ActivationShards | None = None
    apart: Mapping[str, str] = MappingProxyType({})  # table -> the reason why it cannot be added up

    @property
    def found(self) -> ModelLayout:
        """The layout of the model on the processes: it is whole."""
        return ModelLayout({})

    @property
    def known(self) -> bool:
        """True once the layout was read."""
        return True

    @property
    def sharded(self) -> bool:
        """True if this process holds a part of a parameter alone."""
        return False

    @property
    def replicated(self) -> bool:
        """True if parameters are plain tensors, of which other processes are said to have copies."""
        return False

    @property
    def loss_share(self) -> float:
        """The share of this process's loss in the loss of all."""
        return 1.0

    @property
    def running(self) -> bool:
        """True if a forward pass now belongs to training."""
        return True

    def own_sites(self, sites: Sites) -> Sites:
        """Return the sites that this process looks at: all of them."""
        return sites

    def layout(self, parameter: torch.Tensor) -> Layout:
        """Return where this process's part of a parameter lies in it."""
        return whole_layout(parameter, 1.0)

    def share(self, parameter: torch.Tensor) -> float:
        """Return the share that this process adds of a parameter."""
        return 1.0

    def shards_of(self, sites: Sites) -> ActivationShards | None:
        """Return the object that makes activations whole; None if they are."""
        return None

    def close(self) -> None:
        """Take away what was attached to the model."""

    def reshard(self) -> None:
        """Free the parameters that a forward without a backward left unsharded."""

    def check_alike(self, tables: Sequence[Table]) -> None:
        """Raise UsageError on every process if their tables differ."""

    def differing(self, numbers: torch.Tensor) -> torch.Tensor:
        """True for each number that differs between processes that share a layer: (n,) bool."""
        return torch.zeros_like(numbers, dtype=torch.bool)

    def add_up(self, shares: Sequence[Any], device: torch.device) -> list[Any]:
        """Return the sums over all processes of a row's numbers."""
        return list(shares)

    def gathered(self, own: T) -> list[T]:
        """Return the ``own`` of every process."""
        return [own]

    def any(self, told: bool, device: torch.device) -> bool:
        """Return True if it is true on some process."""
        return told

    def mean(self, numbers: torch.Tensor, device: torch.device, failed: bool = False) -> torch.Tensor:
        """Return the mean over processes. If one has failed, raise on all others too, so that none waits."""
        return numbers

    def sum(self, number: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the sum over processes."""
        return number


ALONE = Processes()
