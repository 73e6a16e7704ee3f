"""What a sub-layer adds to the stream, beside what it adds it to."""

from __future__ import annotations

from typing import Any

import torch

from .base import Mean, Numbers, Probe, probe, variance
from .sites import Site, branches


@probe(
    "branch_variance",
    on="reference",
    at=branches,
    unit="variance over d",
    total="mean",
    # sum stands first, since that is the column of the sub-layer's own call; the others are those of its taps
    columns={"sum": Mean(), "branch": Mean("scaled_branch"), "shortcut": Mean()},
)
class BranchVariance(Probe):
    """Var_d of the branch as added (alpha F), of the shortcut s x, and of their sum (what Post-LN normalises, Pre-LN's
    stream after the addition), per token, then the mean over real tokens: beta_ii^2 = branch / sum. Variances do not
    add up where branch and shortcut correlate. Admin, Sec. 4.2 and Thm. 2."""

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
