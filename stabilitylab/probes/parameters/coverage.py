"""Check before the first row: every entry of every parameter of the model counts in exactly one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import nn

from ...errors import UsageError, listed
from ..places.attending import Part

NAMED = 4  # parameters that an error names


class Coverage(NamedTuple):
    """The number of parameters of a model (``covered``: all of them are), and the number of them that are trained
    (``trained``)."""

    covered: int
    trained: int


def covered(
    model: nn.Module, known: Mapping[str, nn.Parameter], parts: Sequence[Sequence[Part]], by_roles: bool
) -> Coverage:
    """Check that all of ``model.parameters()`` is covered, and count it, tied parameters once.

    ``known``: the parameters that were found, by name. ``parts``: for each parameter, the parts that count somewhere.
    ``by_roles``: the model named the parts. Raises UsageError if a parameter was not found, if its parts leave entries
    out, or if they count entries twice.
    """
    own = set(known.values())
    unknown = [name for name, parameter in model.named_parameters() if parameter not in own]
    if len(unknown) < sum(parameter not in own for parameter in model.parameters()):
        unknown.append("one without a name")
    if unknown:
        raise UsageError(
            f"parameters() yields what no module registers ({listed(unknown, NAMED)}), so that it would count nowhere: "
            "make the modules that hold it children of the model."
        )
    source = "parameter_roles()" if by_roles else "the probes' table of parameters"
    empty = [name for (name, parameter), cut in zip(known.items(), parts, strict=True) if parameter.numel() and not cut]
    if empty:
        raise UsageError(f"{source} leaves out {listed(list(map(repr, empty)), NAMED)}: give every parameter a role.")
    for (name, parameter), cut in zip(known.items(), parts, strict=True):
        least, most = _counted(parameter.shape, cut)
        if parameter.numel() and (least, most) != (1, 1):
            fault = "leaves out a part of" if least == 0 else "counts a part of"
            raise UsageError(f"{source} {fault} {name!r}{'' if least == 0 else ' twice'}: give every entry one role.")
    return Coverage(len(known), sum(parameter.requires_grad for parameter in known.values()))


def _counted(shape: Sequence[int], parts: Sequence[Part]) -> tuple[int, int]:
    """The least and the largest number of parts that an entry of a tensor lies in."""
    rows, columns = (*shape, 1, 1)[:2]
    boxes = []
    for part in parts:
        across, along = part if isinstance(part, tuple) else (part, None)
        ends = [(0, size) if cut is None else cut.indices(size)[:2] for cut, size in ((across, rows), (along, columns))]
        boxes.append(ends)
    marks = [sorted({0, size, *(end for box in boxes for end in box[dim])}) for dim, size in enumerate((rows, columns))]
    count = np.zeros([len(own) - 1 for own in marks], dtype=np.int64)
    for box in boxes:
        (top, bottom), (left, right) = ([own.index(end) for end in ends] for own, ends in zip(marks, box, strict=True))
        count[top:bottom, left:right] += 1
    return (int(count.min()), int(count.max())) if count.size else (1, 1)
