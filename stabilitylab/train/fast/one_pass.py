# pyright: reportPrivateImportUsage=false
"""AdamW that measures while it updates: one pass over gradients, weights and moments, on CUDA in one Triton kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..adamw import CAPTURE_CHECK, LeanAdamW

CHUNK = 1 << 14  # entries that one program of the kernel updates
BLOCK = 1 << 10  # entries that it updates at a time
TABLES = 64  # pinned tables of gradients' addresses: one for each recorded update, which reads it at each replay
SUMS = 4  # sums of a piece: squares of gradient, weight and update, and the count of gradient entries below eps

Piece = tuple[Tensor, slice | None]  # a parameter, or some of its rows


def has_kernel() -> bool:
    """True if Triton is installed, as it is with torch for CUDA."""
    try:
        import triton  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    return True


@dataclass(frozen=True)
class _Chunks:
    """The chunks of the parameters that have a gradient, one for each program of the kernel. Each chunk lies in one
    piece."""

    of_tensor: Tensor  # (chunks,) int64: number of the parameter
    of_piece: Tensor  # number of the piece
    start: Tensor  # its first entry among the parameter's
    entries: Tensor  # its number of entries
    addresses: Tensor  # (3, parameters) int64: of weights and both moments
    tables: list[Tensor]  # (parameters,) int64, pinned: for recordings to come


class OnePassAdamW(LeanAdamW):
    """:class:`LeanAdamW` whose step sums g^2, theta_t^2 and (theta_{t+1} - theta_t)^2 for each piece of the parameters,
    in float64, and counts the entries of g below eps, in the pass that updates them.

    On CUDA every step sums, with or without :meth:`measure`, so that a run with probes equals a run without. On a CPU,
    or if a tensor is not a contiguous float32 one, the update is LeanAdamW's, bit for bit, and the sums are taken
    around it (:func:`around`) once :meth:`measure` has been called. ``force``: use the kernel on a CPU, which needs
    Triton's interpreter.
    """

    force = False

    def __init__(self, parameters: Any, lr: float | Tensor = 1e-3, **settings: Any) -> None:
        self._pieces: list[Piece] = []  # the pieces to measure; none: whole parameters, if in one pass
        self._sums: Tensor | None = None
        self._chunks: dict[int, tuple[tuple[bool, ...], _Chunks]] = {}
        self._recorded: list[Tensor] = []  # tables that recorded updates read again
        super().__init__(parameters, lr, **settings)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._chunks = {}

    def measure(self, pieces: Sequence[Piece]) -> None:
        """Ask for the sums of the next step. The pieces cover each parameter once; the pieces of the first call hold
        for all steps."""
        if not self._pieces:
            self._pieces = list(pieces)
            self._chunks = {}
        self._sums = None

    def measured(self) -> Tensor | None:
        """Return the sums of the step since :meth:`measure`: (pieces, 4) float64, 0 for a parameter without a gradient;
        None if there was no step."""
        return self._sums

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if closure is not None or not self._in_one_pass():
            if not self._pieces:
                return self._step(closure)
            with around(self._pieces, self._eps()) as sums:
                loss = self._step(closure)
            self._sums = sums
            return loss
        getattr(self, CAPTURE_CHECK)()
        pieces = self._pieces or [(parameter, None) for group in self.param_groups for parameter in group["params"]]
        device = pieces[0][0].device
        sums = torch.zeros(len(pieces), SUMS, dtype=torch.float64, device=device)
        for number, group, lists, gradients in self._with_gradients():
            if number not in self._chunks or self._chunks[number][0] != lists.present:
                self._chunks[number] = lists.present, _chunks(pieces, lists)
            lists.count.add_(1)
            chunks = self._chunks[number][1]
            _run(chunks, self._table(chunks, gradients), lists.count, group, sums)
        self._sums = sums
        return None

    def _table(self, chunks: _Chunks, gradients: Sequence[Tensor]) -> Tensor:
        """Return the addresses of the gradients, on the device."""
        device = chunks.start.device
        table = torch.tensor([gradient.data_ptr() for gradient in gradients])
        if device.type != "cuda":
            return table
        if not torch.cuda.is_current_stream_capturing():
            return table.pin_memory().to(device, non_blocking=True)
        if not chunks.tables:
            raise RuntimeError(f"more than {TABLES} updates are recorded with train.one_pass")
        self._recorded.append(chunks.tables.pop().copy_(table))  # nothing may be pinned while a graph is recorded
        return self._recorded[-1].to(device, non_blocking=True)

    def _in_one_pass(self) -> bool:
        tensors = [parameter for group in self.param_groups for parameter in group["params"]]
        held = [each for parameter in tensors for each in (parameter, parameter.grad) if each is not None]
        whole = all(each.dtype is torch.float32 and each.is_contiguous() for each in held)
        on_gpu = all(parameter.is_cuda for parameter in tensors)
        return whole and (self.force or (on_gpu and has_kernel()))

    def _eps(self) -> dict[Tensor, float]:
        return {parameter: group["eps"] for group in self.param_groups for parameter in group["params"]}


class around:
    """The sums of :class:`OnePassAdamW` around a step that does not sum: by torch, from a copy of the weights.

    Tests compare the kernel with these sums.
    """

    def __init__(self, pieces: Sequence[Piece], eps: dict[Tensor, float]) -> None:
        self._pieces, self._eps = pieces, eps
        self._old = {parameter: parameter.detach().clone() for parameter, _ in pieces}
        self._sums = torch.zeros(len(pieces), SUMS, dtype=torch.float64, device=pieces[0][0].device)

    def __enter__(self) -> Tensor:
        return self._sums

    def __exit__(self, *error: object) -> None:
        for place, (parameter, rows) in enumerate(self._pieces):
            if (gradient := parameter.grad) is None:
                continue
            rows = slice(None) if rows is None else rows
            g, old = gradient[rows].double(), self._old[parameter][rows]
            moved = (parameter.detach()[rows] - old).double()  # rounded in the type of the weights, as stored
            below = (gradient[rows].abs() < self._eps[parameter]).sum()
            found = (g.square().sum(), old.double().square().sum(), moved.square().sum(), below)
            self._sums[place] = torch.stack([each.double() for each in found])


def _chunks(pieces: Sequence[Piece], lists: Any) -> _Chunks:
    place = {parameter: number for number, parameter in enumerate(lists.parameters)}
    rows: list[tuple[int, int, int, int]] = []
    for number, (parameter, part) in enumerate(pieces):
        if (tensor := place.get(parameter)) is None:
            continue
        ends = (0, len(parameter)) if part is None else part.indices(len(parameter))[:2]
        first, last = (math.prod(parameter.shape[1:]) * end for end in ends)
        rows += [(tensor, number, start, min(CHUNK, last - start)) for start in range(first, last, CHUNK)]
    if sum(row[3] for row in rows) != sum(parameter.numel() for parameter in lists.parameters):
        raise ValueError("the pieces that are measured must cover each parameter once")
    device = lists.parameters[0].device
    columns = [torch.tensor(column, device=device) for column in zip(*rows, strict=True)]
    addresses = [[t.data_ptr() for t in tensors] for tensors in (lists.parameters, lists.means, lists.squares)]
    room = TABLES if device.type == "cuda" else 0
    tables = [torch.empty(len(place), dtype=torch.int64, pin_memory=True) for _ in range(room)]
    return _Chunks(*columns, torch.tensor(addresses, device=device), tables)  # pyright: ignore[reportCallIssue]


def _run(chunks: _Chunks, table: Tensor, count: Tensor, group: dict[str, Any], sums: Tensor) -> None:
    device = sums.device
    beta1, beta2 = group["betas"]
    rate = group["lr"] if isinstance(group["lr"], Tensor) else torch.full((), group["lr"], device=device)
    steps = count.double()
    corrections = torch.stack((1 - beta1**steps, (1 - beta2**steps).sqrt()))  # (2, parameters)
    found = torch.empty(len(chunks.entries), SUMS, dtype=torch.float64, device=device)
    _kernel()[(len(chunks.entries),)](
        table,
        chunks.addresses,
        chunks.of_tensor,
        chunks.start,
        chunks.entries,
        corrections,
        rate,
        found,
        len(table),
        beta1,
        beta2,
        group["eps"],
        group["weight_decay"],
        TURNS=CHUNK // BLOCK,
        BLOCK=BLOCK,
        SUMS=SUMS,
    )
    sums.index_add_(0, chunks.of_piece, found)


@cache
def _kernel() -> Any:
    from .one_pass_kernel import update

    return update
