"""The optimizers: which parameters they hold, and whether one update leaves copies equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...errors import listed
from ...probes.parameters.agreement import alike, summed
from ..bounds import not_checked, weigh
from ..result import Check
from .members import Members, holders, parted, said
from .passes import own_values

MISSES, DOUBLES, UPDATE = "optimizer misses", "optimizer doubles", "update"
NONE = "no optimizer was given"
ROUNDING = 1e-3  # relative difference up to which two updates of a copy count as equal


def held(
    members: Members, optimizers: Sequence[torch.optim.Optimizer], gradients: Mapping[str, Tensor | None]
) -> Iterator[Check]:
    """Check that each trainable parameter with a gradient stands in one optimizer, once."""
    if not optimizers:
        yield from (not_checked(name, NONE) for name in (MISSES, DOUBLES))
        return
    count = Counter(id(own) for one in optimizers for group in one.param_groups for own in group["params"])
    known = {id(own): name for name, own in members.parameters.items()}
    missing = [
        name for name, value in gradients.items() if value is not None and not count[id(members.parameters[name])]
    ]
    foreign = sum(id(own) not in known for one in optimizers for group in one.param_groups for own in group["params"])
    doubled = [name for name, own in members.parameters.items() if count[id(own)] > 1]
    each = members.gathered((missing, foreign, doubled))
    yield _missing(each, len(gradients))
    names = list(dict.fromkeys(name for _, _, own in each for name in own))
    measured = "no parameter stands in the optimizers twice"
    if names:
        ranks = said([rank for rank, (_, _, own) in enumerate(each) if own])
        measured = f"{len(names)} of {len(members.parameters)}: {listed(names)} on {ranks}"
    yield weigh(DOUBLES, float(len(names)), measured, site=names[0] if names else "")


def _missing(each: Sequence[tuple[list[str], int, list[str]]], count: int) -> Check:
    names = list(dict.fromkeys(name for own, _, _ in each for name in own))
    ranks = [rank for rank, (own, _, _) in enumerate(each) if own]
    if not names:
        return weigh(MISSES, 0.0, f"they hold all {count} trainable parameters")
    stale = max(foreign for _, foreign, _ in each)
    more = f"; it holds {stale} tensors that are no parameters of the model" if stale else ""
    measured = f"{len(names)} of {count}: {listed(names)} on {said(ranks)}{more}"
    return weigh(MISSES, float(len(names)), measured, site=names[0])


def updated(
    members: Members,
    before: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
) -> Check:
    """Check one update: copies move alike, and where one part of a parameter moves, no other part with a gradient
    stands still."""
    changes = {name: value - before[name] for name, value in own_values(members).items() if name in gradients}
    own = changes
    each = members.gather(lambda: {name: (members.parts[name], summed(change)) for name, change in own.items()})
    apart = [(name, ranks) for name, known in holders(each) if (ranks := parted(known, _same))]
    if apart:
        names = list(dict.fromkeys(name for name, _ in apart))
        ranks = sorted({rank for _, own_ranks in apart for rank in own_ranks})
        measured = f"{len(names)} of {len(own)}: {listed(names)} move otherwise on {said(ranks)}"
        return weigh(UPDATE, float(len(names)), measured, site=names[0])
    states = {name: _moves(changes[name], gradients[name]) for name in changes}
    found = members.gathered(states)
    known = dict.fromkeys(name for own_states in found for name in own_states)
    names = [name for name in known if {own_states.get(name) for own_states in found} >= {True, False}]
    measured = f"{len(own)} parameters move alike on ranks that hold the same part"
    if names:
        ranks = [rank for rank, told in enumerate(found) if told.get(names[0]) is False]
        measured = f"{len(names)} of {len(own)}: {listed(names)} stand still on {said(ranks)} and move elsewhere"
    return weigh(UPDATE, float(len(names)), measured, site=names[0] if names else "")


def _moves(change: Tensor, gradient: Tensor | None) -> bool | None:
    """True if an update moved this rank's part; None for a part without a gradient, or of a coarse type, whose rounding
    may keep it."""
    if gradient is None or change.dtype not in (torch.float32, torch.float64) or not bool(gradient.any()):
        return None
    return bool(change.any())


def _same(one: object, other: object) -> bool:
    return one is other or (one is not None and other is not None and alike(one, other, ROUNDING))  # pyright: ignore
