"""An evaluation between backward and the optimizer's step: the next loss must be that of a loop without it."""

from __future__ import annotations

from torch import nn

from ...errors import listed
from ...probes.places.naming import parameters_of
from ..bounds import not_checked, weigh
from ..result import Check
from .members import Members, names_of

EVALUATION = "evaluation"
ROUNDING = 1e-4  # relative difference of losses that a GPU's order of additions may make, where all is sharded
NOT_GIVEN = "evaluate= was not given: pass the evaluation of your loop"


def gathered_now(members: Members, model: nn.Module) -> list[str]:
    """Return the names of parameters that are sharded and of which the model now holds the gathered whole."""
    now = parameters_of(model)
    return [
        name
        for name, own in members.parameters.items()
        if hasattr(own, "placements") and not hasattr(now.get(name), "placements")
    ]


def evaluated(members: Members, without: float, with_evaluation: float, left: list[str]) -> Check:
    """Check the losses after an update, without and with an evaluation before the optimizer's step. ``left``: the
    parameters that it left gathered."""
    plain, after = members.mean([without, with_evaluation])
    names = names_of(members.gathered(left))
    if plain != plain or after != after:
        return not_checked(EVALUATION, "the loss after an update is not finite")
    apart = abs(plain - after) / max(abs(plain), 1e-12)
    if not names and apart <= ROUNDING:
        apart = 0.0
    measured = f"the loss after an update is {plain:.6g} with and without it"
    if apart:
        still = f"; it leaves {listed(names)} gathered" if names else ""
        measured = f"the loss after an update is {plain:.6g} without it and {after:.6g} with it{still}"
    remedy = "" if names else "put back what the evaluation changes, such as buffers, attributes and modes of modules"
    return weigh(EVALUATION, apart, measured, remedy=remedy)
