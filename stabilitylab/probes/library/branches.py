"""The share that a sub-layer adds to the stream, beside what it adds it to."""

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
    """Var_d of the branch as added (alpha F), of the shortcut s x, and of their sum (total: what Post-LN normalises,
    Pre-LN's stream after the addition), per token, then the mean over real tokens: beta_ii^2 = branch / total.
    Variances do not add up where branch and shortcut correlate. Admin, Sec. 4.2 and Thm. 2."""

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
    """The share that a layer adds to what enters it, in any model: branch = Var_d(y - x), shortcut = Var_d(x), ratio =
    branch over shortcut, per token, then the mean over real tokens. With norms behind the additions (Post-LN) y - x
    holds their work, too. Balduzzi et al. 2017 (1702.08591), De and Smith 2020 (2002.10444): branches that shrink with
    depth keep gradients alive.

    Look for a ratio that falls to 0 with depth (layers that are near the identity) or is far above 1.

    Cost: two variances of each layer in the reference pass."""

    undefined = frozenset({"ratio"})  # where all entries of a token are alike

    def measure(self, site: Site, x: torch.Tensor | None, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        if x is None or x.shape != y.shape:
            return None
        branch, shortcut = variance(y - x), variance(x)
        return {"ratio": branch / shortcut, "branch": branch, "shortcut": shortcut}
