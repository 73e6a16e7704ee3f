"""The reference pass: a fixed held-out batch, run by the watcher, or replayed where it was recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..library.representations import Output
from ..parameters.processes import Processes
from ..places.expert_products import products
from .board import Board
from .device_recorder import DeviceRecorder, attempt
from .evaluation import evaluation
from .guard import Guard
from .masks import Masks
from .passes import Pass, Wanted
from .watchable import with_hooks

log = logging.getLogger("stabilitylab")


class ReferencePass(Pass):
    """The pass that runs the caller's ``reference`` in eval mode without gradients; flags and random states stay as
    they were. Where the pass is replayed on a GPU, a model that draws random numbers in eval mode draws new ones."""

    def __init__(
        self,
        model: nn.Module,
        boards: Sequence[Board],
        masks: Masks,
        guard: Guard,
        reference: Callable[[], Any],
        stacks: Board | None,
        recorder: DeviceRecorder | None,
        ranks: Processes,
    ) -> None:
        super().__init__(model, boards, masks, guard, ranks)
        self._reference = reference
        self.stacks = stacks
        self._outputs: list[Output] = []
        self._recorder = None if any(board.probe.waits for board in boards) else recorder
        self._replays: dict[bool, Replay] = {}
        self._ran: set[bool] = set()

    def run(self, record: bool = True) -> tuple[list[Output], dict[str, Any]]:
        """Return the stacks' outputs and the metrics that ``reference`` returned. ``record``: fill the boards too."""
        if (replay := self._replays.get(record)) is not None:
            return replay()
        boards = self.boards
        stacks = [self.stacks] if self.stacks else []
        self.boards = [board for board in (*(boards if record else ()), *stacks) if not board.ended]
        self.attach()
        try:
            with evaluation(self.model), with_hooks(), ExitStack() as around:
                around.enter_context(products([site for board in self.boards for site in board.sites]))
                for board in self.boards:
                    around.enter_context(board.probe.around(board.sites))
                if self._recorder is None:
                    return self._work()
                if record not in self._ran:
                    self._ran.add(record)
                    return self._recorder.warm_up(self._work)
                self.guard.recording = True
                try:
                    found = attempt(self._recorder, self._work)
                finally:
                    self.guard.recording = False
                if isinstance(found, str):
                    log.warning("the held-out pass is not replayed: it cannot be recorded (%s).", found)
                    self._recorder = None
                    for board in self.boards:
                        board.clear()
                    return self._work()
                (outputs, metrics), again = found
                replay = self._replays[record] = Replay(self.boards, outputs, metrics, again)
            return replay()
        finally:
            self.close()
            self.boards = boards

    def _work(self) -> tuple[list[Output], dict[str, Any]]:
        self._outputs = []
        returned = self._reference()
        self.end()
        return self._outputs, _scalars(returned) if type(returned) is dict else {}

    def keep(self, wanted: Wanted, x: Any, y: torch.Tensor, weight: torch.Tensor, compiled: bool = False) -> None:
        board, row, _ = wanted
        if board is self.stacks:
            value: Any = board.probe.measure(board.sites[row], x, y, weight)
            self._outputs.append(Output(row, value, weight))
        else:
            super().keep(wanted, x, y, weight, compiled)


class Replay:
    """A recorded pass. Its outputs are handed on as copies, since the next replay overwrites them."""

    def __init__(
        self, boards: Sequence[Board], outputs: list[Output], metrics: dict[str, Any], again: Callable[[], None]
    ) -> None:
        self._outputs, self._metrics, self._again = outputs, metrics, again
        self._found = [(board, board.forget()) for board in boards]

    def __call__(self) -> tuple[list[Output], dict[str, Any]]:
        self._again()
        for board, seen in self._found:
            board.recall(seen)
        return [Output(each.row, each.value.clone(), each.weight.clone()) for each in self._outputs], self._metrics


def _scalars(returned: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in returned.items() if not isinstance(v, torch.Tensor) or v.numel() == 1}
