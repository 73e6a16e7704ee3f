"""Boards of a pipeline's stage: the same tables in the same order on all stages, empty where a stage has no place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ...errors import UsageError
from ..base import PROBES
from ..parameters.pipeline import Part, Pipeline
from .board import Board
from .selection import Names, chosen
from .watchable import compiled_modules

PART = "needs a held-out pass of the whole model, of which a stage of a pipeline has a part"


def check_for_stages(model: nn.Module, mask: Any, reference: Any) -> None:
    """Raise UsageError for what no stage can follow alone."""
    if mask is not None:
        raise UsageError("mask= does not tell which micro-batch a stage of a pipeline is at: leave it out.")
    if reference is not None and not isinstance(reference, str):
        raise UsageError("a stage of a pipeline has no held-out pass of its own: leave reference= out.")
    if compiled_modules(model):
        raise UsageError("a compiled stage of a pipeline cannot be watched: leave torch.compile out.")


def agreed(
    boards: Sequence[Board], dropped: Mapping[str, str], names: Names, stages: Pipeline
) -> tuple[list[Board], list[tuple[str, str]]]:
    """Return the boards, and (probe, reason) for probes that no stage has a place for; raise if the caller named
    one."""
    wanted = chosen(names)
    dropped = {name: PART if PROBES[name].on == "reference" else why for name, why in dropped.items()}
    own = {board.table.name: board for board in boards}
    missing = {name: why for name, why in dropped.items() if wanted[name]}
    parts = stages.agree([Part(board.table, board.rules) for board in boards], list(wanted), missing)
    found = [own.get(name) or Board(PROBES[name](), (), tuple(part.rules)) for name, part in parts.items()]
    return found, [(name, why) for name, why in dropped.items() if name not in parts]
