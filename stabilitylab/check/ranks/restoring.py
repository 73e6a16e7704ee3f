"""The state of a model and its optimizers on this rank, kept as it is and put back bit for bit, without
communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UsageError
from ...probes.parameters.processes import Processes
from ...probes.state import StateSnapshot, random_states, set_random_states


class KeptTraining:
    """The state of a model, its gradients, its optimizers and the random generators when this object was made."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], processes: Processes) -> None:
        self._processes = processes
        self._random = random_states()
        self._snapshot = StateSnapshot(model)
        if not self._snapshot.complete:
            raise UsageError("memory has no room for a copy of the model: check it on a larger machine.")
        self._modes = [(module, module.training) for module in model.modules()]
        self._gradients = [(own, own.grad, _copy(own.grad)) for own in model.parameters()]
        self._kept_optimizers = [_KeptOptimizer(each) for one in optimizers for each in within(one)]
        self._kept_buffers = [(own, own.clone()) for own in model.buffers()]

    def seed(self) -> None:
        """Put the random generators back."""
        set_random_states(self._random)

    def undo_buffers(self) -> None:
        """Put the buffers back."""
        with torch.no_grad():
            for own, before in self._kept_buffers:
                own.copy_(before)

    def undo(self) -> None:
        """Put back everything."""
        self._processes.reshard()
        for module, mode in self._modes:
            module.training = mode
        lasting = [change.name for change in self._snapshot.compare().read() if not change.undone]
        for each in self._kept_optimizers:
            each.undo()
        with torch.no_grad():
            for own, gradient, before in self._gradients:
                own.grad = gradient
                if gradient is not None:
                    _write(gradient, before)
        self.seed()
        if lasting:
            raise UsageError(f"{lasting[0]} cannot be put back: check a model that does not replace its tensors.")


class _KeptOptimizer:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._attributes = optimizer, dict(vars(optimizer))
        self._groups = [
            (group, {key: (value, _copy(value)) for key, value in group.items() if key != "params"}, [*group["params"]])
            for group in optimizer.param_groups
        ]
        self._state = [
            (own, entries, {key: (value, _copy(value)) for key, value in entries.items()})
            for own, entries in optimizer.state.items()
        ]

    def undo(self) -> None:
        attributes = vars(self._optimizer)
        attributes.clear()
        attributes.update(self._attributes)
        self._optimizer.param_groups[:] = [group for group, _, _ in self._groups]
        with torch.no_grad():
            for group, settings, parameters in self._groups:
                _refill(group, settings)
                group["params"] = parameters
            self._optimizer.state.clear()
            for own, entries, before in self._state:
                _refill(entries, before)
                self._optimizer.state[own] = entries


def within(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield an optimizer and those that it holds, as ZeroRedundancyOptimizer does."""
    yield optimizer
    for value in list(vars(optimizer).values()):
        if isinstance(value, torch.optim.Optimizer):
            yield from within(value)


def _refill(entries: dict[Any, Any], before: dict[Any, tuple[Any, Any]]) -> None:
    entries.clear()
    for key, (value, copy) in before.items():
        entries[key] = value
        if isinstance(value, Tensor):
            _write(value, copy)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _write(own: Tensor, before: Tensor) -> None:
    own.detach().copy_(before)
