"""The combination: which signals, and how their weights are fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from corpus import FIRST, HORIZON, CorpusRun
from rivals import Score, features
from scipy.optimize import minimize

# One of each kind, chosen before any run of the corpus was looked at: what a layer's numbers do against their past, and
# levels that theory gives a scale. Of the loss nothing, since t* is made of it.
COMBINED = (
    *("grad_norm.z", "grad_norm.drift", "embedding_gradient.drift", "activation_gradient.drift", "ln_input.drift"),
    *("residual.drift", "heads.drift", "update.drift", "update.z", "update_rms.drift", "rms_t.level", "rms_t.drift"),
    *("log_z.drift", "kurtosis.drift", "headroom.level", "to_edge.level", "uniformity.drift", "eps_floor.level"),
)
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)
EVERY = 5  # rows that are fitted on: neighbours say the same


@dataclass(frozen=True)
class Fit:
    """Weights and centres by signal, of compressed signals; ``penalty``: on weights per standard deviation."""

    weights: dict[str, float]
    centres: dict[str, float]
    penalty: float

    def score(self, lowest: Mapping[str, float] | None = None) -> Score:
        """sum of w (max(c(s), l) - m) over what a row has, as :class:`stabilitylab.alarm.AlarmRule` adds it up; l:
        ``lowest`` of the signal, none if not given."""
        signals = tuple(self.weights)
        least = np.array([(lowest or {}).get(name, -np.inf) for name in signals])
        weights, centres = np.array([*self.weights.values()]), np.array([self.centres[name] for name in signals])

        def of(run: CorpusRun) -> np.ndarray:
            values = np.maximum(features(run, signals), least)
            parts = np.where(np.isnan(values), 0.0, (values - centres) * weights)
            return np.where(np.isnan(values).all(axis=1), -np.inf, parts.sum(axis=1))

        return of


def fit(runs: Sequence[CorpusRun], penalty: float, signals: tuple[str, ...] = COMBINED, signed: bool = False) -> Fit:
    """Logistic regression of "fails within 200 rows" on ``signals``, L2 ``penalty`` on standardised signals; each run
    weighs the same, and failing rows as much as healthy ones. Weights are not negative unless they are ``signed``."""
    x, y, weight = _rows(runs, signals)
    known = ~np.isnan(x).all(axis=0)  # a signal that no run has is 0 everywhere
    centre, scale, some = np.zeros(len(signals)), np.ones(len(signals)), x if known.all() else x[:, known]
    centre[known], scale[known] = np.nanmean(some, axis=0), np.maximum(np.nanstd(some, axis=0), 1e-6)
    z = np.where(np.isnan(x), 0.0, (x - centre) / scale)
    weight = np.where(y, weight / max(weight[y].sum(), 1e-12), weight / max(weight[~y].sum(), 1e-12)) / 2

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        score = theta[0] + z @ theta[1:]
        value = weight @ (np.logaddexp(0.0, score) - y * score) + penalty * theta[1:] @ theta[1:] / 2
        error = weight * (1 / (1 + np.exp(-score)) - y)
        return value, np.concatenate([[error.sum()], z.T @ error + penalty * theta[1:]])

    bounds = [(None, None), *((None if signed else 0.0, None) for _ in signals)]
    found = minimize(loss, np.zeros(1 + len(signals)), jac=True, bounds=bounds, method="L-BFGS-B")
    weights = found.x[1:] / scale
    return Fit(
        {name: float(own) for name, own in zip(signals, weights, strict=True) if own > 0 or (signed and own < 0)},
        {name: float(own) for name, own in zip(signals, centre, strict=True)},
        penalty,
    )


def _rows(runs: Sequence[CorpusRun], signals: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Signals, whether the run fails within 200 rows, and the row's weight, of every fifth row that is either so or
    healthy."""
    xs, ys, weights = [], [], []
    for run in runs:
        near = np.zeros(run.rows, dtype=bool)
        if run.outcome == "failure" and run.failed is not None:
            near[max(FIRST, run.failed - HORIZON) : run.failed] = True
        chosen = np.flatnonzero(near | run.healthy)[::EVERY]
        if len(chosen):
            xs.append(features(run, signals)[chosen])
            ys.append(near[chosen])
            weights.append(np.full(len(chosen), 1.0 / len(chosen)))
    return np.concatenate(xs), np.concatenate(ys), np.concatenate(weights)
