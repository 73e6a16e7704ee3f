"""The gains of the norms, which set the scale of everything behind them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...schema import Row
from ..base import Collected, ParameterProbe, probe
from ..parameters.pieces import Parameters
from ..parameters.squares import Squares
from ..rules import Max, Ratio


@probe("ln_gain", on="step", phase="step", unit="gain", columns={"rms": Ratio(), "max_abs": Max()}, log=False)
class LNGain(ParameterProbe):
    """The root mean square (``rms``) and the largest absolute entry (``max_abs``) of the weight gamma of each norm at
    theta_t, for LayerNorm, RMSNorm and any other norm; both are 1 at the usual initialisation. If a norm's gain is 1 +
    weight (Gemma), the numbers are those of the weight. Wortsman et al. 2023 (2309.14322).

    Look for a gain that keeps growing (the branch or the logits behind it grow with it), or that shrinks towards 0 (the
    layer is being switched off).

    Cost: a few operators over all gains together.
    """

    def __init__(self) -> None:
        self._squares: Squares | None = None

    def lacks(self, parameters: Parameters) -> str:
        return "" if parameters.gains else "finds no norm with a weight in this model"

    def rows(self, parameters: Parameters) -> Sequence[Row]:
        return list(parameters.gains)

    def collect(self, parameters: Parameters) -> Collected:
        held = parameters.tensors
        tensors = [held[index] for index in parameters.gains.values()]
        if self._squares is None:
            self._prepare(parameters, tensors)
        assert self._squares is not None
        some = [tensor for tensor in tensors if tensor.numel()]  # of a sharded gain a rank may hold nothing
        largest = torch.full((len(tensors),), -torch.inf, dtype=torch.float64, device=parameters.device)
        if some:
            norms = torch._foreach_norm(some, float("inf"))  # pyright: ignore
            largest.index_copy_(0, self._held, torch.stack(norms).double())
        sums = {"rms": torch.stack((self._squares(tensors), self._sizes), dim=1), "max_abs": largest[:, None]}
        return Collected(sums, np.ones((len(tensors), len(sums)), dtype=bool))

    def _prepare(self, parameters: Parameters, tensors: Sequence[torch.Tensor]) -> None:
        sizes = [tensor.numel() for tensor in tensors]
        held = [place for place, size in enumerate(sizes) if size]
        # ranks that hold the same entries count them as often above the ratio's line as below it
        self._squares = Squares([(place, None) for place in range(len(tensors))], tensors, parameters.device)
        self._sizes = torch.tensor(sizes, dtype=torch.float64, device=parameters.device)
        self._held = torch.tensor(held, dtype=torch.int64, device=parameters.device)
