"""The optimizers: which parameters they hold, and whether one update leaves copies equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...errors import listed
from ...probes.parameters.agreement import summed
from ..bounds import not_checked, weigh_names
from ..result import Check
from ..wiring import DOUBLES
from .members import Members, differing, names_of, said, same_sums
from .passes import own_values

MISSES, UPDATE = "optimizer misses", "update"
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
    names = names_of([own for _, _, own in each])
    measured = "no parameter stands in the optimizers twice"
    if names:
        ranks = said([rank for rank, (_, _, own) in enumerate(each) if own])
        measured = f"{len(names)} of {len(members.parameters)}: {listed(names)} on {ranks}"
    yield weigh_names(DOUBLES, names, measured)


def _missing(each: Sequence[tuple[list[str], int, list[str]]], count: int) -> Check:
    names = names_of([own for own, _, _ in each])
    ranks = [rank for rank, (own, _, _) in enumerate(each) if own]
    if not names:
        return weigh_names(MISSES, [], f"they hold all {count} trainable parameters")
    stale = max(foreign for _, foreign, _ in each)
    more = f"; it holds {stale} tensors that are no parameters of the model" if stale else ""
    measured = f"{len(names)} of {count}: {listed(names)} on {said(ranks)}{more}"
    return weigh_names(MISSES, names, measured)


def updated(
    members: Members,
    before: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
) -> Check:
    """Check one update: copies move alike, and where one part of a parameter moves, no other part with a gradient
    stands still."""
    changes = {name: value - before[name] for name, value in own_values(members).items() if name in gradients}
    each = members.gather(lambda: {name: (members.parts[name], summed(change)) for name, change in changes.items()})
    apart, ranks = differing(each, lambda one, other: same_sums(one, other, ROUNDING))
    if apart:
        measured = f"{len(apart)} of {len(changes)}: {listed(apart)} move differently on {said(ranks)}"
        return weigh_names(UPDATE, apart, measured)
    states = {name: _moves(changes[name], gradients[name]) for name in changes}
    found = members.gathered(states)
    names = [name for name in names_of(found) if {own_states.get(name) for own_states in found} >= {True, False}]
    measured = f"{len(changes)} parameters move alike on ranks that hold the same part"
    if names:
        ranks = [rank for rank, told in enumerate(found) if told.get(names[0]) is False]
        measured = f"{len(names)} of {len(changes)}: {listed(names)} stand still on {said(ranks)} and move elsewhere"
    return weigh_names(UPDATE, names, measured)


def _moves(change: Tensor, gradient: Tensor | None) -> bool | None:
    """True if an update moved this rank's part; None for a part without a gradient, or of a coarse type, whose rounding
    may keep it."""
    if gradient is None or change.dtype not in (torch.float32, torch.float64) or not bool(gradient.any()):
        return None
    return bool(change.any())
