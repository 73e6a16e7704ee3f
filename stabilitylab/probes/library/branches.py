"""The share of the stream that each branch adds."""

from __future__ import annotations

from typing import Any

import torch

from ..base import Numbers, Probe, probe, variance
from ..places.sites import Site, branches, layers
from ..rules import Mean


@probe(
    "branch_variance",
    on="reference",
    at=branches,
    unit="variance over d",
    total="mean",
    # total stands first, since that is the column of the sub-layer's own call; the others are those of its taps
    columns={"total": Mean(), "branch": Mean("scaled_branch"), "shortcut": Mean()},
    main="branch",
    log=True,
)
class BranchVariance(Probe):
    """The variance Var_d over the width of the parts of each residual addition, per token, then the mean over real
    tokens. ``branch``: alpha F, the branch as it is added. ``shortcut``: s x. ``total``: their sum (in Post-LN the
    input of the norm, in Pre-LN the stream after the addition). Admin's beta_ii^2 is branch / total. If branch and
    shortcut correlate, their variances do not add up to the total. Admin, Sec. 4.2 and Thm. 2."""

    taps = ("scaled_branch", "shortcut")

    def __init__(self) -> None:
        self._tapped: dict[Site, list[torch.Tensor]] = {}

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        tapped = self._tapped.setdefault(site, [])
        if y is x:  # an Identity: one of the taps, both of which come before the sub-layer's own output
            tapped.append(y)
        else:
            y = torch.add(*tapped[-2:])
            tapped.clear()
        return variance(y)  # (B, T)


@probe(
    "layer_branch",
    on="reference",
    at=layers,
    unit={"ratio": "ratio", "branch": "variance over d", "shortcut": "variance over d"},
    total="mean",
    columns={"ratio": Mean(), "branch": Mean(), "shortcut": Mean()},
    log=True,
)
class LayerBranch(Probe):
    """The size of a layer's addition relative to the layer's input, in any model: ``branch`` = Var_d(y - x) and
    ``shortcut`` = Var_d(x) for input x and output y, and ``ratio`` = branch / shortcut, per token, then the mean over
    real tokens. If norms stand behind the additions (Post-LN), y - x also contains the effect of the norms. Balduzzi et
    al. 2017 (1702.08591), De and Smith 2020 (2002.10444): branches that shrink with depth keep gradients alive.

    Look for a ratio that falls to 0 with depth (such layers are near the identity), or that is far above 1.

    Cost: two variances of each layer in the reference pass.
    """

    of_stream = True
    undefined = frozenset({"ratio"})  # where all entries of a token are alike

    def measure(self, site: Site, x: torch.Tensor | None, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        if x is None or x.shape != y.shape:
            return None
        branch, shortcut = variance(y - x), variance(x)
        return {"ratio": branch / shortcut, "branch": branch, "shortcut": shortcut}
