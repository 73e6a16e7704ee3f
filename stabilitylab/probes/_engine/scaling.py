"""The check for a GradScaler that the calling loop uses and did not give: which numbers carry its scale."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from ..parameters.pieces import Parameters
from .board import Board

FRAMES = 11  # of the callers, among which it is looked for


def forgotten_scaler(boards: Sequence[Board], parameters: Parameters, total: bool) -> str:
    """Return a warning if the calling loop uses such a scaler; "" if not. ``total``: every row has grad_norm_total."""
    scaler = _held()
    scale = 1.0 if scaler is None or scaler._scale is None else float(scaler._scale)
    if scaler is None or scale == 1:
        return ""
    # after unscale_ the gradients of parameters are as they should be, and those of activations are not
    unscaled = any(state["stage"] is OptState.UNSCALED for state in scaler._per_optimizer_states.values())
    columns = [board.table.name for board in boards if board.probe.on == "backward"]
    if not unscaled:
        columns += _of_parameters(boards, parameters, total)
    if not columns:
        return ""
    *first, last = columns
    named = f"{', '.join(first)} and {last} carry" if first else f"{last} carries"
    ask = "give scaler=" if unscaled else "give scaler=, and call scaler.unscale_(optimizer) before step()"
    return f"a GradScaler is in use, at {scale:g}, and {named} it: {ask}"


def _of_parameters(boards: Sequence[Board], parameters: Parameters, total: bool) -> Iterator[str]:
    norms = next((board.probe for board in boards if board.table.name == "grad_norm"), None)
    for board in boards:
        if board.probe.on == "step" and board.table.phase == "backward":
            yield board.table.name
        elif board.table.name == "parameter_norm":
            yield "parameter_norm (gradient)"
    if total or norms is not None:
        yield "grad_norm_total"
    if norms is not None:
        yield from (f"grad_norm_{kind}" for kind in parameters.kinds if len(parameters.kinds) > 1)
        if norms.kept is None and any(isinstance(group.get("eps"), float) for group in parameters.optimizer_groups):
            yield "grad_under_eps"


def _held() -> torch.amp.GradScaler | None:
    """Return the GradScaler that the calling loop holds, by any name or as ``self.scaler``; None if there is none.

    Looks through the callers' frames, once a run, at its first row: a scaler that was not given is known to nobody but
    the loop. Its scaled gradients look like any others, and a scaler leaves no mark on an optimizer, so this warning
    could not come without it.
    """
    frame: Any = sys._getframe(1)
    for _ in range(FRAMES):
        if frame is None:
            return None
        own = frame.f_locals.get("self")
        held: list[Any] = [*frame.f_locals.values(), getattr(own, "__dict__", {}).get("scaler")]
        scalers = [each for each in held if issubclass(type(each), torch.amp.GradScaler) and each.is_enabled()]
        if in_use := [each for each in scalers if each._scale is not None]:
            return in_use[0]
        frame = frame.f_back
    return None
