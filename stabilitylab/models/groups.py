"""The groups of parameters that an architecture gives the optimizer: factors on rate, eps and decay."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from ..errors import UsageError
from .base import Factors
from .transformer import Transformer


@dataclass(frozen=True)
class Group:
    """The parameters of one group, by their roles, and its factors on the settings ``train.lr``, ``train.eps`` and
    ``train.weight_decay``."""

    factors: Factors
    roles: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]

    def described(self) -> dict[str, Any]:
        """Return what a run records about the group."""
        return {**asdict(self.factors), "roles": [*self.roles]}


def groups_of(model: Transformer) -> list[Group]:
    """Return the groups of the model's parameters; one group of all parameters for an architecture without factors.

    Raises UsageError if the roles of one parameter have different factors.
    """
    residuals = {str(residual.place): residual for residual in model.residuals()}
    found: dict[str, Factors] = {}
    roles: dict[Factors, list[str]] = {}
    for role, (name, _) in model.parameter_roles().items():
        place = ".".join(role.split(".")[:3])
        stack = model.stacks.get(role.partition(".")[0], model.last_stack)
        inside = residuals.get(place)
        factors = (
            inside.factors(role) if inside is not None else stack.arch.outer_factors(stack.place, role, stack.options)
        )
        if found.setdefault(name, factors) != factors:
            raise UsageError(f"architecture {model.config.arch!r} gives two learning rates to the parameter {name}.")
        roles.setdefault(factors, []).append(role)
    named = dict(model.named_parameters())
    members: dict[Factors, list[nn.Parameter]] = {factors: [] for factors in roles}
    for name, parameter in named.items():  # in the order of the model, as one group has them
        members[found[name]].append(parameter)
    return [Group(factors, tuple(roles[factors]), tuple(own)) for factors, own in members.items()]
