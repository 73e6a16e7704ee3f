"""The plan of the stability table that a user asks for: architectures, depths, and the pairs of them that exist."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import MAX_LAYERS, stack_of
from ..errors import UsageError
from ..experiments import CONTROLS, SCHEMES, Experiment, Recipe, table_runs
from ..experiments.table import table_settings
from ..registry import spelling
from .grids import arch_facts, registered_arch

ALL = "all"


def table(ask: Recipe, archs: Sequence[str] = (ALL,), depths: Sequence[int] = ()) -> tuple[list[Experiment], str]:
    """Return the runs of every architecture at every depth and seed, and a sentence about missing ones; "" if none is
    missing.

    A run is missing if a scheme is not defined for the stack, or if the kind of model cannot have the depth. ``archs``:
    names, controls such as ``branchnorm T=1``, or ``all``. Raises UsageError if nothing is left.
    """
    names, wanted = _named(archs), [*dict.fromkeys(depths)]
    if wrong := next((str(depth) for depth in wanted if not 1 <= depth <= MAX_LAYERS), None):
        raise UsageError(f"--depths {wrong}: give numbers of layers from 1 to {MAX_LAYERS}, such as 12,36,100.")
    stack = stack_of(table_settings(ask).get("model", {}))
    unfit = [name for name in names if not _defined(name, stack)]
    odd = [depth for depth in wanted if depth % 2 and stack == "encoder-decoder"]
    left = [name for name in names if name not in unfit]
    kept = [depth for depth in wanted if depth not in odd]
    why = [
        *([f"{', '.join(unfit)} (not defined for model.stack = {stack!r})"] if unfit else []),
        *([f"depth {', '.join(map(str, odd))} (odd: an encoder-decoder has depth/2 layers a side)"] if odd else []),
    ]
    sentence = f"left out of the table: {'; '.join(why)}." if why else ""
    if not left or (wanted and not kept):
        raise UsageError(f"nothing is left of the table: {'; '.join(why)}.")
    return [*table_runs(ask, left, kept)], sentence


def _named(archs: Sequence[str]) -> list[str]:
    controls = {spelling(name): name for name in CONTROLS}
    found: dict[str, None] = {}
    for name in archs:
        if name == ALL:  # in the order of the papers' tables, followed by other registered ones
            found.update(dict.fromkeys((*SCHEMES, *(arch for arch in arch_facts() if arch not in SCHEMES))))
        else:
            found[controls.get(spelling(name)) or registered_arch(name)] = None
    return [*found]


def _defined(name: str, stack: str) -> bool:
    if stack == "encoder-decoder":
        return True
    control = CONTROLS.get(name, {})
    return "decoder_arch" not in control and stack in arch_facts()[control.get("arch", name)]["defined_for"]
