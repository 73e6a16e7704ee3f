"""BranchNorm: Post-LN with a factor on the branch that grows from 0 to 1."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from torch import Tensor, nn

from ...config import MOST
from ..base import ArchOptions, Place, arch
from ..schedules import Schedule
from ..sublayers import SubLayer
from .deepnorm import deepnorm_constants, deepnorm_gain
from .postln import PostLN


@arch("branchnorm", title="BranchNorm", colour="#0072B2", marker="D", rank=50, gains="beta", family="The papers' own")
class BranchNorm(PostLN):
    r"""x_{l+1} = LN(x_l + alpha_t F(x_l)), alpha_t = min(1, t / T).  BranchNorm, Eqs. 7-8; drawn as DeepNorm.

    Initial weights are drawn with DeepNorm's gains. The tap ``scaled_branch`` carries alpha_t F. At alpha_t = 0 the
    branch is multiplied, not skipped. So a NaN in the branch shows, and the branch's parameters have a gradient (of
    exactly 0), which makes Adam's state exist from the first update.
    """

    takes_alpha = True
    scheduled = True

    class Options(ArchOptions):
        """The options of alpha's schedule. Each has an alias in ``model.`` (``model.T``), which runs record."""

        T: int = Field(default=4000, ge=1, le=MOST)  # updates until alpha reaches 1
        growth: Literal["linear", "exp", "sigmoid"] = "linear"
        t0: int = Field(default=1, ge=0, le=MOST)  # row t uses alpha_{t + t0}

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        self.scaled_branch = nn.Identity()
        # in a tuple: the model registers the schedule once, not every sub-layer again
        self._schedule: tuple[Schedule] = (given["schedule"],)

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        (schedule,) = self._schedule
        return self.norm(self.shortcut(x) + self.scaled_branch(schedule.alpha * self.branch(self.f(x, *context))))

    def gain(self, matrix: str) -> float:
        return deepnorm_gain(self.place, matrix)

    @staticmethod
    def constants(place: Place) -> dict[str, float]:
        return {"beta": deepnorm_constants(place.stack, place.encoder_layers, place.decoder_layers)[1]}
