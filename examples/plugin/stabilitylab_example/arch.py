"""An architecture: Post-LN over a damped branch."""

from pydantic import Field
from torch import Tensor

from stabilitylab.models import ArchOptions, arch
from stabilitylab.models.archs.postln import PostLN


@arch("damped", title="Damped", colour="#8c6d31", marker="P", gains="base")
class Damped(PostLN):
    r"""x_{l+1} = LN(x_l + kappa F(x_l)), kappa a constant.  The example of this repository; from no paper."""

    class Options(ArchOptions):
        kappa: float = Field(default=0.5, gt=0)  # --set arch.kappa=0.1

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        return self.norm(self.shortcut(x) + self.branch(self.options.kappa * self.f(x, *context)))
