"""Dropout: other masks on each data rank, and one mask where tensor ranks drop entries of the same activation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...probes.parameters.layouts import local
from ...probes.state import Digester
from ..bounds import not_checked, weigh
from ..result import Check
from ..seen import DROPOUTS, drops
from .members import Members, said

DATA, TENSOR = "dropout on data ranks", "dropout on tensor ranks"
MOST = 64  # calls that are compared
NONE = "no dropout is active in training mode"


class Drawn(NamedTuple):
    """A call of dropout. ``state``: a digest of the generator's state before it; ``entering``, ``leaving``: digests of
    the activation, or None for attention, whose mask is inside."""

    state: str
    entering: int | None
    leaving: int | None


class DropoutListener(TorchFunctionMode):
    """Keeps the first calls of dropout that are active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Drawn] = []
        self._digester = Digester()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if len(self.calls) >= MOST or not drops(func, args, kwargs):
            return func(*args, **kwargs)
        entering = next((own for own in (*args, *kwargs.values()) if isinstance(own, Tensor)), None)
        if entering is None:
            return func(*args, **kwargs)
        state = _state(entering.device)
        plain = func in DROPOUTS or func in (torch.dropout, torch.feature_dropout)
        before = int(self._digester.of(entering)) if plain else None
        result = func(*args, **kwargs)
        after = int(self._digester.of(local(result).detach())) if plain and isinstance(result, Tensor) else None
        self.calls.append(Drawn(state, before, after))
        return result


def dropouts(members: Members, listener: DropoutListener) -> Iterator[Check]:
    """Check the masks of the ranks' first training pass."""
    each = members.gathered(listener.calls)
    yield _on_data_ranks(members, each)
    yield _on_tensor_ranks(members, each)


def _on_data_ranks(members: Members, each: Sequence[Sequence[Drawn]]) -> Check:
    if members.data_ranks == 1:
        return not_checked(DATA, "there is one data rank")
    if not any(each):
        return not_checked(DATA, NONE)
    alike: dict[tuple[int, str], list[int]] = {}
    for rank, own in enumerate(each):
        if own:
            alike.setdefault((members.tensor[rank], own[0].state), []).append(rank)
    shared = sorted({rank for ranks in alike.values() if len(ranks) > 1 for rank in ranks})
    measured = f"{members.data_ranks} data ranks begin at different states of their generators"
    if shared:
        measured = f"{said(shared)} begin at the same state of the random generator, so that their masks are alike"
    return weigh(DATA, float(len(shared)), measured)


def _on_tensor_ranks(members: Members, each: Sequence[Sequence[Drawn]]) -> Check:
    if members.tensor_ranks == 1:
        return not_checked(TENSOR, "no two ranks are known to share a batch")
    if not any(each):
        return not_checked(TENSOR, NONE)
    compared, wrong, ranks = 0, 0, set[int]()
    for number in range(members.data_ranks):
        own = [rank for rank in range(members.size) if members.data[rank] == number]
        for calls in zip(*(each[rank] for rank in own), strict=False):
            if calls[0].entering is None or len({call.entering for call in calls}) > 1:
                continue
            compared += 1
            if len({call.leaving for call in calls}) > 1:
                wrong += 1
                ranks.update(own)
    if not compared:
        return not_checked(TENSOR, "no dropout has the same input on tensor ranks")
    measured = f"{compared} calls on the same activation drop the same entries"
    if wrong:
        measured = f"{said(sorted(ranks))} drop other entries of the same activation"
    return weigh(TENSOR, float(wrong), measured)


def _state(device: torch.device) -> str:
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()[:16]
