"""Detectors of other packages, as they are, beside a run of the corpus; what is not installed has no numbers.

    pip install stabilityguard==0.3.0 arc-vigil==1.0.0 trainscope==1.8.1

StabilityGuard's SpikeDetector gets the gradient norms of layers' outputs that the run has anyway (its own backward
hooks would change the run). Arc Vigil's monitor looks at the model between the optimizer's step and ``zero_grad``, the
one moment at which both the new weights and a gradient are there. Trainscope's and Lightning's detectors read the loss
alone: ``results/alarm`` feeds them from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

NUMBERS = ("guard", "vigil_moved", "vigil_gradient", "vigil_curved")


class Peers:
    """``guard``: StabilityGuard's largest ratio of a norm to its baseline; ``vigil_*``: Arc Vigil's z-scores."""

    def __init__(self, model: nn.Module) -> None:
        self._guard = self._vigil = None
        try:
            from stabilityguard.core.spike_detector import SpikeDetector  # pyright: ignore

            self._guard: Any = SpikeDetector()
        except ImportError:
            pass
        try:
            from arc_vigil.monitor import BendexMonitor  # pyright: ignore

            self._vigil: Any = BendexMonitor(model)
        except ImportError:
            pass

    def gradients(self, norms: Mapping[str, float]) -> dict[str, float]:
        """After backward: the gradient norm of each layer's output."""
        if self._guard is None:
            return {}
        broken = {name for name, norm in norms.items() if not math.isfinite(norm)}
        _, spike, baselines = self._guard.check(dict(norms), broken)
        if spike is not None:
            return {"guard": spike.ratio}
        ratios = [norm / max(baselines[name], 1e-8) for name, norm in norms.items() if name in baselines]
        return {"guard": max(ratios, default=math.nan)}

    def updated(self, row: int) -> dict[str, float]:
        """After the optimizer's step of this row."""
        if self._vigil is None:
            return {}
        self._vigil.observe(row)
        last = self._vigil._div_hist[-1], self._vigil._grad_hist[-1], self._vigil._kappa_hist[-1]
        return dict(zip(NUMBERS[1:], last, strict=True))
