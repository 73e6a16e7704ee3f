"""An evaluation between backward and the optimizer's step: the next loss must be that of a loop without it."""

from __future__ import annotations

from ...errors import listed
from ...probes.places.naming import named
from ..bounds import not_checked, weigh
from ..result import Check
from .members import Members
from .passes import RankPasses

EVALUATION = "evaluation"
ROUNDING = 1e-4  # relative difference of losses that a GPU's order of additions may make, where all is sharded
NOT_GIVEN = "no evaluate= was given, the evaluation of your loop"


def unsharded(passes: RankPasses) -> list[str]:
    """Return the names of the fully_shard modules that hold gathered parameters now."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    return [
        each.path or "the root"
        for each in named(passes.model)
        if isinstance(each.module, FSDPModule)
        and any(own is not None and not isinstance(own, DTensor) for own in _managed(each.module))
    ]


def _managed(module: object) -> list[object]:
    """Return the parameters that a fully_shard module gathers itself, as they are registered now."""
    found: list[object] = []
    state = module._get_fsdp_state()  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        for own in [] if group is None else group.fsdp_params:
            home = own._module_info
            found.append(getattr(home.module, home.param_name, None))
    return found


def evaluated(members: Members, without: float, with_evaluation: float, left: list[str]) -> Check:
    """Check the losses after an update, without and with an evaluation before the optimizer's step. ``left``: modules
    that it left unsharded."""
    plain, after, gathered = members.mean([without])[0], members.mean([with_evaluation])[0], members.gathered(left)
    if plain != plain or after != after:
        return not_checked(EVALUATION, "the loss after an update is not finite")
    apart = abs(plain - after) / max(abs(plain), 1e-12)
    names = list(dict.fromkeys(name for own in gathered for name in own))
    if not names and apart <= ROUNDING:
        apart = 0.0
    measured = f"the loss after an update is {plain:.6g} with and without it"
    if apart:
        still = f"; it leaves {listed(names)} unsharded" if names else ""
        measured = f"the loss after an update is {plain:.6g} without it and {after:.6g} with it{still}"
    remedy = "" if names else "put back what the evaluation changes, such as buffers, attributes and modes of modules"
    return weigh(EVALUATION, apart, measured, remedy=remedy)
