"""The angle between the gradient and what it acts on: the weights, and Adam's first moment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..base import Collected, ParameterProbe, probe
from ..parameters.layouts import local
from ..parameters.pieces import Parameters
from ..parameters.squares import is_counted
from ..rules import Cosine
from .adam import is_adam, states, unwrapped

Values = Sequence[torch.Tensor | None]


@probe(
    "gradient_alignment",
    on="step",
    unit="cosine",
    columns={"weight": Cosine(), "moment": Cosine()},
    log=False,
)
class GradientAlignment(ParameterProbe):
    """weight: <g, theta_t> / (||g|| ||theta_t||), the cosine of gradient and weight of each sub-layer, and of each
    module outside the layers; moment: <g, m> / (||g|| ||m||), that of the gradient and Adam's first moment m as the
    update begins, so that g is not in it. g is dE/dtheta_t before clipping; of parameters that have both alone. Our
    definitions.

    Look for a weight cosine far below 0: a descent step makes the weights longer. In front of a norm it is 0, since the
    loss does not depend on their length (up to the norm's eps). A moment cosine near 0 is noise, above 0 the same way
    as before; below 0 the gradient turns against the moment, which is what an oscillation at the edge of stability
    looks like. The moment is missing before the first update, and for optimizers that are not Adam's kind.
    The share of each place in the gradient norm is in ``grad_norm``, and ``diagnose`` says it.

    Cost: two products and four norms of all parameters of a probed row in float64. The group "all" leaves it out.
    """

    by_name = True
    undefined = frozenset(("weight", "moment"))  # of a gradient, a weight or a moment that is all 0

    def fitting(self, parameters: Parameters) -> Sequence[str]:
        adam = any(is_adam(unwrapped(optimizer)) for optimizer in parameters.optimizers)
        return ("weight", "moment") if adam else ("weight",)

    def collect(self, parameters: Parameters) -> Collected:
        gradients = parameters.gradients()
        others: dict[str, Values] = {"weight": parameters.tensors}
        if "moment" in self.fitting(parameters):
            known = states(parameters.optimizers)
            others["moment"] = [local(known[p]["exp_avg"]) if p in known else None for p in parameters.originals]
        columns: dict[str, torch.Tensor] = {}
        seen: list[np.ndarray] = []
        for name, other in others.items():
            pairs = [
                (ours, theirs)
                if is_counted(ours) and is_counted(theirs) and ours.shape == theirs.shape
                else (None, None)
                for ours, theirs in zip(gradients, other, strict=True)
            ]
            own, beside = ([pair[at] for pair in pairs] for at in (0, 1))
            sums = (parameters.squares.dots(own, beside), parameters.squares(own), parameters.squares(beside))
            columns[name] = torch.cat([parameters.by_row(each) for each in sums], dim=1)
            seen.append(parameters.seen(own, [""]))
        return Collected(columns, np.concatenate(seen, axis=1))
