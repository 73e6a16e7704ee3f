"""What the optimizer does to the parameters, theta_t -> theta_{t+1}."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from .base import ParameterProbe, Ratio, probe
from .parameters import Parameters


@probe("update_ratio", on="update", unit="ratio", columns={"value": Ratio(), "rms": Ratio()}, default=True)
class UpdateRatio(ParameterProbe):
    """||theta_{t+1} - theta_t||_2 / ||theta_t||_2 per sub-layer, and the update's root mean square over entries (rms);
    row t holds them. Keeps one copy of the parameters."""

    undefined = frozenset({"value"})  # of parameters that are all 0

    def __init__(self) -> None:
        self._theta: list[torch.Tensor] = []

    def before(self, parameters: Parameters) -> None:
        if not self._theta:
            self._theta = [torch.empty_like(tensor) for tensor in parameters.tensors]
        torch._foreach_copy_(self._theta, parameters.tensors)  # pyright: ignore

    def collect(self, parameters: Parameters) -> tuple[Mapping[str, torch.Tensor], np.ndarray]:
        self._pieces = {"theta": parameters.squares(self._theta)}
        torch._foreach_sub_(self._theta, parameters.tensors)  # pyright: ignore
        self._pieces["update"] = parameters.squares(self._theta)
        theta, update = (parameters.by_row(squares) for squares in self._pieces.values())
        sums = {"value": torch.cat((update, theta), dim=1), "rms": torch.cat((update, parameters.entries), dim=1)}
        return sums, np.ones((len(parameters.rows), len(sums)), dtype=bool)

    def pieces(self) -> Mapping[str, torch.Tensor]:
        return self._pieces
