"""The audit of the first row: what it covers of the model and of the loop, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._engine.row import RowRecord
from .._engine.watched import Watched
from ..places.axes import FeatureAxis
from .instrument import Instrument
from .loop_checks import LoopChecks
from .training_pass import TrainingRows


class FirstRow(Instrument):
    """Writes down once, at the first row that is watched, what run.json's ``audit`` tells of it:

    - ``parameters``: trainable tensors, each in one place; ``parameters_without_gradient``: those without a gradient.
    - ``forwards``, ``backwards``: passes of the model that made the update (where each part of it is called alone, or
      in a compiled function, none is seen). ``backwards`` only in one process.
    - ``forwards_broken``, ``forwards_without_backward``, ``passes_discarded``: forwards that raised; those that no
      backward reached, though it reached another's; how often gradients were thrown away.
    - ``norms``: places of norms; ``feature_axes``: those whose features are not in the last dimension, name -> which.
    - ``places_not_called``: the number of places that no pass reached.
    """

    def __init__(self, training: TrainingRows, checks: LoopChecks) -> None:
        self._training, self._checks = training, checks
        self._done = False

    def open(self, watched: Watched) -> None:
        self._watched = watched

    def after_backward(self, row: RowRecord) -> None:
        if self._done or not row.is_live:
            return
        self._done = True
        watched, passes = self._watched, self._training.passes
        trained = [tensor for tensor in watched.parameters.originals if tensor.requires_grad]
        norms = [(site.name, site.features) for site in watched.sites.norms]
        axes = {name: found.known for name, found in norms if isinstance(found, FeatureAxis)}
        facts: dict[str, Any] = {
            "row": row.step,
            "parameters": len(trained),
            "parameters_without_gradient": sum(tensor.grad is None for tensor in trained),
            "forwards_broken": passes.broken,
            "forwards_without_backward": passes.skipped,
            "passes_discarded": passes.discarded,
            "norms": len(watched.sites.norms),
            "feature_axes": {name: axis for name, axis in axes.items() if axis not in (None, -1)},
        }
        if watched.due(row.step):
            facts["places_not_called"] = sum(map(len, self._checks.unseen.values()))
        if passes.attached:
            facts["forwards"] = passes.forwards
            if passes.backwards is not None and passes.backwards.looks:
                facts["backwards"] = passes.backwards.count
        watched.audit.facts |= facts

    def state_dict(self) -> dict[str, Any]:
        return {"audit": dict(self._watched.audit.facts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the facts about the run's first row; checkpoints of older versions have none."""
        audit = state.get("audit")
        self._watched.audit.facts |= audit or {}
        self._done = audit is None or "row" in audit
