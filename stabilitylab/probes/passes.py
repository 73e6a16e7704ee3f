"""The two passes that are recorded: training, by hooks on the caller's own, and reference, run by the watcher."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from .accumulate import Board, CleanPasses, Masks
from .base import wide
from .replaying import Recorder, why
from .representations import Output
from .sites import hidden_state, tensor_of
from .watchable import with_hooks

log = logging.getLogger("stabilitylab")

HELD = 1 << 24  # numbers that may wait on the device before they are added up
SMALL = 1 << 17  # entries of a value that costs a GPU less to read than its kernel costs to launch


class Wanted(NamedTuple):
    """What a probe takes at a module: its board and row, and the raw numbers that this feeds."""

    board: Board
    row: int
    fed: tuple[str, ...]


class Pass:
    """Hooks on the sites of boards. A pass lasts from one call of the model to the next; each asks for masks anew.

    Where parts of the model are called instead of the model, a pass ends when a site comes round again.
    """

    def __init__(self, model: nn.Module, boards: Sequence[Board], masks: Masks, together: bool = False) -> None:
        self.model, self.boards, self.masks, self._together = model, boards, masks, together
        self.seconds = 0.0
        self._handles: list[Any] = []
        self._inside = False
        self._number = 0  # of the pass
        self._calls: dict[int, int] = {}  # site -> the pass of its last call
        self.order: dict[tuple[str, int], int] = {}  # (table, row) -> when it is called in the forward pass
        self._held = 0

    @property
    def attached(self) -> bool:
        return bool(self._handles)

    def attach(self) -> None:
        if not self.boards:
            return
        self._handles.append(self.model.register_forward_pre_hook(self._enter))
        self._handles.append(self.model.register_forward_hook(self._leave))
        wanted: dict[nn.Module, list[Wanted]] = {}
        for board in self.boards:
            read = {board.reads(column) for column in board.rules}
            for row, site in enumerate(board.sites):
                taps = {tap: site.taps[tap] for tap in board.probe.taps if tap in site.taps and tap in read}
                raws = {board.main: site.module} | taps
                for module in dict.fromkeys(raws.values()):
                    fed = tuple(raw for raw, feeder in raws.items() if feeder is module)
                    wanted.setdefault(module, []).append(Wanted(board, row, fed))
        for module, all_of_it in wanted.items():  # one hook a module: what calls a hook costs as much as a norm
            hook = self._hook(tuple(all_of_it), key=len(self._handles))
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def end(self, more: bool = False) -> None:
        """Adds up what the pass left waiting; ``more``: another micro-batch of the same row follows."""
        for board in self.boards:
            board.reduce(self.masks)
        self.masks.renew()
        self._number += 1
        self._held = 0

    def records(self, key: int) -> bool:
        """Whether this call of a site counts."""
        if not self._inside and self._calls.get(key) == self._number:
            self.end(more=True)
        self._calls[key] = self._number
        return True

    def keep(self, board: Board, row: int, fed: tuple[str, ...], x: Any, y: torch.Tensor, weight: torch.Tensor) -> None:
        """Measures at a site and keeps the numbers, still per token, until the pass ends."""
        site = board.sites[row]
        if site.channels_first:
            x, y = site.arranged(x), site.arranged(y)
        if self._together and board.probe.together and y.numel() <= SMALL:
            for raw in fed:
                board.hold_value(raw, row, y)
            self._note(y.numel())
            return
        numbers: Any = board.probe.measure(site, x, y, weight)
        if numbers is None:
            return
        for raw in numbers if isinstance(numbers, dict) else fed:
            number = numbers[raw] if isinstance(numbers, dict) else numbers
            board.hold(raw, row, number)
            self._note(number.numel())

    def _note(self, held: int) -> None:
        self._held += held
        if self._held > HELD:
            for each in self.boards:
                each.reduce(self.masks)
            self._held = 0

    def _hook(self, wanted: tuple[Wanted, ...], key: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not self.records(key):
                return
            began = time.perf_counter()
            x = hidden_state(args, kwargs)
            for each in wanted:
                board, row, fed = each
                site = board.sites[row]
                self.order.setdefault((board.table.name, row), len(self.order))
                y = x if site.take == "input" else tensor_of(output)
                if y is not None:
                    tokens = (site.arranged(y) if site.channels_first else y).shape[:-1]
                    self.keep(board, row, fed, x, y, self.masks(site.mask, tokens, y.device))
            self.seconds += time.perf_counter() - began

        return hook

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.end(more=True)
        self._inside = True

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside = False


class TrainingPass(Pass):
    """Records forwards of the model in training mode with gradients on, and the gradients of their activations.

    A forward that runs inside a backward is a recomputation (activation checkpointing): it counts only for sites that
    had no ordinary forward since ``start_row`` - those that reentrant checkpointing first runs without gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        boards: Sequence[Board],
        masks: Masks,
        scaler: torch.amp.GradScaler | None = None,
        share: float = 1.0,
        clean: CleanPasses | None = None,
        together: bool = False,
    ) -> None:
        super().__init__(model, boards, masks, together)
        self._clean, self._recorded = clean, False
        self._share = share  # of this rank's loss in the loss of all ranks
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.start_row()

    def end(self, more: bool = False) -> None:
        super().end(more)
        if more and self._recorded and self._clean is not None:
            self._clean.count()
        self._recorded = False

    def start_row(self) -> None:
        self._calls.clear()
        self._scale: torch.Tensor | None = None

    def records(self, key: int) -> bool:
        if not (torch.is_grad_enabled() and self.model.training):
            return False
        return key not in self._calls if _in_backward() else super().records(key)

    def keep(self, board: Board, row: int, fed: tuple[str, ...], x: Any, y: torch.Tensor, weight: torch.Tensor) -> None:
        self._recorded = True
        if board.probe.on == "forward":
            torch._C._set_grad_enabled(False)  # it is on; torch.no_grad() costs six times as much
            try:
                super().keep(board, row, fed, x, y, weight)
            finally:
                torch._C._set_grad_enabled(True)
        elif y.requires_grad:

            def on_gradient(gradient: torch.Tensor) -> None:
                began = time.perf_counter()
                if torch.is_grad_enabled():  # under create_graph
                    with torch.no_grad():
                        self._keep_gradient(board, row, fed, gradient, weight)
                else:
                    self._keep_gradient(board, row, fed, gradient, weight)
                self.seconds += time.perf_counter() - began

            y.register_hook(on_gradient)  # not register_full_backward_hook, which changes the gradients themselves

    def _keep_gradient(
        self, board: Board, row: int, fed: tuple[str, ...], gradient: torch.Tensor, weight: torch.Tensor
    ) -> None:
        if self._scaler is not None:
            gradient = gradient.to(wide(gradient)) / self._loss_scale(self._scaler, gradient.device)
        if self._share != 1:
            gradient = gradient.to(wide(gradient)) * self._share
        super().keep(board, row, fed, None, gradient, weight)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and module.training and not _in_backward():
            super()._enter(module, args)

    def _loss_scale(self, scaler: torch.amp.GradScaler, device: torch.device) -> torch.Tensor:
        if self._scale is None:
            self._scale = scaler.scale(torch.ones((), device=device))  # get_scale() would read the device
        return self._scale


class ReferencePass(Pass):
    """Runs the caller's ``reference`` in eval mode without gradients; leaves flags and random state as they were."""

    def __init__(
        self,
        model: nn.Module,
        boards: Sequence[Board],
        masks: Masks,
        reference: Callable[[], Any],
        stacks: Board | None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(model, boards, masks)
        self._reference = reference
        self._stacks = stacks
        self._outputs: list[Output] = []
        self._recorder = None if any(board.probe.waits for board in boards) else recorder
        self._replays: dict[bool, Replay] = {}
        self._ran: set[bool] = set()

    def run(self, record: bool = True) -> tuple[list[Output], dict[str, Any]]:
        """The stacks' outputs, and the metrics that ``reference`` returned; ``record`` fills the boards as well."""
        if (replay := self._replays.get(record)) is not None:
            return replay()
        boards = self.boards
        self.boards = [*(boards if record else ()), *([self._stacks] if self._stacks else ())]
        self.attach()
        try:
            with evaluation(self.model), with_hooks(self.model), ExitStack() as around:
                for board in self.boards:
                    around.enter_context(board.probe.around(board.sites))
                if self._recorder is None:
                    return self._work()
                if record not in self._ran:
                    self._ran.add(record)
                    return self._recorder.warm_up(self._work)
                try:
                    found, again = self._recorder.record(self._work)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    log.warning("the held-out pass is not replayed: it cannot be recorded (%s).", why(error))
                    self._recorder = None
                    for board in self.boards:
                        board.clear()
                    return self._work()
                replay = self._replays[record] = Replay(self.boards, *found, again)
            return replay()
        finally:
            self.detach()
            self.boards = boards

    def _work(self) -> tuple[list[Output], dict[str, Any]]:
        self._outputs = []
        returned = self._reference()
        self.end()
        return self._outputs, _scalars(returned) if type(returned) is dict else {}

    def keep(self, board: Board, row: int, fed: tuple[str, ...], x: Any, y: torch.Tensor, weight: torch.Tensor) -> None:
        if board is self._stacks:
            value: Any = board.probe.measure(board.sites[row], x, y, weight)
            self._outputs.append(Output(row, value, weight))
        else:
            super().keep(board, row, fed, x, y, weight)


class Replay:
    """A recorded pass: its outputs, which the next replay overwrites, are handed on as copies."""

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


@contextmanager
def random_states_kept(model: nn.Module) -> Iterator[None]:
    """Those of torch (on the model's devices too), Python and numpy, whichever the caller's code draws from."""
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; each module's own training flag and the random states are restored. Buffers that a
    forward itself changes in eval mode (a counter, say) are not."""
    training = [module for module in model.modules() if module.training]
    with random_states_kept(model), torch.no_grad():
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True


@contextmanager
def parameters_set(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Iterator[None]:
    """``values`` in place of the parameters, and meanwhile these in place of ``values``, so that no copy of all of them
    is needed; both come back bit for bit. ``.data``: a kept graph must not notice."""
    data = [tensor.data for tensor in tensors]
    _exchange(data, values)
    try:
        yield
    finally:
        _exchange(data, values)


def _exchange(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    pairs, held = [], 0
    for number, pair in enumerate(zip(some, others, strict=True), start=1):
        pairs.append(pair)
        held += pair[0].numel()
        if held > HELD or number == len(some):
            own, other = (list(side) for side in zip(*pairs, strict=True))
            kept = [tensor.clone() for tensor in own]
            torch._foreach_copy_(own, other)  # pyright: ignore
            torch._foreach_copy_(other, kept)  # pyright: ignore
            pairs, held = [], 0


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _scalars(returned: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in returned.items() if not isinstance(v, torch.Tensor) or v.numel() == 1}
