"""Copies that must be equal, parameters and buffers, and shards that must not be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...errors import listed
from ...probes.places.naming import named
from ...probes.state import Digester
from ..bounds import not_checked, weigh_names
from ..result import Check
from .members import Members, Part, differing, holders, names_of, said
from .passes import own_values

REPLICAS, BUFFERS, SHARDS = "replicas", "buffers", "copied shards"
LEAST = 8  # distinct numbers of a shard: one with fewer, such as zeros, may be equal to another by its start


def replicas(members: Members) -> Iterator[Check]:
    """Check that ranks which hold the same part of a parameter hold the same bits, and that other parts differ."""
    each = members.gather(lambda: _parameters(members))
    wrong, ranks = differing(each)
    count = len(names_of(each))
    several = any(len(held) > 1 for _, held in holders(each))
    if not several:
        yield not_checked(REPLICAS, "no two ranks hold the same part of a parameter")
    else:
        measured = f"{count} parameters, equal where several ranks hold them"
        yield weigh_names(REPLICAS, wrong, _other_values(wrong, ranks) if wrong else measured)
    yield _shards(each)


def _parameters(members: Members) -> dict[str, tuple[Part, tuple[tuple[int, ...], int, bool]]]:
    digester = Digester()
    return {
        name: (members.parts[name], (tuple(value.shape), int(digester.of(value)), _is_drawn(value)))
        for name, value in own_values(members).items()
    }


def _shards(each: Sequence[Mapping[str, Any]]) -> Check:
    """Check that no two parts of a parameter are copies of each other."""
    pairs: dict[str, list[int]] = {}
    cut = 0
    for name in names_of(each):
        held = [(rank, *own[name]) for rank, own in enumerate(each) if name in own]
        cut += len({part for _, part, _ in held}) > 1
        seen: dict[Any, tuple[int, Any]] = {}
        for rank, part, (shape, digest, drawn) in held:
            first = seen.setdefault((shape, digest), (rank, part))
            if drawn and first[1] != part:
                pairs.setdefault(name, [first[0]]).append(rank)
    if not cut:
        return not_checked(SHARDS, "no parameter is split over ranks that are known to hold parts of it")
    if not pairs:
        return weigh_names(SHARDS, [], f"the parts of {cut} parameters differ from rank to rank")
    names, ranks = list(pairs), next(iter(pairs.values()))
    measured = f"{len(names)} of {cut}: {listed(names)}: the parts of {said(ranks)} are the same numbers"
    return weigh_names(SHARDS, names, measured)


def buffers(model: nn.Module, members: Members) -> Check:
    """Check that the ranks of one place in their data rank have the same buffers, unless DistributedDataParallel
    broadcasts them before each forward."""
    wrapped = [own for own in model.modules() if isinstance(own, DistributedDataParallel) and own.broadcast_buffers]
    broadcast = {id(own) for wrapper in wrapped for own in wrapper.modules_buffers}
    found: dict[str, Tensor] = {
        f"{each.path}.{key}".lstrip("."): own
        for each in named(model)
        for key, own in each.module._buffers.items()
        if own is not None
    }
    place = members.tensor[members.rank]
    own = {name: one for name, one in found.items() if id(one) not in broadcast}

    def compared() -> dict[str, Any]:
        digester = Digester()
        return {
            name: ((place, 0, 0, 0), (tuple(one.shape), str(one.dtype), int(digester.of(one))))
            for name, one in own.items()
        }

    each = members.gather(compared)
    wrong, ranks = differing(each)
    if not any(members.gathered(bool(found))):
        return not_checked(BUFFERS, "the model has no buffers")
    measured = f"{len(found)} buffers, equal on all data ranks" if own else "DistributedDataParallel broadcasts them"
    return weigh_names(BUFFERS, wrong, _other_values(wrong, ranks) if wrong else measured)


def _is_drawn(value: Tensor) -> bool:
    """True for numbers that two ranks cannot have alike by their start, as zeros and ones are."""
    sample = value.detach().flatten()[:4096]
    return len(torch.unique(sample)) >= LEAST


def _other_values(names: Sequence[str], ranks: Sequence[int]) -> str:
    return f"{listed(names)}: {said(ranks)} {'holds' if len(ranks) == 1 else 'hold'} other values than the rest"
