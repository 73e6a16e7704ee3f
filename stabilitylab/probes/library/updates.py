"""The update of the parameters by the optimizer, theta_t -> theta_{t+1}."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...schema import Row
from ..base import Collected, ParameterProbe, probe
from ..parameters.copies import kept, parts
from ..parameters.pieces import Parameters
from ..rules import Norm, Ratio


@probe(
    "update_ratio",
    on="update",
    unit={"value": "ratio", "rms": "units of theta"},
    columns={"value": Ratio(), "rms": Ratio()},
    default=True,
    log=True,
)
class UpdateRatio(ParameterProbe):
    """The size of the update of each sub-layer relative to its parameters: ``value`` is ||theta_{t+1} - theta_t||_2 /
    ||theta_t||_2, and ``rms`` is the root mean square of the update over its entries. Row t holds the update from t to
    t+1. The probe keeps one copy of the parameters; if the model fills a GPU, the copy is on the host."""

    undefined = frozenset({"value"})  # of parameters that are all 0

    def __init__(self) -> None:
        self._theta: list[torch.Tensor] = []

    def before(self, parameters: Parameters) -> None:
        if parameters.measuring is None:  # else the optimizer's own step sums what is wanted
            self._theta = kept(parameters.tensors, self._theta)

    def collect(self, parameters: Parameters) -> Collected:
        pieces = moved(self._theta, parameters) if parameters.measuring is None else stepped(parameters)
        theta, update = (parameters.by_row(squares) for squares in pieces.values())
        sums = {"value": torch.cat((update, theta), dim=1), "rms": torch.cat((update, parameters.entries), dim=1)}
        return Collected(sums, np.ones((len(parameters.rows), len(sums)), dtype=bool), pieces=pieces)


@probe(
    "parameter_norm",
    on="update",
    unit="L2 norm",
    columns={"weight": Norm(), "gradient": Norm(), "moved": Norm()},
    log=True,
)
class ParameterNorm(ParameterProbe):
    """The norms of every single parameter, by its name. ``weight``: ||theta_t||_2. ``gradient``: ||dE/dtheta_t||_2,
    before clipping. ``moved``: ||theta_{t+1} - theta_t||_2. The probe keeps one copy of the parameters, as
    ``update_ratio`` does.

    Look for the one matrix behind the number of a layer: a projection whose weight grows while the others stay, a
    gradient that is absent (the parameter has none), or a gradient that a single embedding dominates.
    """

    def __init__(self) -> None:
        self._theta: list[torch.Tensor] = []

    def rows(self, parameters: Parameters) -> Sequence[Row]:
        return parameters.each

    def before(self, parameters: Parameters) -> None:
        self._theta = kept(parameters.tensors, self._theta)
        gradients = parameters.gradients()
        self._gradient = parameters.by_parameter(parameters.squares(gradients))
        self._given = np.array([gradient is not None for gradient in gradients], dtype=bool)

    def collect(self, parameters: Parameters) -> Collected:
        pieces = moved(self._theta, parameters)
        theta, update = (parameters.by_parameter(squares) for squares in pieces.values())
        seen = np.ones((len(parameters.each), 3), dtype=bool)
        seen[:, 1] = self._given
        return Collected({"weight": theta, "gradient": self._gradient, "moved": update}, seen)


def stepped(parameters: Parameters) -> dict[str, torch.Tensor]:
    """Return the result of :func:`moved` from the optimizer's own sums. What it did not step has an update of 0."""
    if (sums := parameters.in_step()) is None:
        theta = parameters.squares(parameters.tensors)
        return {"theta": theta, "update": torch.zeros_like(theta)}
    pairs = zip(parameters.tensors, parameters.gradients(), strict=True)
    still = [tensor if gradient is None else None for tensor, gradient in pairs]
    return {"theta": sums[:, 1] + parameters.squares(still), "update": sums[:, 2].contiguous()}


def moved(theta: Sequence[torch.Tensor], parameters: Parameters) -> dict[str, torch.Tensor]:
    """Return the squares of each piece of the parameters as they were, "theta", and of their change since, "update".
    The copy ``theta`` is overwritten."""
    pieces: dict[str, torch.Tensor] = {}
    now = parameters.tensors
    for part in parts(theta, parameters.device):
        pairs = [(old, new) for old, new in zip(part, now, strict=True) if old is not None]
        for name in ("theta", "update"):
            if name == "update":
                torch._foreach_sub_(*map(list, zip(*pairs, strict=True)))  # pyright: ignore
            squares = parameters.squares(part)
            pieces[name] = pieces[name] + squares if name in pieces else squares
    return pieces
