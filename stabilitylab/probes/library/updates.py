"""What the optimizer does to the parameters, theta_t -> theta_{t+1}."""

from __future__ import annotations

import numpy as np
import torch

from ..base import Collected, ParameterProbe, probe
from ..parameters.copies import keep, parts, room_for
from ..parameters.pieces import Parameters
from ..rules import Ratio


@probe(
    "update_ratio",
    on="update",
    unit={"value": "ratio", "rms": "units of theta"},
    columns={"value": Ratio(), "rms": Ratio()},
    default=True,
    log=True,
)
class UpdateRatio(ParameterProbe):
    """||theta_{t+1} - theta_t||_2 / ||theta_t||_2 per sub-layer, and the update's root mean square over entries (rms);
    row t holds them. Keeps one copy of the parameters; of a model that fills a GPU on the host."""

    undefined = frozenset({"value"})  # of parameters that are all 0

    def __init__(self) -> None:
        self._theta: list[torch.Tensor] = []

    def before(self, parameters: Parameters) -> None:
        self._theta = self._theta or room_for(parameters.tensors)
        keep(self._theta, parameters.tensors)

    def collect(self, parameters: Parameters) -> Collected:
        now = parameters.tensors
        pieces: dict[str, torch.Tensor] = {}
        for part in parts(self._theta, parameters.device):
            pairs = [(old, new) for old, new in zip(part, now, strict=True) if old is not None]
            for name in ("theta", "update"):
                if name == "update":
                    torch._foreach_sub_(*map(list, zip(*pairs, strict=True)))  # pyright: ignore
                squares = parameters.squares(part)
                pieces[name] = pieces[name] + squares if name in pieces else squares
        theta, update = (parameters.by_row(squares) for squares in pieces.values())
        sums = {"value": torch.cat((update, theta), dim=1), "rms": torch.cat((update, parameters.entries), dim=1)}
        return Collected(sums, np.ones((len(parameters.rows), len(sums)), dtype=bool), pieces=pieces)
