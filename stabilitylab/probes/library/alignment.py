"""The angles between the gradient and two other vectors: the weights, and Adam's first moment."""

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
    """The cosine between the gradient g and two other vectors, for each sub-layer and for each module outside the
    layers. ``weight``: <g, theta_t> / (||g|| ||theta_t||), the cosine with the weights. ``moment``: <g, m> / (||g||
    ||m||), the cosine with Adam's first moment m as the update begins, so that g is not yet part of m. g is dE/dtheta_t
    before clipping. Only parameters that have both vectors count. Our definitions.

    Look for a weight cosine far below 0: a descent step then makes the weights longer. The cosine is 0 for weights in
    front of a norm, since the loss does not depend on their length (up to the norm's eps). A moment cosine near 0 means
    noise. Above 0, the gradient points the same way as before. Below 0, the gradient turns against the moment, as it
    does in an oscillation at the edge of stability.

    ``moment`` is missing before the first update, and for optimizers that are not of Adam's kind. The table
    ``grad_norm`` has the share of each place in the gradient norm, and ``diagnose`` prints it.

    Cost: in float64, two products and four norms of all parameters of a probed row. The group "all" does not include
    this probe.
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
