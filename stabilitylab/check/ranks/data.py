"""The samples of each rank: other ones on each data rank, the same ones on the tensor ranks of one."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...probes.parameters.layouts import local
from ..bounds import not_checked, weigh
from ..result import Check
from ..seen import tensors_of
from .members import Members, parted, said

SAME, TENSOR = "same batch", "tensor batch"
MOST = 64  # batches of a rank that are looked at


def batches(members: Members, own: Sequence[Any]) -> Iterator[Check]:
    """Check which samples the ranks have. ``own``: this rank's batches. A sample is an entry along the first dimension
    of the batch's tensors."""
    each = members.gather(lambda: [row for batch in own[:MOST] for row in _samples(batch)])
    told = "the batch has no tensors with entries that differ"
    yield _apart(members, each) if any(each) else not_checked(SAME, told)
    if members.tensor_ranks == 1:
        yield not_checked(TENSOR, "no two ranks are known to share a batch")
    else:
        yield _together(members, each) if any(each) else not_checked(TENSOR, told)


def _apart(members: Members, each: Sequence[Sequence[str]]) -> Check:
    if members.data_ranks == 1:
        return not_checked(SAME, "there is one data rank")
    firsts = [members.data.index(number) for number in range(members.data_ranks)]
    owners = Counter(row for rank in firsts for row in set(each[rank]))
    shares = {rank: sum(owners[row] > 1 for row in each[rank]) / len(each[rank]) for rank in firsts if each[rank]}
    value = max(shares.values(), default=0.0)
    shown = [rank for rank, share in shares.items() if share > 0]
    count = sum(len(each[rank]) for rank in firsts)
    measured = f"{count} samples on {members.data_ranks} data ranks, none on two of them"
    if shown:
        measured = f"{said(shown)}: up to {value:.0%} of a rank's samples are also on another data rank"
    return weigh(SAME, value, measured)


def _together(members: Members, each: Sequence[Sequence[str]]) -> Check:
    wrong: list[int] = []
    for number in range(members.data_ranks):
        held = [(rank, tuple(own)) for rank, own in enumerate(each) if members.data[rank] == number]
        wrong += parted(held)
    measured = "the tensor ranks of each data rank have the same samples"
    if wrong:
        verb = "has" if len(wrong) == 1 else "have"
        measured = f"{said(wrong)} {verb} other samples than the tensor ranks beside"
    return weigh(TENSOR, float(len(wrong)), measured)


def _samples(batch: Any) -> list[str]:
    """Return a digest of each sample that is not of one value."""
    found = [local(own.detach()) for own in tensors_of(batch)]
    found = [own for own in found if own.dim() and own.numel() and own.device.type != "meta"]
    if not found:
        return []
    rows = len(max(found, key=Tensor.numel))
    parts = [own.reshape(rows, -1).cpu() for own in found if len(own) == rows]
    told = []
    for at in range(rows):
        values = [part[at] for part in parts]
        if any(bool((value != value[0]).any()) for value in values):
            told.append(hashlib.sha256(b"".join(map(_bytes, values))).hexdigest()[:16])
    return told


def _bytes(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes() if values.numel() else b""
