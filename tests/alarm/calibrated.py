"""A calibrated alarm without runs: one rule on jumps of gradients."""

from __future__ import annotations

from stabilitylab.alarm import CalibratedRule, Calibration, HealthyRun
from stabilitylab.alarm.calibration import RecordedTable, thresholds


def made(k: int = 4, steps: tuple[tuple[int, int, int], ...] = ((0, 60, 1),), places: int = 3) -> Calibration:
    """The largest scores of its k runs are 1, 1.1, 1.2 ...; the tables are those of :mod:`made`."""
    scores = {f"run-{number}": {"z": 1 + number / 10} for number in range(k)}
    own = {"z": 2.5}
    (threshold,) = thresholds(own, [*scores.values()]).values()
    return Calibration(
        stabilitylab="0.1.0",
        rule_set="own",
        runs=tuple(HealthyRun(name=name, run_id=name, scores={**told}) for name, told in scores.items()),
        rules=(
            CalibratedRule(
                name="z",
                title="a gradient jumps",
                weights={"grad_norm.z": 1.0},
                centres={},
                own_threshold=2.5,
                threshold=threshold,
            ),
        ),
        left_out={"loss.z": "loss"},
        steps=steps,
        tables={
            "grad_norm": RecordedTable(places=places, steps=steps),
            "update_ratio": RecordedTable(places=2, steps=steps),
        },
        recipe={"label": "Model", "lr": 0.001},
        differing={},
    )
